"""The native twins of what chooses the places that latent attention attends to, and of how queries grow with theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktinject import _native
from ktinject.generation.cpu.native_parts import UnknownLayer, norm, projection, wide
from ktinject.generation.indexer_spec import IndexerSpec
from ktinject.generation.layer_spec import NormSpec
from ktinject.generation.pooled_index_spec import BIAS, GATE, PooledIndexSpec
from ktinject.operators.probes.norm import LayerNormSpec

Copies = list[tuple[Tensor, Tensor]]


def growth(module: Any, copies: Copies) -> dict[str, Any]:
    """What queries are multiplied with by their position. copies: as `NativeLayers` has them."""
    return {"growth": wide(module.scale, copies), "growth_bias": wide(module.bias, copies)}


def of_places(spec: IndexerSpec, module: Any, dtype: torch.dtype, copies: Copies) -> Any:
    """What chooses the places that latent attention attends to."""
    weight, bias = (tensor.detach() for tensor in (module.k_norm.weight, module.k_norm.bias))
    if weight.dtype not in (dtype, torch.float32) or bias.dtype != weight.dtype:
        raise UnknownLayer(f"the norm of its {type(module).__name__} is {weight.dtype}")
    return _native.Indexer(
        q=projection(module, "wq_b"),
        k=projection(module, "wk"),
        weights=projection(module, "weights_proj"),
        norm_weight=weight,
        norm_bias=bias,
        epsilon=spec.epsilon,
        heads=spec.heads,
        size=spec.size,
        rotary=spec.rotary,
        top_k=spec.top_k,
        neighbours=spec.rope == "neighbours",
        at_end=spec.at_end,
        **({} if spec.input_epsilon is None else _of_input(spec.input_epsilon, module, dtype, copies)),
    )


def of_pools(spec: PooledIndexSpec, module: Any, dtype: torch.dtype, copies: Copies) -> Any:
    """What chooses pools of places."""
    weight, bias = (tensor.detach() for tensor in (module.k_norm.weight, module.k_norm.bias))
    gate = getattr(module, GATE).detach()
    if not (weight.dtype == bias.dtype == gate.dtype == dtype and gate.is_contiguous()):
        raise UnknownLayer(f"the norm or the gate of its {type(module).__name__} is not of the model's dtype")
    return _native.PooledIndex(
        q=projection(module, "wq_b"),
        k=projection(module, "wk"),
        gate=_native.Projection(weight=gate),
        weights=projection(module, "weights_proj"),
        norm_weight=weight,
        norm_bias=bias,
        epsilon=spec.epsilon,
        bias=wide(getattr(module, BIAS), copies),
        heads=spec.heads,
        size=spec.size,
        top_k=spec.top_k,
        score_scale=spec.scale,
        weight_scale=spec.heads**-0.5,
    )


def _of_input(epsilon: float, module: Any, dtype: torch.dtype, copies: Copies) -> dict[str, Any]:
    """What makes an indexer's queries of its input, where there is no low-rank query."""
    layer_norm = LayerNormSpec(module.q_input_norm.normalized_shape[0], epsilon, True)
    return {
        "q_norm": norm(NormSpec("q_input_norm", layer_norm), module, dtype),
        **growth(module.softmax_scaling, copies),
    }
