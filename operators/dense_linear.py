"""Chooses the operator of a linear layer by the device of the layer and the format that the rule asks for.

Rules name this operator if they serve machines with and without a GPU. The plan shows the operator that was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ktinject.operators.base import REGISTRY, Config, NeverBuilt, Operator, register_operator
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig
from ktinject.operators.expert_formats import K_QUANTS

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format
    from ktinject.machine import Machine

_SERVED = {"cpu": ("bf16", "fp8", "int8", "int4", "kept"), "cuda": ("bf16", "fp8", "int4", "kept")}

# Inputs of a K-quant's block.
_BLOCK = 256


@dataclass(frozen=True)
class DenseLinearConfig(Config):
    """Arguments of `dense_linear` in a rule."""

    # The format in memory; int8 on the CPU only. kept: there the K-quant of a GGUF file, else what bf16 does.
    weights: Literal["bf16", "fp8", "int8", "int4", "kept"] = "bf16"
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
    | kept | a GGUF file's K-quant (q2_k to q6_k, iq4_xs) as it is: cpu_linear; else as bf16 | as bf16 |
    """

    Config = DenseLinearConfig
    device_types = ("cuda", "cpu")
    native_formats = K_QUANTS

    @classmethod
    def use_checkpoint_format(cls, config: Any, source: Format) -> Any:
        return replace(config, weights=source.encoding) if config.weights == "kept" else config

    @classmethod
    def resolve(cls, module: nn.Module, config: Any) -> tuple[type[Operator], Any] | None:
        kind = config.device.partition(":")[0]
        if not isinstance(module, nn.Linear) or config.weights not in (*_SERVED[kind], *K_QUANTS):
            return cls, config
        if config.weights in K_QUANTS and kind == "cpu" and module.in_features % _BLOCK == 0:
            return CpuLinear, CpuLinearConfig(device=config.device, weights=config.weights)
        if config.weights in ("kept", *K_QUANTS):
            config = replace(config, weights="bf16")
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
