"""Floats of 4 bits (e2m1) with scales for 16 or 32 inputs.

    name    whose                    codes                          scales
    nvfp4   NVIDIA ModelOpt          <stem>.weight U8 [n, k / 2]    .weight_scale F8_E4M3 [n, k / 16], times
                                                                    .weight_scale_2 F32 []
    nvfp4   compressed-tensors       <stem>.weight_packed U8        .weight_scale the same, by .weight_global_scale F32
    mxfp4   compressed-tensors       <stem>.weight_packed U8        .weight_scale U8 [n, k / 32], exponents
    mxfp4   DeepSeek-V4, ModelOpt    <stem>.weight I8 or U8         .scale F8_E8M0, or .weight_scale U8, [n, k / 32]

Of a byte the lower half is the even input. Stacked experts have a dimension in front, and `<key>`, `<key>_weight_scale`
and `<key>_weight_scale_2` for names; some are stored [experts, k / 2, n], with scales [experts, k / 16, n].

Source: the OCP Microscaling Formats specification 1.0 (e2m1, e8m0); NVIDIA ModelOpt's NVFP4QTensor; compressed-tensors'
nvfp4-pack-quantized and mxfp4-pack-quantized; transformers' FineGrainedFP8 for DeepSeek-V4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import (
    Format,
    Nvfp4,
    OwnTensors,
    SourceFormat,
    check_finite,
    check_scales,
    no_expert_of_a_matrix,
    refused,
    unread,
)
from ktinject.checkpoints.formats.mxfp4 import EXACT_IN, MOST_SCALE, unpacked
from ktinject.checkpoints.formats.schemes import check_transforms, says
from ktinject.checkpoints.reader import Reader

NV_GROUP, MX_GROUP = 16, 32
_CODES = ("U8", "I8")
_EXPONENTS = ("U8", "F8_E8M0")
_DIVIDES = "_global_scale"


class Fp4(SourceFormat):
    title = "NVFP4 and MXFP4"
    methods = ("modelopt", "compressed-tensors", "fp8")
    tells = (".weight_scale_2", ".weight_global_scale")
    own = (
        OwnTensors((".weight", ".weight_scale", ".weight_scale_2")),
        OwnTensors((".weight_packed", ".weight_scale", ".weight_global_scale")),
        OwnTensors((".weight_packed", ".weight_scale")),
        OwnTensors((".weight", ".weight_scale")),
        OwnTensors((".weight", ".scale")),
        OwnTensors(("", "_weight_scale", "_weight_scale_2"), ending=""),
        OwnTensors(("_packed", "_scale", "_global_scale"), ending=""),
        OwnTensors(("_packed", "_scale"), ending=""),
    )

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        held = super().held(reader, key)
        if not held or not reader.complete:
            is_mx = len(held) == 2 and held[0].endswith("_packed") and says(reader, key, "float", 4)
            return held if len(held) == 3 or is_mx else ()
        codes, scales = reader.tensors[held[0]], reader.tensors[held[1]]
        # Integers of eight bits have scales of floats; packed integers are I32.
        return held if codes.dtype in _CODES and scales.dtype in (*_EXPONENTS, "F8_E4M3") else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        check_transforms(reader, key)
        name = "nvfp4" if len(held) == 3 else "mxfp4"
        exact = EXACT_IN if name == "mxfp4" else ()
        if not reader.complete:
            return Format(name, held, encoding=name, exact_in=exact)
        codes, scales = (reader.tensors[part] for part in held[:2])
        kind, group = ("F8_E4M3", NV_GROUP) if name == "nvfp4" else (" or ".join(_EXPONENTS), MX_GROUP)
        if scales.dtype not in kind.split(" or "):
            raise unread(reader, held[1], f"{scales.dtype} scales of {name}; {kind} is needed")
        shape = _shape(codes.shape, scales.shape, group)
        if shape is None:
            text = f"codes {list(codes.shape)} with scales {list(scales.shape)}"
            raise refused(
                reader,
                held[0],
                f"{text}; {group} inputs, in {group // 2} bytes, share a scale. {DOWNLOAD_AGAIN}",
            )
        if name == "nvfp4":
            whole, of_all = reader.tensors[held[2]], shape[:-2]
            if whole.dtype != "F32" or whole.shape not in ((), (1,), of_all, (*of_all, 1), (*of_all, 1, 1)):
                text = f"{whole.dtype} {list(whole.shape)}; F32 [] is needed"
                raise refused(reader, held[2], f"{text}, or one for each expert. {DOWNLOAD_AGAIN}")
        # Whether it is rows that codes are packed along, operators have to know.
        encoding = name if shape[-1] == 2 * codes.shape[-1] or name == "mxfp4" else f"{name} across"
        divided = name == "nvfp4" and held[2].endswith(_DIVIDES)
        return Format(
            name, held, shape=shape, group_size=group, encoding=encoding, exact_in=exact, is_divided=divided
        )

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """fp32, each the fp32 product of the value and its scale, which is that of two scales in NVFP4."""
        assert form.shape is not None, "of a complete checkpoint"
        no_expert_of_a_matrix(reader, form.companions[0], index, form.shape)
        codes = reader.read(form.companions[0], index).view(torch.uint8)
        if form.name == "mxfp4":
            scales = _exponents(reader, form.companions[1], index)
        else:
            scales = _scaled(reader, form, index)
        across = scales.shape[-1] * form.group_size != codes.shape[-1] * 2
        if across:
            codes, scales = codes.mT, scales.mT
        values = unpacked(codes).unflatten(-1, (-1, form.group_size)).mul_(scales[..., None]).flatten(-2)
        return values.mT if across else values

    def stored(self, reader: Reader, key: str, form: Format) -> Nvfp4:
        """Of NVFP4. compressed-tensors divides by what multiplies all: its reciprocal is rounded to fp32."""
        codes = reader.read(form.companions[0]).view(torch.uint8)
        scales, whole = _two_scales(reader, form, None)
        return Nvfp4(codes, scales, (1 / whole if form.is_divided else whole).expand(scales.shape[:-2]))


def _exponents(reader: Reader, name: str, index: int | None) -> Tensor:
    """MXFP4's scales in fp32, one for each group, as they lie. Raises CheckpointError."""
    raw = reader.read(name, index).view(torch.uint8)
    if len(wrong := (raw > MOST_SCALE).flatten().nonzero()):
        at = [int(i) for i in torch.unravel_index(wrong[0], raw.shape)]
        text = f"{int(raw[tuple(at)])} at {at}; exponents must be at most {MOST_SCALE}"
        raise refused(reader, name, f"{text}. {DOWNLOAD_AGAIN}")
    return raw.view(torch.float8_e8m0fnu).float()


def _two_scales(reader: Reader, form: Format, index: int | None) -> tuple[Tensor, Tensor]:
    """NVFP4's scales as they lie; and fp32 [] or [experts], what is for all of a matrix. Raises CheckpointError."""
    name, whole_name = form.companions[1:]
    scales = reader.read(name, index)
    # A group of zeros may have a scale of zero.
    check_finite(name, scales, reader)
    if bool((scales.float() < 0).any()):
        text = f"{scales.float().min().item()}; scales must not be negative"
        raise refused(
            reader, name, f"{text}. Use a checkpoint whose scales have no sign: their weights have it."
        )
    each = len(reader.tensors[whole_name].shape) > 0 and reader.tensors[whole_name].shape != (1,)
    whole = reader.read(whole_name, index if each else None)
    check_scales(reader, whole_name, whole)
    whole = whole.reshape(whole.shape[: scales.dim() - 2] if whole.numel() > 1 else ())
    return scales, whole


def _scaled(reader: Reader, form: Format, index: int | None) -> Tensor:
    """NVFP4's two scales in one, fp32. Raises CheckpointError."""
    scales, whole = _two_scales(reader, form, index)
    whole = whole[..., None, None]
    product = scales.float() / whole if form.is_divided else scales.float() * whole
    check_finite(f"{form.companions[1]} with {form.companions[2]}", product, reader)
    return product


def _shape(codes: tuple[int, ...], scales: tuple[int, ...], group: int) -> tuple[int, ...] | None:
    """The shape of the weight; None if codes and scales do not fit together."""
    if len(codes) < 2 or len(codes) != len(scales) or codes[:-2] != scales[:-2] or 0 in codes:
        return None
    (n, half), (rows, groups) = codes[-2:], scales[-2:]
    if n == rows and 2 * half == group * groups:
        return (*codes[:-1], 2 * half)
    if len(codes) > 2 and half == groups and 2 * n == group * rows:
        return (*codes[:-2], 2 * n, half)
    return None
