"""How `auto` chooses, from given speeds; and what the plan says of a depth."""

from __future__ import annotations

import dataclasses
from typing import Any

import models
import pytest
import torch
from transformers import PreTrainedModel

import ktinject
from ktinject.operators.deferred_moe import DeferredMoeConfig
from ktinject.operators.offload import deferral
from ktinject.operators.probes import moe_block
from ktinject.operators.probes.moe_block import BlockSpec


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Layers 0, 2 and 4 have experts; layer 1 is dense."""
    return models.tiny("qwen3_moe", num_hidden_layers=5, num_experts_per_tok=6, mlp_only_layers=[1, 3])


def depth(model: PreTrainedModel, at: int, **arguments: Any) -> Any:
    config = DeferredMoeConfig(**{"device": "cuda:0", "schedule": "auto"} | arguments)
    modules = {f"model.layers.{i}.mlp": (model.model.layers[i].mlp, config) for i in (0, 2, 4)}
    spec = moe_block.probe(model.model.layers[at].mlp)
    assert isinstance(spec, BlockSpec)
    return deferral.depth(model.model, modules, f"model.layers.{at}.mlp", spec, expert_bytes=1e6)


def speeds(monkeypatch: pytest.MonkeyPatch, expert_us: float, gap_us: float | None = None) -> None:
    monkeypatch.setattr(deferral, "cpu_bandwidth", lambda: 1e12 / expert_us / deferral.REACHED)
    monkeypatch.setattr(deferral, "gpu_bandwidth", lambda device: 1e12)
    if gap_us is not None:
        monkeypatch.setattr(deferral, "gap_us", lambda *_: gap_us)


@pytest.mark.parametrize(
    ("expert_us", "gap_us", "most", "want"),
    [
        (20, 50, 6, 3),  # 3 · 20 are the first to fill 50
        (20, 60, 6, 3),
        (20, 61, 6, 4),
        (20, 61, 2, 2),  # no more than the rule allows
        (20, 500, 6, 6),  # nor than there are
        (30, 500, 0, 1),  # nor, if it says nothing, than a quarter
        (900, 50, 6, 1),  # a long expert fills any gap
        (20, 10, 6, 0),  # a gap that the splitting would eat up
        (1.5, 500, 6, 0),  # experts so short that it would eat up all of them
    ],
)
def test_as_many_as_fill_the_gap(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    expert_us: float,
    gap_us: float,
    most: int,
    want: int,
) -> None:
    speeds(monkeypatch, expert_us, gap_us)
    count, remark = depth(model, 0, deferred=most)
    assert count == want
    assert f"the GPU takes about {gap_us:.0f} us between, the CPU {expert_us:.0f} us an expert" in remark
    assert ("not worth it" in remark) == (want == 0)


def test_what_lies_between(model: PreTrainedModel) -> None:
    """Attention and dense layers up to the next router; the experts and shared experts are not among them."""
    layers = model.model.layers
    between = [layers[1], layers[2].self_attn, layers[2].mlp.gate]
    own = [[*module.parameters(recurse=False)] for part in between for module in part.modules()]
    size = sum(tensor.nbytes for tensors in own for tensor in tensors)
    count = sum(1 for tensors in own if tensors)
    # A layer lists its norms behind its block: those of layer 0 stand for those of layer 2.
    rest = [layers[0].input_layernorm, layers[0].post_attention_layernorm]
    size += sum(module.weight.nbytes for module in rest)
    found = deferral.gap_us(model.model, layers[0].mlp, layers[2].mlp, "experts", 1e9)
    want = size / 1e9 * 1e6 + (count + len(rest)) * deferral.MODULE_US
    assert found == pytest.approx(want)


def test_shared_experts_do_not_fill_the_gap() -> None:
    model = models.tiny("deepseek_v3", num_hidden_layers=3)
    first, second = (layer.mlp for layer in model.model.layers[1:])
    before = deferral.gap_us(model.model, first, second, "experts", 1e9)
    with torch.no_grad():
        second.shared_experts.up_proj.weight = torch.nn.Parameter(torch.zeros(4000, 4000))
    assert deferral.gap_us(model.model, first, second, "experts", 1e9) == before


def test_nothing_to_overlap_with(model: PreTrainedModel) -> None:
    assert depth(model, 0, device="cpu") == (0, "auto: no GPU computes meanwhile")
    assert depth(model, 4) == (0, "it is the last")
    rule = {"name": "e", "match": {"class": "Qwen3MoeSparseMoeBlock"}}
    rule["replace"] = {"operator": "deferred_moe", "schedule": "auto", "deferred": 3}  # type: ignore[assignment]
    runs = [replacement.runs["deferred"] for replacement in ktinject.plan(model, [rule]).replacements]
    assert runs[0] == "0 of 6 (auto: no GPU computes meanwhile)"


@pytest.mark.parametrize(("deferred", "warned"), [(1, False), (2, True)])
def test_the_plan_warns_beyond_the_bound(model: PreTrainedModel, deferred: int, warned: bool) -> None:
    rule = {"name": "e", "match": {"class": "Qwen3MoeSparseMoeBlock"}}
    rule["replace"] = {"operator": "deferred_moe", "deferred": deferred}  # type: ignore[assignment]
    said = str(ktinject.plan(model, [rule]))
    assert (f"e: warning: {deferred} of 6 experts deferred: beyond a quarter" in said) == warned


def test_measured_speeds() -> None:
    assert 1e8 < deferral.cpu_bandwidth() < 1e13
    config = dataclasses.replace(DeferredMoeConfig(), schedule="auto")
    assert not config.auto_sized


@pytest.mark.gpu
def test_measured_speed_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert 1e11 < deferral.gpu_bandwidth("cuda:0") < 2e13
