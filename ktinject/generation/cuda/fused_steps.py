"""The decode steps of modules that are known by what they hold; `fused.py` tries them out and puts them in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Cache, Norm
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.hybrid_experts import HybridExperts, Underway

Step = Callable[..., Any]

# Weights from which on cuBLAS is faster, and inputs from which on a norm is, as a kernel of its own.
_MANY_WEIGHTS = 50_000_000
_MANY_INPUTS = 4096


def is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


def known(module: nn.Module, block_counts: Tensor) -> Step | None:
    """The decode step of a module by what it is made of, or None."""
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return _norm_step(module)
    if name.endswith("Attention") or isinstance(module, AbsorbedMla):
        return _attention_step(module, block_counts)
    if name.endswith("Router"):
        return _router_step(module) or _grouped_router_step(module)
    if name.endswith("RotaryEmbedding"):
        return _rotation_step(module)
    if is_layer(module):
        return _layer_step(module, block_counts)
    return _shared_step(module)


def _rotation_step(module: Any) -> Step | None:
    kind = getattr(module, "rope_type", None)
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return None  # frequencies that change with the length
    frequencies, scale = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, (int, float)):
        return None
    own = type(module).forward

    def step(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.shape[-1] != 1 or position_ids.dim() != 2 or args or kwargs:
            return own(module, x, position_ids, *args, **kwargs)
        return decode_ops.rotation(position_ids.contiguous(), module.inv_freq.float(), scale, x.dtype)

    return step


def _norm_of(module: Any) -> Norm | None:
    """A norm by its weight and what it adds to the mean square, by the names that is known under."""
    if not type(module).__name__.lower().endswith("rmsnorm"):
        return None
    weight = getattr(module, "weight", None)
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    eps = next((eps for eps in found if isinstance(eps, float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    return Norm(weight, eps)


def _norm_step(module: nn.Module) -> Step | None:
    norm = _norm_of(module)
    if norm is None:
        return None

    def step(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != norm.weight.dtype:
            raise ValueError(f"found {hidden_states.dtype}, the weight is {norm.weight.dtype}")
        return decode_ops.rms_norm(hidden_states, norm)

    return step


def _is_router(module: Any) -> bool:
    has = all(hasattr(module, name) for name in ("weight", "top_k", "num_experts", "norm_topk_prob"))
    return has and getattr(module, "bias", None) is None and not hasattr(module, "e_score_correction_bias")


def _router_step(module: Any) -> Step | None:
    if not _is_router(module):
        return None

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(hidden_states, module.weight)
        return (logits, *decode_ops.route(logits, module.top_k, module.norm_topk_prob))

    return step


class _GroupedRouter:
    """A router by sigmoids, of groups of experts, with a correction of its choice, as DeepSeek-V3's."""

    _NEEDED = ("weight", "top_k", "num_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")

    def __init__(self, module: Any) -> None:
        self.module = module

    @classmethod
    def of(cls, module: Any) -> _GroupedRouter | None:
        bias, weight = getattr(module, "e_score_correction_bias", None), getattr(module, "weight", None)
        if not all(hasattr(module, name) for name in cls._NEEDED) or not isinstance(bias, Tensor):
            return None
        if not isinstance(weight, Tensor) or weight.dtype == torch.float32 or weight.shape[1] % 32:
            return None
        return cls(module)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [b, hidden] → logits [b, e], weights and ids [b, t]."""
        router = self.module
        # Products of two values of 16 bits are exact in fp32, so nothing has to be widened before.
        logits = decode_ops.linear(x, [router.weight], wide=True)
        weights, ids = decode_ops.route_grouped(
            logits,
            router.e_score_correction_bias,
            router.top_k,
            router.num_group,
            router.topk_group,
            bool(router.norm_topk_prob),
            router.routed_scaling_factor,
        )
        return logits, weights, ids


def _grouped_router_step(module: Any) -> Step | None:
    router = _GroupedRouter.of(module)
    if router is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if len(x) > decode_ops.MOST_ROWS or x.dtype != module.weight.dtype:
            return own(module, hidden_states)
        return router(x)

    return step


def _shared_step(module: Any) -> Step | None:
    """A block with shared experts on the GPU, which compute while the CPU computes the others."""
    if {name for name, _ in module.named_children()} != {"gate", "experts", "shared_experts"}:
        return None
    if not isinstance(module.experts, HybridExperts) or not type(module.gate).__name__.endswith("Router"):
        return None

    def step(hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = module.gate(x)
        started = module.experts.start(x, ids, weights)
        found = module.experts.complete(started, residual=module.shared_experts(x))
        return found.view_as(hidden_states)

    return step


def _is_plain(module: Any, k: int, dtype: torch.dtype) -> bool:
    """Whether `decode_ops.linear` can take a linear layer's place."""
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
    """x [m, k], normed where there is a norm, through each of up to three layers, + residual; each [m, n]."""
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
    """Attention with projections to heads, rotation by halves and, maybe, a norm of queries and keys by heads."""

    _NEEDED = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "head_dim",
        "scaling",
        "layer_idx",
        "num_key_value_groups",
    )

    def __init__(self, module: Any, norms: tuple[Norm | None, Norm | None], block_counts: Tensor) -> None:
        self.module, self.norms, self.block_counts = module, norms, block_counts

    @classmethod
    def of(cls, module: Any, block_counts: Tensor) -> _Attention | None:
        if not all(hasattr(module, name) for name in cls._NEEDED) or hasattr(module, "sinks"):
            return None
        if getattr(module, "attn_logit_softcapping", None):
            return None
        if any(p.dtype == torch.float32 for p in module.parameters()):
            return None  # tensor cores would round what it computes with
        present = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        norms = [None if norm is None else _norm_of(norm) for norm in present]
        for norm, found in zip(present, norms):
            if norm is not None and (found is None or found.weight.shape != (module.head_dim,)):
                return None
        if norms[0] is not None and norms[1] is not None and norms[0].eps != norms[1].eps:
            return None
        return cls(module, (norms[0], norms[1]), block_counts)

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → what the heads found [b, heads · size]; the output projection is left."""
        module = self.module
        then = module.o_proj.weight if type(module.o_proj) is nn.Linear else None
        q, k, v = (
            part.view(len(x), -1, module.head_dim)
            for part in _project(x, (module.q_proj, module.k_proj, module.v_proj), norm, then=then)
        )
        return decode_ops.attend(
            q, k, v, self.norms, rotation, cache, module.scaling, self.block_counts
        ).flatten(1)


class _Latent:
    """`absorbed_mla`, whose cache holds the latent and one rotary key."""

    def __init__(self, module: AbsorbedMla, norms: tuple[Norm | None, Norm]) -> None:
        self.module, self.norms = module, norms

    @classmethod
    def of(cls, module: Any) -> _Latent | None:
        if not isinstance(module, AbsorbedMla) or module.spec.rope not in ("halves", "neighbours"):
            return None
        if any(p.dtype == torch.float32 for p in module.parameters()):
            return None
        query = None if module.q_a_proj is None else _norm_of(module.q_a_layernorm)
        latent = _norm_of(module.kv_a_layernorm)
        if latent is None or (query is None and module.q_a_proj is not None):
            return None
        return cls(module, (query, latent))

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → what the heads found [b, heads · size]; the output projection is left."""
        module, spec, (query, latent) = self.module, self.module.spec, self.norms
        first = module.q_proj if module.q_a_proj is None else module.q_a_proj
        q, kv = _project(x, (first, module.kv_a_proj_with_mqa), norm)
        if module.q_a_proj is not None:
            [q] = _project(q.contiguous(), (module.q_b_proj,), query)
        q = q.view(len(x), spec.num_heads, -1)
        decode_ops.latent(q, kv, latent, rotation, cache, spec.rope == "neighbours")
        nope, rope = q[:, :, None].split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        return module.attend_latent(nope, rope, cache.keys, cache.values, cache.mask)[:, 0]


def _cache_of(module: Any, hidden_states: Tensor, args: Any, kwargs: Any) -> Cache | None:
    """What attention attends to in a captured step; None for any other call, as others may make meanwhile."""
    held, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
    index = module.spec.layer_idx if isinstance(module, AbsorbedMla) else module.layer_idx
    layer: Any = held.layers[index] if held is not None else None
    if hidden_states.shape[1] != 1 or args or kwargs.get("position_embeddings") is None:
        return None
    if mask is None or not hasattr(layer, "cache_position"):
        return None
    if isinstance(module, AbsorbedMla) and not module.absorbs(1, layer.keys.shape[2]):
        return None
    return Cache(layer.keys, layer.values, layer.cache_position, mask)


def _attention_step(module: Any, block_counts: Tensor) -> Step | None:
    attention = _Latent.of(module) or _Attention.of(module, block_counts)
    if attention is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_of(module, hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        found = attention(hidden_states[:, 0].contiguous(), None, kwargs["position_embeddings"], cache)
        return module.o_proj(found)[:, None], None

    return step


class _Routed:
    """A block of a router, experts behind a handoff and, maybe, shared experts."""

    def __init__(self, block: Any, router: _GroupedRouter | None) -> None:
        self.gate, self.experts, self.router = block.gate, block.experts, router
        self.shared: Any = getattr(block, "shared_experts", None)

    @classmethod
    def of(cls, block: Any) -> _Routed | None:
        children = dict(block.named_children())
        if not {"gate", "experts"} <= set(children) <= {"gate", "experts", "shared_experts"}:
            return None
        gate: Any = children["gate"]
        experts = children["experts"]
        if not type(gate).__name__.endswith("Router") or not isinstance(experts, HybridExperts):
            return None
        router = _GroupedRouter.of(gate)
        if router is None and not (_is_router(gate) and experts.routes(gate.num_experts, gate.top_k)):
            return None
        return cls(block, router)

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """x [b, hidden] + the experts of the normed x."""
        if self.router is not None:
            normed = decode_ops.rms_norm(x, norm)
            _, weights, ids = self.router(normed)
            started = self.experts.start(normed, ids, weights)
        else:
            normed = torch.empty_like(x)
            logits = decode_ops.linear(x, [self.gate.weight], norm=norm, normed=normed)
            started = self.experts.start_routed(normed, logits, self.gate.top_k, self.gate.norm_topk_prob)
        if self.shared is None:
            return self.experts.complete(started, residual=x)
        shared = self.shared(normed)  # while the CPU computes
        if (
            isinstance(started, Underway) and started.part is None
        ):  # rounded before and after, as a residual is
            return self.experts.complete(started._replace(part=shared.float()), residual=x)
        return x + self.experts.complete(started, residual=shared)


def _layer_step(module: Any, block_counts: Tensor) -> Step | None:
    """norm, attention, residual, norm, experts or a dense part, residual."""
    parts = [
        getattr(module, n, None) for n in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    ]
    if any(part is None for part in parts):
        return None
    before, behind = _norm_of(parts[0]), _norm_of(parts[2])
    attention, mlp = _Latent.of(parts[1]) or _Attention.of(parts[1], block_counts), module.mlp
    if before is None or behind is None or attention is None:
        return None
    if len([*module.children()]) != len(parts) or before.weight.dtype == torch.float32:
        return None
    routed = _Routed.of(mlp)
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_of(module.self_attn, hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        x = hidden_states[:, 0].contiguous()
        found = attention(x, before, kwargs["position_embeddings"], cache)
        then = None if routed is None else routed.gate.weight
        [x] = _project(found, [module.self_attn.o_proj], residual=x, then=then)
        if routed is not None and x.shape[1] % 32 == 0:
            return routed(x, behind)[:, None]
        return x[:, None] + mlp(decode_ops.rms_norm(x, behind)[:, None])

    return step
