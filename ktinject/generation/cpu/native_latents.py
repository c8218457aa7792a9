"""The native twins of attention to a latent by transformers' own modules, in layers of several residual streams: with
gates and sinks (Hunyuan 4), or to pools of tokens (GLM-5.3-Flash).

In other layers, `absorbed_mla` stands for such a module, and its twin is made of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import indexer_spec, norm_spec, pooled_index_spec
from ktinject.generation.cache_layers import LayerKind
from ktinject.generation.cpu import native_indexers
from ktinject.generation.cpu.native_parts import UnknownLayer, child_of, known, linear, norm, wide
from ktinject.operators.cpu_linear import CpuLinear

_CHILDREN = {
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
}
_GATE, _INDEXER = "gate_proj", "indexer"
Copies = list[tuple[Tensor, Tensor]]


def is_one(module: Any) -> bool:
    """Whether a module looks like such attention."""
    children = {name for name, child in module.named_children() if child is not None}
    return children - {_GATE, _INDEXER} == _CHILDREN


def of_attention(module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies) -> Any:
    """The twin, with the up-projections absorbed. copies: as `NativeLayers` has them."""
    has_gate, kinds = (
        hasattr(module, _GATE),
        {LayerKind(indexed=True), LayerKind(indexed=True, is_pooled=True)},
    )
    if kind not in kinds or kind.is_pooled == has_gate:
        raise UnknownLayer(f"its cache is not what a {type(module).__name__} needs")
    names = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling")
    heads, rank, nope, rope, value, scaling = (getattr(module, name, None) for name in names)
    sizes = [size for size in (heads, rank, nope, rope, value) if isinstance(size, int)]
    held = {name for name, _ in module.named_parameters(recurse=False)}
    sinks = {"sinks"} if has_gate else set()
    if len(sizes) < 5 or not isinstance(scaling, float) or held != sinks:
        raise UnknownLayer(f"{type(module).__name__} has no {', '.join((*names, *sinks))}, or holds more")

    def norm_at(name: str) -> Any:
        return norm(known(norm_spec.norm_at(module, name)), module, dtype)

    return _native.LatentAttention(
        q=None,
        q_a=linear(module, "q_a_proj"),
        q_norm=norm_at("q_a_layernorm"),
        q_b=linear(module, "q_b_proj"),
        kv=linear(module, "kv_a_proj_with_mqa"),
        kv_norm=norm_at("kv_a_layernorm"),
        expansion=_expansion(module, dtype),
        o=linear(module, "o_proj"),
        heads=sizes[0],
        rank=sizes[1],
        nope=sizes[2],
        rope=sizes[3],
        value=sizes[4],
        neighbours=False,
        scale=scaling,
        indexer=_index(module, kind, dtype, copies),
        chooses=True,
        sinks=wide(module.sinks, copies) if has_gate else None,
        gate=linear(module, _GATE) if has_gate else None,
    )


def _index(module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies) -> Any:
    """The twin of what chooses the places; None: they are those of the layer before."""
    index = getattr(module, _INDEXER, None)
    if index is None:
        return None
    if kind.is_pooled:
        return native_indexers.of_pools(known(pooled_index_spec.of_index(index)), index, dtype, copies)
    return native_indexers.of_places(known(indexer_spec.of_indexer(index)), index, dtype, copies)


def _expansion(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight of kv_b_proj; where that is packed, its values in the model's dtype."""
    layer = child_of(module, "kv_b_proj", nn.Module)
    if isinstance(layer, CpuLinear):
        if "bias" in layer.parameter_shapes():
            raise UnknownLayer("its kv_b_proj has a bias")
        return layer.unpack("weight").to(dtype)
    if type(layer) is not nn.Linear or layer.bias is not None or layer.weight.dtype != dtype:
        raise UnknownLayer(f"its kv_b_proj is a {type(layer).__name__} that is not known")
    weight: Tensor = layer.weight.detach()
    return weight.contiguous()
