"""The native twins of layers of several residual streams, and of the attention in them: with compressed keys
(DeepSeek-V4), or to a latent, with gates and sinks (Hunyuan 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import compressed_spec, feed_forward_spec, indexer_spec, norm_spec, streams_spec
from ktinject.generation.cache_layers import LayerKind
from ktinject.generation.compressed_spec import CompressorSpec
from ktinject.generation.cpu import native_indexers
from ktinject.generation.cpu.native_feed_forward import feed_forward
from ktinject.generation.cpu.native_parts import (
    UnknownLayer,
    child_of,
    known,
    linear,
    norm,
    projection,
    wide,
)
from ktinject.hf import adapters
from ktinject.operators.cpu_linear import CpuLinear

_HEAD = "hc_head"
# What attention to a latent holds whose heads have gates.
_GATED = {
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
}
Copies = list[tuple[Tensor, Tensor]]


def count(layers: nn.ModuleList) -> int:
    """How many streams the layers of a model have."""
    found = {
        known(streams_spec.of_connection(layer.attn_hc)).streams if streams_spec.is_layer(layer) else 1
        for layer in layers
    }
    if len(found) != 1:
        raise UnknownLayer(f"its layers have {', '.join(map(str, sorted(found)))} streams")
    return found.pop()


def heads(streams: int) -> set[str]:
    """What the module with the layers calls that which collapses streams behind the last one."""
    return {_HEAD} if streams > 1 else set()


def head(module: Any, streams: int, hidden: int, copies: Copies) -> Any:
    """Its twin; None of a model of one stream. copies: as `NativeLayers` has them."""
    if streams == 1:
        return None
    found: Any = getattr(module, _HEAD, None)
    held = {name for name, _ in found.named_parameters()} if isinstance(found, nn.Module) else set()
    eps: Any = getattr(found, "eps", None)
    norm_eps: Any = getattr(getattr(found, "input_norm", None), "eps", None)
    has_numbers = isinstance(eps, float) and isinstance(norm_eps, float)
    if held != {"hc_fn", "hc_base", "hc_scale"} or not has_numbers:
        raise UnknownLayer(f"its {type(found).__name__} does not collapse streams in a known way")
    return _native.HyperConnection(
        streams=streams,
        hidden=hidden,
        fn=wide(found.hc_fn, copies),
        base=wide(found.hc_base, copies),
        scale=wide(found.hc_scale, copies),
        norm_eps=norm_eps,
        eps=eps,
        is_head=True,
    )


def rotations(layers: nn.ModuleList) -> list[str]:
    """The names by which layers find their rotations among those of all kinds; empty: they are given one."""
    names = [getattr(getattr(layer, "self_attn", None), "rope_layer_type", None) for layer in layers]
    return [name for name in names if isinstance(name, str)] if all(names) else []


def least_compared(layers: nn.ModuleList, kinds: Sequence[LayerKind]) -> int:
    """Tokens before one that sees two windows, of which an index then has to choose; 0 without such an index."""
    compressors: list[Any] = [
        getattr(getattr(layer, "self_attn", None), "compressor", None) for layer in layers
    ]
    rates = (
        kind.rate
        for compressor, kind in zip(compressors, kinds)
        if kind.rate is not None and hasattr(compressor, "indexer")
    )
    return max((2 * rate - 1 for rate in rates), default=0)


def layer(
    module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies, angles: tuple[int, int]
) -> dict[str, Any]:
    """What `_native.Decoder.add` takes for a layer. angles: the columns of the rotation that are its kind's"""
    unit = feed_forward_spec.of_feed_forward(module.mlp)

    def norm_at(name: str) -> Any:
        return norm(known(norm_spec.norm_at(module, name)), module, dtype)

    return {
        "before_attention": norm_at("input_layernorm"),
        "attention": _attention(module.self_attn, kind, dtype, copies),
        "before_feed_forward": norm_at("post_attention_layernorm"),
        "feed_forward": feed_forward(unit, module.mlp, dtype, copies),
        "attention_streams": _connection(module.attn_hc, copies),
        "feed_forward_streams": _connection(module.ffn_hc, copies),
        "first_angle": angles[0],
        "angles": angles[1],
    }


def _connection(module: Any, copies: Copies) -> Any:
    spec = known(streams_spec.of_connection(module))
    return _native.HyperConnection(
        streams=spec.streams,
        hidden=module.fn.shape[1] // spec.streams,
        fn=wide(module.fn, copies),
        base=wide(module.base, copies),
        scale=wide(module.scale, copies),
        norm_eps=spec.norm_eps,
        eps=spec.eps,
        iterations=spec.iterations,
        post_factor=spec.post[0],
        post_eps=spec.post[1],
        rounds=spec.iterations > 0,
    )


def _attention(module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies) -> Any:
    children = {name for name, child in module.named_children() if child is not None}
    if children - {"indexer"} == _GATED:
        return _gated(module, kind, dtype, copies)
    return _shared_key(module, kind, dtype, copies)


def _gated(module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies) -> Any:
    """To chosen places of a latent, with sinks, and gates behind the heads; with the up-projections absorbed."""
    if kind != LayerKind(indexed=True):
        raise UnknownLayer(f"its cache is not what a {type(module).__name__} needs")
    names = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "scaling")
    heads, rank, nope, rope, value, scaling = (getattr(module, name, None) for name in names)
    sizes = [size for size in (heads, rank, nope, rope, value) if isinstance(size, int)]
    held = {name for name, _ in module.named_parameters(recurse=False)}
    if len(sizes) < 5 or not isinstance(scaling, float) or held != {"sinks"}:
        raise UnknownLayer(f"{type(module).__name__} has no {', '.join(names)} and sinks")
    indexer = getattr(module, "indexer", None)

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
        indexer=None
        if indexer is None
        else native_indexers.of_places(known(indexer_spec.of_indexer(indexer)), indexer, dtype, copies),
        chooses=True,
        sinks=wide(module.sinks, copies),
        gate=linear(module, "gate_proj"),
    )


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


def _shared_key(module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies) -> Any:
    """Of heads that share one key, which is the value."""
    if not compressed_spec.is_attention(module):
        raise UnknownLayer(f"{type(module).__name__} is not known in layers of several streams")
    spec = known(compressed_spec.of_attention(module))
    has_compressor = getattr(module, "compressor", None) is not None
    if kind.window is None or kind.is_state or kind.indexed or (kind.rate is not None) != has_compressor:
        raise UnknownLayer(f"its cache is not what a {type(module).__name__} needs")
    grouped: Any = adapters.unadapted(module.o_a_proj)
    groups: Any = getattr(grouped, "n_groups", None)
    is_plain = isinstance(grouped, nn.Linear) and grouped.bias is None and isinstance(groups, int)
    if not is_plain or grouped.weight.dtype != dtype or not grouped.weight.is_contiguous():
        raise UnknownLayer(f"its o_a_proj is a {type(grouped).__name__} that is not known")

    def norm_at(name: str) -> Any:
        return norm(known(norm_spec.norm_at(module, name)), module, dtype)

    keys, index = _compressors(module, kind, spec.layer_idx, dtype, copies)
    return _native.SharedKeyAttention(
        q_a=linear(module, "q_a_proj"),
        q_norm=norm_at("q_a_norm"),
        q_b=linear(module, "q_b_proj"),
        kv=linear(module, "kv_proj"),
        kv_norm=norm_at("kv_norm"),
        grouped=grouped.weight.detach(),
        o=linear(module, "o_b_proj"),
        sinks=wide(module.sinks, copies),
        compressor=keys,
        index=index,
        heads=spec.heads,
        size=spec.head_size,
        groups=groups,
        window=kind.window,
        scale=spec.scaling,
        query_epsilon=spec.norm_eps,
    )


def _compressors(
    module: Any, kind: LayerKind, layer_index: int, dtype: torch.dtype, copies: Copies
) -> tuple[Any, Any]:
    """The twins of what compresses an attention's keys, and of what chooses among them; None where there is none."""
    if kind.rate is None:
        return None, None
    specs = dict(compressed_spec.compressors(module, layer_index))
    spec, compressor = specs.get("compressor"), module.compressor
    if spec is None:
        raise UnknownLayer(f"its {type(compressor).__name__} is not known")
    keys = _compressor(spec, compressor, kind.rate, dtype, copies)
    if spec.indexer is None:
        return keys, None
    indexer = compressor.indexer
    scorer, heads, top_k = indexer.scorer, indexer.num_heads, indexer.index_topk
    return keys, _native.CompressedIndex(
        keys=_compressor(spec.indexer, indexer, kind.rate, dtype, copies),
        q=projection(indexer, "q_b_proj"),
        weights=projection(scorer, "weights_proj"),
        heads=heads,
        top_k=top_k,
        score_scale=scorer.softmax_scale,
        weight_scale=scorer.weights_scaling,
    )


def _compressor(spec: CompressorSpec, module: Any, rate: int, dtype: torch.dtype, copies: Copies) -> Any:
    if module.compress_rate != rate:
        raise UnknownLayer(f"its {type(module).__name__} has windows of {module.compress_rate} tokens")
    angles = module.rotary_emb.get_buffer("_".join((spec.rotation, "inv_freq")))
    return _native.Compressor(
        kv=projection(module, "kv_proj"),
        gate=projection(module, "gate_proj"),
        bias=wide(module.position_bias, copies),
        norm=norm(known(norm_spec.norm_at(module, "kv_norm")), module, dtype),
        angles=wide(angles, copies),
        scale=spec.scale,
        rounds_sum=module.position_bias.dtype != torch.float32,
    )


def showing_begun(
    forward: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A compressor's forward that shows the present window, too, though it is not complete: so that a step in which no
    window is complete compares attention to compressed keys.
    """

    def run(
        hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        keys, _ = forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        layer = cache.layers[layer_idx]
        is_behind = torch.arange(keys.shape[2]) > layer.cache_position // layer.rate
        added = keys.new_zeros(len(keys), 1, 1, keys.shape[2]).masked_fill_(is_behind, float("-inf"))
        return keys, added

    return run
