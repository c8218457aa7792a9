"""Routers and MoE blocks of a decode step with few kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.projections import Step, project
from ktinject.generation.feed_forward_spec import MoeSpec, RouterSpec
from ktinject.operators.hybrid_experts import HybridExperts, Underway


def _is_plain_softmax(spec: RouterSpec) -> bool:
    return (
        spec.scores == "softmax"
        and not spec.is_corrected
        and spec.groups == 1
        and spec.factor == 1
        and spec.rounds
        and spec.is_plain
    )


def router_step(spec: RouterSpec, module: Any) -> Step | None:
    if not _is_plain_softmax(spec):
        return _grouped_router_step(spec, module)

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(hidden_states, module.weight, module.bias if spec.has_bias else None)
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
        if not spec.is_plain:
            return None
        if module.weight.dtype == torch.float32 or module.weight.shape[1] % 32:
            return None
        if not decode_ops.routes_grouped(spec.num_experts):
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


def moe_step(spec: MoeSpec, module: Any) -> Step | None:
    """An MoE block with shared experts on the GPU. They compute while the CPU computes the routed experts."""
    shared = _shared_of(spec, module)
    gate, experts = module.get_submodule(spec.router.path), module.get_submodule(spec.experts)
    if shared is None or not isinstance(experts, HybridExperts):
        return None
    router = spec.router
    is_other = (
        router.of_block or router.scales_input or spec.narrow or spec.norm or spec.factors != (1.0, 1.0)
    )
    if is_other:
        return None  # the block gives its router more than x, its experts something else, or changes what it adds

    def step(hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = gate(x)
        started = experts.start(x, ids, weights)
        found = experts.complete(started, residual=shared(x))
        return found.view_as(hidden_states)

    return step


def _shared_of(spec: MoeSpec, block: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """What the shared experts add to x [m, hidden], behind their gate if they have one; None: there are none."""
    if spec.shared is None:
        return None
    shared: Any = block.get_submodule(spec.shared.path)
    if spec.shared_gate is None:
        return shared
    gate = block.get_submodule(spec.shared_gate)

    def gated(x: Tensor) -> Tensor:
        [score] = project(x, [gate])
        return torch.sigmoid(score) * shared(x)

    return gated


class Routed:
    """An MoE block: a router, routed experts (`hybrid_experts`) and optionally shared experts."""

    def __init__(self, spec: MoeSpec, block: Any, router: _GroupedRouter | None) -> None:
        self.spec, self.router = spec.router, router
        self.gate: Any = block.get_submodule(spec.router.path)
        self.experts: Any = block.get_submodule(spec.experts)
        self.shared = _shared_of(spec, block)
        # The block of the next layer that has one, and the norm before it; see `fused_steps.connect`.
        self.next: tuple[Routed, Norm] | None = None

    @classmethod
    def of(cls, spec: MoeSpec, block: Any) -> Routed | None:
        experts = block.get_submodule(spec.experts)
        is_other = spec.narrow or spec.norm or spec.factors != (1.0, 1.0)
        if not isinstance(experts, HybridExperts) or is_other:
            return None
        router = _GroupedRouter.of(spec.router, block.get_submodule(spec.router.path))
        by_softmax = _is_plain_softmax(spec.router) and decode_ops.routes(
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
            bias = self.gate.bias if self.spec.has_bias else None
            logits = decode_ops.linear(x, [self.gate.weight], [bias], norm=norm, normed=normed)
            started = self._start(normed, logits)
        self._foresee(x, started)
        if self.shared is None:
            return self.experts.complete(started, residual=x)
        shared = self.shared(normed)  # while the CPU computes
        if isinstance(started, Underway) and started.part is None:
            # The wait adds `part` before it rounds the sum, and x after that.
            return self.experts.complete(started._replace(part=shared.float()), residual=x)
        return x + self.experts.complete(started, residual=shared)

    def _foresee(self, x: Tensor, started: Any) -> None:
        """While the CPU computes: what the next block's router chooses for this one's input, as a guess."""
        if self.next is None or len(x) != 1:
            return
        block, norm = self.next
        if block.gate.weight.device != x.device or not (
            self.experts.is_foreseeable(self.spec.top_k) and block.experts.is_foreseeable(block.spec.top_k)
        ):
            return
        block.experts.foresee(started, block.choose(x, norm))

    def choose(self, x: Tensor, norm: Norm) -> Tensor:
        """The ids [b, t] of the experts for norm(x), of a router that chooses by softmax."""
        bias = self.gate.bias if self.spec.has_bias else None
        logits = decode_ops.linear(x, [self.gate.weight], [bias], norm=norm)
        return decode_ops.route(logits, self.spec.top_k, self.spec.is_normed)[1]

    def _start(self, x: Tensor, logits: Tensor) -> Any:
        spec = self.spec
        if self.experts.routes(spec.num_experts, spec.top_k):
            return self.experts.start_routed(x, logits, spec.top_k, spec.is_normed)
        weights, ids = decode_ops.route(logits, spec.top_k, spec.is_normed)  # more than a submit chooses from
        return self.experts.start(x, ids, weights)
