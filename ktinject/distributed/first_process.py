"""Routed experts that process 0 of a tensor-parallel model has, and all processes need the results of.

    process 0   Announced: the operator inside ──► broadcast
    others      Elsewhere                      ◄── [m, hidden]

Their own routers gave the others the same ids and weights, which nobody looks at. A failure in process 0 is sent as
NaN, and raised by all processes at the end of the forward pass (`Team.settle`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Operator

if TYPE_CHECKING:
    from ktinject.distributed.process_group import Team


class _InFirst(Operator):
    """What both have in common; no rule can name them, and the plan knows the operator that it is about."""

    device_types = ("cuda", "cpu")

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls()

    def describe(self) -> dict[str, Any]:
        return {"kernel": "in process 0", "weights": "in process 0"}

    def footprint(self) -> dict[str, int]:
        return {}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> NoReturn:
        raise OperatorError(f"{name} is not for {self.name}")


class Elsewhere(_InFirst):
    """Stands for experts of process 0."""

    name = "elsewhere"
    capturable = True
    team: Team

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden] → what process 0 computed, of the same shape, dtype and device."""
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        return self.team.broadcast(out) if len(out) else out


class Announced(_InFirst):
    """Tells the others what the operator inside computes.

    operator   filled
    """

    name = "announced"

    def __init__(self, operator: Operator, team: Team) -> None:
        super().__init__()
        self.operator, self.team, self.capturable = operator, team, operator.capturable

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the operator inside; but what that raises is left to `Team.settle`, and NaN is returned."""
        try:
            if self.team.failure:
                raise OperatorError(self.team.failure)  # the rest of a pass that has failed
            out = self.operator(hidden_states, top_k_index, top_k_weights)
        except OperatorError as error:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise
            self.team.failure = str(error)
            out = torch.full_like(hidden_states, torch.nan, memory_format=torch.contiguous_format)
        return self.team.broadcast(out.contiguous()) if len(out) else out
