"""compressed-tensors' pack-quantized integers of 4 and 8 bits. int_packing.py draws the tensors."""

from __future__ import annotations

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats import int_packing
from ktinject.checkpoints.formats.base import (
    Codes,
    Format,
    OwnTensors,
    check_finite,
    refused,
    unread,
)
from ktinject.checkpoints.formats.gptq import BITS
from ktinject.checkpoints.formats.int_groups import (
    IntegerFormat,
    announced,
    check_part,
    group_size_of,
    group_table,
    integer_format,
)
from ktinject.checkpoints.formats.schemes import scheme_of
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown

_PARTS = (".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx")


class Packed(IntegerFormat):
    title = "compressed-tensors' packed integers of 4 and 8 bits"
    methods = ("compressed-tensors",)
    own = (OwnTensors(_PARTS[:2], _PARTS[2:]),)
    tells = (".weight_packed",)

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        scheme = scheme_of(reader, key)
        if scheme is None:
            text = "compressed-tensors packed, and quantization_config.config_groups does not say how"
            raise refused(reader, key, f"{text}. Correct config.json.")
        bits, size = scheme.get("num_bits"), scheme.get("group_size") or -1
        if bits not in BITS or scheme.get("type", "int") != "int":
            raise unread(
                reader, key, f"compressed-tensors packed as {shown(scheme)}; int of 4 and 8 bits is read"
            )
        parts = _parts(key, held)
        zeros = ".weight_zero_point" in parts
        ordered = ".weight_g_idx" in parts
        if not reader.complete:
            return announced("packed", held, bits, size, zeros, ordered)
        check_part(reader, held[0], ("I32",), None)
        check_part(reader, held[1], ("F16", "BF16", "F32"), None)
        (n, columns), groups = reader.tensors[held[0]].shape, reader.tensors[held[1]].shape[1]
        k = columns * 32 // bits
        if type(size) is int and 0 < size < k and k - 32 // bits < size * groups < k:
            k = size * groups  # the last word is not full
        # Of a format without group_size, one scale an output is a group of all inputs.
        group = group_size_of(reader, held[1], k, groups, varied="group_size" not in scheme, said=size)
        groups = -(-k // group)
        check_part(reader, held[1], ("F16", "BF16", "F32"), (n, groups))
        for part, dtypes, shape in (
            (".weight_zero_point", ("I32",), (-(-n * bits // 32), groups)),
            (".weight_g_idx", ("I32", "I64"), (k,)),
            (".weight_shape", ("I32", "I64"), (2,)),
        ):
            if part in parts:
                check_part(reader, parts[part], dtypes, shape)
        scales = reader.tensors[held[1]].dtype
        return integer_format("packed", held, (n, k), bits, group, zeros, scales, ordered)

    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        assert form.shape is not None, "of a complete checkpoint"
        parts = _parts(key, form.companions)
        read = {part: reader.read(name) for part, name in parts.items()}
        packed, scales = read[".weight_packed"], read[".weight_scale"]
        check_finite(parts[".weight_scale"], scales, reader)
        n, k = form.shape
        claimed = read.get(".weight_shape")
        if claimed is not None and tuple(claimed.tolist()) != (n, k):
            text = f"weight_shape says {claimed.tolist()}; weight_packed holds {[n, k]}"
            raise refused(reader, key, f"{text}. {DOWNLOAD_AGAIN}")
        group_of = group_table(reader, key, k, form.group_size, read.get(".weight_g_idx"))
        bits = 4 if -(-k * 4 // 32) == packed.shape[1] else 8
        return int_packing.from_packed(packed, scales, read.get(".weight_zero_point"), group_of, k, bits)


def _parts(key: str, held: tuple[str, ...]) -> dict[str, str]:
    """What a name has in place of ".weight" → the name."""
    stem = key.removesuffix(".weight")
    return {name.removeprefix(stem): name for name in held}
