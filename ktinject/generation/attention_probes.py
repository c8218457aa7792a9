"""What attention makes of keys and of values, found by running it as layer_probes.py runs the parts of a layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ktinject.generation.layer_probes import ROWS, Stub, random, run_twin
from ktinject.hf import compat
from ktinject.operators.probes.answer import refusal_of
from ktinject.support import Support


class _Keys:
    """Stands for a cache, and ends the forward that gives it keys."""

    def update(self, keys: Tensor, *_: Any, **__: Any) -> None:
        raise _GivenKeys(keys)


class _GivenKeys(Exception):
    """Its argument is what a cache was given."""


@dataclass(frozen=True)
class Turning:
    """How attention turns keys, and queries in the same way.

    by_neighbours  pairs of a head's values are (2i, 2i + 1) and stay there; else they are (i, i + n / 2)
    before_norms   norms are of heads that are turned
    is_none        nothing is turned
    """

    by_neighbours: bool = False
    before_norms: bool = False
    is_none: bool = False


BY_HALVES = Turning()


def turning(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Turning | Support:
    """How attention makes the keys that it caches of what the projection gives.

    heads  names of the projections, keys' the second
    norms  of those of its norms of queries and keys that there are
    gate   of a projection to gates, if there is one
    """
    size = module.head_dim
    given = (*heads[:3], gate) if gate else heads[:3]
    made = {name: getattr(module.get_submodule(name), "out_features", 0) for name in given}
    keys = random(1, ROWS, made[heads[1]], seed=4).double()
    angles = random(1, ROWS, size // 2, seed=5).double().repeat(1, 1, 2)
    children = {
        **{name: Stub(functools.partial(_zeros, made[name])) for name in given if name != heads[1]},
        heads[1]: Stub(lambda _: keys),
        **dict.fromkeys(norms, Stub(_norm)),
    }
    try:
        run_twin(
            module,
            children,
            random(1, ROWS, 8).double(),
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            **{compat.CACHE: _Keys()},
        )
    except _GivenKeys as given:
        (found,) = given.args
    except Exception as error:
        return refusal_of(error)
    else:
        found = None
    split = keys.view(1, ROWS, -1, size).transpose(1, 2)
    for way in (Turning(), Turning(True), Turning(False, True), Turning(True, True), Turning(is_none=True)):
        want = split if way.before_norms or not norms else _norm(split)
        want = want if way.is_none else _turned(want, angles, way.by_neighbours)
        want = _norm(want) if way.before_norms and norms else want
        if isinstance(found, Tensor) and found.shape == want.shape and torch.allclose(found, want):
            return way
    return Support.no(f"{type(module).__name__} makes keys in another way")


@dataclass(frozen=True)
class Outputs:
    """What attention makes of the values of its heads, beside weighing them.

    scale  that they are multiplied with before they are cached
    gate   a function of what a projection gives, each head's one or each value's, that they are multiplied with
           before the output projection; none: there is no such
    """

    scale: float = 1.0
    gate: Literal["none", "sigmoid", "softplus"] = "none"


PLAIN_OUTPUTS = Outputs()


def outputs(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Outputs | Support:
    """What attention makes of values, of a text of one token, which sees its own alone. Arguments as of `turning`."""
    made = {
        name: getattr(module.get_submodule(name), "out_features", 0) for name in (*heads[:3], gate) if name
    }
    groups = made[heads[1]] // module.head_dim
    queries = made[heads[0]] // module.head_dim
    values = random(1, 1, made[heads[2]], seed=6).double()
    gates = 3 * random(1, 1, made.get(gate, 1), seed=7).double()
    seen: list[Tensor] = []

    def cached(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    angles = torch.zeros(1, 1, module.head_dim, dtype=torch.float64, device="cpu")
    sinks = getattr(module, "sinks", None)
    children: dict[str, Any] = {
        **{name: Stub(functools.partial(_zeros, made[name])) for name in heads[:2]},
        heads[2]: Stub(lambda _: values),
        heads[3]: Stub(cached),
        **dict.fromkeys(norms, Stub(_norm)),
    }
    if gate:
        children[gate] = Stub(lambda _: gates)
    if sinks is not None:  # which are to have no part in it
        children["sinks"] = torch.full(sinks.shape, -1e9, dtype=torch.float64, device="cpu")
    try:
        run_twin(
            module,
            children,
            random(1, 1, 8).double(),
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            **{compat.CACHE: None},
        )
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    split = values.view(groups, -1).repeat_interleave(queries // groups, 0)
    by_gate = {"none": torch.ones_like(split)}
    if gate:
        of_heads = gates.view(queries, -1).expand_as(split)
        by_gate = {"sigmoid": of_heads.sigmoid(), "softplus": functional.softplus(of_heads)}
    for name, factors in by_gate.items():
        want = (split * factors).flatten()
        found = seen[0].flatten() if seen else want[:0]
        if found.shape != want.shape:
            break
        scale = float(f"{((found * want).sum() / (want * want).sum()).item():.6g}")
        if scale > 0 and torch.allclose(found, scale * want, rtol=1e-4, atol=1e-5):
            return Outputs(scale, name)  # type: ignore[arg-type]
    return Support.no(f"{type(module).__name__} makes something else of values")


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


def _norm(x: Tensor) -> Tensor:
    """Stands for a norm, of a head or of all: what it makes of a value depends on that alone."""
    return torch.tanh(x + 0.3)


def _turned(x: Tensor, angles: Tensor, by_neighbours: bool) -> Tensor:
    """x [1, heads, m, n] turned by angles [1, m, n], which are twice side by side."""
    half = x.shape[-1] // 2
    cos, sin = angles[..., :half].cos(), angles[..., :half].sin()
    a, b = (x[..., ::2], x[..., 1::2]) if by_neighbours else (x[..., :half], x[..., half:])
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if by_neighbours else torch.cat(pair, -1)
