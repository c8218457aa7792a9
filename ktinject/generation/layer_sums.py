"""How a decoder layer adds its parts where both sides of a sum are multiplied with numbers, found by running it as
layer_probes.py runs its parts.

    y = kept · x + added · attention(norm(x)), and then the same of y and the feed-forward part

Of MiniMax-01, what is kept is not x but norm(x).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.layer_probes import ARGUMENTS, LayerNames, Stub, random, run_twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.support import Support


@dataclass(frozen=True)
class Sums:
    """The numbers of both sums, (kept, added) each.

    keeps_normed  what is kept is what the norm before the part gives
    """

    attention: tuple[float, float] = (1.0, 1.0)
    feed_forward: tuple[float, float] = (1.0, 1.0)
    keeps_normed: bool = False

    @classmethod
    def of_residual(cls, factor: float) -> Sums:
        """Of a layer that multiplies what it adds with a factor."""
        return cls((1.0, factor), (1.0, factor))


# What stands for norms and parts, in the order of `LayerNames.parts`.
_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.sin(x + 0.3),
    lambda x: torch.cos(2 * x),
    lambda x: torch.tanh(3 * x - 0.7),
    lambda x: torch.cos(x - 0.7),
    torch.square,
    lambda x: torch.sin(3 * x + 0.2),
)


def of_layer(layer: nn.Module, names: LayerNames, gives_more: bool) -> Sums | Support:
    """The sums of a layer of attention and a feed-forward part, each behind a norm.

    gives_more  its attention gives something along with what is added
    """
    unknown = Support.no("it is not x + attention(norm(x)), and that + feed_forward(norm(that))")
    if len(names.parts) != 2 or not names.before_attention or not names.before_feed_forward or names.shared:
        return unknown
    kinds = [name for part in names.parts for name in part[:3]]
    functions = {name: function for name, function in zip(kinds, _FUNCTIONS) if name}
    given: dict[str, Tensor] = {}

    def noting(name: str) -> Callable[..., Any]:
        def note(x: Tensor, **_: Any) -> Any:
            given[name] = x
            found = functions[name](x)
            return (found, None) if name == names.attention and gives_more else found

        return note

    children = {name: Stub(noting(name), names_kept=name == names.attention) for name in functions}
    x = random(1, 2, 8, seed=11).double()
    arguments = dict.fromkeys(ARGUMENTS)
    try:
        found = run_twin(layer, children, x, use_cache=True, **arguments)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    found = found[0] if isinstance(found, tuple) else found
    between = given.get(names.before_feed_forward)
    for keeps_normed in (False, True):
        first, second = (
            _factors([functions.get(name) for name in part[:3]], into, out, keeps_normed)
            for part, into, out in zip(names.parts, (x, between), (between, found))
        )
        if first is not None and second is not None:
            return Sums(first, second, keeps_normed)
    return unknown


def _factors(part: list[Any], x: Any, y: Any, keeps_normed: bool) -> tuple[float, float] | None:
    """(kept, added) for which y is kept · x + added · part(x), or the same of what the norm before gives."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.shape != y.shape:
        return None
    before, own, behind = part
    normed = before(x)
    added = own(normed) if behind is None else behind(own(normed))
    kept = normed if keeps_normed else x
    sides = torch.stack([kept.flatten(), added.flatten()], -1)
    solved = torch.linalg.lstsq(sides, y.double().flatten()[:, None]).solution[:, 0]
    # Of digits beyond these, doubles know nothing.
    first, second = (float(f"{one:.12g}") for one in solved.tolist())
    if first > 0 and second > 0 and torch.allclose(y, first * kept + second * added, rtol=1e-9, atol=1e-9):
        return first, second
    return None
