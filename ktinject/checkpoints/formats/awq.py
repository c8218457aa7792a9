"""AWQ's integers of 4 bits, version gemm, which auto-round writes, too. int_packing.py draws the tensors."""

from __future__ import annotations

from ktinject.checkpoints.formats import int_packing
from ktinject.checkpoints.formats.base import (
    Codes,
    Format,
    OwnTensors,
    check_finite,
    refused,
    unread,
)
from ktinject.checkpoints.formats.gptq import OVERRIDES, packs_as
from ktinject.checkpoints.formats.int_groups import (
    IntegerFormat,
    check_part,
    group_size_of,
    group_table,
    integer_format,
)
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown


class Awq(IntegerFormat):
    title = "AWQ of 4 bits"
    methods = ("awq",)
    own = (OwnTensors((".qweight", ".qzeros", ".scales")),)

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        # GPTQ has tensors of the same names.
        return super().held(reader, key) if packs_as(reader) == "awq" else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        quantization = reader.quantization
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        if bits != 4:
            raise unread(reader, key, f"AWQ of {shown(bits)} bits; 4 are read")
        version = str(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            raise unread(reader, key, f"AWQ of version {shown(version)}; gemm is read")
        zeros = bool(quantization.get("zero_point", not quantization.get("sym", False)))
        if not reader.complete:
            size = quantization.get("group_size")
            size = size if type(size) is int else -1
            return Format("awq", held, group_size=size, has_zeros=zeros, encoding="int4")
        check_part(reader, held[0], ("I32",), None)
        weight, scales = reader.tensors[held[0]], reader.tensors[held[2]]
        k, n = weight.shape[0], 8 * weight.shape[1]
        varied = any(quantization.get(name) for name in OVERRIDES)
        group = group_size_of(reader, scales.name, k, scales.shape[0] if scales.shape else 0, varied)
        groups = -(-k // group)
        check_part(reader, held[2], ("F16", "BF16", "F32"), (groups, n))
        check_part(reader, held[1], ("I32",), (groups, n // 8))
        return integer_format("awq", held, (n, k), 4, group, zeros, scales.dtype)

    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        assert form.shape is not None, "of a complete checkpoint"
        qweight, qzeros, scales = (reader.read(name) for name in form.companions)
        check_finite(form.companions[2], scales, reader)
        group_of = group_table(reader, key, form.shape[1], form.group_size, None)
        found = int_packing.from_awq(qweight, qzeros, scales, group_of)
        if found.zeros is not None and not form.has_zeros:
            text = "zero points other than 8, and config.json says that there are none"
            raise refused(reader, key, f"{text}. Correct quantization_config.zero_point.")
        return found
