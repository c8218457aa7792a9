"""Modules of routed experts, described or refused, and compared with the reference."""

from __future__ import annotations

from math import inf

import reference
import torch
from torch import Tensor, nn

from ktinject.operators.probes.answer import Refusal
from ktinject.operators.probes.experts import ExpertsSpec, probe

torch.set_num_threads(1)

PLAIN = ExpertsSpec(
    num_experts=6,
    hidden_size=40,
    intermediate_size=24,
    has_gate=True,
    has_bias=False,
    is_transposed=False,
    is_concatenated=True,
    activation="silu",
    alpha=1.0,
    gate_max=inf,
    up_limit=inf,
    up_offset=0.0,
)


TOKENS = 7


def described(module: nn.Module) -> ExpertsSpec:
    spec = probe(module)
    assert isinstance(spec, ExpertsSpec), spec
    return spec


def refusal(module: nn.Module) -> str:
    found = probe(module)
    assert isinstance(found, Refusal), found
    assert "\n" not in found.reason and not found.reason.endswith(".")
    return found.reason


def inputs(
    spec: ExpertsSpec, tokens: int = TOKENS, k: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, spec.hidden_size, generator=random)
    index = torch.stack([torch.randperm(spec.num_experts, generator=random)[:k] for _ in range(tokens)])
    return x, index, torch.rand(tokens, k, generator=random)


def assert_reference_is(module: nn.Module, spec: ExpertsSpec) -> None:
    """Fill the module with Gaussian weights and compare its own eager forward with the reference."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    if hasattr(module, "config"):
        module.config._experts_implementation = "eager"
    x, index, weights = inputs(spec)
    want = reference.experts(
        x, index, weights, reference.weights_of(spec, reference.parameters_of(module)), spec
    )
    with torch.no_grad():
        assert reference.relative_error(module(x, index, weights), want) < 1e-5
    assert want.norm() > 0.1
