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
from ktinject.operators.expert_formats import of_linear

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format
    from ktinject.machine import Machine

_SERVED = {"cpu": ("bf16", "fp8", "int8", "int4", "kept"), "cuda": ("bf16", "fp8", "int4", "kept")}


@dataclass(frozen=True)
class DenseLinearConfig(Config):
    """Arguments of `dense_linear` in a rule."""

    # The format in memory; int8 on the CPU only. kept: the checkpoint's own, else what bf16 does.
    weights: Literal["bf16", "fp8", "int8", "int4", "kept"] = "bf16"
    group_size: Literal[128, 64, 32] = 128  # int4 only: how many inputs share a scale
    # int4 on a GPU only: keep a bf16 copy beside the int4 weights, for prompts; see int4_linear
    bf16_copy: bool = False

    def __post_init__(self) -> None:
        if self.bf16_copy and self.weights != "int4":
            raise ValueError(
                f"bf16_copy keeps a copy beside int4 weights, and weights is {self.weights}. "
                "Write weights: int4, or bf16_copy: false."
            )


@dataclass(frozen=True)
class _AsStored(DenseLinearConfig):
    """`kept`, with what `cpu_linear` needs to take the checkpoint's weights as they are."""

    weights: str = "bf16"  # type: ignore[assignment]
    symmetric: bool = True


@register_operator("dense_linear")
class DenseLinear(NeverBuilt):
    """Leaves to the planner which operator computes a linear layer, by format and device. Takes every nn.Linear.

    | weights | on the CPU | on a GPU |
    |---|---|---|
    | bf16 | cpu_linear; a model that is not bf16 keeps the layer | keeps the layer |
    | fp8 | cpu_linear | fp8_linear |
    | int8 | cpu_linear | refused |
    | int4 | cpu_linear | int4_linear |
    | kept | the checkpoint's own format: cpu_linear; else as bf16 | as bf16 |

    Of a checkpoint's formats, cpu_linear keeps fp8 (blocks of 128 × 128, or a scale for each output), mxfp8, nvfp4,
    mxfp4, int8 (a scale for each output), int4 (groups of 32, 64 and 128), K-quants and q8_0. On a GPU, weights: fp8
    and int4 take a checkpoint's own, too, with activations in fp8 in the first case.
    """

    Config = DenseLinearConfig
    device_types = ("cuda", "cpu")
    native_formats = CpuLinear.native_formats

    @classmethod
    def use_checkpoint_format(cls, config: Any, source: Format) -> Any:
        if config.weights != "kept":
            return config
        found = of_linear(source)
        return _AsStored(config.device, **{"group_size": config.group_size, **found})

    @classmethod
    def resolve(cls, module: nn.Module, config: Any) -> tuple[type[Operator], Any] | None:
        kind = config.device.partition(":")[0]
        if not isinstance(module, nn.Linear):
            return cls, config
        if isinstance(config, _AsStored) and config.weights != "bf16":
            if kind == "cuda":
                return None  # what fp8_linear would save, it pays for in fp8 activations, which nobody has asked for
            sizes: dict[str, Any] = {"group_size": config.group_size, "symmetric": config.symmetric}
            return CpuLinear, CpuLinearConfig(device=config.device, weights=config.weights, **sizes)  # type: ignore[arg-type]
        if config.weights not in _SERVED[kind]:
            return cls, config
        if config.weights == "kept":
            config = replace(config, weights="bf16")
        if config.weights == "bf16" and (kind == "cuda" or module.weight.dtype != torch.bfloat16):
            return None
        if kind == "cpu":
            return CpuLinear, CpuLinearConfig(
                device=config.device, weights=config.weights, group_size=config.group_size
            )
        operator = REGISTRY[f"{config.weights}_linear"]
        of_int4 = {"group_size": config.group_size, "bf16_copy": config.bf16_copy}
        return operator, operator.Config(
            device=config.device, **(of_int4 if config.weights == "int4" else {})
        )

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if not isinstance(module, nn.Linear):
            return "it replaces nn.Linear"
        kind = config.device.partition(":")[0]
        return f"weights {config.weights} are not computed on {config.device}; allowed: {', '.join(_SERVED[kind])}"
