"""Attention with compressed keys with few kernels.

    projections, norms | queries turned | keys turned, and into the ring | projections, a window's key | attention
    | turned back | output projections

A module's forward of a step of one token a row is replaced where the cache is one of ours; others stay the module's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktinject.generation.cache import KVBucket
from ktinject.generation.cache_layers import BucketLayer
from ktinject.generation.compressed import CompressedLayer
from ktinject.generation.compressed_spec import CompressorSpec, SharedKeyAttentionSpec
from ktinject.generation.cuda import compressed_ops
from ktinject.generation.cuda.compressed_ops import CompressorWeights
from ktinject.generation.cuda.projections import Step, project
from ktinject.hf import compat


def attention_step(spec: SharedKeyAttentionSpec, module: Any) -> Step:
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, mask = compat.cache_of(kwargs), kwargs.get("attention_mask")
        held = cache.layers[spec.layer_idx] if isinstance(cache, KVBucket) else None
        is_ours = isinstance(held, BucketLayer) and isinstance(mask, Tensor) and mask.is_floating_point()
        if hidden_states.shape[1] != 1 or args or not is_ours:
            return own(module, hidden_states, *args, **kwargs)
        assert isinstance(mask, Tensor) and isinstance(cache, KVBucket)
        positions, (cos, sin) = kwargs["position_ids"], kwargs["position_embeddings"][spec.rotation]
        rows, x = len(hidden_states), hidden_states[:, 0].contiguous()
        cos, sin = (part[:, 0].expand(rows, -1) for part in (cos, sin))
        q, kv = project(x, [module.q_a_proj, module.kv_proj])
        residual = module.q_a_norm(q)
        q = module.q_b_proj(residual).view(rows, spec.heads, spec.head_size)
        q = compressed_ops.turn_heads(q, cos, sin, eps=spec.norm_eps)
        kv = compressed_ops.turn_heads(module.kv_norm(kv)[:, None], cos, sin)[:, None]
        keys = cache.update(kv, kv, spec.layer_idx)[0]
        rest: Tensor | None = None
        if module.compressor is not None:
            arguments = hidden_states, residual[:, None], positions, cache, spec.layer_idx
            compressed, hidden = module.compressor(*arguments)
            keys, rest = torch.cat([keys, compressed], 2), hidden[:, 0, 0].contiguous()
        # For 64 heads, transformers repeats the keys as often.
        scores = q @ keys[:, 0].mT
        weights = compressed_ops.sink_softmax(scores, spec.scaling, mask[:, 0, 0], rest, module.sinks)
        out = weights @ keys[:, 0]
        out = compressed_ops.turn_heads(out, cos, sin, is_back=True)
        out = module.o_a_proj(out.view(rows, 1, module.config.o_groups, -1)).flatten(2)
        return module.o_b_proj(out), None

    return step


def compressor_step(spec: CompressorSpec, module: Any) -> Step | None:
    """Of a compressor whose keys are all seen, or chosen by an index; None: of dtypes that the kernels do not have."""
    if not (_is_wide(module) and (spec.indexer is None or _is_wide(module.indexer))):
        return None
    own = type(module).forward

    def step(
        hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
    ) -> Any:
        given = hidden_states, q_residual, position_ids, cache, layer_idx
        layer = _layer_of(cache, layer_idx, hidden_states)
        if layer is None:
            return own(module, *given)
        # transformers shows all keys that there are to a token, unless they are chosen.
        index = spec.indexer
        seen = layer.cache_position if index is None else position_ids[:, -1]
        seen = seen.expand(len(hidden_states))
        keys, added = _compress(spec, module, hidden_states, layer, seen, cache.is_compared)
        if index is not None and keys.shape[1] <= module.indexer.index_topk:
            # It would choose all of them, but needs its own keys later.
            _compress(index, module.indexer, hidden_states, layer, seen, cache.is_compared)
        elif index is not None:
            chosen = module.indexer(*given)[:, 0]
            count = keys.shape[1]
            chosen = torch.where(chosen < 0, count, chosen)
            added = keys.new_full((len(keys), count + 1), float("-inf")).scatter_(1, chosen, 0.0)[:, :count]
        return keys[:, None], added[:, None, None]

    return step


def indexer_step(spec: CompressorSpec, module: Any) -> Step | None:
    """Of an index, which chooses a compressor's keys by keys of its own; None as above."""
    if not _is_wide(module):
        return None
    own = type(module).forward

    def step(
        hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
    ) -> Any:
        layer = _layer_of(cache, layer_idx, hidden_states)
        if layer is None:
            return own(module, hidden_states, q_residual, position_ids, cache, layer_idx)
        seen = position_ids[:, -1].expand(len(hidden_states))
        keys, added = _compress(spec, module, hidden_states, layer, seen, cache.is_compared)
        cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=spec.rotation)
        rows = len(hidden_states)
        q = module.q_b_proj(q_residual).view(rows, -1, spec.size)
        q = compressed_ops.turn_heads(q, *(part[:, 0].expand(rows, -1) for part in (cos, sin)))
        scores = module.scorer(q[:, None], keys, hidden_states) + added[:, None]
        chosen = scores.topk(min(module.index_topk, keys.shape[1]), dim=-1).indices
        return torch.where(chosen >= ((seen + 1) // layer.rate)[:, None, None], -1, chosen)

    return step


def _is_wide(module: Any) -> bool:
    return {module.position_bias.dtype, module.kv_norm.weight.dtype} == {torch.float32}


def _layer_of(cache: Any, index: int, hidden_states: Tensor) -> CompressedLayer | None:
    """The layer of a step's cache; None for what is no such step."""
    layer = cache.layers[index] if isinstance(cache, KVBucket) else None
    return layer if isinstance(layer, CompressedLayer) and hidden_states.shape[1] == 1 else None


def _compress(
    spec: CompressorSpec,
    module: Any,
    hidden_states: Tensor,
    layer: CompressedLayer,
    seen: Tensor,
    always: bool,
) -> tuple[Tensor, Tensor]:
    """The keys of all windows [b, windows, d], and what hides those that are not complete at `seen`, [b, windows].

    always  as `compressed_ops.compress` takes it
    """
    x, part = hidden_states[:, 0].contiguous(), layer.parts[spec.name]
    kv, gate = project(x, [module.kv_proj, module.gate_proj])
    angles = getattr(module.rotary_emb, "_".join((spec.rotation, "inv_freq")))
    weights = CompressorWeights(
        module.position_bias, module.kv_norm.weight, spec.norm_eps, angles.float(), spec.scale
    )
    part.gate_dtype = torch.promote_types(gate.dtype, torch.float32)
    added = compressed_ops.compress(kv, gate, part, weights, layer.cache_position, seen, always=always)
    return part.keys, added
