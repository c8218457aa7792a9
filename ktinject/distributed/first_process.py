"""Routed experts of a tensor-parallel model: the process of rank 0 holds them, and all processes need their results.

    rank 0   BroadcastExperts: the operator inside ──► broadcast
    others   ReceivedExperts                       ◄── [m, hidden]

The other processes have routed, too, to the same experts, and ignore the result. Rank 0 sends a failure as
NaN, and it is raised by all processes at the end of the forward pass (`ProcessGroup.raise_if_failed`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Operator

if TYPE_CHECKING:
    from ktinject.distributed.process_group import ProcessGroup


class _RankZeroExperts(Operator):
    """What both have in common. No rule names them; the plan shows the operator that rank 0 has."""

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


class ReceivedExperts(_RankZeroExperts):
    """Stands for experts of process 0."""

    name = "received_experts"
    capturable = True
    group: ProcessGroup

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden] → what process 0 computed, of the same shape, dtype and device."""
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        return self.group.broadcast(out) if len(out) else out


class BroadcastExperts(_RankZeroExperts):
    """Tells the others what the operator inside computes.

    operator   filled
    """

    name = "broadcast_experts"

    def __init__(self, operator: Operator, group: ProcessGroup) -> None:
        super().__init__()
        self.operator, self.group, self.capturable = operator, group, operator.capturable

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As the operator inside. Its errors are left to `ProcessGroup.raise_if_failed`; the output is then NaN."""
        try:
            if self.group.failure:
                raise OperatorError(self.group.failure)  # the rest of a pass that has failed
            out = self.operator(hidden_states, top_k_index, top_k_weights)
        except OperatorError as error:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise
            self.group.failure = str(error)
            out = torch.full_like(hidden_states, torch.nan, memory_format=torch.contiguous_format)
        return self.group.broadcast(out.contiguous()) if len(out) else out
