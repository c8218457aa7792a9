"""Routed experts that process 0 of a tensor-parallel model has, and all processes need the results of.

    process 0   forward of its operator ──► broadcast
    others      Elsewhere                ◄── [m, hidden]

Their own routers gave the others the same ids and weights, which nobody looks at. A failure in process 0 is sent as
NaN, and raised by all processes at the end of the forward pass (`Team.settle`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Operator

if TYPE_CHECKING:
    from ktinject.team import Team


class Elsewhere(Operator):
    """Stands for experts of process 0; no rule can name it."""

    name = "elsewhere"
    device_types = ("cuda", "cpu")
    capturable = True
    team: Team

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls()

    def describe(self) -> dict[str, Any]:
        return {"kernel": "in process 0", "weights": "in process 0"}

    def footprint(self) -> dict[str, int]:
        return {}

    def wants(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> NoReturn:
        raise OperatorError(f"{name} belongs to process 0")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden] → what process 0 computed, of the same shape, dtype and device."""
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        return self.team.broadcast(out) if len(out) else out


def connect(operators: Iterable[Operator], team: Team) -> None:
    """Let process 0's operators tell the others their results, and `Elsewhere` hear them."""
    for operator in operators:
        if isinstance(operator, Elsewhere):
            operator.team = team
        elif operator.across == "first":
            operator.__dict__["forward"] = functools.partial(_announce, weakref.ref(operator), team)


def _announce(
    reference: weakref.ref[Operator], team: Team, hidden_states: Tensor, *routing: Tensor
) -> Tensor:
    operator: Any = reference()
    try:
        if team.failure:
            raise OperatorError(team.failure)  # the rest of a pass that has failed
        out = type(operator).forward(operator, hidden_states, *routing)
    except OperatorError as error:
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise
        team.failure = str(error)
        out = torch.full_like(hidden_states, torch.nan, memory_format=torch.contiguous_format)
    return team.broadcast(out.contiguous()) if len(out) else out
