"""What attention makes of queries, keys and values, found by running it as layer_probes.py runs a layer's parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ktinject.generation.layer_probes import ROWS, Stub, beside, random, run_twin
from ktinject.hf import compat
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.support import Support


class _Keys:
    """Stands for a cache, and ends the forward that gives it keys."""

    def update(self, keys: Tensor, *_: Any, **__: Any) -> None:
        raise _GivenKeys(keys)

    def get_seq_length(self, *_: Any) -> int:
        return 0


class _GivenKeys(Exception):
    """Its argument is what a cache was given."""


@dataclass(frozen=True)
class Turning:
    """How attention turns keys, and queries in the same way.

    by_neighbours  pairs of a head's values are (2i, 2i + 1) and stay there; else they are (i, i + n / 2)
    before_norms   norms are of heads that are turned
    is_none        nothing is turned
    interleaved    cos and sin have the two of an angle beside each other, not all angles twice
    tuned          (e, f) of queries that are multiplied with 1 + f · log(1 + floor((position + 1) / e)); or none
    scaled         queries are multiplied in fp32 with what the layer gives as `SCALE`, which is known elsewhere
    """

    by_neighbours: bool = False
    before_norms: bool = False
    is_none: bool = False
    interleaved: bool = False
    tuned: tuple[float, float] | None = None
    scaled: bool = False


BY_HALVES = Turning()


def turning(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Turning | Support:
    """How attention makes the keys that it caches of what the projection gives.

    heads  names of the projections, keys' the second
    norms  of those of its norms of queries and keys that there are; and one called v_norm has no part in it
    gate   of a projection to gates, if there is one
    """
    size = module.head_dim
    given = _there(module, (*heads[:3], gate))
    made = {name: getattr(module.get_submodule(name), "out_features", 0) for name in given}
    keys = _far_apart(random(1, ROWS, made[heads[1]], seed=4).double())
    half = random(1, ROWS, size // 2, seed=5).double()
    angles = half.repeat(1, 1, 2)
    children = {
        **{name: Stub(functools.partial(_zeros, made[name])) for name in given if name != heads[1]},
        heads[1]: Stub(lambda _: keys.clone()),
        **dict.fromkeys((*norms, *_there(module, ("v_norm",))), Stub(_norm)),
    }
    together = half.repeat_interleave(2, -1)
    rotations: list[Any] = [(one.cos(), one.sin()) for one in (angles, together)]
    rotations.append(torch.polar(torch.ones_like(half), half))
    refused: Support | None = None
    split = keys.view(1, ROWS, -1, size).transpose(1, 2)
    for rotation in rotations:
        found = _keys_given(module, children, rotation)
        if isinstance(found, Support):
            refused = refused or found
            continue
        interleaved = rotation is rotations[1]
        for way in (
            Turning(),
            Turning(True),
            Turning(False, True),
            Turning(True, True),
            Turning(is_none=True),
        ):
            want = split if way.before_norms or not norms else _norm(split)
            want = want if way.is_none else _turned(want, angles, way.by_neighbours)
            want = _norm(want) if way.before_norms and norms else want
            if found.shape == want.shape and _are_close(found, want):
                return replace(way, interleaved=interleaved and not way.is_none)
    return refused or Support.no(f"{type(module).__name__} makes keys in another way")


def _there(module: Any, names: Sequence[str]) -> list[str]:
    """Those of its children that there are."""
    return [name for name in names if name and getattr(module, name, None) is not None]


def _keys_given(module: Any, children: dict[str, Stub], rotation: Any) -> Tensor | Support:
    """The keys that an attention gives to its cache."""
    try:
        run_twin(
            module,
            children,
            random(1, ROWS, 8).double(),
            position_embeddings=rotation,
            attention_mask=None,
            **{compat.CACHE: _Keys()},
            **beside(module),
        )
    except _GivenKeys as given:
        (found,) = given.args
        if isinstance(found, Tensor):
            return found
    except Exception as error:
        return refusal_of(error)
    return Support.no(f"{type(module).__name__} makes keys in another way")


class _TwoKeys:
    """Stands for a cache that holds so many tokens, of which attention is given two: one with a value, one without.

    given  keys that it was to keep
    """

    def __init__(self, length: int, keys: Tensor, values: Tensor) -> None:
        self._length, self._both = length, (keys, values)
        self.given: list[Tensor] = []

    def update(self, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.given.append(keys)
        return self._both

    def get_seq_length(self, *_: Any) -> int:
        return self._length


class _Weighing:
    """Runs an attention on one token, whose query meets two keys: one whose product with it is 1, which has a value,
    and one of zeros without. Arguments as of `turning`.
    """

    def __init__(self, module: Any, heads: Sequence[str], norms: Sequence[str], gate: str) -> None:
        size = module.head_dim
        made = {
            name: getattr(module.get_submodule(name), "out_features", 0)
            for name in _there(module, (*heads[:3], gate))
        }
        groups = made[heads[1]] // size
        query = random(1, 1, size, seed=4).double()
        wanted = _norm(query) if norms else query
        both = torch.stack(
            [torch.zeros(size, dtype=torch.float32, device="cpu"), (wanted / wanted.square().sum()).flatten()]
        )
        self._keys = both.double().expand(1, groups, 2, size)
        value = made[heads[2]] // groups if heads[2] in made else size
        self._values = (
            torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")
            .double()[:, None]
            .expand(1, groups, 2, value)
        )
        self._module, self._seen = module, list[Tensor]()
        self._children: dict[str, Any] = {
            **{name: Stub(functools.partial(_zeros, width)) for name, width in made.items()},
            heads[0]: Stub(lambda x: query.repeat(1, 1, made[heads[0]] // size)),
            heads[3]: Stub(self._given),
            **dict.fromkeys((*norms, *_there(module, ("v_norm",))), Stub(_norm)),
        }
        zeros = torch.zeros(1, 1, size, dtype=torch.float64, device="cpu")
        few = zeros[..., : size // 2]
        self._rotations: list[Any] = [(zeros.cos(), zeros), (few.cos(), few), torch.polar(few.cos(), few)]
        sinks = getattr(module, "sinks", None)
        if sinks is not None:  # which are to have no part in it
            self._children["sinks"] = torch.full(sinks.shape, -1e9, dtype=torch.float64, device="cpu")

    def _given(self, x: Tensor) -> Tensor:
        self._seen.append(x)
        return x

    def at(self, position: int, **more: Any) -> tuple[Tensor, Tensor]:
        """The weight of the key for a query there, and the key that it leaves in the cache.

        more    what else the forward takes
        Raises  whatever transformers' code does where it is given what it is not made for
        """
        while True:
            cache = _TwoKeys(position, self._keys, self._values)
            try:
                run_twin(
                    self._module,
                    self._children,
                    random(1, 1, 8).double(),
                    position_embeddings=self._rotations[0],
                    attention_mask=None,
                    position_ids=torch.tensor([[position]], dtype=torch.int64, device="cpu"),
                    **{compat.CACHE: cache},
                    **beside(self._module),
                    **more,
                )
                return self._seen[-1].flatten()[0], cache.given[-1]
            except Exception:
                self._rotations.pop(0)
                if not self._rotations or self._seen:
                    raise


# Positions at which queries are looked at, by which some models multiply them.
_POSITIONS = (0, 1, 1000, 4095, 4096, 8191, 8192, 20000, 100_000, 1_000_000)


@twin.on_cpu()
def tuned_queries(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Any:
    """`Turning.tuned`, or a Support: queries depend on their position in another way. Arguments as of `turning`."""
    weighing = _Weighing(module, heads, norms, gate)
    try:
        # Whatever grows with the position shows between these.
        if torch.equal(weighing.at(_POSITIONS[0])[0], weighing.at(_POSITIONS[-1])[0]):
            return None
        found = torch.stack([weighing.at(position)[0] for position in _POSITIONS])
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    every, factor = (getattr(module, name, None) for name in ("floor_scale", "attn_scale"))
    if isinstance(every, (int, float)) and isinstance(factor, (int, float)) and every > 1 and not gate:
        places = torch.tensor(_POSITIONS, dtype=torch.float32, device="cpu") + 1
        times = 1 + factor * torch.log1p(torch.floor(places / every)).double()
        if torch.allclose(found, torch.sigmoid(times * module.scaling), rtol=1e-5, atol=1e-6):
            return float(every), float(factor)
    return Support.no(f"the queries of its {type(module).__name__} depend on their position in another way")


# What BEAM's layers give attention to multiply queries with.
SCALE = "attention_scaling"


def takes_scale(module: Any) -> bool:
    """Whether a module's forward has an argument `SCALE`."""
    return SCALE in inspect.signature(type(module).forward).parameters


@twin.on_cpu()
def scaled_queries(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> bool | Support:
    """`Turning.scaled`, or why that is not known. Arguments as of `turning`."""
    if not takes_scale(module):
        return False
    weighing = _Weighing(module, heads, norms, gate)
    try:
        plain, key = weighing.at(0)
        for times in (0.5, 3.0):
            found, other = weighing.at(
                0, **{SCALE: torch.full((1, 1, 1, 1), times, dtype=torch.float32, device="cpu")}
            )
            want = torch.sigmoid(
                torch.tensor(times * module.scaling, dtype=torch.float32, device="cpu")
            ) / torch.sigmoid(torch.tensor(module.scaling, dtype=torch.float32, device="cpu"))
            if not torch.equal(key, other) or not torch.allclose(found / plain, want.double(), rtol=1e-5):
                return Support.no(f"{type(module).__name__} makes something else of {SCALE}")
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    return True


@dataclass(frozen=True)
class Outputs:
    """What attention makes of the values of its heads, beside weighing them.

    scale  that they are multiplied with before they are cached
    gate   a function of what a projection gives, each head's one or each value's, that they are multiplied with
           before the output projection; none: there is no such
    normed by a norm called v_norm, of a head's values
    keys   are what values are made of, too: what the projection gives, before it is normed and turned
    biased a parameter `GATE_BIAS` is added to what the gate's projection gives, each head's to all of its gates
    """

    scale: float = 1.0
    gate: Literal["none", "sigmoid", "softplus"] = "none"
    normed: bool = False
    keys: bool = False
    biased: bool = False


PLAIN_OUTPUTS = Outputs()
GATE_BIAS = "gate_bias"


def outputs(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Outputs | Support:
    """What attention makes of values, of a text of one token, which sees its own alone. Arguments as of `turning`."""
    made = {
        name: getattr(module.get_submodule(name), "out_features", 0)
        for name in _there(module, (*heads[:3], gate))
    }
    groups = made[heads[1]] // module.head_dim
    queries = made[heads[0]] // module.head_dim
    of_keys, normed = heads[2] not in made, bool(_there(module, ("v_norm",)))
    source = heads[1] if of_keys else heads[2]
    values = _far_apart(random(1, made[source], 1, seed=6).double()).mT
    gates = 3 * random(1, 1, made.get(gate, 1), seed=7).double()
    seen: list[Tensor] = []

    def cached(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    angles = torch.zeros(1, 1, module.head_dim, dtype=torch.float64, device="cpu")
    sinks = getattr(module, "sinks", None)
    children: dict[str, Any] = {
        **{name: Stub(functools.partial(_zeros, made[name])) for name in heads[:2]},
        source: Stub(lambda _: values.clone()),  # some write to it in place
        heads[3]: Stub(cached),
        **dict.fromkeys((*norms, *_there(module, ("v_norm",))), Stub(_norm)),
    }
    if gate:
        children[gate] = Stub(lambda _: gates)
    if sinks is not None:  # which are to have no part in it
        children["sinks"] = torch.full(sinks.shape, -1e9, dtype=torch.float64, device="cpu")
    biased = bool(gate) and getattr(module, GATE_BIAS, None) is not None
    bias = random(queries, seed=8).double()
    if biased:
        children[GATE_BIAS] = bias
    try:
        run_twin(
            module,
            children,
            random(1, 1, 8).double(),
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            **{compat.CACHE: None},
            **beside(module),
        )
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    split = values.view(groups, -1).repeat_interleave(queries // groups, 0)
    split = _norm(split) if normed else split
    by_gate = {"none": torch.ones_like(split)}
    if gate:
        of_heads = gates.view(queries, -1) + bias[:, None] * biased
        of_heads = of_heads.expand_as(split)
        by_gate = {"sigmoid": of_heads.sigmoid(), "softplus": functional.softplus(of_heads)}
    for name, factors in by_gate.items():
        want = (split * factors).flatten()
        found = seen[0].flatten() if seen else want[:0]
        if found.shape != want.shape:
            break
        scale = float(f"{((found * want).sum() / (want * want).sum()).item():.6g}")
        if scale > 0 and torch.allclose(found, scale * want, rtol=1e-4, atol=1e-5):
            return Outputs(scale, name, normed, of_keys, biased)  # type: ignore[arg-type]
    return Support.no(f"{type(module).__name__} makes something else of values")


def _far_apart(x: Tensor) -> Tensor:
    """Rows [1, m, n] of several sizes, so that a bound which Gaussian numbers do not reach shows."""
    sizes = torch.tensor([1.0, 30.0, 1000.0], dtype=x.dtype, device=x.device)
    return x * sizes[torch.arange(x.shape[1], device=x.device) % 3][:, None]


def _are_close(found: Tensor, want: Tensor) -> bool:
    """Relative to the largest of a row; some compute in fp32."""
    most = 1e-5 * (1 + want.abs().amax(-1, keepdim=True))
    return bool(((found - want).abs() <= most).all())


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


def _norm(x: Tensor) -> Tensor:
    """Stands for a norm, of a head or of all: what it makes of a value depends on that alone."""
    return torch.asinh(x + 0.3)


def _turned(x: Tensor, angles: Tensor, by_neighbours: bool) -> Tensor:
    """x [1, heads, m, n] turned by angles [1, m, n], which are twice side by side."""
    half = x.shape[-1] // 2
    cos, sin = angles[..., :half].cos(), angles[..., :half].sin()
    a, b = (x[..., ::2], x[..., 1::2]) if by_neighbours else (x[..., :half], x[..., half:])
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if by_neighbours else torch.cat(pair, -1)
