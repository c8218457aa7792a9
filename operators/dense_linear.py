"""Chooses the operator of a linear layer by the device of the layer and the format that the rule asks for.

Rules name this operator if they serve machines with and without a GPU. The plan shows the operator that was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ktinject.operators.base import REGISTRY, Config, NeverBuilt, Operator, register_operator
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig

if TYPE_CHECKING:
    from ktinject.machine import Machine

_SERVED = {"cpu": ("bf16", "fp8", "int8", "int4"), "cuda": ("bf16", "fp8", "int4")}


@dataclass(frozen=True)
class DenseLinearConfig(Config):
    """Arguments of `dense_linear` in a rule."""

    weights: Literal["bf16", "fp8", "int8", "int4"] = "bf16"  # the format in memory; int8 on the CPU only
    group_size: Literal[128, 64, 32] = 128  # int4 only: how many inputs share a scale


@register_operator("dense_linear")
class DenseLinear(NeverBuilt):
    """Leaves to the planner which operator computes a linear layer, by format and device. Takes every nn.Linear.

    | weights | on the CPU | on a GPU |
    |---|---|---|
    | bf16 | cpu_linear; a model that is not bf16 keeps the layer | keeps the layer |
    | fp8 | cpu_linear | fp8_linear |
    | int8 | cpu_linear | refused |
    | int4 | cpu_linear | int4_linear |
    """

    Config = DenseLinearConfig
    device_types = ("cuda", "cpu")

    @classmethod
    def resolve(cls, module: nn.Module, config: Any) -> tuple[type[Operator], Any] | None:
        kind = config.device.partition(":")[0]
        if not isinstance(module, nn.Linear) or config.weights not in _SERVED[kind]:
            return cls, config
        if config.weights == "bf16" and (kind == "cuda" or module.weight.dtype != torch.bfloat16):
            return None
        if kind == "cpu":
            return CpuLinear, CpuLinearConfig(
                device=config.device, weights=config.weights, group_size=config.group_size
            )
        operator = REGISTRY[f"{config.weights}_linear"]
        size = {"group_size": config.group_size} if config.weights == "int4" else {}
        return operator, operator.Config(device=config.device, **size)

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if not isinstance(module, nn.Linear):
            return "it replaces nn.Linear"
        kind = config.device.partition(":")[0]
        return f"weights {config.weights} are not computed on {config.device}; allowed: {', '.join(_SERVED[kind])}"
