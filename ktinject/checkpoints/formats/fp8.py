"""FP8 in blocks: e4m3 values and a scale for each block of a matrix, by which its values are multiplied.

    <key>            F8_E4M3 [..., n, k]
    <key>_scale_inv  [..., ceil(n / block n), ceil(k / block k)]

Source: DeepSeek-V3's checkpoints (`weight_scale_inv` multiplies, in spite of its name).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import (
    Format,
    Fp8Blocks,
    OwnTensors,
    SourceFormat,
    place_of,
    refused,
    unread,
)
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown

SCALES = ("F32", "BF16", "F16", "F8_E8M0")  # all exact in fp32
BLOCK = (128, 128)  # where config.json does not say
_SCALE = "_scale_inv"


class BlockFp8(SourceFormat):
    title = "FP8 (F8_E4M3) with block scales"
    methods = ("fp8",)
    own = (OwnTensors(("", _SCALE), ending=""),)

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        scale = key + _SCALE
        block = _block(reader, key)
        if reader.complete:
            _check_scale_grid(reader, key, scale, block)
        return Format("fp8_blocks", (scale,), block, encoding="fp8")

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """fp32, each value the fp32 product of the stored value and its scale."""
        blocks = _read(reader, key, form, index)
        return _dequantize(blocks.values, blocks.scales, blocks.block)

    def stored(self, reader: Reader, key: str, form: Format) -> Fp8Blocks:
        return _read(reader, key, form, None)


def _read(reader: Reader, key: str, form: Format, index: int | None) -> Fp8Blocks:
    assert form.block is not None, "detect gave it"
    if index is not None and len(reader.tensors[key].shape) < 3:
        raise refused(
            reader, key, f"there is no expert {index} in a matrix; FP8 blocks are read as whole matrices."
        )
    scales = reader.read(form.companions[0], index).float()
    wrong = ~(torch.isfinite(scales) & (scales > 0))
    if wrong.any():
        position = place_of(scales, int(wrong.flatten().nonzero()[0]))
        found = scales[tuple(position)].item()
        raise refused(
            reader,
            form.companions[0],
            f"{found} at {position}; scales must be positive and finite. {DOWNLOAD_AGAIN}",
        )
    return Fp8Blocks(reader.read(key, index), scales, form.block)


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


def _block(reader: Reader, key: str) -> tuple[int, int]:
    block = reader.quantization.get("weight_block_size", BLOCK)
    if isinstance(block, (list, tuple)) and len(block) == 2 and all(type(x) is int and x > 0 for x in block):
        return block[0], block[1]
    raise refused(
        reader,
        key,
        f"quantization_config.weight_block_size is {shown(block)}; two positive integers are needed. "
        "Correct config.json.",
    )


def _check_scale_grid(reader: Reader, key: str, scale: str, block: tuple[int, int]) -> None:
    weight, scales = reader.tensors[key], reader.tensors[scale]
    if weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
        found = f"{weight.dtype} {list(weight.shape)}"
        raise unread(reader, key, f"{found} with block scales; a matrix of F8_E4M3 is needed")
    if scales.dtype not in SCALES:
        raise unread(reader, scale, f"scales of dtype {scales.dtype}; allowed: {', '.join(SCALES)}")
    *leading, n, k = weight.shape
    expected = (*leading, -(-n // block[0]), -(-k // block[1]))
    if scales.shape != expected:
        raise refused(
            reader,
            scale,
            f"a scale grid of {list(scales.shape)}; {list(expected)} is needed for {list(weight.shape)} "
            f"in blocks of {block[0]} × {block[1]}. Correct quantization_config.weight_block_size in "
            "config.json, or download the files again.",
        )
