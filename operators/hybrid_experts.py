"""Routed experts on the CPU beside a model on a GPU: no host function, no copy the host waits for, no allocation.

Decoding goes through `handoff`, so the operator can be captured in a CUDA graph. On a machine without a GPU, or under
autograd, it is `cpu_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from ktinject.operators.base import register_operator
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.handoff import Handoff

if TYPE_CHECKING:
    from ktinject.machine import Machine
    from ktinject.operators.routed_experts import ExpertsSpec


@dataclass(frozen=True)
class HybridExpertsConfig(CpuExpertsConfig):
    """Arguments of `hybrid_experts` in a rule, beside those of `cpu_experts`."""

    handoff: Literal["auto", "flags", "host_func"] = "auto"  # how the GPU tells the CPU


@register_operator("hybrid_experts")
class HybridExperts(CpuExperts):
    """`cpu_experts` that a GPU hands its work to within its own stream."""

    Config = HybridExpertsConfig
    device_types = ("cuda", "cpu")
    capturable = True

    def __init__(self, spec: ExpertsSpec, config: HybridExpertsConfig) -> None:
        super().__init__(spec, config)
        self.handoff = Handoff(self.native, spec.hidden_size, config.handoff)

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        return cls._unsupported(module, config)

    def describe(self) -> dict[str, Any]:
        runs = super().describe()
        if self.config.device == "cpu":
            runs["handoff"] = "none: no GPU is used, so hybrid_experts computes as cpu_experts does"
        else:
            runs["handoff"] = self.handoff.describe(torch.device(self.config.device))
        return runs

    def finish(self) -> None:
        super().finish()
        if self.config.device != "cpu":
            self.handoff.prepare(torch.device(self.config.device))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [m, hidden], top_k_index and top_k_weights [m, t] → [m, hidden], dtype and device kept.

        Ids of -1 and num_experts are skipped. Raises OperatorError for any other id that is no expert: on a GPU, in
        the next call.
        """
        needs_graph = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
        if not hidden_states.is_cuda or needs_graph or torch.compiler.is_compiling():
            return super().forward(hidden_states, top_k_index, top_k_weights)
        ticket = self.handoff.submit(hidden_states, top_k_index, top_k_weights)
        return self.handoff.wait(ticket)
