"""SGLang itself on a CPU, with some of its experts, and all others ktinject's: the answers stay the same.

It needs an environment with SGLang, which docs/how-to/sglang.md describes, and takes some minutes:

    SGLANG_PYTHON=that/environment/bin/python pytest -m sglang tests/ktinject/sglang
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import stand_ins
from safetensors.torch import load_file, save_file
from trained import trained_model

REPOSITORY = Path(__file__).parents[3]
TRAINED = trained_model("tiny-qwen3-moe")
EXPERTS = 32
PYTHON = os.environ.get("SGLANG_PYTHON", "")
PROMPTS = [[5, 17, 300, 41, 99], [700, 3, 12, 88, 45, 19, 7], [1, 2, 3], [*range(40, 100)]]
# All is bf16: of two logits as close as this, another order of sums may make the other one the greater. SGLang alone,
# too, writes tokens that fp32 has behind its best by 0.28, or in a batch 0.67 (docs/benchmarks.md, SGLang's engine).
TIE = 0.25

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not PYTHON, reason="SGLANG_PYTHON names no environment with SGLang"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with a head of its own, since SGLang's class has no tied one."""
    folder = tmp_path_factory.mktemp("model")
    tensors = load_file(TRAINED / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((TRAINED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """The benchmark, which has the process with an engine."""
    sys.path.insert(0, str(REPOSITORY / "benchmarks"))
    import sglang_engine

    yield sglang_engine
    sys.path.remove(str(REPOSITORY / "benchmarks"))


def answers(
    bench: ModuleType,
    model: Path,
    folder: Path,
    on_gpu: int | None,
    *rounds: str,
    fails: bool = False,
    apart: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """What SGLang says, by rounds, which `sglang_engine.engine` knows. By default, all prompts are asked once.

    on_gpu  SGLang's own experts; None: all of them
    fails   one answer of the CPU fails
    apart   each of two processes has a CPU of its own, and so a part of the CPU's experts
    """
    options = bench.options_of("cpu", False, max_total_tokens=4096, chunked_prefill_size=32)
    if on_gpu is not None:
        options |= {"kt_weight_path": str(model), "kt_method": "BF16", "kt_num_gpu_experts": on_gpu}
    given = {
        "model": str(model),
        "options": options | others,
        "prompts": PROMPTS,
        "new": 12,
        "at_once": len(PROMPTS),
        "requests": 1_000,
        "margins": True,
        "rounds": rounds or ("first",),
    }
    site = stand_ins.write(folder / "site", fails)
    environ = {**os.environ, "PYTHONPATH": str(site), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if others.get("tp_size") == 2:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # by its rule, else, a NUMA node for each process
        environ["SGLANG_SET_CPU_AFFINITY"] = str(int(apart))
    running = bench.Engine("engine", folder, given, PYTHON, environ)
    try:
        running.running.wait(timeout=2000 if "soak" in rounds else 800)
    finally:
        running.stop()
    told = running.log.read_text(errors="replace")
    found = running.found()
    assert [*given["rounds"]][: len(found) - 1] == [*found][1:] and len(found) > 1, told[-4000:]
    if on_gpu is None:
        assert "experts as bf16" not in told
    else:
        here = (EXPERTS - on_gpu) // (2 if apart else 1)
        assert told.count(f"layer 0: {here} experts as bf16") == (2 if apart else 1), told[-4000:]
    return found


@pytest.fixture(scope="module")
def stock(bench: ModuleType, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang alone."""
    return answers(bench, model, tmp_path_factory.mktemp("stock"), None)["first"]


def agree(found: Any, want: Any) -> bool:
    """The same tokens, until two are as likely."""
    for index, (ours, theirs) in enumerate(zip(found["ids"], want["ids"])):
        if ours != theirs:
            return want["margins"][index] < TIE
    return len(found["ids"]) == len(want["ids"])


@pytest.mark.parametrize("on_gpu", [0, 8, EXPERTS - 1])
def test_the_answers_are_those_of_sglang_alone(
    bench: ModuleType, model: Path, stock: Any, on_gpu: int, tmp_path: Path
) -> None:
    found = answers(bench, model, tmp_path, on_gpu)["first"]
    assert all(agree(ours, theirs) for ours, theirs in zip(found, stock))
    assert sum(ours["ids"] == theirs["ids"] for ours, theirs in zip(found, stock)) >= 2


def test_a_failure_ends_its_requests_and_not_the_server(
    bench: ModuleType, model: Path, stock: Any, tmp_path: Path
) -> None:
    found = answers(bench, model, tmp_path, 8, "first", "second", fails=True)
    assert "500: The experts on the CPU failed: this test" in found["first"][0]["error"]
    assert all(agree(ours, theirs) for ours, theirs in zip(found["second"], stock, strict=True))


@pytest.mark.parametrize("apart", [False, True])
def test_two_processes_share_the_other_weights(
    bench: ModuleType, model: Path, stock: Any, apart: bool, tmp_path: Path
) -> None:
    """Of tensor parallelism: the experts of the CPU are in the first process, or each has a part."""
    found = answers(bench, model, tmp_path, 8, apart=apart, tp_size=2)["first"]
    assert all(agree(ours, theirs) for ours, theirs in zip(found, stock))


def test_a_thousand_requests_with_cancels_leave_nothing_behind(
    bench: ModuleType, model: Path, stock: Any, tmp_path: Path
) -> None:
    """Then it is killed at work, and another one answers as before."""
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir(), again.mkdir()
    found = answers(bench, model, first, 8, "first", "soak", "after", "killed")
    assert "killed" not in found and "after" in found
    assert all(agree(ours, theirs) for ours, theirs in zip(found["first"], stock, strict=True))
    said = answers(bench, model, again, 8)["first"]
    for later in (found["after"], said):
        assert [one["ids"] for one in later] == [one["ids"] for one in found["first"]]
    ended = found["soak"]["ended"]
    assert ended["failed"] == 0 and ended["stop"] > 400 and ended["cancelled"] > 100, ended
    assert bench.grown(found["soak"]["held"]) < bench.MOST_GROWTH
    assert found["soak"]["left"] == [0] * 4
