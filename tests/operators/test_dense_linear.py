"""dense_linear: which operator it comes to, by format, device and dtype of the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import ktinject
from ktinject import PlanError
from ktinject import rules as language
from ktinject.machine import Gpu, detect
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.dense_linear import DenseLinear, DenseLinearConfig
from ktinject.planning.plan import Plan
from ktinject.planning.planner import make
from tests.models import tiny
from tests.reference import relative_error


def rules(path: str = r".*\.self_attn\.[qkvo]_proj", **arguments: Any) -> list[dict[str, Any]]:
    replaced = {"operator": "dense_linear", **arguments}
    return [{"name": "dense", "match": {"path": path}, "replace": replaced}]


def planned(model: PreTrainedModel, gpus: int, **arguments: Any) -> Plan:
    """On a machine with made-up GPUs, and with the CUDA parts whether this build has them or not."""
    with torch.device("meta"):
        there = type(model)(model.config).to(model.dtype)
    made_up = tuple(Gpu(i, "made-up", 2**34, 2**34, (9, 0)) for i in range(gpus))
    has = replace(detect(), gpus=made_up, cuda_built=True)
    return make(there, language.read(rules(**arguments)), None, has)


@pytest.mark.parametrize(
    "weights,gpus,operator",
    [
        ("bf16", 0, "cpu_linear"),
        ("fp8", 0, "cpu_linear"),
        ("int8", 0, "cpu_linear"),
        ("int4", 0, "cpu_linear"),
        ("bf16", 1, None),
        ("fp8", 1, "fp8_linear"),
        ("int4", 1, "int4_linear"),
        ("kept", 0, "cpu_linear"),
        ("kept", 1, None),
    ],
)
def test_what_it_comes_to(weights: str, gpus: int, operator: str | None) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64}
    found = planned(tiny("qwen3_moe", **sizes).bfloat16(), gpus, weights=weights, group_size=64)
    assert [replacement.operator for replacement in found.replacements] == (
        [operator] * 8 if operator else []
    )
    assert {replacement.config.device for replacement in found.replacements} <= {"cuda:0" if gpus else "cpu"}
    if weights == "int4":
        assert {replacement.config.group_size for replacement in found.replacements} == {64}
    if operator is None:
        assert "dense               8 modules   keep" in str(found)
        assert found.matched["dense"][0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bf16_leaves_a_model_of_more_digits_alone(dtype: torch.dtype) -> None:
    model = tiny("qwen3_moe").to(dtype)
    assert planned(model, 0).replacements == planned(model, 0, weights="kept").replacements == ()
    assert len(planned(model, 0, weights="int8").replacements) == 8


def test_what_runs_is_what_was_planned() -> None:
    model, other = tiny("qwen3_moe").bfloat16(), tiny("qwen3_moe").bfloat16()
    ktinject.optimize(other, rules(), progress=False, devices=["cpu"])
    assert isinstance(other.model.layers[0].self_attn.q_proj, CpuLinear)
    assert {replacement.operator for replacement in other.ktinject.replacements} == {"cpu_linear"}
    ids = torch.randint(3, 96, (2, 7))
    with torch.inference_mode():
        exact = model.float()(ids).logits
        assert relative_error(other(ids).logits, exact) <= 0.05


def test_refused() -> None:
    with pytest.raises(
        PlanError,
        match="dense_linear cannot replace a Linear: weights int8 are not computed on cuda:0; allowed: bf16, fp8",
    ):
        planned(tiny("qwen3_moe").bfloat16(), 1, weights="int8")
    with pytest.raises(PlanError, match=r"cannot replace a Qwen3MoeRMSNorm: it replaces nn\.Linear"):
        planned(tiny("qwen3_moe").bfloat16(), 0, path=r".*\.norm")
    reason = DenseLinear.supports(torch.nn.ReLU(), DenseLinearConfig(device="cpu"), detect())
    assert reason == "it replaces nn.Linear"
