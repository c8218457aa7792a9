"""Routers' weights that a model keeps in fp32 and a checkpoint has in bf16, as transformers does since 5.24."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import on_meta, saved
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import ktinject
from ktinject.errors import OperatorError
from ktinject.operators.cpu_router import CpuRouter
from ktinject.planning import narrow

torch.set_num_threads(1)
IDS = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(0))
GATE = "model.layers.1.mlp.gate"


def keeping(model: PreTrainedModel) -> PreTrainedModel:
    """As transformers builds such a model since 5.24, also where it is older."""
    model = model.bfloat16()
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "gate.weight"}
    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.weight = nn.Parameter(module.weight.detach().float(), requires_grad=False)
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    return model.eval()


def swapped(folder: Path, model: PreTrainedModel, **given: Any) -> PreTrainedModel:
    return ktinject.optimize(
        keeping(on_meta(model)), "auto", checkpoint=folder, devices="cpu", progress=False, **given
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_bf16_of_a_checkpoint_is_computed_as_it_is(family: str, tmp_path: Path) -> None:
    folder = saved(models.tiny(family).bfloat16(), tmp_path)
    model = keeping(on_meta(models.tiny(family)))
    kept, weight = model._keep_in_fp32_modules_strict, model.get_parameter(f"{GATE}.weight")
    plan = ktinject.plan(model, "auto", checkpoint=folder, devices="cpu")
    assert GATE in {r.path for r in plan.replacements if r.operator == "cpu_router"}
    assert model._keep_in_fp32_modules_strict is kept, "a plan changes nothing"
    assert model.get_parameter(f"{GATE}.weight") is weight and weight.dtype == torch.float32
    found = swapped(folder, models.tiny(family))
    assert isinstance(found.get_submodule(GATE), CpuRouter)
    found.generate(IDS, max_new_tokens=4, do_sample=False)
    assert found.ktinject_decoding.last == "native loop", found.ktinject_decoding.reason


def test_fp32_of_a_checkpoint_stays(tmp_path: Path) -> None:
    plain = keeping(models.tiny("deepseek_v3"))
    gate: Any = plain.get_submodule(GATE)
    gate.weight.data.normal_()
    folder = saved(plain, tmp_path)
    found = swapped(folder, models.tiny("deepseek_v3"))
    weight = found.get_parameter(f"{GATE}.weight")
    assert weight.dtype == torch.float32 and torch.equal(weight, gate.weight)


@pytest.mark.parametrize("is_exact", [True, False])
def test_weights_that_are_there_are_looked_at(is_exact: bool) -> None:
    model = keeping(models.tiny("deepseek_v3"))
    if not is_exact:
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.data.normal_()
    values = model.get_parameter(f"{GATE}.weight").detach().clone()
    with torch.no_grad():
        before = model(IDS).logits
    narrow.routers(model, None, None)
    weight = model.get_parameter(f"{GATE}.weight")
    assert weight.dtype == (torch.bfloat16 if is_exact else torch.float32)
    assert torch.equal(weight.float(), values)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)


def test_a_router_that_rounds_with_its_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keeping(models.tiny("deepseek_v3"))
    kind = type(model.get_submodule(GATE))

    def forward(self: Any, x: Tensor) -> Any:
        logits = functional.linear(x.view(-1, x.shape[-1]).to(self.weight.dtype), self.weight).float()
        return logits, *logits.sigmoid().topk(self.top_k)

    monkeypatch.setattr(kind, "forward", forward)
    narrow.routers(model, None, None)
    assert model.get_parameter(f"{GATE}.weight").dtype == torch.float32
    assert "gate.weight" in model._keep_in_fp32_modules_strict


def test_other_models_and_failures_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = models.tiny("deepseek_v3")
    kept = exact._keep_in_fp32_modules_strict
    narrow.routers(exact, None, None)
    assert exact._keep_in_fp32_modules_strict is kept, "a model of fp32"
    folder = saved(models.tiny("deepseek_v3").bfloat16(), tmp_path)
    model = keeping(on_meta(models.tiny("deepseek_v3")))

    def fails(*_: Any) -> None:
        raise OperatorError("no")

    monkeypatch.setattr(CpuRouter, "finish", fails)
    with pytest.raises(OperatorError):
        ktinject.optimize(model, "auto", checkpoint=folder, devices="cpu", progress=False)
    assert model.get_parameter(f"{GATE}.weight").dtype == torch.float32
    assert "gate.weight" in model._keep_in_fp32_modules_strict
