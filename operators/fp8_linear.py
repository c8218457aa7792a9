"""A linear layer on the GPU with fp8 weights in blocks, multiplied by torch's scaled product if the GPU supports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject import _native
from ktinject.addresses import address
from ktinject.checkpoints.formats.base import Fp8Blocks
from ktinject.errors import OperatorError
from ktinject.machine import has_gpu
from ktinject.operators.base import Config, register_operator
from ktinject.operators.linears.gpu_linear import GpuLinear

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format, Stored

BLOCK = 128
FP8_MAX = 448.0  # the greatest value of float8_e4m3fn
_ROWS = 4  # cuBLAS takes a multiple of this many tokens


@dataclass(frozen=True)
class Fp8LinearConfig(Config):
    """Arguments of `fp8_linear` in a rule."""

    block_size: Literal[128] = 128  # a block of this many outputs and inputs shares a scale


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round activations to fp8, with one scale for each 128 inputs of a token.

    x        [m, k] float, k a multiple of 128
    Returns  [m, k] float8_e4m3fn and scales [m, k / 128] fp32, each column contiguous
    """
    m, k = x.shape
    groups = x.view(m, k // BLOCK, BLOCK).float()
    # Multiplied by the reciprocal, since torch divides a tensor by a number differently on CPU and GPU (last bit).
    scales = (groups.abs().amax(-1) * (1 / FP8_MAX)).clamp_(min=1e-12)
    values = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    return values.view(m, k), scales.t().contiguous().t()


def quantise_on_gpu(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """`quantise_rows` in one kernel, with the same bits.

    x        [m, k] bfloat16 or float16 on a CUDA device, contiguous, aligned to 8 bytes, k a multiple of 128
    padded   rows of the result; rows from m on are zero
    Returns  [padded, k] float8_e4m3fn and scales [padded, k / 128] fp32, each column contiguous
    """
    m, k = x.shape
    values = torch.empty(padded, k, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(k // BLOCK, padded, dtype=torch.float32, device=x.device)
    _native.fp8_quantise(
        address("x", x, x.device),
        x.dtype == torch.float16,
        m,
        padded,
        k,
        address("values", values, x.device),
        address("scales", scales, x.device),
        x.device.index,
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    return values, scales.t()


def quantise_blocks(weight: Tensor) -> Fp8Blocks:
    """Round a weight [n, k] to fp8 with a scale for each 128 × 128 block; the greatest magnitude becomes 448.

    Raises OperatorError if a value is not finite.
    """
    n, k = weight.shape
    padded = functional.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.view(-(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK)
    greatest = blocks.abs().amax((1, 3))
    if not bool(torch.isfinite(greatest).all()):
        raise OperatorError("fp8_linear: weight: a value is not finite; it cannot be quantised.")
    scales = (greatest / FP8_MAX).clamp_(min=1e-12)
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return Fp8Blocks(values.view(padded.shape)[:n, :k].contiguous(), scales, (BLOCK, BLOCK))


def dequantise_blocks(values: Tensor, scales: Tensor) -> Tensor:
    """values [n, k] fp8 times the scales of their blocks [⌈n / 128⌉, ⌈k / 128⌉ or more] → [n, k] fp32."""
    n, k = values.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return values.float() * spread


def has_scaled_product(device: str) -> bool:
    """Whether torch multiplies fp8 with 1 × 128 and 128 × 128 scales on a device.

    That needs cuBLAS 12.9 and compute capability 9.0.
    """
    if not has_gpu(device) or not _native.cuda_built():
        return False
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return torch.cuda.get_device_capability(device) == (9, 0) and version >= (12, 9)


@register_operator("fp8_linear")
class Fp8Linear(GpuLinear):
    """Runs a linear layer on a GPU with fp8 weights: e4m3 with a scale for each block of 128 × 128.

    On compute capability 9.0, torch's scaled product multiplies, and activations are rounded to e4m3 with a scale for
    each token and 128 inputs. Elsewhere, or if the number of inputs is no multiple of 128, the weights are unpacked to
    the model's dtype when loaded, and the plan says so. Weights are quantised when loaded, or taken exactly from a
    checkpoint with fp8 blocks, as DeepSeek-V3 is published.
    """

    Config = Fp8LinearConfig
    native_formats = ("fp8",)

    def __init__(self, module: nn.Linear, config: Fp8LinearConfig) -> None:
        super().__init__(module, config)
        self.is_scaled = self.in_features % BLOCK == 0 and has_scaled_product(config.device)

    @classmethod
    def misfit(cls, k: int, n: int, config: Any) -> str | None:
        if k == 0 or n == 0 or k % 16:
            return f"it has {k} inputs and {n} outputs; inputs must be a multiple of 16, and there must be outputs"
        return None

    def describe(self) -> dict[str, Any]:
        if self.is_scaled:
            return {"weights": "fp8 128 × 128", "kernel": "cuBLAS fp8, activations 1 × 128"}
        why = "inputs are no multiple of 128" if self.in_features % BLOCK else "no scaled product on this GPU"
        dtype = str(self.dtype).removeprefix("torch.")
        return {"weights": f"fp8 128 × 128, unpacked to {dtype}: {why}", "kernel": f"cuBLAS {dtype}"}

    def keeping(self, source: Format) -> str:
        return "kept" if source.is_taken(self.native_formats) else "quantised again"

    def _grid(self) -> tuple[int, int]:
        return -(-self.out_features // BLOCK), -(-self.in_features // BLOCK)

    def footprint(self) -> dict[str, int]:
        n, k = self.out_features, self.in_features
        bias = 4 * n if self.has_bias else 0
        if not self.is_scaled:
            return {self.config.device: 2 * n * k + bias}
        rows, columns = self._grid()
        return {self.config.device: BLOCK * rows * k + 4 * rows * (columns + -columns % 4) + bias}

    def _allocate(self) -> None:
        device = self.config.device
        if not self.is_scaled:
            self._dense = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=device)
            return
        rows, columns = self._grid()
        # cuBLAS takes whole blocks of outputs only, and rows of scales that are multiples of four.
        self._values = torch.zeros(rows * BLOCK, self.in_features, dtype=torch.float8_e4m3fn, device=device)
        self._scales = torch.ones(rows, columns + -columns % 4, dtype=torch.float32, device=device)

    def _pack(self, weight: Tensor) -> None:
        self._take(quantise_blocks(weight))

    def _take(self, blocks: Fp8Blocks) -> None:
        values, scales = blocks.values, blocks.scales
        if not self.is_scaled:
            self._dense.copy_(dequantise_blocks(values, scales))
            return
        # Copied as bytes, since not every version of torch copies float8 slices.
        self._values.view(torch.uint8)[: self.out_features].copy_(values.view(torch.uint8))
        self._scales[:, : scales.shape[1]].copy_(scales)

    @classmethod
    def use_checkpoint_format(cls, config: Any, source: Format) -> Any:
        return config

    def misfit_of(self, name: str, source: Format, part: int | None) -> str | None:
        return self._misfit(source.block)

    def _misfit(self, block: tuple[int, int] | None) -> str | None:
        if block is None or block == (BLOCK, BLOCK):
            return None
        return (
            f"weight: the checkpoint has blocks of {block[0]} × {block[1]}; served are {BLOCK} × {BLOCK}; "
            "keep these modules, or use another operator, which decodes them"
        )

    def load_stored(self, name: str, stored: Stored, expert: int | None, part: int | None) -> None:
        assert isinstance(stored, Fp8Blocks) and name == "weight", "only fp8 weights are taken"
        shape = (self.out_features, self.in_features)
        if stored.values.shape != shape:
            raise OperatorError(
                f"fp8_linear: weight: found {list(stored.values.shape)}; expected {list(shape)}."
            )
        if misfit := self._misfit(stored.block):
            raise OperatorError(f"fp8_linear: {misfit}.")
        device = self.config.device
        self._take(Fp8Blocks(stored.values.to(device), stored.scales.to(device), stored.block))
        self._loaded.add(name)

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        if name == "bias" and self._bias is not None:
            self._at(name)
            return self._bias.cpu()
        if name != "weight":
            raise OperatorError(
                f"fp8_linear: found parameter {name}; allowed: {', '.join(self.parameter_shapes())}."
            )
        self._at(name)
        return self._unpacked().cpu()

    def _unpacked(self) -> Tensor:
        if not self.is_scaled:
            return self._dense.float()
        return dequantise_blocks(self._values[: self.out_features], self._scales)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return self._unpacked().to(dtype)

    def multiply(self, x: Tensor) -> Tensor:
        if not self.config.device.startswith("cuda"):
            raise OperatorError(
                f"fp8_linear: it computes on CUDA devices; this one is on {self.config.device}."
            )
        bias = None if self._bias is None else self._bias.to(x.dtype)
        if not self.is_scaled:
            return functional.linear(x, self._dense.to(x.dtype), bias)
        m = x.shape[0]
        if m == 0:
            return x.new_empty(0, self.out_features)
        if x.data_ptr() % 8:
            x = x.clone()
        values, scales = quantise_on_gpu(x, m + -m % _ROWS)
        recipe = functional.ScalingType
        y = functional.scaled_mm(
            values,
            self._values.t(),
            scales,
            recipe.BlockWise1x128,
            self._scales.t(),
            recipe.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )
        y = y[:m, : self.out_features].to(x.dtype)
        return y.contiguous() if bias is None else y + bias
