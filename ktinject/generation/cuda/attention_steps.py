"""Attention of a decode step with few kernels: grouped-query attention, and attention to a latent."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ktinject.generation.attention_probes import BY_HALVES, PLAIN_OUTPUTS
from ktinject.generation.cache import KVBucket
from ktinject.generation.cache_layers import BucketLayer, ConsecutiveLayer
from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Cache, Norm
from ktinject.generation.cuda.projections import Step, norm_of, project, weight_of
from ktinject.generation.layer_spec import AttentionSpec, GroupedAttentionSpec, LatentAttentionSpec
from ktinject.hf import compat
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.probes import twin


class _Attention:
    """Grouped-query attention with rotation by halves; maybe norms of each query and key head, sinks, output gates."""

    def __init__(
        self,
        spec: GroupedAttentionSpec,
        module: Any,
        norms: tuple[Norm | None, Norm | None],
        block_counts: Tensor,
    ) -> None:
        self.spec, self.module, self.norms, self.block_counts = spec, module, norms, block_counts
        self._halves_alike = _takes_one_half(module)

    @classmethod
    def of(cls, spec: GroupedAttentionSpec, module: Any, block_counts: Tensor) -> _Attention | None:
        if spec.output != "o_proj" or spec.turning != BY_HALVES or spec.outputs != PLAIN_OUTPUTS:
            return None
        if spec.index is not None:
            return None
        if len({getattr(module.get_submodule(name), "out_features", 0) for name in ("k_proj", "v_proj")}) > 1:
            return None
        if any(p.dtype == torch.float32 for p in module.parameters()):
            return None  # the kernels compute in 16 bits on tensor cores, which would round fp32 weights
        specs = (spec.q_norm, spec.k_norm)
        norms = [None if norm is None else norm_of(norm, module) for norm in specs]
        for described, found in zip(specs, norms):
            if described is not None and (found is None or described.rms.size != spec.head_size):
                return None
        if norms[0] is not None and norms[1] is not None and norms[0][1:] != norms[1][1:]:
            return None
        return cls(spec, module, (norms[0], norms[1]), block_counts)

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → the heads' outputs [b, heads · size], before the output projection."""
        module, spec = self.module, self.spec
        then = weight_of(module.o_proj)
        sizes = (spec.head_size * (2 if spec.has_output_gate else 1), spec.head_size, spec.head_size)
        parts = project(x, (module.q_proj, module.k_proj, module.v_proj), norm, then=then)
        q, k, v = (part.view(len(x), -1, size) for part, size in zip(parts, sizes))
        return decode_ops.attend(
            q,
            k,
            v,
            self.norms,
            rotation,
            cache,
            module.scaling,
            self.block_counts,
            sinks=module.sinks if spec.has_sinks else None,
            has_gates=spec.has_output_gate,
            halves_alike=self._halves_alike,
        ).flatten(1)


def _takes_one_half(module: Any) -> bool:
    """Whether the file of an attention rotates heads by cos and sin of one half, as gpt-oss' does.

    If this is wrong, the first step finds out: it compares.
    """
    rotate: Any = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get("apply_rotary_pos_emb")
    kind: Any = {"dtype": torch.float32, "device": "cpu"}
    q, turn = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], **kind), torch.tensor([[[0.0, 0.0]]], **kind)
    try:
        with twin.on_cpu():
            found, _ = rotate(q, q, turn, turn + 1)
        return bool(torch.equal(found, torch.tensor([[[[-3.0, -4.0, 1.0, 2.0]]]], **kind)))
    except Exception:  # transformers' own code, given what it may not be made for
        return False


class _Latent:
    """Latent attention by `absorbed_mla`, whose KV cache holds the latent and one rotary key for all heads."""

    def __init__(self, module: AbsorbedMla, norms: tuple[Norm | None, Norm]) -> None:
        self.module, self.norms = module, norms

    @classmethod
    def of(cls, spec: LatentAttentionSpec, module: AbsorbedMla) -> _Latent | None:
        said = spec.latent
        is_plain = not (said.by_position or said.has_key_norm or said.has_gate) and said.factors == (1.0, 1.0)
        if said.rope not in ("halves", "neighbours") or said.chooses != "none" or not is_plain:
            return None
        if any(p.dtype == torch.float32 for p in module.parameters()):
            return None
        query = None if spec.q_norm is None else norm_of(spec.q_norm, module)
        latent = norm_of(spec.kv_norm, module)
        if latent is None or not latent.is_plain or (query is None and spec.q_norm is not None):
            return None
        return cls(module, (query, latent))

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → the heads' outputs [b, heads · size], before the output projection."""
        module, spec, (query, latent) = self.module, self.module.spec, self.norms
        first = module.q_proj if module.q_a_proj is None else module.q_a_proj
        q, kv = project(x, (first, module.kv_a_proj_with_mqa), norm)
        if module.q_a_proj is not None:
            [q] = project(q.contiguous(), (module.q_b_proj,), query)
        q = q.view(len(x), spec.num_heads, -1)
        decode_ops.latent(q, kv, latent, rotation, cache, spec.rope == "neighbours")
        nope, rope = q[:, :, None].split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        return module.attend_latent(nope, rope, cache.keys, cache.values, cache.mask)[:, 0]


def attention_of(spec: AttentionSpec, module: Any, block_counts: Tensor) -> _Attention | _Latent | None:
    if isinstance(spec, LatentAttentionSpec):
        return _Latent.of(spec, module)
    return _Attention.of(spec, module, block_counts)


def cache_of(spec: AttentionSpec, module: Any, hidden_states: Tensor, args: Any, kwargs: Any) -> Cache | None:
    """The cache and mask of a captured step's attention; None if the call is not one of a captured step."""
    held, mask = compat.cache_of(kwargs), kwargs.get("attention_mask")
    if hidden_states.shape[1] != 1 or args or not isinstance(kwargs.get("position_embeddings"), tuple):
        return None
    if mask is None or not isinstance(held, KVBucket):
        return None
    layer = held.layers[spec.layer_idx]
    is_consecutive = type(layer) is ConsecutiveLayer
    if type(layer) is not BucketLayer and not is_consecutive:
        return None  # one with an index chooses tokens, of which the kernels know nothing
    if isinstance(module, AbsorbedMla) and (layer.window or not module.absorbs(1, layer.keys.shape[2])):
        return None
    if mask.dtype != torch.bool:  # it is added to scores, and was made of this one
        own = held.masks[layer.window]
        mask = own if own.device == mask.device else mask == 0
    if is_consecutive:  # behind a ring, too: the mask says which of its places are seen
        return Cache(layer.keys, layer.values, layer.place[:1], mask, is_consecutive=True)
    return Cache(layer.keys, layer.values, layer.cache_position, mask, layer.window or 0)


def attention_step(spec: AttentionSpec, module: Any, block_counts: Tensor) -> Step | None:
    attention = attention_of(spec, module, block_counts)
    if attention is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(spec, module, hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        found = attention(hidden_states[:, 0].contiguous(), None, kwargs["position_embeddings"], cache)
        return module.o_proj(found)[:, None], None

    return step
