"""Attention whose keys are values, with compressed ones beside those of a window (DeepSeek-V4), for the captured step.

Found by what the modules hold, and compared in the first step (cuda/fused.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ktinject.operators.probes import norm
from ktinject.operators.probes.norm import RmsNormSpec
from ktinject.support import Support

_ATTENTION = {"q_a_proj", "q_a_norm", "q_b_proj", "q_b_norm", "kv_proj", "kv_norm", "o_a_proj", "o_b_proj"}
_COMPRESSOR = {"kv_proj", "gate_proj", "kv_norm", "rotary_emb"}
_INDEXER = _COMPRESSOR | {"q_b_proj", "scorer"}
# Frequencies that are those of a text of any length.
_STATIC = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class CompressorSpec:
    """What makes one key of each window, as native/cuda/decode_compress.hpp has the formula.

    name      by which the cache's layer has its part
    size      of a key
    overlaps  a window takes something of the one before
    rotation  the name of its angles
    scale     of their cos and sin
    indexer   of a compressor whose keys an index chooses, that index
    """

    path: str
    layer_idx: int
    name: str
    size: int
    overlaps: bool
    norm_eps: float
    rotation: str
    scale: float
    indexer: CompressorSpec | None = None


@dataclass(frozen=True)
class SharedKeyAttentionSpec:
    """Attention of many heads to one head whose keys are values; what they give turns back.

    rotation  the name of the angles
    norm_eps  of the queries' norm, which has no weight
    """

    path: str
    layer_idx: int
    heads: int
    head_size: int
    scaling: float
    rotation: str
    norm_eps: float


def is_attention(module: nn.Module) -> bool:
    children = {name for name, child in module.named_children() if child is not None}
    return children - {"compressor"} == _ATTENTION


def of_attention(module: Any) -> SharedKeyAttentionSpec | Support:
    """The spec of an attention, with an empty path."""
    index, heads, size, scaling = (
        getattr(module, name, None) for name in ("layer_idx", "num_heads", "head_dim", "scaling")
    )
    rotation, eps = getattr(module, "rope_layer_type", None), getattr(module.q_b_norm, "eps", None)
    if not (isinstance(index, int) and isinstance(heads, int) and isinstance(size, int)):
        return Support.no("it has no layer_idx, num_heads and head_dim")
    if not (isinstance(scaling, float) and isinstance(rotation, str) and isinstance(eps, float)):
        return Support.no("it has no scaling, rope_layer_type and q_b_norm.eps")
    if {name for name, _ in module.named_parameters(recurse=False)} != {"sinks"} or size % 2:
        return Support.no("it holds something else than sinks, or heads of an odd size")
    return SharedKeyAttentionSpec("", index, heads, size, scaling, rotation, eps)


def compressors(attention: Any, index: int) -> Iterator[tuple[str, CompressorSpec]]:
    """Path below an attention and spec, with an empty path, of what compresses its keys."""
    compressor = getattr(attention, "compressor", None)
    if compressor is None:
        return
    indexer = getattr(compressor, "indexer", None)
    of_index = None if indexer is None else _of_compressor(indexer, index, "indexer", _INDEXER)
    if isinstance(of_index, CompressorSpec):
        yield "compressor.indexer", of_index
    holds = _COMPRESSOR if indexer is None else _COMPRESSOR | {"indexer"}
    found = _of_compressor(compressor, index, "compressor", holds, of_index)
    if isinstance(found, CompressorSpec):
        yield "compressor", found


def _of_compressor(
    module: Any, index: int, name: str, holds: set[str], indexer: CompressorSpec | Support | None = None
) -> CompressorSpec | Support:
    if isinstance(indexer, Support):
        return indexer
    children = {child for child, _ in module.named_children()}
    bias, size, rotation = (
        getattr(module, attribute, None) for attribute in ("position_bias", "head_dim", "rope_layer_type")
    )
    if children != holds or not (
        isinstance(bias, Tensor) and isinstance(size, int) and isinstance(rotation, str)
    ):
        return Support.no(f"it holds {', '.join(sorted(children))}")
    rms = norm.probe(module.kv_norm)
    if not isinstance(rms, RmsNormSpec):
        return rms
    if rms.rounds_before_weight or rms.has_unit_offset:
        return Support.no("its norm rounds before the weight, or has an offset")
    kinds, scale = (
        getattr(module.rotary_emb, part, None)
        for part in ("rope_type", "_".join((rotation, "attention_scaling")))
    )
    if (
        not isinstance(kinds, dict)
        or kinds.get(rotation) not in _STATIC
        or not isinstance(scale, (int, float))
    ):
        return Support.no("its angles may depend on the length of a text")
    width = bias.shape[-1]
    if width not in (size, 2 * size) or size % 2:
        return Support.no(f"position_bias has {width} values, keys {size}")
    return CompressorSpec("", index, name, size, width > size, rms.epsilon, rotation, float(scale), indexer)
