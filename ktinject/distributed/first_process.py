"""Routed experts of a tensor-parallel model: rank 0 holds and computes them, and broadcasts the results to all ranks.

    rank 0       BroadcastExperts: the operator inside ──► broadcast
    other ranks  ReceivedExperts                       ◄── [m, hidden]

Every rank computes the same routing, but only rank 0 uses it. If the experts fail, rank 0 broadcasts NaN, and all ranks
raise the error at the end of the forward pass (`ProcessGroup.raise_if_failed`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Operator

if TYPE_CHECKING:
    from ktinject.distributed.process_group import ProcessGroup
    from ktinject.machine import Machine


class _RankZeroExperts(Operator):
    """The common base of the two operators. No rule can name them: the plan names the operator inside rank 0."""

    device_types = ("cuda", "cpu")

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        return None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls()

    def describe(self) -> dict[str, Any]:
        return {"kernel": "in process 0", "weights": "in process 0"}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> NoReturn:
        raise OperatorError(f"{name} is not for {self.name}")

    def is_lossless(self) -> bool:
        return False  # the weights are not here


class ReceivedExperts(_RankZeroExperts):
    """Takes the place of the experts in every rank but 0, and receives their results."""

    name = "received_experts"
    capturable = True
    group: ProcessGroup

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden] → what rank 0 computed, in the same shape and dtype, on the same device."""
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        return self.group.broadcast(out) if len(out) else out


class BroadcastExperts(_RankZeroExperts):
    """Computes the experts on rank 0 and broadcasts the results.

    operator   computes the experts; its weights are loaded
    """

    name = "broadcast_experts"

    def __init__(self, operator: Operator, group: ProcessGroup) -> None:
        super().__init__()
        self.operator, self.group, self.capturable = operator, group, operator.capturable

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The forward of the operator inside. If it fails, the output is NaN, and `raise_if_failed` raises it."""
        try:
            if self.group.failure:
                raise OperatorError(self.group.failure)  # an earlier layer of this pass has failed
            out = self.operator(hidden_states, top_k_index, top_k_weights)
        except OperatorError as error:
            if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
                raise
            self.group.failure = str(error)
            out = torch.full_like(hidden_states, torch.nan, memory_format=torch.contiguous_format)
        return self.group.broadcast(out.contiguous()) if len(out) else out
