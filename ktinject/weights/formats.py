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
from dataclasses import dataclass
from typing import Any

import torch

from ktinject.errors import CheckpointError
from ktinject.weights import gguf_blocks, int4, mxfp4
from ktinject.weights.checkpoint import Checkpoint
from ktinject.weights.safetensors_header import DOWNLOAD_AGAIN, shown
from ktinject.weights.stored import Codes, Fp8Blocks

FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
SCALES = ("F32", "BF16", "F16", "F8_E8M0")  # all exact in fp32
BLOCK = (128, 128)
Q4_0_GROUP = 32  # inputs in a block
READ = (
    "Read are bf16, fp16, fp32, FP8 (F8_E4M3) with block scales, MXFP4 as gpt-oss has it, int4 of GPTQ, AWQ and "
    "compressed-tensors, and most types of GGUF; use a checkpoint in one of these."
)

# The tensors that hold an int4 weight, by what replaces ".weight" in its name: needed ones, then optional ones.
_INT4 = (
    ((".qweight", ".qzeros", ".scales"), (".g_idx",)),
    ((".weight_packed", ".weight_scale"), (".weight_shape", ".weight_zero_point", ".weight_g_idx")),
)
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

_CHECK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Format:
    """How one weight is stored.

    name        a row of the table above; "float" if only an index is there, which does not tell the dtype
    companions  further tensors that belong to the weight; for int4, kv_b and mxfp4 all of its tensors
    block       (n, k) of fp8_blocks, else None
    shape       of the weight where it has no tensor of its own: int4, kv_b, mxfp4; None if only an index is there
    group_size  inputs that share a scale, in int4 and q4_0; else 0
    has_zeros   int4 has zero points other than 8
    """

    name: str
    companions: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None
    group_size: int = 0
    has_zeros: bool = False

    @property
    def is_plain(self) -> bool:
        """The tensor holds the values themselves."""
        return self.name in FLOATS.values()


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
    for needed, optional in (*_INT4, _KV_B):
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
        for needed, optional in (*_INT4, _KV_B):
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
        return _detect_int4(checkpoint, key, held, quantization or {})
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
        if dtype in gguf_blocks.TYPES:
            return Format(dtype.lower(), group_size=Q4_0_GROUP if dtype == "Q4_0" else 0)
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
            raise _refused(
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
    return Fp8Blocks(checkpoint.read(key, index), scales, form.block)


def codes(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any] | None = None) -> Codes:
    """Read an int4 weight as it is stored.

    Raises   CheckpointError as `detect` and `Checkpoint.read`, or if scales, shape or groups make no sense
    """
    form = detect(checkpoint, key, quantization)
    if form.name == "q4_0":
        return int4.from_q4_0(_blocks(checkpoint, key), checkpoint.tensors[key].shape[-1])
    read = {name.removeprefix(key.removesuffix("weight")): checkpoint.read(name) for name in form.companions}
    scales = read.get("scales", read.get("weight_scale"))
    assert form.shape is not None and scales is not None, "asked for int4 only"
    check_finite(form.companions[2 if "scales" in read else 1], scales)
    group_of = read.get("g_idx", read.get("weight_g_idx"))
    if group_of is not None and (group_of.min() < 0 or group_of.max() >= form.shape[1] // form.group_size):
        raise _refused(checkpoint, key, f"g_idx names a group that is not there. {DOWNLOAD_AGAIN}")
    if form.name == "packed":
        claimed = read.get("weight_shape")
        if claimed is not None and tuple(claimed.tolist()) != form.shape:
            raise _refused(
                checkpoint,
                key,
                f"weight_shape says {claimed.tolist()}; weight_packed holds {list(form.shape)}. {DOWNLOAD_AGAIN}",
            )
        found = int4.from_packed(read["weight_packed"], scales, read.get("weight_zero_point"), group_of)
    elif form.name == "awq":
        found = int4.from_awq(read["qweight"], read["qzeros"], scales)
    else:
        version = 2 if (quantization or {}).get("checkpoint_format") == "gptq_v2" else 1
        found = int4.from_gptq(read["qweight"], read["qzeros"], scales, group_of, version)
    if found.zeros is not None and not form.has_zeros:
        raise _refused(
            checkpoint,
            key,
            "zero points other than 8, and config.json says symmetric. Correct quantization_config.sym.",
        )
    return found


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


def _detect_mxfp4(checkpoint: Checkpoint, key: str, held: tuple[str, ...]) -> Format:
    if not checkpoint.complete:
        return Format("mxfp4", held)
    blocks, scales = (checkpoint.tensors[name] for name in held)
    if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != mxfp4.BYTES:
        text = f"{blocks.dtype} {list(blocks.shape)}; U8 [..., outputs, groups, {mxfp4.BYTES}] is needed"
        raise _refused(checkpoint, held[0], f"{text}. {READ}")
    *leading, n, groups, _ = blocks.shape
    if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != (*leading, n, groups):
        text = f"{scales.dtype} {list(scales.shape)}; U8 {[*leading, n, groups]} is needed"
        raise _refused(checkpoint, held[1], f"{text}. {DOWNLOAD_AGAIN}")
    return Format("mxfp4", held, shape=(*leading, groups * mxfp4.GROUP, n), group_size=mxfp4.GROUP)


def _decode_mxfp4(checkpoint: Checkpoint, form: Format, index: int | None) -> torch.Tensor:
    assert form.shape is not None, "of a complete checkpoint"
    if index is not None and len(form.shape) < 3:
        raise _refused(
            checkpoint,
            form.companions[0],
            f"there is no expert {index} in a matrix; MXFP4 is read as whole matrices.",
        )
    blocks, scales = (checkpoint.read(name, index) for name in form.companions)
    scales = scales.view(torch.uint8)
    wrong = (scales > mxfp4.MOST_SCALE).flatten().nonzero()
    if len(wrong):
        position = _position(scales, int(wrong[0]))
        found = int(scales[tuple(position)])
        raise _refused(
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
        raise _refused(checkpoint, held[0], f"{text}. {DOWNLOAD_AGAIN}")
    for name in held:
        detect(checkpoint, name)
    (heads, latent, keys), values = parts[0], parts[1][1]
    return Format("kv_b", held, shape=(heads * (keys + values), latent))


def _blocks(checkpoint: Checkpoint, key: str, index: int | None = None) -> torch.Tensor:
    """The bytes of GGUF's blocks, their fp16 numbers checked."""
    rows = checkpoint.read(key, index)
    check_finite(key, gguf_blocks.scales(checkpoint.tensors[key].dtype, rows))
    return rows


def _detect_int4(
    checkpoint: Checkpoint, key: str, held: tuple[str, ...], quantization: Mapping[str, Any]
) -> Format:
    method = quantization.get("quant_method")
    stem = key.removesuffix("weight")
    if f"{stem}weight_packed" in held:
        name, zeros = "packed", f"{stem}weight_zero_point" in held
        scheme = _packed_scheme(checkpoint, key, quantization)
        group_size = scheme.get("group_size") or -1
    elif method in ("gptq", "awq"):
        name = method
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        if bits != 4:
            raise _refused(checkpoint, key, f"{method} with {bits} bits; 4 are read. {READ}")
        if name == "awq" and str(quantization.get("version", "gemm")).lower() != "gemm":
            raise _refused(checkpoint, key, f"AWQ of version {quantization['version']}; gemm is read. {READ}")
        zeros = name == "awq" or not quantization.get("sym", True)
        group_size = quantization.get("group_size", quantization.get("q_group_size", -1))
    else:
        raise _refused(
            checkpoint,
            key,
            f"GPTQ or AWQ; quantization_config.quant_method is {shown(method)} and does not say which. "
            "Correct config.json.",
        )
    if not checkpoint.complete:
        return Format(name, held, None, None, group_size if type(group_size) is int else -1, zeros)
    found = {part.removeprefix(stem): checkpoint.tensors[part] for part in held}

    def refuse(part: str, needed: str) -> CheckpointError:
        info = found[part]
        text = f"{info.dtype} {list(info.shape)}; {needed} is needed. {DOWNLOAD_AGAIN}"
        return _refused(checkpoint, stem + part, text)

    first, scale = ("weight_packed", "weight_scale") if name == "packed" else ("qweight", "scales")
    for part in (first, scale):
        if len(found[part].shape) != 2 or 0 in found[part].shape:
            raise refuse(part, "a matrix")
    rows, columns = found[first].shape
    n, k = {"packed": (rows, 8 * columns), "gptq": (columns, 8 * rows), "awq": (8 * columns, rows)}[name]
    groups = found[scale].shape[name == "packed"]
    if k % groups:
        raise refuse(scale, f"a number of groups that divides {k}")
    expected: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
        first: (("I32",), (rows, columns)),
        scale: (("F16", "BF16", "F32"), (n, groups) if name == "packed" else (groups, n)),
        "qzeros": (("I32",), (groups, -(-n // 8))),
        "weight_zero_point": (("I32",), (-(-n // 8), groups)),
        "g_idx": (("I32", "I64"), (k,)),
        "weight_g_idx": (("I32", "I64"), (k,)),
        "weight_shape": (("I32", "I64"), (2,)),
    }
    for part, (dtypes, dims) in expected.items():
        if part in found and (found[part].dtype not in dtypes or found[part].shape != dims):
            raise refuse(part, f"{' or '.join(dtypes)} {list(dims)}")
    return Format(name, held, None, (n, k), k // groups, zeros)


def _packed_scheme(checkpoint: Checkpoint, key: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """compressed-tensors says in config.json how its packed weights are made; all in one way."""
    groups = quantization.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    for scheme in schemes:
        if (
            not isinstance(scheme, Mapping)
            or scheme.get("num_bits") != 4
            or scheme.get("type", "int") != "int"
        ):
            raise _refused(
                checkpoint,
                key,
                f"compressed-tensors packed as {shown(scheme)}; int of 4 bits is read. {READ}",
            )
    if not schemes:
        raise _refused(
            checkpoint,
            key,
            "compressed-tensors packed, and quantization_config.config_groups does not say how. Correct config.json.",
        )
    return schemes[0]


def _position(tensor: torch.Tensor, flat: int) -> list[int]:
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def _refused(checkpoint: Checkpoint, key: str, found: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path}: tensor {shown(key)}: {found}")
