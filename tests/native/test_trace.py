"""What looks into the native core: spans of expert work, which experts compute, and experts that are copies of one."""

from __future__ import annotations

import pytest
import torch
from silu_layers import silu_experts

from ktinject import _native


def experts(weights: str = "bf16", has_bias: bool = True) -> _native.Experts:
    return silu_experts(4, 200, 72, weights, 64 if weights == "int4" else 0, has_bias)


def call(layer: _native.Experts, tokens: int = 3, expert: int = 0) -> torch.Tensor:
    x = torch.randn(tokens, 200, generator=torch.Generator().manual_seed(0))
    out = torch.full_like(x, torch.nan)
    ids = torch.full((tokens, 1), expert)
    layer.forward(x, ids, torch.ones(tokens, 1), out)
    return out


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_repeat_makes_all_experts_one(weights: str) -> None:
    layer = experts(weights)
    with pytest.raises(ValueError, match="no such expert, or no memory yet"):
        layer.repeat(0)
    layer.allocate()
    for projection, n, k in (("gate", 72, 200), ("up", 72, 200), ("down", 200, 72)):
        layer.load(projection, 2, torch.randn(n, k))
        layer.load_bias(projection, 2, torch.randn(n))
    wanted = call(layer, expert=2)
    assert layer.absent(99)
    layer.repeat(2)
    assert not layer.absent(99)
    for expert in range(4):
        assert torch.equal(call(layer, expert=expert), wanted)
    with pytest.raises(ValueError, match="no such expert"):
        layer.repeat(4)


def test_spans_are_recorded_between_start_and_stop_only() -> None:
    layer, other = experts(has_bias=False), experts(has_bias=False)
    for each in (layer, other):
        each.allocate()
        each.mark_loaded()
    call(layer)
    _native.trace_start()
    call(layer, 3)
    call(other, 5)
    spans = _native.trace_stop()
    call(layer)
    assert [(owner, tokens) for _, _, owner, tokens in spans] == [(layer.id, 3), (other.id, 5)]
    assert all(begin < end for begin, end, *_ in spans) and spans[0][1] <= spans[1][0]
    _native.trace_start()
    assert _native.trace_stop() == []


@pytest.mark.parametrize("ids_of", [torch.int32, torch.int64])
def test_uses_are_counted_between_start_and_stop_only(ids_of: torch.dtype) -> None:
    layer, other = experts(has_bias=False), experts(has_bias=False)
    for each in (layer, other):
        each.allocate()
        each.mark_loaded()
    ids = torch.tensor([[0, 3], [-1, 3], [4, 1]], dtype=ids_of)  # 4 is none of its experts

    def route(layer: _native.Experts) -> None:
        x = torch.ones(3, 200)
        layer.forward(x, ids, torch.ones(3, 2), torch.empty_like(x))

    route(layer)
    _native.uses_start()
    try:
        assert _native.uses() == []
        route(layer)
        call(other, 5, 2)
        route(layer)
    finally:
        _native.uses_stop()
    route(layer)
    assert _native.uses() == [(layer.id, [2, 2, 0, 4]), (other.id, [0, 0, 5, 0])]
    _native.uses_start()
    _native.uses_stop()
    assert _native.uses() == []
