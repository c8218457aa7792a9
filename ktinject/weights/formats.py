"""Source formats: how a checkpoint stores one weight, and how to get its values back.

    name         stored as                                             `decode` gives
    bf16         BF16 [..., n, k]                                      bf16, as it is
    fp16         F16                                                   fp16, as it is
    fp32         F32                                                   fp32, as it is
    fp8_blocks   F8_E4M3 [..., n, k] and `<key>_scale_inv` of shape    fp32: value · scale of its block
                 [..., ceil(n / block n), ceil(k / block k)]

`<key>` is the name of the weight's tensor, usually ending in `.weight`. Other formats are recognised by the
tensors they come with and refused by name.

Source: the FP8 layout is DeepSeek-V3's (`weight_scale_inv` multiplies, in spite of its name).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktinject.errors import CheckpointError
from ktinject.weights.checkpoint import Checkpoint
from ktinject.weights.safetensors_header import DOWNLOAD_AGAIN, shown

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
SCALES = ("F32", "BF16", "F16", "F8_E8M0")  # all exact in fp32
BLOCK = (128, 128)
READ = "Read are bf16, fp16, fp32, and FP8 (F8_E4M3) with block scales; use a checkpoint in one of these."

# What the name of a tensor that comes with a format adds to the weight's name without ".weight"; the first one
# found names the format.
UNSUPPORTED = {
    ".weight_packed": "compressed-tensors packed",
    ".g_idx": "GPTQ",
    ".qweight": "AWQ or GPTQ",
    "_blocks": "MXFP4",
    ".weight.absmax": "bitsandbytes 4-bit",
    ".absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes int8",
    ".weight_scale_2": "NVFP4",
    ".weight_scale": "FP8 with a scale per tensor or channel",
}

_CHECK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Format:
    """How one weight is stored.

    name        a row of the table above; "float" if only an index is there, which does not tell the dtype
    companions  further tensors that belong to the weight
    block       (n, k) of fp8_blocks, else None
    """

    name: str
    companions: tuple[str, ...] = ()
    block: tuple[int, int] | None = None


def companions(key: str) -> tuple[str, ...]:
    """Names that may accompany a weight, in any format that is read."""
    return (f"{key}_scale_inv",)


def detect(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any] | None = None) -> Format:
    """How the checkpoint stores a weight, from headers alone, or names alone if it is not complete.

    quantization  the model config's `quantization_config`, whose weight_block_size is used (else 128 × 128)
    Raises        CheckpointError if the weight is absent, in a format that is not read, or its scales misfit
    """
    names = checkpoint.names
    stem = key.removesuffix(".weight")
    for suffix, name in UNSUPPORTED.items():
        if stem + suffix in names:
            raise _refused(checkpoint, key, f"{name} format, to which {shown(stem + suffix)} belongs. {READ}")
    if key not in names:
        raise _refused(checkpoint, key, "not in the checkpoint.")
    scale = f"{key}_scale_inv"
    if scale not in names:
        if not checkpoint.complete:
            return Format("float")
        dtype = checkpoint.tensors[key].dtype
        if dtype not in FLOATS:
            raise _refused(checkpoint, key, f"dtype {dtype} without {shown(scale)}. {READ}")
        return Format(FLOATS[dtype])
    block = _block(checkpoint, key, quantization or {})
    if checkpoint.complete:
        _check_scale_grid(checkpoint, key, scale, block)
    return Format("fp8_blocks", (scale,), block)


def decode(
    checkpoint: Checkpoint,
    key: str,
    index: int | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Read one weight, or one slice of its first dimension, as floats.

    Returns  [..., n, k] CPU; bf16, fp16 and fp32 as stored; fp8_blocks as fp32, each value the fp32 product
             of the stored value and its scale
    Raises   CheckpointError as `detect` and `Checkpoint.read`, and if a scale is not positive and finite
    """
    form = detect(checkpoint, key, quantization)
    if form.block is None:
        return checkpoint.read(key, index)
    if index is not None and len(checkpoint.tensors[key].shape) < 3:
        raise _refused(
            checkpoint, key, f"there is no expert {index} in a matrix; FP8 blocks are read as whole matrices."
        )
    scales = checkpoint.read(form.companions[0], index).float()
    wrong = ~(torch.isfinite(scales) & (scales > 0))
    if wrong.any():
        position = _position(scales, int(wrong.flatten().nonzero()[0]))
        found = scales[tuple(position)].item()
        raise _refused(
            checkpoint,
            form.companions[0],
            f"{found} at {position}; scales must be positive and finite. {DOWNLOAD_AGAIN}",
        )
    return _dequantize(checkpoint.read(key, index), scales, form.block)


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError naming the tensor and the position of its first NaN or infinity, if any."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHECK_ELEMENTS):
        piece = flat[start : start + _CHECK_ELEMENTS]
        if piece.element_size() == 1:
            piece = piece.float()  # torch has no isfinite for 8-bit floats
        finite = torch.isfinite(piece)
        if not finite.all():
            first = int((~finite).nonzero()[0])
            raise CheckpointError(
                f"tensor {shown(name)}: {piece[first].item()} at {_position(tensor, start + first)}; "
                f"all values must be finite. The checkpoint is damaged. {DOWNLOAD_AGAIN}"
            )


def _dequantize(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiply each block by its scale.

    weight   [..., n, k] float8_e4m3fn
    scales   [..., ceil(n / block n), ceil(k / block k)] fp32
    Returns  [..., n, k] fp32
    """
    rows, columns = block
    n, k = weight.shape[-2:]
    values = weight.float()
    scales = scales.repeat_interleave(rows, dim=-2)[..., :n, :, None]
    # Broadcast over views of whole blocks: scales spread over columns too would be as large as the weight.
    whole = k // columns
    values[..., : whole * columns].unflatten(-1, (whole, columns)).mul_(scales[..., :whole, :])
    if whole * columns < k:
        values[..., whole * columns :].mul_(scales[..., whole, :])
    return values


def _block(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any]) -> tuple[int, int]:
    block = quantization.get("weight_block_size", BLOCK)
    if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(x) is int and x > 0 for x in block):
        return block[0], block[1]
    raise _refused(
        checkpoint,
        key,
        f"quantization_config.weight_block_size is {shown(block)}; two positive integers are needed. "
        "Correct config.json.",
    )


def _check_scale_grid(checkpoint: Checkpoint, key: str, scale: str, block: tuple[int, int]) -> None:
    weight, scales = checkpoint.tensors[key], checkpoint.tensors[scale]
    if weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
        raise _refused(
            checkpoint,
            key,
            f"{weight.dtype} {list(weight.shape)} with block scales; a matrix of F8_E4M3 is needed. {READ}",
        )
    if scales.dtype not in SCALES:
        raise _refused(
            checkpoint, scale, f"scales of dtype {scales.dtype}; allowed: {', '.join(SCALES)}. {READ}"
        )
    *leading, n, k = weight.shape
    expected = (*leading, -(-n // block[0]), -(-k // block[1]))
    if scales.shape != expected:
        raise _refused(
            checkpoint,
            scale,
            f"a scale grid of {list(scales.shape)}; {list(expected)} is needed for {list(weight.shape)} "
            f"in blocks of {block[0]} × {block[1]}. Correct quantization_config.weight_block_size in "
            "config.json, or download the files again.",
        )


def _position(tensor: torch.Tensor, flat: int) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def _refused(checkpoint: Checkpoint, key: str, found: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}: tensor {shown(key)}: {found}")
