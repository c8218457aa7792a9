"""The native twins of layers of several residual streams, and of the attention in them: with compressed keys
(DeepSeek-V4), to a latent (native_latents.py), or with states of fixed size (GLM-5.3-Flash).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import (
    compressed_spec,
    feed_forward_spec,
    layer_probes,
    norm_spec,
    recurrent_spec,
    streams_spec,
)
from ktinject.generation.cache_layers import LayerKind
from ktinject.generation.compressed_spec import CompressorSpec
from ktinject.generation.cpu import native_latents
from ktinject.generation.cpu.native_feed_forward import feed_forward
from ktinject.generation.cpu.native_parts import (
    UnknownLayer,
    known,
    linear,
    norm,
    projection,
    wide,
)
from ktinject.generation.cpu.native_states import state_twin
from ktinject.hf import adapters

_HEAD = "hc_head"
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
    if isinstance(found, nn.Module) and not [*found.parameters()] and _is_mean(found, streams):
        return _native.HyperConnection(
            streams=streams, hidden=hidden, fn=None, base=None, scale=None, is_head=True
        )
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


def _is_mean(module: nn.Module, streams: int) -> bool:
    """Whether what collapses [b, n, streams, hidden] gives their mean."""
    given = layer_probes.random(2, 3, streams, 5, seed=11)
    try:
        found = layer_probes.run_twin(module, {}, given)
    except Exception:  # code of transformers' that is made for something else
        return False
    return isinstance(found, Tensor) and torch.equal(found, given.mean(2))


def rotations(layers: nn.ModuleList) -> list[str]:
    """The names by which layers find their rotations among those of all kinds; empty: they are given one."""
    names = [getattr(getattr(layer, "self_attn", None), "rope_layer_type", None) for layer in layers]
    return [name for name in names if isinstance(name, str)] if all(names) else []


def least_compared(layers: nn.ModuleList, kinds: Sequence[LayerKind]) -> int:
    """Tokens before one that sees two windows or pools, of which an index has to choose; 0 without such an index."""
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    least = [0]
    for attention, kind in zip(attentions, kinds):
        compressor = getattr(attention, "compressor", None)
        if kind.rate is not None and hasattr(compressor, "indexer"):
            least.append(2 * kind.rate - 1)
        if kind.is_pooled and (index := getattr(attention, "indexer", None)) is not None:
            least.append(2 * index.index_kpool)
    return max(least)


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
    finder = recurrent_spec.finder(module)
    if (finder is not None) != kind.is_state:
        raise UnknownLayer(f"its cache is not what a {type(module).__name__} needs")
    if finder is not None:
        return state_twin(known(finder(module)), module, dtype, copies)
    if native_latents.is_one(module):
        return native_latents.of_attention(module, kind, dtype, copies)
    return _shared_key(module, kind, dtype, copies)


def _shared_key(module: Any, kind: LayerKind, dtype: torch.dtype, copies: Copies) -> Any:
    """Of heads that share one key, which is the value."""
    if not compressed_spec.is_attention(module):
        raise UnknownLayer(f"{type(module).__name__} is not known in layers of several streams")
    spec = known(compressed_spec.of_attention(module))
    has_compressor = getattr(module, "compressor", None) is not None
    is_other = kind.is_state or kind.indexed or kind.keeps_prompt
    if kind.window is None or is_other or (kind.rate is not None) != has_compressor:
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
        is_behind = torch.arange(keys.shape[2], device="cpu") > layer.cache_position // layer.rate
        added = keys.new_zeros(len(keys), 1, 1, keys.shape[2]).masked_fill_(is_behind, float("-inf"))
        return keys, added

    return run
