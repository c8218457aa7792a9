"""cpu_router beside the router it replaces: the same choices, from the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ktinject
from ktinject import OperatorError, PlanError
from ktinject.machine import detect
from ktinject.operators.cpu_linear import CpuLinearConfig
from ktinject.operators.cpu_router import CpuRouter
from tests.models import AVAILABLE, tiny
from tests.reference import relative_error

SERVED = [
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "kimi_k2",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
]
RULES = [
    {"name": "router", "match": {"path": r".*\.mlp\.(gate|router)"}, "replace": {"operator": "cpu_router"}}
]
CPU = CpuLinearConfig(device="cpu")


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.parametrize("name", [name for name in SERVED if name in AVAILABLE])
def test_the_same_choices(name: str) -> None:
    model, other = tiny(name).bfloat16(), tiny(name).bfloat16()
    ktinject.optimize(other, RULES, devices=["cpu"], progress=False)
    path = next(path for path, module in other.named_modules() if isinstance(module, CpuRouter))
    ours, theirs = other.get_submodule(path), model.get_submodule(path)
    assert isinstance(ours, type(theirs)) and [*ours.state_dict()] == [
        buffer for buffer in theirs.state_dict() if buffer not in ("weight", "bias")
    ]
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(2)).bfloat16()
    beside = [torch.linspace(-0.1, 0.1, 6)] if name == "minimax_m2" else []  # its block holds the correction
    with torch.no_grad():
        for want, found in zip(tensors(theirs(x, *beside)), tensors(ours(x, *beside)), strict=True):
            assert want.shape == found.shape and want.dtype == found.dtype
            if want.is_floating_point():
                # A logit on the border between two bf16 values may fall to the other side.
                assert relative_error(found, want) <= 3e-3
            else:
                assert (want == found).float().mean() >= 0.98


def test_recorded_like_any_router() -> None:
    model = ktinject.optimize(tiny("qwen3_moe").bfloat16(), RULES, devices=["cpu"], progress=False)
    logits = model(torch.randint(3, 96, (1, 5)), output_router_logits=True).router_logits
    assert len(logits) == 2 and logits[0].shape == (5, 6)


def test_other_models_and_devices_keep_their_routers() -> None:
    assert ktinject.plan(tiny("qwen3_moe"), RULES, devices=["cpu"]).replacements == ()
    router = tiny("qwen3_moe").bfloat16().model.layers[0].mlp.gate
    assert CpuRouter.resolve(router, CpuLinearConfig(device="cuda:0")) is None


def test_saved_again_as_it_was(tmp_path: Path) -> None:
    model = tiny("deepseek_v3").bfloat16()
    weight = model.model.layers[1].mlp.gate.weight.clone()
    ktinject.optimize(model, RULES, devices=["cpu"], progress=False).save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).model.layers[1].mlp.gate.weight, weight)


class Odd(nn.Module):
    """A router that uses its weight in another way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 40).bfloat16())
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "matmul":
            return x @ self.weight.T
        return functional.linear(x, weight=self.weight, bias=None)


@pytest.mark.parametrize("way", ["matmul", "by keyword"])
def test_refused_forward(way: str) -> None:
    reason = CpuRouter.supports(Odd(way), CPU, detect())
    assert reason is not None and reason.startswith("its forward ")


def test_refused_parameters() -> None:
    needed = "; a weight [experts, hidden] is needed, and at most a bias [experts]"
    reason = CpuRouter.supports(nn.LayerNorm(3).bfloat16(), CPU, detect())
    assert reason == f"its parameters are weight, bias{needed}"
    reason = CpuRouter.supports(nn.Bilinear(3, 3, 4).bfloat16(), CPU, detect())
    assert reason == f"its parameters are weight, bias{needed}"
    rules = [{**RULES[0], "match": {"path": r".*\.norm"}}]
    with pytest.raises(
        PlanError, match="cpu_router cannot replace a Qwen3MoeRMSNorm: its parameters are weight;"
    ):
        ktinject.plan(tiny("qwen3_moe").bfloat16(), rules, devices=["cpu"])
    router = CpuRouter.build(tiny("qwen3_moe").bfloat16().model.layers[0].mlp.gate, CPU)
    with pytest.raises(OperatorError, match="never loaded: weight"):
        router.finish()
    with pytest.raises(OperatorError, match="never loaded: weight"):
        torch.matmul(torch.zeros(1, 6), router.weight)


def test_its_weight_is_not_written_to_in_vain() -> None:
    model = ktinject.optimize(tiny("qwen3_moe").bfloat16(), RULES, devices=["cpu"], progress=False)
    weight: Any = model.model.layers[0].mlp.gate.weight
    read = weight.clone()
    assert type(read) is torch.Tensor and torch.equal(torch.stack([weight, weight])[1], read)
    weight *= 2
    assert torch.equal(weight.data, 2 * read)
    weight.data = read
    weight[1].zero_()
    assert not weight[1].any() and torch.equal(weight[2:].clone(), read[2:])
    with pytest.raises(OperatorError, match=r"weight: found shape \[3, 4\]; expected \[6, 40\]"):
        weight.data = torch.zeros(3, 4)
