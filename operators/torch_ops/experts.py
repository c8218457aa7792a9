"""The custom op through which routed experts are traced and differentiated.

Its schema carries a number, since a traced graph cannot hold a Python object.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ktinject.operators.probes import experts as routed_experts
from ktinject.operators.probes.experts import ExpertsSpec


class Experts(Protocol):
    """Routed experts with frozen weights."""

    spec: ExpertsSpec

    def compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden], top_k_index and top_k_weights [m, t] → [m, hidden], without autograd."""

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        """The fp32 weights of a parameter, of one expert."""


_handles = itertools.count(1)
_experts: weakref.WeakValueDictionary[int, Experts] = weakref.WeakValueDictionary()


def handle_of(experts: Experts) -> int:
    """A new number for a layer's experts, valid as long as the object lives."""
    handle = next(_handles)
    _experts[handle] = experts
    return handle


@torch.library.custom_op(
    "ktinject::experts",
    mutates_args=(),
    schema="(Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, int handle) -> Tensor",
)
def experts_op(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, handle: int) -> Tensor:
    return _experts[handle].compute(hidden_states, top_k_index, top_k_weights)


@experts_op.register_fake
def _(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, handle: int) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    *tensors, ctx.handle = inputs
    ctx.save_for_backward(*tensors)


@torch.library.custom_op(
    "ktinject::experts_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, int handle)"
    " -> (Tensor, Tensor)",
)
def experts_backward_op(
    grad: Tensor, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, handle: int
) -> tuple[Tensor, Tensor]:
    """Gradients for hidden states and routing weights; the experts are frozen.

    Each expert that was hit is unpacked to fp32 and recomputed: gradients are those of the dequantised weights.
    """
    operator = _experts[handle]
    spec = operator.spec
    grad_x = torch.zeros_like(hidden_states, dtype=torch.float32, memory_format=torch.contiguous_format)
    grad_weights = torch.zeros_like(top_k_weights, dtype=torch.float32, memory_format=torch.contiguous_format)
    for e in top_k_index.unique().tolist():
        if not 0 <= e < spec.num_experts:
            continue
        parts = {
            projection: view.to(hidden_states.device)
            for name in routed_experts.parameter_shapes(spec)
            for projection, _, view in routed_experts.views(spec, name, operator.unpack(name, e), e, None)
        }
        tokens, slots = torch.where(top_k_index == e)
        rows = hidden_states[tokens].float()
        grad_y = grad[tokens].float()
        up = nn.functional.linear(rows, parts["up"], parts.get("up_bias"))
        gate = nn.functional.linear(rows, parts["gate"], parts.get("gate_bias")) if spec.has_gate else None
        y = nn.functional.linear(
            routed_experts.activate(spec, gate, up), parts["down"], parts.get("down_bias")
        )
        grad_weights[tokens, slots] = (grad_y * y).sum(-1)
        grad_h = (grad_y * top_k_weights[tokens, slots, None].float()) @ parts["down"]
        gate_slope, up_slope = _slopes(spec, gate, up)
        grad_rows = (grad_h * up_slope) @ parts["up"]
        if gate_slope is not None:
            grad_rows += (grad_h * gate_slope) @ parts["gate"]
        grad_x.index_add_(0, tokens, grad_rows)
    return grad_x.to(hidden_states.dtype), grad_weights.to(top_k_weights.dtype)


def _slopes(spec: ExpertsSpec, gate: Tensor | None, up: Tensor) -> tuple[Tensor | None, Tensor]:
    """Derivatives of `routed_experts.activate` by gate and up, each [m, n]. Autograd does not reach into an op."""

    def act_slope(x: Tensor) -> Tensor:
        inside = x <= spec.gate_max
        x = x.clamp(max=spec.gate_max)
        if spec.activation == "silu":
            s = torch.sigmoid(spec.alpha * x)
            slope = s + spec.alpha * x * s * (1 - s)
        elif spec.activation in ("gelu", "gelu_tanh"):
            kind = "none" if spec.activation == "gelu" else "tanh"
            slope = torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=kind)
        elif spec.activation == "relu":
            slope = (x > 0).float()
        elif spec.activation == "relu2":
            slope = 2 * x.clamp(min=0)
        else:
            slope = torch.ones_like(x)
        return slope * inside

    if gate is None:
        return None, act_slope(up)
    linear = up.clamp(-spec.up_limit, spec.up_limit) + spec.up_offset
    up_slope = routed_experts.activate(
        dataclasses.replace(spec, up_offset=1.0, up_limit=inf), gate, torch.zeros_like(up)
    )
    return act_slope(gate) * linear, up_slope * (up.abs() <= spec.up_limit)


@experts_backward_op.register_fake
def _(
    grad: Tensor, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, handle: int
) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
        torch.empty_like(top_k_weights, memory_format=torch.contiguous_format),
    )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, None]:
    grad_x, grad_weights = experts_backward_op(grad, *ctx.saved_tensors, ctx.handle)
    return grad_x, None, grad_weights, None


experts_op.register_autograd(_backward, setup_context=_save)
