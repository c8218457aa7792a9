"""How close a module and a formula must be to count as the same, and why so close."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """The greatest difference, relative above one, at which a module and a formula are the same; with its reason."""

    most: float
    reason: str

    def allows(self, difference: float) -> bool:
        return difference <= self.most  # NaN is not


def difference(found: Tensor, want: Tensor) -> float:
    """The greatest difference, relative above one; inf where the shapes differ."""
    if found.shape != want.shape:
        return inf
    return ((found - want).abs() / (1 + want.abs())).max().item() if want.numel() else 0.0
