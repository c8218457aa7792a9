"""compressed-tensors' int-quantized: integers of 8 bits, one a byte.

    <stem>.weight             I8 [n, k]
    <stem>.weight_scale       [n, 1], [n, groups], or [1] for all
    <stem>.weight_zero_point  I8 of the scales' shape, where codes are not symmetric

Source: compressed-tensors' int-quantized and naive-quantized.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.formats.base import Codes, Format, OwnTensors, check_finite
from ktinject.checkpoints.formats.int_groups import (
    IntegerFormat,
    announced,
    check_part,
    group_size_of,
    group_table,
    integer_format,
)
from ktinject.checkpoints.formats.schemes import check_transforms, says, scheme_of
from ktinject.checkpoints.reader import Reader

_FLOATS = ("F16", "BF16", "F32")


class Int8(IntegerFormat):
    title = "compressed-tensors' integers of 8 bits"
    methods = ("compressed-tensors",)
    own = (OwnTensors((".weight", ".weight_scale"), (".weight_zero_point",)),)

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        held = super().held(reader, key)
        if not held:
            return ()
        is_int = reader.tensors[key].dtype == "I8" if reader.complete else says(reader, key, "int", 8)
        return held if is_int else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        check_transforms(reader, key)
        if not reader.complete:
            said = (scheme_of(reader, key) or {}).get("group_size")
            return announced("int8", held, 8, said, len(held) > 2)
        check_part(reader, held[0], ("I8",), None)
        (n, k), scales = reader.tensors[held[0]].shape, reader.tensors[held[1]]
        size = k
        if scales.shape not in ((), (1,), (1, 1)):
            check_part(reader, held[1], _FLOATS, None)
            said = (scheme_of(reader, key) or {}).get("group_size")
            size = group_size_of(reader, held[1], k, scales.shape[1], varied=said is None, said=said or -1)
            check_part(reader, held[1], _FLOATS, (n, -(-k // size)))
        else:
            check_part(reader, held[1], _FLOATS, scales.shape)
        if len(held) > 2:
            check_part(reader, held[2], ("I8",), scales.shape)
        return integer_format("int8", held, (n, k), 8, size, len(held) > 2, scales.dtype)

    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        assert form.shape is not None, "of a complete checkpoint"
        codes, scales, *rest = (reader.read(name) for name in form.companions)
        check_finite(form.companions[1], scales, reader)
        n, k = form.shape
        zeros = _above(rest[0]).reshape(-1, rest[0].shape[-1] if rest[0].dim() else 1) if rest else None
        if scales.dim() < 2 or len(scales) != n:
            scales = scales.reshape(1, 1).expand(n, 1).contiguous()
            zeros = None if zeros is None else zeros.reshape(1, 1).expand(n, 1).contiguous()
        return Codes(_above(codes), scales, zeros, group_table(reader, key, k, form.group_size, None), 8)


def _above(codes: Tensor) -> Tensor:
    """int8 as uint8, 128 above."""
    return codes.view(torch.uint8) ^ 128
