"""Decode steps with few kernels, one for each kind of spec. `fused.py` compares them with the modules and uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Cache, Norm
from ktinject.generation.layer_spec import (
    AttentionSpec,
    DecoderLayerSpec,
    GatedDeltaSpec,
    GroupedAttentionSpec,
    LatentAttentionSpec,
    MoeSpec,
    NormSpec,
    PartSpec,
    RotationSpec,
    RouterSpec,
)
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.hybrid_experts import HybridExperts, Underway

Step = Callable[..., Any]

# With more weights, cuBLAS is faster than our kernel. With more inputs, a norm is faster as a kernel of its own.
_MANY_WEIGHTS = 50_000_000
_MANY_INPUTS = 4096


def step_of(spec: PartSpec, module: Any, block_counts: Tensor) -> Step | None:
    """A function that replaces a module's forward in a captured decode step; None if there are no kernels for it.

    spec          what the module computes
    block_counts  as `decode_ops.attend` takes them
    """
    if isinstance(spec, NormSpec):
        return _norm_step(spec, module)
    if isinstance(spec, (GroupedAttentionSpec, LatentAttentionSpec)):
        return _attention_step(spec, module, block_counts)
    if isinstance(spec, RouterSpec):
        return _router_step(spec, module)
    if isinstance(spec, RotationSpec):
        return _rotation_step(spec, module)
    if isinstance(spec, DecoderLayerSpec):
        return _layer_step(spec, module, block_counts)
    return _moe_step(spec, module)


def _rotation_step(spec: RotationSpec, module: Any) -> Step:
    own = type(module).forward

    def step(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.shape[-1] != 1 or position_ids.dim() != 2 or args or kwargs:
            return own(module, x, position_ids, *args, **kwargs)
        return decode_ops.rotation(position_ids.contiguous(), module.inv_freq.float(), spec.scale, x.dtype)

    return step


def _norm(spec: NormSpec, owner: nn.Module) -> Norm | None:
    """The norm at the spec's path below `owner`; None if the kernels cannot compute it."""
    return (
        None
        if spec.rms.has_unit_offset
        else Norm(owner.get_submodule(spec.path).get_parameter("weight"), spec.rms.epsilon)
    )


def _norm_step(spec: NormSpec, module: nn.Module) -> Step | None:
    norm = _norm(spec, module)
    if norm is None:
        return None

    def step(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != norm.weight.dtype:
            raise ValueError(f"found {hidden_states.dtype}, the weight is {norm.weight.dtype}")
        return decode_ops.rms_norm(hidden_states, norm)

    return step


def _is_plain_softmax(spec: RouterSpec) -> bool:
    return (
        spec.scores == "softmax"
        and not spec.is_corrected
        and spec.groups == 1
        and spec.factor == 1
        and spec.rounds
        and not spec.has_bias
    )


def _router_step(spec: RouterSpec, module: Any) -> Step | None:
    if not _is_plain_softmax(spec):
        return _grouped_router_step(spec, module)

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(hidden_states, module.weight)
        return (logits, *decode_ops.route(logits, spec.top_k, spec.is_normed))

    return step


class _GroupedRouter:
    """DeepSeek-V3's router: sigmoid scores, a bias that corrects the choice, and groups of experts."""

    def __init__(self, spec: RouterSpec, module: Any) -> None:
        self.spec, self.module = spec, module

    @classmethod
    def of(cls, spec: RouterSpec, module: Any) -> _GroupedRouter | None:
        if spec.scores != "sigmoid" or not spec.is_corrected or spec.has_bias:
            return None
        if module.weight.dtype == torch.float32 or module.weight.shape[1] % 32:
            return None
        return cls(spec, module)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [b, hidden] → logits [b, e], weights and ids [b, t]."""
        spec, router = self.spec, self.module
        # transformers computes these logits in fp32. Products of two 16-bit values are exact in fp32, so the kernel
        # may take x and the weight as they are.
        logits = decode_ops.linear(x, [router.weight], wide=True)
        weights, ids = decode_ops.route_grouped(
            logits,
            router.e_score_correction_bias,
            spec.top_k,
            spec.groups,
            spec.top_groups,
            spec.is_normed,
            spec.factor,
        )
        return logits, weights, ids


def _grouped_router_step(spec: RouterSpec, module: Any) -> Step | None:
    router = _GroupedRouter.of(spec, module)
    if router is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if len(x) > decode_ops.MOST_ROWS or x.dtype != module.weight.dtype:
            return own(module, hidden_states)
        return router(x)

    return step


def _moe_step(spec: MoeSpec, module: Any) -> Step | None:
    """An MoE block with shared experts on the GPU. They compute while the CPU computes the routed experts."""
    if spec.shared is None or spec.shared_gate is not None:
        return None
    gate, experts = module.get_submodule(spec.router.path), module.get_submodule(spec.experts)
    shared = module.get_submodule(spec.shared.path)
    if not isinstance(experts, HybridExperts):
        return None

    def step(hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = gate(x)
        started = experts.start(x, ids, weights)
        found = experts.complete(started, residual=shared(x))
        return found.view_as(hidden_states)

    return step


def _is_plain(module: Any, k: int, dtype: torch.dtype) -> bool:
    """Whether `decode_ops.linear` can take the place of a linear layer."""
    if type(module) is not nn.Linear or dtype == torch.float32 or k % 32:
        return False
    return module.weight.dtype == dtype and module.weight.is_contiguous() and not module._forward_hooks


def _project(
    x: Tensor,
    linears: Sequence[nn.Module],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    then: Tensor | None = None,
) -> list[Tensor]:
    """norm(x) through each of up to three linear layers, plus the residual.

    x         [m, k]
    norm      None: x as it is
    residual  [m, n], with one layer only
    then      weights that the next call will read; see `decode_ops.linear`
    Returns   [m, n] for each layer
    """
    parts: list[Any] = list(linears)
    if norm is not None and x.shape[1] > _MANY_INPUTS:
        x, norm = decode_ops.rms_norm(x, norm), None
    is_plain = all(_is_plain(part, x.shape[1], x.dtype) for part in parts)
    if is_plain and sum(part.weight.numel() for part in parts) < _MANY_WEIGHTS:
        out = decode_ops.linear(
            x, [p.weight for p in parts], [p.bias for p in parts], norm=norm, residual=residual, then=then
        )
        return list(out.split([p.out_features for p in parts], dim=1))
    x = x if norm is None else decode_ops.rms_norm(x, norm)
    found = [linear(x) for linear in linears]
    return found if residual is None else [residual + y for y in found]


class _Attention:
    """Grouped-query attention with rotation by halves, and optionally norms of each query and key head."""

    def __init__(
        self,
        spec: GroupedAttentionSpec,
        module: Any,
        norms: tuple[Norm | None, Norm | None],
        block_counts: Tensor,
    ) -> None:
        self.spec, self.module, self.norms, self.block_counts = spec, module, norms, block_counts

    @classmethod
    def of(cls, spec: GroupedAttentionSpec, module: Any, block_counts: Tensor) -> _Attention | None:
        is_plain = not spec.has_sinks and not spec.has_output_gate
        if not is_plain or any(p.dtype == torch.float32 for p in module.parameters()):
            return None  # the kernels compute in 16 bits on tensor cores, which would round fp32 weights
        specs = (spec.q_norm, spec.k_norm)
        norms = [None if norm is None else _norm(norm, module) for norm in specs]
        for described, found in zip(specs, norms):
            if described is not None and (found is None or described.rms.size != spec.head_size):
                return None
        if norms[0] is not None and norms[1] is not None and norms[0].eps != norms[1].eps:
            return None
        return cls(spec, module, (norms[0], norms[1]), block_counts)

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → the heads' outputs [b, heads · size], before the output projection."""
        module = self.module
        then = module.o_proj.weight if type(module.o_proj) is nn.Linear else None
        q, k, v = (
            part.view(len(x), -1, self.spec.head_size)
            for part in _project(x, (module.q_proj, module.k_proj, module.v_proj), norm, then=then)
        )
        return decode_ops.attend(
            q, k, v, self.norms, rotation, cache, module.scaling, self.block_counts
        ).flatten(1)


class _Latent:
    """Latent attention by `absorbed_mla`, whose KV cache holds the latent and one rotary key for all heads."""

    def __init__(self, module: AbsorbedMla, norms: tuple[Norm | None, Norm]) -> None:
        self.module, self.norms = module, norms

    @classmethod
    def of(cls, spec: LatentAttentionSpec, module: AbsorbedMla) -> _Latent | None:
        if spec.latent.rope not in ("halves", "neighbours"):
            return None
        if any(p.dtype == torch.float32 for p in module.parameters()):
            return None
        query = None if spec.q_norm is None else _norm(spec.q_norm, module)
        latent = _norm(spec.kv_norm, module)
        if latent is None or (query is None and spec.q_norm is not None):
            return None
        return cls(module, (query, latent))

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → the heads' outputs [b, heads · size], before the output projection."""
        module, spec, (query, latent) = self.module, self.module.spec, self.norms
        first = module.q_proj if module.q_a_proj is None else module.q_a_proj
        q, kv = _project(x, (first, module.kv_a_proj_with_mqa), norm)
        if module.q_a_proj is not None:
            [q] = _project(q.contiguous(), (module.q_b_proj,), query)
        q = q.view(len(x), spec.num_heads, -1)
        decode_ops.latent(q, kv, latent, rotation, cache, spec.rope == "neighbours")
        nope, rope = q[:, :, None].split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        return module.attend_latent(nope, rope, cache.keys, cache.values, cache.mask)[:, 0]


def _attention_of(spec: AttentionSpec, module: Any, block_counts: Tensor) -> _Attention | _Latent | None:
    if isinstance(spec, LatentAttentionSpec):
        return _Latent.of(spec, module)
    return _Attention.of(spec, module, block_counts)


def _cache_of(
    spec: AttentionSpec, module: Any, hidden_states: Tensor, args: Any, kwargs: Any
) -> Cache | None:
    """The cache and mask of a captured step's attention; None if the call is not one of a captured step."""
    held, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    layer: Any = held.layers[spec.layer_idx] if held is not None else None
    if hidden_states.shape[1] != 1 or args or kwargs.get("position_embeddings") is None:
        return None
    if mask is None or not hasattr(layer, "cache_position"):
        return None
    if isinstance(module, AbsorbedMla) and not module.absorbs(1, layer.keys.shape[2]):
        return None
    return Cache(layer.keys, layer.values, layer.cache_position, mask)


def _attention_step(spec: AttentionSpec, module: Any, block_counts: Tensor) -> Step | None:
    attention = _attention_of(spec, module, block_counts)
    if attention is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_of(spec, module, hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        found = attention(hidden_states[:, 0].contiguous(), None, kwargs["position_embeddings"], cache)
        return module.o_proj(found)[:, None], None

    return step


class _Routed:
    """An MoE block: a router, routed experts (`hybrid_experts`) and optionally shared experts."""

    def __init__(self, spec: MoeSpec, block: Any, router: _GroupedRouter | None) -> None:
        self.spec, self.router = spec.router, router
        self.gate: Any = block.get_submodule(spec.router.path)
        self.experts: Any = block.get_submodule(spec.experts)
        self.shared: Any = None if spec.shared is None else block.get_submodule(spec.shared.path)

    @classmethod
    def of(cls, spec: MoeSpec, block: Any) -> _Routed | None:
        experts = block.get_submodule(spec.experts)
        if spec.shared_gate is not None or not isinstance(experts, HybridExperts):
            return None
        router = _GroupedRouter.of(spec.router, block.get_submodule(spec.router.path))
        by_softmax = _is_plain_softmax(spec.router) and experts.routes(
            spec.router.num_experts, spec.router.top_k
        )
        return None if router is None and not by_softmax else cls(spec, block, router)

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """x + experts(norm(x)), [b, hidden]."""
        if self.router is not None:
            normed = decode_ops.rms_norm(x, norm)
            _, weights, ids = self.router(normed)
            started = self.experts.start(normed, ids, weights)
        else:
            normed = torch.empty_like(x)
            logits = decode_ops.linear(x, [self.gate.weight], norm=norm, normed=normed)
            started = self.experts.start_routed(normed, logits, self.spec.top_k, self.spec.is_normed)
        if self.shared is None:
            return self.experts.complete(started, residual=x)
        shared = self.shared(normed)  # while the CPU computes
        if isinstance(started, Underway) and started.part is None:
            # The wait adds `part` before it rounds the sum, and x after that.
            return self.experts.complete(started._replace(part=shared.float()), residual=x)
        return x + self.experts.complete(started, residual=shared)


def _layer_step(spec: DecoderLayerSpec, module: Any, block_counts: Tensor) -> Step | None:
    """The step of a whole decoder layer: norm, attention, residual, norm, MoE block or dense layers, residual."""
    before, behind = _norm(spec.input_norm, module), _norm(spec.post_attention_norm, module)
    self_attn: Any = module.get_submodule(spec.attention.path)
    mlp = module.get_submodule(spec.feed_forward.path)
    heads = spec.attention
    if isinstance(heads, GatedDeltaSpec):
        return None
    attention = _attention_of(heads, self_attn, block_counts)
    if before is None or behind is None or attention is None or before.weight.dtype == torch.float32:
        return None
    routed = _Routed.of(spec.feed_forward, mlp) if isinstance(spec.feed_forward, MoeSpec) else None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_of(heads, self_attn, hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        x = hidden_states[:, 0].contiguous()
        found = attention(x, before, kwargs["position_embeddings"], cache)
        then = None if routed is None else routed.gate.weight
        [x] = _project(found, [self_attn.o_proj], residual=x, then=then)
        if routed is not None and x.shape[1] % 32 == 0:
            return routed(x, behind)[:, None]
        return x[:, None] + mlp(decode_ops.rms_norm(x, behind)[:, None])

    return step
