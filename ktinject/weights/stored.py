"""Weights as quantised checkpoints store them, for the operators that take them without rounding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Codes:
    """A weight [n, k] in int4.

    codes       [n, k] uint8, 0 to 15
    scales      [n, groups], float
    zeros       [n, groups] uint8, 0 to 15; None: 8 everywhere
    group_of    [k] int64, the group of each input; None: groups are equal and in order
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_of: Tensor | None = None

    def values(self) -> Tensor:
        """[n, k] fp32, each the fp32 product of scale and difference; exact for scales of 16 bits."""
        n, k = self.codes.shape
        groups = self.scales.shape[1]
        if self.group_of is not None:
            offset = 8 if self.zeros is None else self.zeros[:, self.group_of].float()
            return (self.codes.float() - offset) * self.scales.float()[:, self.group_of]
        steps = self.codes.view(n, groups, k // groups).float()
        steps -= 8 if self.zeros is None else self.zeros[:, :, None].float()
        return steps.mul_(self.scales.float()[:, :, None]).view(n, k)


@dataclass(frozen=True)
class Fp8Blocks:
    """A weight [n, k] in fp8 with a scale a block, by which the values are multiplied.

    values  [n, k] float8_e4m3fn
    scales  [ceil(n / block n), ceil(k / block k)] fp32, positive
    block   (n, k)
    """

    values: Tensor
    scales: Tensor
    block: tuple[int, int]
