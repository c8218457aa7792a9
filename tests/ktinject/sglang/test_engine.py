"""SGLang itself on a CPU, with some of its experts, and all others ktinject's: the answers stay the same.

It needs an environment with SGLang, which docs/how-to/sglang.md describes, and takes some minutes:

    SGLANG_PYTHON=that/environment/bin/python pytest -m sglang tests/ktinject/sglang
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import stand_ins
from safetensors.torch import load_file, save_file

TRAINED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3-moe"
EXPERTS = 32
PYTHON = os.environ.get("SGLANG_PYTHON", "")
PROMPTS = [[5, 17, 300, 41, 99], [700, 3, 12, 88, 45, 19, 7], [1, 2, 3], [*range(40, 100)]]
# Logits are bf16: of two that are closer than a step of theirs, another order of sums may make the other the greater.
TIE = 0.13

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


def answers(
    model: Path,
    folder: Path,
    on_gpu: int | None,
    fails: bool = False,
    soak: int = 0,
    kill_after: int = 0,
    apart: bool = False,
    **others: Any,
) -> Any:
    """What SGLang says, by rounds and prompts.

    on_gpu      SGLang's own experts; None: all of them
    fails       one answer of the CPU fails
    soak        requests between two rounds, some of them cancelled
    kill_after  of them, end all of SGLang's processes at once; then nothing is said
    apart       each of two processes has a CPU of its own, and so a part of the CPU's experts
    """
    options: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.2,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 32,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
    }
    if on_gpu is not None:
        options |= {"kt_weight_path": str(model), "kt_method": "BF16", "kt_num_gpu_experts": on_gpu}
    given = {
        "model": str(model),
        "options": options | others,
        "prompts": PROMPTS,
        "rounds": 1 + (fails or soak > 0),
        "new": 12,
        "soak": soak,
    }
    site = stand_ins.write(folder / "site", fails)
    environ = {**os.environ, "PYTHONPATH": str(site), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if others.get("tp_size") == 2:
        environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # by its rule, else, a NUMA node for each process
        environ["SGLANG_SET_CPU_AFFINITY"] = str(int(apart))
    out = folder / "answers.json"
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("engine.py"), json.dumps(given), out],
            env=environ,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            if kill_after:
                counted(running, out.with_suffix(".count"), kill_after)
                return None
            running.wait(timeout=2000 if soak else 800)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
    told = (folder / "log").read_text(errors="replace")
    assert out.exists(), told[-4000:]
    if on_gpu is None:
        assert "experts as bf16" not in told
    else:
        here = (EXPERTS - on_gpu) // (2 if apart else 1)
        assert told.count(f"layer 0: {here} experts as bf16") == (2 if apart else 1), told[-4000:]
    return json.loads(out.read_text())


def counted(running: subprocess.Popen[bytes], path: Path, least: int) -> None:
    """Wait until so many requests have ended."""
    end = time.monotonic() + 800
    while not path.exists() or int(path.read_text() or 0) < least:
        assert running.poll() is None and time.monotonic() < end, path.with_name("log").read_text()[-4000:]
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SGLang alone."""
    return answers(model, tmp_path_factory.mktemp("stock"), None)[0]


def agree(found: Any, want: Any) -> bool:
    """The same tokens, until two are as likely."""
    for index, (ours, theirs) in enumerate(zip(found["ids"], want["ids"])):
        if ours != theirs:
            return want["margins"][index] < TIE
    return len(found["ids"]) == len(want["ids"])


@pytest.mark.parametrize("on_gpu", [0, 8, EXPERTS - 1])
def test_the_answers_are_those_of_sglang_alone(model: Path, stock: Any, on_gpu: int, tmp_path: Path) -> None:
    found = answers(model, tmp_path, on_gpu)[0]
    assert all(agree(ours, theirs) for ours, theirs in zip(found, stock))
    assert sum(ours["ids"] == theirs["ids"] for ours, theirs in zip(found, stock)) >= 2


def test_a_failure_ends_its_requests_and_not_the_server(model: Path, stock: Any, tmp_path: Path) -> None:
    first, second = answers(model, tmp_path, 8, fails=True)
    assert "500: The experts on the CPU failed: this test" in first[0]["error"]
    assert all(agree(ours, theirs) for ours, theirs in zip(second, stock))


@pytest.mark.parametrize("apart", [False, True])
def test_two_processes_share_the_other_weights(model: Path, stock: Any, apart: bool, tmp_path: Path) -> None:
    """Of tensor parallelism: the experts of the CPU are in the first process, or each has a part."""
    found = answers(model, tmp_path, 8, apart=apart, tp_size=2)[0]
    assert all(agree(ours, theirs) for ours, theirs in zip(found, stock))


def test_a_thousand_requests_with_cancels_leave_nothing_behind(
    model: Path, stock: Any, tmp_path: Path
) -> None:
    killed, again = tmp_path / "killed", tmp_path / "again"
    killed.mkdir(), again.mkdir()
    answers(model, killed, 8, soak=1_000, kill_after=100)
    first, soaked, second = answers(model, again, 8, soak=1_000)
    assert all(agree(ours, theirs) for ours, theirs in zip(first, stock))
    assert [one["ids"] for one in second] == [one["ids"] for one in first]
    ended, held = soaked["ended"], soaked["held"]
    assert ended["failed"] == 0 and ended["stop"] > 400 and ended["cancelled"] > 100, ended
    assert held[-1] < held[0] + 64, held
