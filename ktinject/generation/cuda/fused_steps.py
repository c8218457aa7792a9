"""Decode steps with few kernels, one for each kind of spec. `fused.py` compares them with the modules and uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.attention_steps import attention_of, attention_step, cache_of
from ktinject.generation.cuda.feed_forward_steps import Routed, moe_step, router_step
from ktinject.generation.cuda.projections import Step, norm_of, project
from ktinject.generation.layer_spec import (
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


def step_of(spec: PartSpec, module: Any, block_counts: Tensor) -> Step | None:
    """A function that replaces a module's forward in a captured decode step; None if there are no kernels for it.

    spec          what the module computes
    block_counts  as `decode_ops.attend` takes them
    """
    if isinstance(spec, NormSpec):
        return _norm_step(spec, module)
    if isinstance(spec, (GroupedAttentionSpec, LatentAttentionSpec)):
        return attention_step(spec, module, block_counts)
    if isinstance(spec, RouterSpec):
        return router_step(spec, module)
    if isinstance(spec, RotationSpec):
        return _rotation_step(spec, module)
    if isinstance(spec, DecoderLayerSpec):
        return _layer_step(spec, module, block_counts)
    return moe_step(spec, module)


def _rotation_step(spec: RotationSpec, module: Any) -> Step:
    own = type(module).forward

    def step(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() == 3 and position_ids.stride(0) == 0:
            position_ids = position_ids[0]  # one position for all axes, as a recorded step has it
        if position_ids.shape[-1] != 1 or position_ids.dim() != 2 or args or kwargs:
            return own(module, x, position_ids, *args, **kwargs)
        return decode_ops.rotation(position_ids.contiguous(), module.inv_freq.float(), spec.scale, x.dtype)

    return step


def _norm_step(spec: NormSpec, module: nn.Module) -> Step | None:
    norm = norm_of(spec, module)
    if norm is None:
        return None

    def step(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != norm.weight.dtype:
            raise ValueError(f"found {hidden_states.dtype}, the weight is {norm.weight.dtype}")
        return decode_ops.rms_norm(hidden_states, norm)

    return step


def _layer_step(spec: DecoderLayerSpec, module: Any, block_counts: Tensor) -> Step | None:
    """The step of a whole decoder layer: norm, attention, residual, norm, MoE block or dense layers, residual."""
    before, behind = norm_of(spec.input_norm, module), norm_of(spec.post_attention_norm, module)
    self_attn: Any = module.get_submodule(spec.attention.path)
    mlp = module.get_submodule(spec.feed_forward.path)
    heads = spec.attention
    if isinstance(heads, GatedDeltaSpec):
        return None
    attention = attention_of(heads, self_attn, block_counts)
    if before is None or behind is None or attention is None or before.weight.dtype == torch.float32:
        return None
    routed = Routed.of(spec.feed_forward, mlp) if isinstance(spec.feed_forward, MoeSpec) else None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(heads, self_attn, hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        x = hidden_states[:, 0].contiguous()
        found = attention(x, before, kwargs["position_embeddings"], cache)
        then = None if routed is None else routed.gate.weight
        [x] = project(found, [self_attn.o_proj], residual=x, then=then)
        if routed is not None and x.shape[1] % 32 == 0:
            return routed(x, behind)[:, None]
        return x[:, None] + mlp(decode_ops.rms_norm(x, behind)[:, None])

    return step
