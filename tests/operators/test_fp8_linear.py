"""`fp8_linear`: its values on the CPU, every refusal, and on a GPU the scaled product against fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn

from ktinject import machine
from ktinject.checkpoints.formats.base import Format, Fp8Blocks
from ktinject.errors import OperatorError
from ktinject.machine import Gpu
from ktinject.operators import fp8_linear
from ktinject.operators.fp8_linear import Fp8Linear, Fp8LinearConfig


def linear(k: int, n: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    torch.manual_seed(k + n)
    return nn.Linear(k, n, bias=bias, dtype=dtype)


def filled(module: nn.Linear, device: str = "cpu") -> Fp8Linear:
    operator = Fp8Linear.build(module, Fp8LinearConfig(device=device))
    operator.allocate()
    for name in operator.parameter_shapes():
        operator.load(name, getattr(module, name), None, None)
    operator.finish()
    return operator


def test_each_block_has_its_scale() -> None:
    weight = torch.randn(200, 300)
    weight[130, 140] = 50
    weight[:128, 256:] = 0
    blocks = fp8_linear.quantise_blocks(weight)
    assert blocks.values.shape == (200, 300) and blocks.scales.shape == (2, 3)
    for row in range(2):
        for column in range(3):
            part = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            greatest = weight[part].abs().max()
            assert blocks.scales[row, column] == pytest.approx(max(float(greatest) / 448, 1e-12))
            values = blocks.values[part].float() * blocks.scales[row, column]
            # Three bits of mantissa: at most a sixteenth of the value, or half of the least step.
            bound = weight[part].abs() / 16 + blocks.scales[row, column] * 2.0**-10
            assert ((values - weight[part]).abs() <= bound * 1.001).all()
    whole = fp8_linear.dequantise_blocks(blocks.values, blocks.scales)
    assert reference.relative_error(whole, weight) < 0.03


def test_rows_are_rounded_with_a_scale_for_128_inputs() -> None:
    x = torch.randn(5, 384).bfloat16()
    x[2, 128:256] = 0
    values, scales = fp8_linear.quantise_rows(x)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (5, 3) and scales.stride() == (1, 5)
    back = values.float().view(5, 3, 128) * scales[..., None]
    assert reference.relative_error(back.view(5, 384), x) < 0.03 and back[2, 1].abs().max() == 0


def test_blocks_of_a_checkpoint_are_taken_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = fp8_linear.quantise_blocks(torch.randn(200, 256))
    for scaled in (False, True):
        monkeypatch.setattr(fp8_linear, "has_scaled_product", lambda device, scaled=scaled: scaled)
        operator = Fp8Linear.build(linear(256, 200), Fp8LinearConfig(device="cpu"))
        operator.allocate()
        operator.load_stored("weight", blocks, None, None)
        operator.finish()
        exact = fp8_linear.dequantise_blocks(blocks.values, blocks.scales)
        assert operator.unpack("weight").equal(exact if scaled else exact.bfloat16().float())
        held = [operator._values, operator._scales] if scaled else [operator._dense]
        assert operator.footprint() == {"cpu": sum(t.nbytes for t in held)}


def test_the_plan_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = filled(linear(256, 8, bias=True))
    assert (
        operator.describe()["weights"] == "fp8 128 × 128, unpacked to bfloat16: no scaled product on this GPU"
    )
    monkeypatch.setattr(fp8_linear, "has_scaled_product", lambda device: True)
    assert "inputs are no multiple of 128" in filled(linear(192, 8)).describe()["weights"]
    assert filled(linear(256, 8)).describe() == {
        "weights": "fp8 128 × 128",
        "kernel": "cuBLAS fp8, activations 1 × 128",
    }


# Refusals


def test_what_is_refused() -> None:
    gpu = Gpu(0, "a GPU", 1 << 34, 1 << 34, (7, 5))
    box = dataclasses.replace(machine.detect(), gpus=(gpu,), cuda_built=True)

    def reason(module: nn.Module) -> str:
        return Fp8Linear.supports(module, Fp8LinearConfig("cuda:0"), box) or "served"

    assert "compute capability 7.5; 8.0 or newer is needed" in reason(linear(128, 8))
    assert "inputs must be a multiple of 16" in reason(linear(40, 8))
    assert "dtype is float32" in reason(linear(128, 8, dtype=torch.float32))
    assert "it replaces nn.Linear" in reason(nn.Embedding(128, 8))


def test_loads_and_inputs_that_are_refused() -> None:
    operator = Fp8Linear.build(linear(128, 8), Fp8LinearConfig(device="cpu"))
    operator.allocate()
    blocks = fp8_linear.quantise_blocks(torch.randn(8, 128))
    for bad, words in [
        (fp8_linear.quantise_blocks(torch.randn(8, 64)), r"found \[8, 64\]; expected \[8, 128\]"),
        (Fp8Blocks(blocks.values, blocks.scales, (64, 64)), "the checkpoint has blocks of 64 × 64"),
    ]:
        with pytest.raises(OperatorError, match=words):
            operator.load_stored("weight", bad, None, None)
    assert operator.misfit_of("weight", Format("fp8_blocks", block=(128, 128)), None) is None
    found = operator.misfit_of("weight", Format("fp8_blocks", block=(64, 64)), None) or ""
    assert "has blocks of 64 × 64; served are 128 × 128" in found, "the plan says so, too"
    with pytest.raises(OperatorError, match="a value is not finite"):
        operator.load("weight", torch.full((8, 128), float("inf")), None, None)
    operator = filled(linear(128, 8))
    with pytest.raises(OperatorError, match="it computes on CUDA devices; this one is on cpu"):
        operator(torch.zeros(1, 128, dtype=torch.bfloat16))


# On a GPU


def expected(operator: Fp8Linear, x: Tensor) -> Tensor:
    """In fp64, of the unpacked weight, and of the rounded input where the product is scaled."""
    given: Any = x.cpu().double()
    if operator.is_scaled:
        values, scales = fp8_linear.quantise_rows(x.cpu())
        given = (values.float().view(*scales.shape, 128) * scales[..., None]).view(x.shape).double()
    bias = operator.unpack("bias").double() if operator.has_bias else 0
    return given @ operator.unpack("weight").double().T + bias


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for k, n in [(128, 128), (256, 576), (7168, 512), (192, 64), (1536, 200)]:
        operator = filled(linear(k, n, bias=n == 200, dtype=dtype), "cuda:0")
        for m in (0, 1, 3, 4, 17, 128, 300):
            x = torch.randn(m, k, device="cuda").to(dtype)
            y = operator(x)
            assert y.shape == (m, n) and y.dtype == dtype
            error = reference.relative_error(y.cpu(), expected(operator, x))
            assert error < reference.FP8_LINEAR_TOLERANCE, (k, n, m, error)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = (torch.randn(7, 384, device="cuda") * 3).to(dtype)
    x[2, 128:256] = 0
    values, scales = fp8_linear.quantise_on_gpu(x, 8)
    wanted, grid = fp8_linear.quantise_rows(torch.nn.functional.pad(x, (0, 0, 0, 1)))
    assert scales.equal(grid) and scales.stride() == grid.stride()
    assert values.view(torch.uint8).equal(wanted.view(torch.uint8))
