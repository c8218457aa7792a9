"""Decoder layers that hold router and experts themselves, beside a dense unit, as Gemma 4's do.

    y = x + norm(attention(norm(x)))
    z = y + norm(norm(unit(norm(y))) + norm(experts(norm(y), router(y))))       times a number

Each norm is another one. That a layer computes this is found by running it, as layer_probes.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation import feed_forward_spec, norm_spec, normed_router
from ktinject.generation.feed_forward_spec import FeedForwardSpec, MoeSpec, OtherFeedForward, RouterSpec
from ktinject.generation.layer_probes import ARGUMENTS, LayerNames, Stub, random, run_twin
from ktinject.generation.norm_spec import NormSpec
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.support import Support

# The norms of the dense unit, and of the experts.
_OF_UNIT = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1")
_OF_EXPERTS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
NAMES = LayerNames(
    "self_attn",
    before_attention="input_layernorm",
    behind_attention="post_attention_layernorm",
    behind_feed_forward="post_feedforward_layernorm",
)
SCALE = "layer_scalar"
CHILDREN = {*filter(None, NAMES), "mlp", "router", "experts", *_OF_UNIT, *_OF_EXPERTS}

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "input_layernorm": lambda x: torch.sin(x + 0.3),
    "self_attn": lambda x: torch.cos(2 * x),
    "post_attention_layernorm": torch.exp,
    "pre_feedforward_layernorm": lambda x: torch.tanh(x - 0.5),
    "mlp": torch.square,
    "post_feedforward_layernorm_1": lambda x: torch.cos(x - 0.7),
    "pre_feedforward_layernorm_2": lambda x: torch.sin(3 * x + 0.2),
    "experts": lambda x: torch.tanh(2 * x),
    "post_feedforward_layernorm_2": lambda x: torch.sin(x - 0.4),
    "post_feedforward_layernorm": torch.atan,
}


@twin.on_cpu()
def residual(layer: nn.Module) -> float | Support:
    """1.0 if a layer with these children computes what is said above; else why not."""
    if [name for name, _ in layer.named_buffers(recurse=False)] != [SCALE]:
        return Support.no(f"it holds another buffer than {SCALE}")
    if [*layer.parameters(recurse=False)]:
        return Support.no("it holds parameters beside its children")
    x, scale = random(1, 2, 8).double(), torch.tensor([0.7], dtype=torch.float64, device="cpu")
    weights, ids = (
        torch.full((2, 2), 0.5, dtype=torch.float32, device="cpu").double(),
        torch.tensor([[0, 1], [1, 0]], device="cpu"),
    )
    routed: list[Tensor] = []

    def route(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routed.append(x)
        return weights, weights, ids

    def experts(x: Tensor, *given: Any) -> Tensor:
        if given[0] is not ids or given[1] is not weights:
            raise RuntimeError("its experts are given something else than the router's choice")
        return _FUNCTIONS["experts"](x)

    children = {name: Stub(function) for name, function in _FUNCTIONS.items()}
    children["self_attn"] = Stub(lambda x: (_FUNCTIONS["self_attn"](x), None))
    children |= {"router": Stub(route), "experts": Stub(experts)}
    arguments = dict.fromkeys(ARGUMENTS)
    try:
        found = run_twin(layer, {**children, SCALE: scale}, x, **arguments)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)

    def through(x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = _FUNCTIONS[name](x)
        return x

    y = x + through(x, "input_layernorm", "self_attn", "post_attention_layernorm")
    dense = through(y, _OF_UNIT[0], "mlp", _OF_UNIT[1])
    sparse = through(y, _OF_EXPERTS[0], "experts", _OF_EXPERTS[1])
    want = (y + through(dense + sparse, "post_feedforward_layernorm")) * scale
    is_same = isinstance(found, Tensor) and found.shape == want.shape and torch.allclose(found, want)
    if is_same and len(routed) == 1 and torch.allclose(routed[0].flatten(), y.flatten()):
        return 1.0
    return Support.no("it does not add experts to a dense unit, with norms around both")


def feed_forward(layer: nn.Module) -> FeedForwardSpec:
    """The dense unit and the experts, as one part of the layer. Paths are the layer's."""
    norms: list[NormSpec] = []
    for name in (*_OF_UNIT, *_OF_EXPERTS):
        norm = norm_spec.norm_at(layer, name)
        if isinstance(norm, Support):
            return OtherFeedForward("", norm.reason)
        norms.append(norm)
    unit = feed_forward_spec.of_dense(layer.get_submodule("mlp"))
    router = normed_router.of_router(layer.get_submodule("router"))
    if isinstance(unit, Support) or isinstance(router, Support):
        refused = unit if isinstance(unit, Support) else router
        assert isinstance(refused, Support)
        return OtherFeedForward("", refused.reason)
    return MoeSpec(
        path="",
        router=RouterSpec("router", **router),
        experts="experts",
        shared=replace(unit, path="mlp"),
        shared_gate=None,
        shared_norms=(norms[0], norms[1]),
        experts_norms=(norms[2], norms[3]),
    )
