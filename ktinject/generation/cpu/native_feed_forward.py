"""The native twins of feed-forward parts: dense layers, and Mixture-of-Experts blocks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation.cpu.native_parts import UnknownLayer, child_of, linear, norm, wide
from ktinject.generation.feed_forward_spec import DenseSpec, FeedForwardSpec, OtherFeedForward, RouterSpec
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.cpu_router import CpuRouter


def feed_forward(
    spec: FeedForwardSpec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]
) -> Any:
    """The twin of a feed-forward part. copies: as `NativeLayers` has them."""
    if isinstance(spec, OtherFeedForward):
        raise UnknownLayer(spec.reason)
    if isinstance(spec, DenseSpec):
        return _unit(module, spec)
    chosen, shared = spec.router, None
    if spec.shared is not None:
        shared = _unit(module.get_submodule(spec.shared.path), spec.shared)
        if any(spec.shared_norms):
            shared = _native.Normed(shared, *(norm(one, module, dtype) for one in spec.shared_norms))
    holder = module.get_submodule(chosen.path.rpartition(".")[0])
    router = child_of(holder, chosen.path.rpartition(".")[2], nn.Module)
    packed = isinstance(router, CpuRouter)
    return _native.Mixture(
        router=router.linear.native if packed else None,
        weight=None if packed else _weight(chosen, router, copies),
        scores=chosen.scores,
        correction=_correction(chosen, holder if chosen.of_block else router, copies),
        top_k=chosen.top_k,
        groups=chosen.groups,
        top_groups=chosen.top_groups,
        normed=chosen.is_normed,
        factor=chosen.factor,
        rounds_logits=chosen.rounds_logits,
        rounds_scores=chosen.rounds_scores,
        rounds_weights=chosen.rounds,
        experts=child_of(holder, spec.experts.rpartition(".")[2], CpuExperts).native,
        shared=shared,
        bias=_bias(chosen, router, copies) if not packed else None,
        router_norm=_router_norm(chosen, router, dtype),
        input_factor=chosen.input_factor,
        by_logits=chosen.by_logits,
        expert_factors=_parameter(chosen.expert_factors, router, copies),
        nearness=chosen.nearness,
        scales_input=chosen.scales_input,
        before=norm(spec.experts_norms[0], module, dtype),
        behind=norm(spec.experts_norms[1], module, dtype),
        routed_factor=spec.factors[0],
        whole_factor=spec.factors[1],
        gate=None if spec.shared_gate is None else _gate(module.get_submodule(spec.shared_gate), dtype),
        narrow_in=linear(module, spec.narrow[0]) if spec.narrow else None,
        narrow_out=linear(module, spec.narrow[1]) if spec.narrow else None,
        table=_table(chosen, router),
    )


def _weight(spec: RouterSpec, router: nn.Module, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[experts, hidden] in fp32, of a router that computes its product itself."""
    weight = dict(router.named_parameters()).get(spec.weight)
    if weight is None or not weight.is_contiguous():
        raise UnknownLayer(f"its {type(router).__name__} has no {spec.weight} that is contiguous")
    return wide(weight, copies)


def _bias(spec: RouterSpec, router: nn.Module, copies: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    return _parameter("bias" if spec.has_bias else "", router, copies)


def _parameter(name: str, router: nn.Module, copies: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """A router's parameter of one number an expert, in fp32."""
    return wide(router.get_parameter(name), copies) if name else None


def _table(spec: RouterSpec, router: nn.Module) -> Tensor | None:
    """The experts of each token, [vocabulary, top_k] int64, where they are not chosen."""
    if not spec.table:
        return None
    table = router.get_buffer(spec.table)
    if table.dtype != torch.int64 or not table.is_contiguous() or table.shape[-1] != spec.top_k:
        raise UnknownLayer(f"the {spec.table} of its {type(router).__name__} is no list of experts")
    return table


def _router_norm(spec: RouterSpec, router: nn.Module, dtype: torch.dtype) -> Any:
    """That of what a router takes, whose weight the router holds."""
    if spec.norm is None:
        return None
    weight, rms = router.get_parameter(spec.norm.path).detach(), spec.norm.rms
    if weight.dtype != dtype or not weight.is_contiguous():
        raise UnknownLayer(f"the {spec.norm.path} of its {type(router).__name__} is {weight.dtype}")
    return _native.Norm(weight, rms.epsilon)


def _correction(spec: RouterSpec, owner: Any, copies: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """What is added to the scores for the choice, [experts] in fp32."""
    if not spec.is_corrected:
        return None
    path, _, name = spec.correction.rpartition(".")
    return wide(getattr(owner.get_submodule(path), name).flatten(), copies)


def _gate(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight [1, hidden] of the factor that a shared expert has."""
    is_plain = type(module) is nn.Linear and module.bias is None and module.weight.is_contiguous()
    if not is_plain or module.weight.dtype != dtype:
        raise UnknownLayer(f"its shared expert's gate is a {type(module).__name__} that is not known")
    weight: Tensor = module.weight.detach()
    return weight


def _unit(module: Any, spec: DenseSpec) -> Any:
    first, *up, down = (linear(module, name) for name in spec.names)
    if not spec.has_gate:
        return _native.PlainUnit(first, down)
    return _native.GatedUnit(first, up[0] if up else None, down, **asdict(spec.gating))
