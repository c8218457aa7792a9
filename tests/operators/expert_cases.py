"""Leaves, formats and inputs that `cpu_experts` is tested with, and what it is compared with."""

from __future__ import annotations

from functools import cache
from typing import Any

import k_quants
import reference
import torch
import transformers
from probe_cases import experts_module
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktinject import _native
from ktinject.checkpoints.formats.base import GgufRows
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.probes.experts import ExpertsSpec

torch.set_num_threads(1)

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16"},
    "int8": {"weights": "int8"},
    "int4_g32": {"weights": "int4", "group_size": 32},
    "int4_g64": {"weights": "int4", "group_size": 64},
    "int4_g128": {"weights": "int4", "group_size": 128},
    "int4_g32_zero": {"weights": "int4", "group_size": 32, "symmetric": False},
    "fp8": {"weights": "fp8"},
    "mxfp4": {"weights": "mxfp4"},
    "fp8_channel": {"weights": "fp8_channel"},
    "nvfp4": {"weights": "nvfp4"},
    "mxfp8": {"weights": "mxfp8"},
}
# What a GPU unpacks, and computes where experts are on it. q8_0: of widths that are multiples of 32.
ON_GPU: dict[str, dict[str, Any]] = {
    "bf16": {"weights": "bf16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4", "group_size": 32},
    "int4 with zero points": {"weights": "int4", "group_size": 64, "symmetric": False},
    "fp8": {"weights": "fp8"},
    "mxfp4": {"weights": "mxfp4"},
    "fp8_channel": {"weights": "fp8_channel"},
    "nvfp4": {"weights": "nvfp4"},
    "mxfp8": {"weights": "mxfp8"},
    "q8_0": {"weights": "q8_0"},
}
# K-quants come from GGUF files alone: tests/ktinject/loading/test_k_quants.py.
TABLE = [row for row in _native.kernels() if row["weights"] not in reference.K_QUANTS]
RUNS = [
    (name, row["name"])
    for name, arguments in FORMATS.items()
    for row in TABLE
    if row["weights"] == arguments["weights"] and row["available"]
]
emulated = reference.rounding


def load(made: CpuExperts, name: str, values: Tensor) -> None:
    """A parameter in any format; what is kept from files alone is first made as these have it."""
    if not made.takes_stored_only:
        return made.load(name, values, None, None)
    kind = made.native_formats[-1 if name.startswith("down_proj") else 0]
    rows, block = k_quants.quantised(values.detach(), kind), k_quants.INPUTS.get(kind, 256)
    made.load_stored(
        name, GgufRows(kind, rows, block, rows.shape[-1] * block // values.shape[-1]), None, None
    )


@cache
def family(name: str) -> nn.Module:
    return experts_module(name)


@cache
def gaussian(hidden: int, inner: int, experts: int = 4) -> nn.Module:
    """A plain leaf of any size; weights that give activations of about one."""
    config = transformers.Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    random = torch.Generator().manual_seed(hidden * 1000 + inner)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=random)
    return module


def build(module: nn.Module, name: str = "bf16", kernel: str = "auto") -> CpuExperts:
    return CpuExperts.build(module, CpuExpertsConfig(device="cpu", kernel=kernel, **FORMATS[name]))


def filled(module: nn.Module, name: str = "bf16", kernel: str = "auto") -> CpuExperts:
    """An operator with the module's weights, loaded whole."""
    operator = build(module, name, kernel)
    operator.allocate()
    for parameter, tensor in reference.parameters_of(module).items():
        operator.load(parameter, tensor, None, None)
    operator.finish()
    return operator


@cache
def ready(family_name: str, name: str, kernel: str = "auto") -> CpuExperts:
    return filled(family(family_name), name, kernel)


def unpacked(operator: CpuExperts) -> dict[str, Tensor]:
    return reference.weights_of(
        operator.spec, {name: operator.unpack(name) for name in operator.parameter_shapes()}
    )


def multiplied(operator: CpuExperts) -> dict[str, Tensor]:
    """What the kernels multiply by; biases are added as they are."""
    return {
        name: value if name.endswith("bias") else reference.multiplied(value, operator.config.weights)
        for name, value in unpacked(operator).items()
    }


def inputs(spec: ExpertsSpec, tokens: int, top_k: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, spec.hidden_size, generator=random)
    index = torch.rand(tokens, spec.num_experts, generator=random).argsort(-1)[:, :top_k].contiguous()
    return x, index, torch.rand(tokens, top_k, generator=random) + 0.1


def original(module: nn.Module, spec: ExpertsSpec) -> dict[str, Tensor]:
    return reference.weights_of(spec, reference.parameters_of(module))


@cache
def wanted(family_name: str, name: str, tokens: int) -> dict[str, Tensor]:
    """The three references of a family: they do not depend on the kernel."""
    operator = ready(family_name, name)
    arguments = inputs(operator.spec, tokens)
    weights = unpacked(operator)
    return {
        "original": reference.experts(
            *arguments, original(family(family_name), operator.spec), operator.spec
        ),
        "unpacked": reference.experts(*arguments, weights, operator.spec),
        "emulated": reference.experts(*arguments, multiplied(operator), operator.spec, emulated(name)),
    }


def requantised(operator: CpuExperts) -> float:
    """AMX rounds int4 weights once more, to the int8 grid of their column: up to 2.7 % a layer of three matrices."""
    return 3e-2 if operator.native.kernels[0].endswith("amx_int4") else 0.0


def assert_close(out: Tensor, want: dict[str, Tensor], name: str, operator: CpuExperts) -> None:
    extra = requantised(operator)
    assert reference.relative_error(out, want["emulated"]) <= reference.EMULATED_TOLERANCE[name] + extra
    if out.shape[0] < 9:  # the looser bounds are averages
        return
    assert reference.relative_error(out, want["unpacked"]) <= reference.KERNEL_TOLERANCE[name] + extra
    assert reference.relative_error(out, want["original"]) <= reference.TOLERANCE[name]
