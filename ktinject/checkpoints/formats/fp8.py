"""FP8: e4m3 values, and scales by which they are multiplied.

    <key> F8_E4M3 [..., n, k], and one of
    <key>_scale_inv, <stem>.weight_scale, <stem>.scale, <stem>.qscale_weight; of stacked experts also <key>_weight_scale

    a scale for       shape of the scales                        named here
    a block           [..., ceil(n / block n), ceil(k / block k)]  fp8_blocks
    an output         [..., n, 1], or [n]                          fp8_channel
    the whole matrix  [], [1], [1, 1] or one for each expert       fp8_tensor
    32 inputs         [..., n, k / 32], U8 or F8_E8M0: an exponent   mxfp8

Block sizes are those of config.json: `weight_block_size`, or compressed-tensors' `block_structure` and `group_size`.

Source: DeepSeek-V3's and V4's checkpoints (`weight_scale_inv` multiplies, in spite of its name), compressed-tensors'
float-quantized and mxfp8-quantized, NVIDIA ModelOpt's FP8, MiniMax-M3's MXFP8, transformers' FineGrainedFP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ktinject.checkpoints.formats.base import (
    Format,
    Fp8Blocks,
    OwnTensors,
    SourceFormat,
    check_scales,
    no_expert_of_a_matrix,
    refused,
    unread,
)
from ktinject.checkpoints.formats.schemes import check_transforms, scheme_of
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown

SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")  # all exact in fp32; U8 is F8_E8M0
BLOCK = (128, 128)  # where config.json does not say
_EXPONENTS = ("U8", "F8_E8M0")
_MX = 32


class Fp8(SourceFormat):
    title = "FP8 (F8_E4M3) with scales for blocks, outputs or whole matrices, and MXFP8"
    methods = ("fp8", "compressed-tensors", "modelopt")
    tells = (".weight_scale",)
    own = (
        OwnTensors(("", "_scale_inv"), ending=""),
        OwnTensors((".weight", ".weight_scale")),
        OwnTensors((".weight", ".scale")),
        OwnTensors((".weight", ".qscale_weight")),
        OwnTensors(("", "_weight_scale"), ending=""),
        OwnTensors(("", "_scale"), ending=""),
    )

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        held = super().held(reader, key)
        # Only the first way to name scales means FP8 whatever the weight is, and is refused if that is something else.
        if held and held[1] != key + "_scale_inv":
            if not reader.complete:
                return held if held[1].endswith(".weight_scale") else ()
            return held if reader.tensors[key].dtype == "F8_E4M3" else ()
        return held

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        scale = held[1]
        check_transforms(reader, key)
        if not reader.complete:
            return _announced(reader, key, scale)
        name, block = _scheme(reader, key, scale)
        if name == "mxfp8":
            return _mxfp8(scale)
        exact = ("bf16",) if reader.tensors[scale].dtype in _EXPONENTS else ()
        if name == "fp8_tensor":
            block = BLOCK  # one scale for all is the same scale for each block
        encoding = {"fp8_blocks": "fp8", "fp8_tensor": "fp8", "fp8_channel": "fp8_channel"}.get(name, "")
        return Format(name, (scale,), block, encoding=encoding, exact_in=exact)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """fp32, each value the fp32 product of the stored value and its scale."""
        blocks = _read(reader, key, form, index)
        return _dequantize(blocks.values, blocks.scales, blocks.block)

    def stored(self, reader: Reader, key: str, form: Format) -> Fp8Blocks:
        return _read(reader, key, form, None)


def _announced(reader: Reader, key: str, scale: str) -> Format:
    """By what config.json says, where an index alone is there."""
    if _has_blocks(reader, scale):
        block = _block_size(reader, key)
        # Of published checkpoints, those with exponents alone have blocks of 32 inputs.
        return _mxfp8(scale) if block == (1, _MX) else Format("fp8_blocks", (scale,), block, encoding="fp8")
    scheme = scheme_of(reader, key) or {}
    strategy, structure = scheme.get("strategy"), scheme.get("block_structure")
    if strategy in ("group", None) and scheme.get("group_size") == _MX:
        return _mxfp8(scale)
    if strategy == "block" and structure is not None and _is_size(structure):
        return Format("fp8_blocks", (scale,), (structure[0], structure[1]), encoding="fp8")
    if strategy == "channel":
        return Format("fp8_channel", (scale,), encoding="fp8_channel")
    if strategy == "tensor":
        return Format("fp8_tensor", (scale,), BLOCK, encoding="fp8")
    return Format("fp8", (scale,))


def _mxfp8(scale: str) -> Format:
    return Format("mxfp8", (scale,), (1, _MX), group_size=_MX, encoding="mxfp8", exact_in=("bf16", "mxfp8"))


def _read(reader: Reader, key: str, form: Format, index: int | None) -> Fp8Blocks:
    assert form.block is not None, "detect gave it"
    shape, name = reader.tensors[key].shape, form.companions[0]
    no_expert_of_a_matrix(reader, key, index, shape)
    of_all = len(reader.tensors[name].shape) < len(shape) - 2 or math.prod(reader.tensors[name].shape) == 1
    raw = reader.read(name, None if of_all else index)
    scales = (raw.view(torch.float8_e8m0fnu) if raw.dtype == torch.uint8 else raw).float()
    check_scales(reader, name, scales, of_parts=form.name != "fp8_tensor")
    values = reader.read(key, index)
    *leading, n, k = values.shape
    rows, columns = -(-n // form.block[0]), -(-k // form.block[1])
    if form.name == "fp8_tensor":
        scales = scales.reshape(*(leading if scales.numel() > 1 else (1,) * len(leading)), 1, 1)
        scales = scales.expand(*leading, rows, columns).contiguous()
    return _with_zeros(Fp8Blocks(values, scales.reshape(*leading, rows, columns), form.block))


def _with_zeros(blocks: Fp8Blocks) -> Fp8Blocks:
    """Blocks of scale 0 as zeros of scale 1, since kernels divide by scales."""
    zero = blocks.scales == 0
    if not zero.any():
        return blocks
    rows, columns = blocks.block
    *_, n, k = blocks.values.shape
    where = zero.repeat_interleave(rows, -2)[..., :n, :].repeat_interleave(columns, -1)[..., :k]
    values = blocks.values.view(torch.uint8).masked_fill(where, 0).view(blocks.values.dtype)
    return Fp8Blocks(values, blocks.scales.masked_fill(zero, 1.0), blocks.block)


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


def _scheme(reader: Reader, key: str, scale: str) -> tuple[str, tuple[int, int]]:
    """The name of the format, and how many outputs and inputs share a scale. Raises CheckpointError."""
    weight, scales = reader.tensors[key], reader.tensors[scale]
    if weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
        found = f"{weight.dtype} {list(weight.shape)}"
        raise unread(reader, key, f"{found} with block scales; a matrix of F8_E4M3 is needed")
    if scales.dtype not in SCALES:
        raise unread(reader, scale, f"scales of dtype {scales.dtype}; allowed: {', '.join(SCALES)}")
    *leading, n, k = weight.shape
    lead, dims = tuple(leading), scales.shape
    expected = []
    for block in dict.fromkeys(_block_sizes(reader, key, scale)):
        grid = (*lead, -(-n // block[0]), -(-k // block[1]))
        if dims == grid:
            mx = block == (1, _MX) and scales.dtype in _EXPONENTS
            return "mxfp8" if mx else "fp8_blocks" if block[0] > 1 else "fp8_groups", block
        expected.append((grid, block))
    if not _has_blocks(reader, scale) and scales.dtype != "U8" and 0 not in weight.shape:
        if dims == (1,) * len(dims) or (lead and dims in (lead, (*lead, 1), (*lead, 1, 1))):
            return "fp8_tensor", (n, k)
        if dims == (*lead, n, 1) or (not lead and dims == (n,)):
            return "fp8_channel", (1, k)
    grid, block = expected[0] if expected else ((*lead, n, 1), (1, k))
    raise refused(
        reader,
        scale,
        f"a scale grid of {list(dims)}; {list(grid)} is needed for {list(weight.shape)} "
        f"in blocks of {block[0]} × {block[1]}. Correct quantization_config.weight_block_size in "
        "config.json, or download the files again.",
    )


def _has_blocks(reader: Reader, scale: str) -> bool:
    """Whether scales of this name are for blocks, and for nothing larger."""
    of_blocks = scale.endswith(("_scale_inv", ".scale"))
    return of_blocks and reader.quantization.get("weight_block_size", BLOCK) is not None


def _block_sizes(reader: Reader, key: str, scale: str) -> Iterator[tuple[int, int]]:
    """The sizes that blocks may have, the likeliest first."""
    if _has_blocks(reader, scale):
        yield _block_size(reader, key)
    else:
        scheme = scheme_of(reader, key) or {}
        structure, group = scheme.get("block_structure"), scheme.get("group_size")
        if structure is not None and _is_size(structure):
            yield structure[0], structure[1]
        if type(group) is int and group > 0:
            yield 1, group
    if reader.tensors[scale].dtype in _EXPONENTS:
        yield 1, _MX


def _is_size(block: object) -> bool:
    return (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(x) is int and x > 0 for x in block)
    )


def _block_size(reader: Reader, key: str) -> tuple[int, int]:
    block = reader.quantization.get("weight_block_size", BLOCK)
    if _is_size(block):
        return block[0], block[1]
    raise refused(
        reader,
        key,
        f"quantization_config.weight_block_size is {shown(block)}; two positive integers are needed. "
        "Correct config.json.",
    )
