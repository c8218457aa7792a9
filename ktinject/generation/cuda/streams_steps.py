"""Layers of residual streams with few kernels: streams collapsed | norm | a part | added to the mixed streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktinject.generation.cuda import streams_ops
from ktinject.generation.cuda.projections import Step
from ktinject.generation.cuda.streams_ops import ConnectionWeights
from ktinject.generation.streams_spec import HyperConnectionSpec, TokenRoutedSpec
from ktinject.operators.hybrid_experts import HybridExperts


def connection_step(spec: HyperConnectionSpec, module: Any, block_counts: Tensor) -> Step | None:
    is_narrow = any(parameter.dtype != torch.float32 for parameter in module.parameters())
    if spec.streams != streams_ops.STREAMS or not spec.iterations or is_narrow:
        return None
    own = type(module).forward

    def step(hidden_streams: Tensor) -> Any:
        if hidden_streams.shape[1] != 1 or len(hidden_streams) > len(block_counts):
            return own(module, hidden_streams)
        numbers = spec.norm_eps, spec.eps, spec.iterations
        weights = ConnectionWeights(module.fn, module.base, module.scale, *numbers)
        found = streams_ops.hyper_connection(hidden_streams[:, 0].contiguous(), weights, block_counts)
        return tuple(part[:, None] for part in found)

    return step


def streams_layer_step(module: Any) -> Step:
    own = type(module).forward

    def step(hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if hidden_states.shape[1] != 1 or hidden_states.shape[2] != streams_ops.STREAMS:
            return own(module, hidden_states, input_ids, **kwargs)
        post, comb, collapsed = module.attn_hc(hidden_states)
        y, _ = module.self_attn(module.input_layernorm(collapsed), **kwargs)
        hidden_states = _mixed(hidden_states, y, post, comb)
        post, comb, collapsed = module.ffn_hc(hidden_states)
        y = module.mlp(module.post_attention_layernorm(collapsed), input_ids=input_ids)
        return _mixed(hidden_states, y, post, comb)

    return step


def token_routed_step(spec: TokenRoutedSpec, module: Any) -> Step | None:
    """Of an MoE block: its shared experts compute while the CPU computes the routed ones."""
    experts = module.experts
    if not isinstance(experts, HybridExperts):
        return None

    def step(hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        given = (hidden_states, input_ids) if spec.by_token else (hidden_states,)
        _, weights, ids = module.gate(*given)
        x = hidden_states.view(-1, hidden_states.shape[-1])
        found = experts.complete(experts.start(x, ids, weights), residual=module.shared_experts(x))
        return found.view_as(hidden_states)

    return step


def _mixed(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """All with a dimension of one token behind the rows."""
    given = (part[:, 0].contiguous() for part in (streams, y, post, comb))
    return streams_ops.mix(*given)[:, None]
