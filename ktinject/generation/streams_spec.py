"""Decoder layers whose residual is several streams (hyper-connections, DeepSeek-V4 and Hunyuan 4).

    x ──► hyper-connection ──► norm ──► attention ──► post · y + combᵀ · x ──► the same with the feed-forward part
              └── post, comb ──────────────────────────────┘

Found by what they hold, and compared in the first step (cuda/fused.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ktinject.support import Support

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "attn_hc", "ffn_hc"}
_BLOCK = {"gate", "experts", "shared_experts"}
_CONNECTION = {"fn", "base", "scale"}


@dataclass(frozen=True)
class HyperConnectionSpec:
    """The weights of streams and these streams collapsed, as native/decode/hyper_connection.hpp has the formula.

    streams     how many
    iterations  that normalise how they are mixed; 0: they are not mixed, and only what comes out is rounded
    eps         of their weights
    norm_eps    of the norm before the projection
    post        (factor, eps) of the weights of what is added
    """

    path: str
    streams: int
    iterations: int
    eps: float
    norm_eps: float
    post: tuple[float, float] = (2.0, 0.0)


@dataclass(frozen=True)
class StreamsLayerSpec:
    """A layer whose parts have hyper-connections: children are `_LAYER`."""

    path: str
    layer_idx: int


@dataclass(frozen=True)
class TokenRoutedSpec:
    """An MoE block whose router may be given the token's number beside x: children are `_BLOCK`.

    by_token  it is
    """

    path: str
    by_token: bool


def is_block(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} == _BLOCK and isinstance(
        getattr(module, "is_hash", None), bool
    )


def of_block(module: Any) -> TokenRoutedSpec:
    """The spec of a block, with an empty path."""
    return TokenRoutedSpec("", module.is_hash)


def is_connection(module: nn.Module) -> bool:
    return {name for name, _ in module.named_parameters(recurse=False)} == _CONNECTION


def is_layer(module: nn.Module) -> bool:
    return {name for name, _ in module.named_children()} == _LAYER and is_connection(
        module.get_submodule("attn_hc")
    )


def of_connection(module: Any) -> HyperConnectionSpec | Support:
    """The spec of a hyper-connection, with an empty path."""
    streams, iterations, eps, magnitude = (
        getattr(module, name, None)
        for name in ("hc_mult", "hc_sinkhorn_iters", "hc_eps", "hc_post_magnitude")
    )
    norm_eps = getattr(getattr(module, "input_norm", None), "eps", None)
    is_mixed = isinstance(iterations, int) and iterations > 0
    if not isinstance(streams, int) or not (is_mixed or isinstance(magnitude, (int, float))):
        return Support.no("it has no hc_mult and hc_sinkhorn_iters, or hc_post_magnitude")
    if not isinstance(eps, float) or not isinstance(norm_eps, float):
        return Support.no("it has no hc_eps, or no input_norm.eps")
    outputs, columns = module.fn.shape
    if outputs != (2 + (streams if is_mixed else 0)) * streams or columns % streams:
        return Support.no(f"fn is {list(module.fn.shape)} of {streams} streams")
    if isinstance(iterations, int) and is_mixed:
        return HyperConnectionSpec("", streams, iterations, eps, norm_eps)
    assert isinstance(magnitude, (int, float))
    return HyperConnectionSpec("", streams, 0, eps, norm_eps, (float(magnitude), eps))


def of_layer(layer: Any) -> StreamsLayerSpec | Support:
    """The spec of a layer, with an empty path."""
    index = getattr(layer, "layer_idx", None)
    return StreamsLayerSpec("", index) if isinstance(index, int) else Support.no("it has no layer_idx")
