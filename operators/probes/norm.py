"""What a norm computes, found out by running it: RMS normalisation with a weight, and its ε.

    y = weight * round(x / sqrt(mean(x²) + ε))

in the dtype of x, with sums in fp32, rounded where transformers rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import Refusal, answered_once
from ktinject.operators.probes.comparison import Tolerance

_TOLERANCE = Tolerance(
    1e-5, "fp32 on both sides: what is left is the order of a sum; times the greatest weight"
)


@dataclass(frozen=True)
class NormSpec:
    """The ε of the formula above."""

    epsilon: float


def formula(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The formula in PyTorch's operations."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


@answered_once
def probe(module: nn.Module) -> NormSpec | Refusal:
    """The ε of a module that computes the formula."""
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.dim() != 1 or len(module.state_dict()) != 1 or [*module.children()]:
        return Refusal("it holds something else than one vector called weight")
    if [*module.buffers()]:
        return Refusal("it has a buffer beside its weight")
    try:
        with twin.on_cpu():
            return _epsilon(module, weight.shape[0])
    except Exception as error:  # the module's own code runs here, so anything may come out of it
        return Refusal(f"its forward fails on a copy of itself: {type(error).__name__}: {error}")


def _epsilon(module: nn.Module, n: int) -> NormSpec | Refusal:
    random = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(n, generator=random, dtype=torch.float32) + 2.0
    wide = twin.with_parameters(module, {"weight": values})
    # With x far below sqrt(ε), y is weight * x / sqrt(ε).
    tiny = torch.full((1, n), 2.0**-60)
    scale = (wide(tiny) / (values * tiny)).mean().item()
    if not (math.isfinite(scale) and scale > 0):
        return Refusal("it has no ε")
    epsilon = float(f"{scale**-2:.6g}")
    for size in (1.0, 1e-3, 30.0):
        x = torch.randn(3, n, generator=random) * size
        off = (wide(x) - formula(x, values, epsilon)).abs().max().item()
        if not _TOLERANCE.allows(off / values.abs().max().item()):
            return Refusal(f"it is not weight * x / sqrt(mean(x²) + ε): max difference {off:.1e}")
    x = torch.randn(3, n, generator=random).bfloat16()
    narrow = twin.with_parameters(module, {"weight": values.bfloat16()})
    if not torch.equal(narrow(x), formula(x, values.bfloat16(), epsilon)):
        return Refusal("it rounds bf16 at another place")
    return NormSpec(epsilon)
