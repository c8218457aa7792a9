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

    def narrow(self, dim: int, start: int, length: int) -> Codes:
        """A copy of some of its outputs (0) or inputs (1). Raises ValueError if that would divide a group."""
        codes = self.codes.narrow(dim, start, length).clone()
        if dim == 1 and self.group_of is not None:
            return Codes(codes, self.scales, self.zeros, self.group_of[start : start + length].clone())
        if dim == 1:
            size = self.codes.shape[1] // self.scales.shape[1]
            start, length = _blocks(start, length, size, "inputs")
        scales = self.scales.narrow(dim, start, length).clone()
        zeros = None if self.zeros is None else self.zeros.narrow(dim, start, length).clone()
        return Codes(codes, scales, zeros, self.group_of)

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

    def narrow(self, dim: int, start: int, length: int) -> Fp8Blocks:
        """A copy of some of its outputs (0) or inputs (1). Raises ValueError if that would divide a block."""
        first, count = _blocks(start, length, self.block[dim], ("outputs", "inputs")[dim])
        values = self.values.narrow(dim, start, length).clone()
        return Fp8Blocks(values, self.scales.narrow(dim, first, count).clone(), self.block)


def _blocks(start: int, length: int, size: int, what: str) -> tuple[int, int]:
    """The first of the blocks of this size, and how many they are."""
    if start % size or length % size:
        raise ValueError(
            f"{what} {start} to {start + length - 1} are no whole blocks: a scale is for {size} of them. "
            "Use fewer processes, or an operator for which the checkpoint is decoded"
        )
    return start // size, length // size
