"""Source formats: how a checkpoint stores one weight, and how to get its values back.

    name         stored as                                             `decode` gives
    bf16         BF16 [..., n, k]                                      bf16, as it is
    fp16         F16                                                   fp16, as it is
    fp32         F32                                                   fp32, as it is
    fp8_blocks   F8_E4M3 [..., n, k] and `<key>_scale_inv` of shape    fp32: value · scale of its block
                 [..., ceil(n / block n), ceil(k / block k)]
    gptq, awq,   int4 codes, scales and zero points in tensors of        fp32: scale · (code - zero point)
    packed       their own (int4.py draws them); no tensor `<key>`
    q4_0 … q6_k  GGUF's quantised blocks (gguf_blocks.py lists them)     fp32, as ggml dequantises them
    kv_b         `<stem>.k_b` [heads, latent, d] and `<stem>.v_b`        [heads · (d + v), latent], as its parts are
                 [heads, v, latent], in which GGUF keeps the weight
    mxfp4        U8 `<key>_blocks` and `<key>_scales` (mxfp4.py);      bf16, transposed as gpt-oss has it; exact
                 no tensor `<key>`

`<key>` is the name of the weight's tensor, usually ending in `.weight`. Other formats are recognised by the
tensors they come with and refused by name.

Source: the FP8 layout is DeepSeek-V3's (`weight_scale_inv` multiplies, in spite of its name).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ktinject.checkpoints import gguf_blocks, int4, int4_tensors, mxfp4
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.safetensors import DOWNLOAD_AGAIN, shown
from ktinject.checkpoints.stored import (
    FLOATS,
    READ,
    Codes,
    Format,
    Fp8Blocks,
    check_finite,
    place_of,
    refused,
)

SCALES = ("F32", "BF16", "F16", "F8_E8M0")  # all exact in fp32
BLOCK = (128, 128)
Q4_0_GROUP = 32  # inputs in a block

_KV_B = ((".k_b", ".v_b"), ())
_MXFP4 = ("_blocks", "_scales")  # what the names of its two tensors add to the weight's
METHODS = (
    "fp8",
    "mxfp4",
    "gptq",
    "awq",
    "compressed-tensors",
)  # values of quant_method in config.json that are read

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


def companions(key: str) -> tuple[str, ...]:
    """Names that may accompany a weight, in any format that is read."""
    return (f"{key}_scale_inv",)


def weight_names(names: Iterable[str]) -> set[str]:
    """The names of a checkpoint, with the weight's in place of the tensors that hold it as int4 or mxfp4."""
    names = set(names)
    for name in [name for name in names if name.endswith(_MXFP4[0])]:
        key = name.removesuffix(_MXFP4[0])
        if key + _MXFP4[1] in names:
            names -= {key + suffix for suffix in _MXFP4}
            names.add(key)
    for needed, optional in (*int4_tensors.TENSORS, _KV_B):
        for name in [name for name in names if name.endswith(needed[0])]:
            stem = name.removesuffix(needed[0])
            if all(stem + suffix in names for suffix in needed):
                names -= {stem + suffix for suffix in (*needed, *optional)}
                names.add(f"{stem}.weight")
    return names


def tensors_of(checkpoint: Checkpoint, key: str) -> tuple[str, ...]:
    """The tensors that hold a weight's values: itself, or those of int4 or mxfp4."""
    names, stem = checkpoint.names, key.removesuffix(".weight")
    if key not in names:
        if all(key + suffix in names for suffix in _MXFP4):
            return tuple(key + suffix for suffix in _MXFP4)
        for needed, optional in (*int4_tensors.TENSORS, _KV_B):
            if all(stem + suffix in names for suffix in needed):
                return tuple(stem + s for s in (*needed, *optional) if stem + s in names)
    return (key,)


def shape(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """The shape of a weight as a model has it; of a complete checkpoint. Raises CheckpointError as `detect`."""
    if key in checkpoint.tensors:
        return checkpoint.tensors[key].shape
    found = detect(checkpoint, key, quantization).shape
    assert found is not None, "only int4, kv_b and mxfp4 have no tensor of their own"
    return found


def detect(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any] | None = None) -> Format:
    """How the checkpoint stores a weight, from headers alone, or names alone if it is not complete.

    quantization  the model config's `quantization_config`, whose weight_block_size is used (else 128 × 128)
    Raises        CheckpointError if the weight is absent, in a format that is not read, or its scales misfit
    """
    names = checkpoint.names
    stem = key.removesuffix(".weight")
    held = tensors_of(checkpoint, key)
    if held[0] == key + _MXFP4[0]:
        return _detect_mxfp4(checkpoint, key, held)
    if held != (key,):
        if held[0].endswith(_KV_B[0][0]):
            return _detect_kv_b(checkpoint, key, held)
        return int4_tensors.detect(checkpoint, key, held, quantization or {})
    for suffix, name in UNSUPPORTED.items():
        if stem + suffix in names:
            raise refused(checkpoint, key, f"{name} format, to which {shown(stem + suffix)} belongs. {READ}")
    if key not in names:
        raise refused(checkpoint, key, "not in the checkpoint.")
    scale = f"{key}_scale_inv"
    if scale not in names:
        if not checkpoint.complete:
            return Format("float")
        dtype = checkpoint.tensors[key].dtype
        if dtype in gguf_blocks.TYPES:
            return Format(dtype.lower(), group_size=Q4_0_GROUP if dtype == "Q4_0" else 0)
        if dtype not in FLOATS:
            alone = f" without {shown(scale)}" if dtype == "F8_E4M3" else " is not that of a weight"
            raise refused(checkpoint, key, f"dtype {dtype}{alone}. {READ}")
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
             of the stored value and its scale, and GGUF's blocks; mxfp4 as bf16 [..., k, n]
    Raises   CheckpointError as `detect` and `Checkpoint.read`, and if a scale is not positive and finite
    """
    form = detect(checkpoint, key, quantization)
    if form.name == "mxfp4":
        return _decode_mxfp4(checkpoint, form, index)
    if form.name == "kv_b":
        keys, values = (decode(checkpoint, part) for part in form.companions)
        return torch.cat((keys.mT, values), 1).flatten(0, 1)
    if form.name.upper() in gguf_blocks.TYPES:
        return gguf_blocks.values(form.name.upper(), _blocks(checkpoint, key, index))
    if form.shape is not None:
        if index is not None:
            raise refused(
                checkpoint, key, f"there is no expert {index} in a matrix; int4 is read as whole matrices."
            )
        return codes(checkpoint, key, quantization).values()
    if form.block is None:
        return checkpoint.read(key, index)
    blocks = fp8_blocks(checkpoint, key, index, quantization)
    return _dequantize(blocks.values, blocks.scales, blocks.block)


def fp8_blocks(
    checkpoint: Checkpoint,
    key: str,
    index: int | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Fp8Blocks:
    """Read a weight in the format fp8_blocks as it is stored. Raises CheckpointError as `decode`."""
    form = detect(checkpoint, key, quantization)
    assert form.block is not None, "asked for fp8_blocks only"
    if index is not None and len(checkpoint.tensors[key].shape) < 3:
        raise refused(
            checkpoint, key, f"there is no expert {index} in a matrix; FP8 blocks are read as whole matrices."
        )
    scales = checkpoint.read(form.companions[0], index).float()
    wrong = ~(torch.isfinite(scales) & (scales > 0))
    if wrong.any():
        position = place_of(scales, int(wrong.flatten().nonzero()[0]))
        found = scales[tuple(position)].item()
        raise refused(
            checkpoint,
            form.companions[0],
            f"{found} at {position}; scales must be positive and finite. {DOWNLOAD_AGAIN}",
        )
    return Fp8Blocks(checkpoint.read(key, index), scales, form.block)


def codes(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any] | None = None) -> Codes:
    """Read an int4 weight as it is stored.

    Raises   CheckpointError as `detect` and `Checkpoint.read`, or if scales, shape or groups make no sense
    """
    form = detect(checkpoint, key, quantization)
    if form.name == "q4_0":
        return int4.from_q4_0(_blocks(checkpoint, key), checkpoint.tensors[key].shape[-1])
    return int4_tensors.codes(checkpoint, key, form, quantization or {})


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
    raise refused(
        checkpoint,
        key,
        f"quantization_config.weight_block_size is {shown(block)}; two positive integers are needed. "
        "Correct config.json.",
    )


def _check_scale_grid(checkpoint: Checkpoint, key: str, scale: str, block: tuple[int, int]) -> None:
    weight, scales = checkpoint.tensors[key], checkpoint.tensors[scale]
    if weight.dtype != "F8_E4M3" or len(weight.shape) < 2:
        raise refused(
            checkpoint,
            key,
            f"{weight.dtype} {list(weight.shape)} with block scales; a matrix of F8_E4M3 is needed. {READ}",
        )
    if scales.dtype not in SCALES:
        raise refused(
            checkpoint, scale, f"scales of dtype {scales.dtype}; allowed: {', '.join(SCALES)}. {READ}"
        )
    *leading, n, k = weight.shape
    expected = (*leading, -(-n // block[0]), -(-k // block[1]))
    if scales.shape != expected:
        raise refused(
            checkpoint,
            scale,
            f"a scale grid of {list(scales.shape)}; {list(expected)} is needed for {list(weight.shape)} "
            f"in blocks of {block[0]} × {block[1]}. Correct quantization_config.weight_block_size in "
            "config.json, or download the files again.",
        )


def _detect_mxfp4(checkpoint: Checkpoint, key: str, held: tuple[str, ...]) -> Format:
    if not checkpoint.complete:
        return Format("mxfp4", held)
    blocks, scales = (checkpoint.tensors[name] for name in held)
    if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != mxfp4.BYTES:
        text = f"{blocks.dtype} {list(blocks.shape)}; U8 [..., outputs, groups, {mxfp4.BYTES}] is needed"
        raise refused(checkpoint, held[0], f"{text}. {READ}")
    *leading, n, groups, _ = blocks.shape
    if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != (*leading, n, groups):
        text = f"{scales.dtype} {list(scales.shape)}; U8 {[*leading, n, groups]} is needed"
        raise refused(checkpoint, held[1], f"{text}. {DOWNLOAD_AGAIN}")
    return Format("mxfp4", held, shape=(*leading, groups * mxfp4.GROUP, n), group_size=mxfp4.GROUP)


def _decode_mxfp4(checkpoint: Checkpoint, form: Format, index: int | None) -> torch.Tensor:
    assert form.shape is not None, "of a complete checkpoint"
    if index is not None and len(form.shape) < 3:
        raise refused(
            checkpoint,
            form.companions[0],
            f"there is no expert {index} in a matrix; MXFP4 is read as whole matrices.",
        )
    blocks, scales = (checkpoint.read(name, index) for name in form.companions)
    scales = scales.view(torch.uint8)
    wrong = (scales > mxfp4.MOST_SCALE).flatten().nonzero()
    if len(wrong):
        position = place_of(scales, int(wrong[0]))
        found = int(scales[tuple(position)])
        raise refused(
            checkpoint,
            form.companions[1],
            f"{found} at {position}; scales must be at most {mxfp4.MOST_SCALE}. {DOWNLOAD_AGAIN}",
        )
    return mxfp4.values(blocks, scales).mT


def _detect_kv_b(checkpoint: Checkpoint, key: str, held: tuple[str, ...]) -> Format:
    parts = [checkpoint.tensors[name].shape for name in held]
    if [len(part) for part in parts] != [3, 3] or parts[0][0] != parts[1][0] or parts[0][1] != parts[1][2]:
        text = (
            f"shapes {[list(part) for part in parts]}; [heads, latent, d] and [heads, v, latent] are needed"
        )
        raise refused(checkpoint, held[0], f"{text}. {DOWNLOAD_AGAIN}")
    for name in held:
        detect(checkpoint, name)
    (heads, latent, keys), values = parts[0], parts[1][1]
    return Format("kv_b", held, shape=(heads * (keys + values), latent))


def _blocks(checkpoint: Checkpoint, key: str, index: int | None = None) -> torch.Tensor:
    """The bytes of GGUF's blocks, their fp16 numbers checked."""
    rows = checkpoint.read(key, index)
    check_finite(key, gguf_blocks.scales(checkpoint.tensors[key].dtype, rows))
    return rows
