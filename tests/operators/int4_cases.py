"""Operators `int4_linear` with weights, and a check of their products, for the tests of them."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import reference
import torch
from torch import Tensor, nn

from ktinject.checkpoints.formats.base import Codes, Format
from ktinject.operators.int4_linear import Int4Linear, Int4LinearConfig

# benchmarks/on_gpu_box.sh sets it: racecheck needs another way to release slots, and breaks off in cuBLAS's kernels.
RACECHECK = "RACECHECK" in os.environ

# Inputs and outputs of layers of the models that `ktinject bench` knows.
LAYERS = [
    (2048, 512), (512, 2048), (2560, 512), (2880, 512), (3584, 512), (4096, 512), (3072, 1024), (7168, 576),
    (4096, 1024), (2048, 2048), (5120, 1024), (4096, 1408), (1408, 4096), (1536, 4096), (2560, 2560),
    (2560, 3072), (3072, 2560),
    (2048, 4096), (4096, 2048), (512, 16384), (7168, 1536), (4096, 2816), (2816, 4096), (2880, 4096), (4096, 2880),
    (4096, 3072), (3072, 4096), (2048, 6144), (3584, 3584), (7168, 2048), (2048, 7168), (2048, 8192), (512, 32768),
    (4096, 4096), (1536, 12288), (3072, 6144), (6144, 3072), (2048, 12288), (5120, 5120), (2560, 12288), (12288, 2560),
]  # fmt: skip


def linear(
    k: int, n: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias=bias, dtype=dtype)


def filled(module: nn.Linear, device: str = "cpu", sm80_only: bool = False, **arguments: Any) -> Int4Linear:
    operator = Int4Linear.build(module, Int4LinearConfig(device=device, **arguments))
    operator.sm80_only = sm80_only
    operator.every_lane = RACECHECK
    operator.allocate()
    for name in operator.parameter_shapes():
        operator.load(name, getattr(module, name), None, None)
    operator.finish()
    return operator


def codes(n: int, k: int, groups: int, zeros: bool = True) -> Codes:
    torch.manual_seed(n)
    points = torch.randint(0, 16, (n, groups), dtype=torch.uint8)
    scales = torch.rand(n, groups).half()
    return Codes(torch.randint(0, 16, (n, k), dtype=torch.uint8), scales, points if zeros else None)


def in_activation_order(
    n: int, k: int, group: int, device: str = "cpu", group_of: Tensor | None = None, bf16_copy: bool = False
) -> tuple[Int4Linear, Codes]:
    """An operator with codes whose groups are inputs anywhere, and these codes."""
    stored = codes(n, k, k // group)
    if group_of is None:
        group_of = torch.randperm(k, generator=torch.Generator().manual_seed(k)) // group
    stored = dataclasses.replace(stored, group_of=group_of)
    source = Format("gptq", ("a.qweight", "a.qzeros", "a.scales", "a.g_idx"), None, (n, k), group, True)
    config = Int4LinearConfig(device, bf16_copy=bf16_copy)
    operator = Int4Linear.build(linear(k, n), Int4Linear.use_checkpoint_format(config, source))
    operator.allocate()
    operator.load_stored("weight", stored, None, None)
    operator.finish()
    return operator, stored


def check_product(operator: Int4Linear, dtype: torch.dtype, m: int) -> None:
    """A product of m random tokens against fp64, and twice the same bits."""
    device, k, n = operator.config.device, operator.in_features, operator.out_features
    weight, bias = exact(operator)
    x = torch.randn(m, k, device=device).to(dtype)
    torch.empty(m, n, dtype=dtype, device=device).fill_(float("nan"))  # likely the memory that y gets
    y = operator(x)
    assert y.dtype == dtype and y.shape == (m, n)
    error = reference.relative_error(y, x.double() @ weight.T + bias)
    few = 2 if y.numel() < 2000 else 1  # the rounding of few outputs may be above the average
    if operator._is_copied(m, dtype):
        few = 2  # cuBLAS may add up parts in 16 bits, more of them for fewer tokens
    elif operator._is_unpacked(m):
        few = 1.5
    assert error < few * reference.INT4_LINEAR_TOLERANCE[dtype], (k, n, m, operator.blocks, error)
    assert operator(x).equal(y), "the same bits every time"


@functools.lru_cache(maxsize=1)
def exact(operator: Int4Linear) -> tuple[Tensor, Tensor | int]:
    """Weight [n, k] and bias in fp64 on the operator's device."""
    device = operator.config.device
    bias = operator.unpack("bias").to(device).double() if operator.has_bias else 0
    return operator.unpack("weight").to(device).double(), bias
