"""vLLM itself on a CPU, with ktinject's experts: the answers stay the same, and what is not served is refused.

It needs an environment with vLLM and ktinject, which docs/how-to/vllm.md describes, and takes some minutes:

    VLLM_PYTHON=that/environment/bin/python pytest -m vllm tests/ktinject/vllm
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trained import trained_model

TRAINED = trained_model("tiny-qwen3-moe")
PYTHON = os.environ.get("VLLM_PYTHON", "")
# Pieces of code, of whose greedy tokens in fp32 none has a near second: experts in bf16 write the same.
PROMPTS = [
    [13, 200, 260, 1720, 1888, 36, 1267, 13, 200, 260],
    [200, 200, 653, 1070, 940, 75, 439, 543, 910, 85, 407, 1879, 200, 653],
    [655, 27, 577, 948, 422, 278, 422, 200, 200, 200, 33, 71, 316, 390, 672, 556, 15, 68]
    + [1267, 200, 513, 634, 1373, 84, 301],
]
FAR = 0.4
NEW = 12

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON names no environment with vLLM"),
]


def asked(folder: Path, environment: dict[str, str] | None = None, **given: Any) -> Any:
    out, log = folder / "answers.json", folder / "log"
    with log.open("w") as told:
        subprocess.run(
            [PYTHON, str(Path(__file__).with_name("vllm_engine.py")), json.dumps(given), str(out)],
            stdout=told,
            stderr=told,
            timeout=900,
            env=os.environ | (environment or {}),
        )
    assert out.exists(), log.read_text()[-3000:]
    return json.loads(out.read_text()), log.read_text()


def answers(folder: Path, models: list[Path], method: str | None, **others: Any) -> Any:
    """What vLLM says, by models and prompts, in fp32. method: of ktinject's experts; None: vLLM's own."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enforce_eager": True,
    }
    if method is not None:
        options |= {"quantization": "ktinject", "additional_config": {"ktinject": {"method": method}}}
    given = {"model": [*map(str, models)], "options": options | others, "prompts": PROMPTS, "new": NEW}
    # In this process, so that several models may be there at once.
    return asked(folder, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if len(models) > 1 else None, **given)


@pytest.fixture(scope="module")
def best() -> list[list[int]]:
    """The greedy tokens by transformers in fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32)
    found = []
    for ids in PROMPTS:
        text = [*ids]
        for _ in range(NEW):
            with torch.no_grad():
                values, places = model(torch.tensor([text])).logits[0, -1].topk(2)
            assert values[0] - values[1] >= FAR
            text.append(int(places[0]))
        found.append(text[len(ids) :])
    return found


@pytest.mark.parametrize("eager", [True, False])
def test_the_answers_are_those_of_fp32(tmp_path: Path, best: list[list[int]], eager: bool) -> None:
    """Also where vLLM compiles the model."""
    (found,), log = answers(tmp_path, [TRAINED], "BF16", enforce_eager=eager)
    assert "32 experts as bf16" in log
    assert found == best


def test_methods_pack_otherwise(tmp_path: Path) -> None:
    _, log = answers(tmp_path, [TRAINED], "AMXINT4")
    assert "32 experts as int4" in log


def test_two_models_in_a_process_keep_their_own_experts(tmp_path: Path, best: list[list[int]]) -> None:
    """The layers of both have the same names."""
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(TRAINED / "model.safetensors")
    changed = {name: value.roll(1, 0) if ".experts." in name else value for name, value in tensors.items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    (other / "config.json").write_text((TRAINED / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((TRAINED / name).read_bytes())
    (first, second), _ = answers(tmp_path, [TRAINED, other], "BF16")
    assert first == best
    assert second != best


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"tp_size": 2}}, "--tensor-parallel-size 2"),
    ({"parallel": {"dp_size": 2}}, "--data-parallel-size 2"),
    ({"parallel": {"use_ep": True}}, "--enable-expert-parallel"),
    ({"config": {"num_experts": 40}}, "experts that are there twice"),
    ({"config": {"is_lora_enabled": True}}, "--enable-lora"),
    ({"config": {"has_bias": True}}, "experts with biases"),
    ({"layer": {"activation": "gelu"}}, "the activation gelu"),
    ({"layer": {"swiglu_limit": 7.0}}, "a limit of the activation"),
    ({"layer": {"apply_router_weight_on_input": True}}, "weights that scale the input"),
    ({"layer": {"layer_name": "experts"}}, "no number of a layer"),
    ({"options": {"methods": "BF16"}}, "found methods; allowed: method, threads, nodes"),
    ({"options": "BF16"}, "allowed: method, threads, nodes"),
    ({"folder": "Qwen/Qwen3-30B-A3B"}, "there is no such folder"),
    ({"packed": True}, "new weights for experts that are packed"),
    ({"version": "0.34.0"}, "found vLLM 0.34.0; allowed is 0.32"),
    ({"version": "0.321"}, "found vLLM 0.321; allowed is 0.32"),
    ({"device": "NVIDIA H200"}, "found the device NVIDIA H200; allowed: cpu"),
]


def test_what_is_not_served_is_refused(tmp_path: Path) -> None:
    cases = [{}, {"options": {"method": "BF16"}}, *(case for case, _ in REFUSED)]
    (number, options, *said), _ = asked(tmp_path, refusals=cases)
    assert number == "7" and options == "{'method': 'BF16'}"
    for text, (case, expected) in zip(said, REFUSED, strict=True):
        assert expected in text, case
