"""How weights come back from what llama.cpp's converter made of them.

    recipe       tensors of the file                              the weight
    rope_rows    q or k, of each head pairs (i, i + d / 2) beside  its rows in two halves again
                 each other
    minus_one    a norm's weight plus one                         the weight
    log          -exp(A)                                          A
    conv         [channels, kernel]                               [channels, 1, kernel]
    kv_b         k_b [heads, latent, d], v_b [heads, v, latent]   [heads · (d + v), latent]
    qkvz         rows of q, k, v of all heads; rows of z          of each key head rows of q, k, v, z
    heads_*      values' heads with those of a key head apart     with those of a key head beside each other
    transposed   [..., n, k]                                      [..., k, n]
    interleaved  gate and up, [..., n, k] each                    [..., k, 2 n], gate and up in turn
    side_by_side gate and up, [..., n, k] each                    [..., k, 2 n], first gate
    stacked      gate and up, [..., n, k] each                    [..., 2 n, k], first gate

A recipe is found when the file is opened: it checks shapes, and says which shape the weight has.

Source: `modify_tensors` of the classes in llama.cpp's conversion/.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Shape = tuple[int, ...]
# Key of the metadata behind the architecture's name → a number from 1 on.
Numbers = Callable[[str], int]
# Shapes of the parts → shape of the weight, and what makes its values of theirs.
Found = tuple[Shape, Callable[..., Tensor]]


class Misfit(ValueError):
    """What is wrong, and what is needed."""


class Recipe(NamedTuple):
    """What a weight is made of.

    parts    names of the tensors in the file, behind the layer's
    find     numbers and the parts' shapes → `Found`. Raises Misfit
    by_slice slices of the weight's first dimension are made of the same slices of its parts
    rows     as `Made` says
    """

    parts: tuple[str, ...]
    find: Callable[..., Found]
    by_slice: bool = False
    rows: Literal["", "moved", "across"] = ""


def number_of(metadata: Mapping[str, Any], architecture: str) -> Numbers:
    """Reads numbers. The function raises Misfit for one that is absent, or is none from 1 to 2^31 - 1."""

    def number(key: str) -> int:
        found = metadata.get(f"{architecture}.{key}")
        if type(found) is not int or not 0 < found < 2**31:
            raise Misfit(f"needs a number as {architecture}.{key}, which is {found!r:.60}")
        return found

    return number


def _need(fits: bool, found: tuple[Shape, ...], needed: str) -> None:
    if not fits:
        shapes = ", ".join(str([*shape]) for shape in found)
        raise Misfit(f"has {'shapes' if len(found) > 1 else 'shape'} {shapes}; {needed} is needed")


def rope_rows(heads: str) -> Callable[..., Found]:
    """heads   key of their number"""

    def find(number: Numbers, shape: Shape) -> Found:
        count = number(heads)
        _need(shape[0] % (2 * count) == 0, (shape,), f"rows of {count} heads of even width")
        return shape, lambda t: t.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)

    return find


def minus_one(number: Numbers, shape: Shape) -> Found:
    return shape, lambda t: t.float() - 1


def log(number: Numbers, shape: Shape) -> Found:
    return shape, _log


def _log(a: Tensor) -> Tensor:
    if not bool((a < 0).all()):
        raise Misfit("holds a value that is not negative; the exponential of one is stored so")
    return torch.log(-a.float())


def conv(number: Numbers, shape: Shape) -> Found:
    _need(len(shape) == 2, (shape,), "[channels, kernel]")
    return (shape[0], 1, shape[1]), lambda t: t.unsqueeze(1)


def kv_b(number: Numbers, keys: Shape, values: Shape) -> Found:
    fits = (len(keys), len(values)) == (3, 3) and keys[0] == values[0] and keys[1] == values[2]
    _need(fits, (keys, values), "[heads, latent, d] and [heads, v, latent]")
    heads, latent, d = keys
    return (heads * (d + values[1]), latent), lambda k, v: torch.cat((k.mT, v), 1).flatten(0, 1)


class _Heads(NamedTuple):
    """Of linear attention: heads of keys, of values, and how wide they are."""

    keys: int
    values: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, number: Numbers) -> _Heads:
        keys, values = number("ssm.group_count"), number("ssm.time_step_rank")
        inner = number("ssm.inner_size")
        if values % keys or inner % values:
            raise Misfit(f"is of {keys} and {values} heads of {inner} values in all, which do not divide")
        return cls(keys, values, number("ssm.state_size"), inner // values)

    @property
    def key_rows(self) -> int:
        """Rows of q and k."""
        return 2 * self.keys * self.key_width

    @property
    def value_rows(self) -> int:
        return self.values * self.value_width

    def grouped(self, t: Tensor, dim: int, width: int) -> Tensor:
        """Heads `keys` apart beside each other, along a dimension."""
        return t.unflatten(dim, (-1, self.keys, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def qkvz(number: Numbers, qkv: Shape, z: Shape) -> Found:
    heads = _Heads.of(number)
    inputs = qkv[-1]
    needed = (heads.key_rows + heads.value_rows, inputs), (heads.value_rows, inputs)
    _need((qkv, z) == needed, (qkv, z), f"{[*needed[0]]} and {[*needed[1]]}")

    def make(rows: Tensor, gate: Tensor) -> Tensor:
        half = heads.key_rows // 2
        parts = (*rows.split((half, half, heads.value_rows)), gate)
        return torch.cat([part.unflatten(0, (heads.keys, -1)) for part in parts], 1).flatten(0, 1)

    return (qkv[0] + z[0], inputs), make


def heads_of_rows(wide: bool) -> Callable[..., Found]:
    """wide    a head has a row for each of its values, else one"""

    def find(number: Numbers, shape: Shape) -> Found:
        heads = _Heads.of(number)
        width = heads.value_width if wide else 1
        _need(shape[0] == heads.values * width, (shape,), f"{heads.values * width} rows")
        return shape, lambda t: heads.grouped(t, 0, width)

    return find


def heads_of_last_rows(number: Numbers, shape: Shape) -> Found:
    """Behind the rows of q and k, which stay."""
    heads = _Heads.of(number)
    _need(
        shape[0] == heads.key_rows + heads.value_rows, (shape,), f"{heads.key_rows + heads.value_rows} rows"
    )

    def make(t: Tensor) -> Tensor:
        rows = t[heads.key_rows :]
        return torch.cat((t[: heads.key_rows], heads.grouped(rows, 0, heads.value_width)))

    return shape, make


def heads_of_columns(number: Numbers, shape: Shape) -> Found:
    heads = _Heads.of(number)
    _need(len(shape) == 2 and shape[1] == heads.value_rows, (shape,), f"{heads.value_rows} columns")
    return shape, lambda t: heads.grouped(t, 1, heads.value_width)


def chain(first: Callable[..., Found], second: Callable[..., Found]) -> Callable[..., Found]:
    def find(number: Numbers, *shapes: Shape) -> Found:
        shape, make = first(number, *shapes)
        shape, then = second(number, shape)
        return shape, lambda *parts: then(make(*parts))

    return find


def transposed(number: Numbers, shape: Shape) -> Found:
    _need(len(shape) == 3, (shape,), "[experts, outputs, inputs]")
    return (shape[0], shape[2], shape[1]), lambda t: t.mT


def _pair(gate: Shape, up: Shape, dimensions: int, needed: str) -> None:
    _need(gate == up and len(gate) == dimensions, (gate, up), f"twice {needed}")


def interleaved(number: Numbers, gate: Shape, up: Shape) -> Found:
    _pair(gate, up, 3, "[experts, outputs, inputs]")
    experts, n, k = gate
    return (experts, k, 2 * n), lambda g, u: torch.stack((g, u), -2).flatten(-3, -2).mT


def interleaved_bias(number: Numbers, gate: Shape, up: Shape) -> Found:
    _pair(gate, up, 2, "[experts, outputs]")
    return (gate[0], 2 * gate[1]), lambda g, u: torch.stack((g, u), -1).flatten(-2)


def side_by_side(number: Numbers, gate: Shape, up: Shape) -> Found:
    _pair(gate, up, 3, "[experts, outputs, inputs]")
    experts, n, k = gate
    return (experts, k, 2 * n), lambda g, u: torch.cat((g, u), -2).mT


def stacked(dimensions: int) -> Callable[..., Found]:
    def find(number: Numbers, gate: Shape, up: Shape) -> Found:
        _pair(gate, up, dimensions, ("", "", "[outputs, inputs]", "[experts, outputs, inputs]")[dimensions])
        return (*gate[:-2], 2 * gate[-2], gate[-1]), lambda g, u: torch.cat((g, u), -2)

    return find
