"""GPTQ's integers of 4 and 8 bits, which auto-round writes, too. int_packing.py draws the tensors.

Bits and groups may differ from layer to layer, which config.json says by patterns (`dynamic`, `extra_config`): so they
are taken from the tensors, and what config.json says of all layers has to agree where it has no such patterns.
"""

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
from ktinject.checkpoints.formats.int_groups import (
    IntegerFormat,
    announced,
    check_part,
    group_size_of,
    group_table,
    integer_format,
)
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown

BITS = (4, 8)
AUTO_ROUND = ("auto-round", "intel/auto-round")
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_CLASSIC = "auto_round:auto_gptq"
# Settings of single layers, by the names of modules.
OVERRIDES = ("dynamic", "extra_config", "dynamic_config")


def packs_as(reader: Reader) -> str:
    """What config.json says: gptq, awq, or nothing."""
    method = reader.quantization.get("quant_method")
    if method in AUTO_ROUND:
        return "awq" if "awq" in _packing(reader) else "gptq"
    return method if method in ("gptq", "awq") else ""


def _packing(reader: Reader) -> str:
    """What auto-round says of how it packs."""
    return str(
        reader.quantization.get("packing_format", reader.quantization.get("backend", _CLASSIC))
    ).lower()


def _version(reader: Reader, key: str) -> int:
    """1: zero points are stored less one; 2: as they are. Raises CheckpointError."""
    if reader.quantization.get("quant_method") in AUTO_ROUND:
        packing = _packing(reader)
        return 1 if "gptq" in packing and "gptqmodel" not in packing else 2
    said = reader.quantization.get("checkpoint_format") or "gptq"
    if not isinstance(said, str) or said not in _VERSIONS:
        raise unread(
            reader, key, f"GPTQ with checkpoint_format {shown(said)}; {' and '.join(_VERSIONS)} are read"
        )
    return _VERSIONS[said]


class Gptq(IntegerFormat):
    title = "GPTQ of 4 and 8 bits"
    methods = ("gptq", *AUTO_ROUND)
    own = (OwnTensors((".qweight", ".qzeros", ".scales"), (".g_idx",)),)
    tells = (".qweight", ".g_idx")

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        quantization, method = reader.quantization, reader.quantization.get("quant_method")
        if not packs_as(reader):
            text = f"GPTQ or AWQ; quantization_config.quant_method is {shown(method)} and does not say which"
            raise refused(reader, key, f"{text}. Correct config.json.")
        _version(reader, key)
        said, zeros = quantization.get("bits", 4), not quantization.get("sym", True)
        # Without desc_act the table of groups is there, and says that they are in order.
        ordered = held[-1].endswith(".g_idx") and quantization.get("desc_act", True) is not False
        if not reader.complete:
            return announced("gptq", held, said, quantization.get("group_size"), zeros, ordered)
        shape, bits, size = _from_tensors(reader, held, said)
        scales = reader.tensors[held[2]].dtype
        return integer_format("gptq", held, shape, bits, size, zeros, scales, ordered)

    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        assert form.shape is not None, "of a complete checkpoint"
        qweight, qzeros, scales = (reader.read(name) for name in form.companions[:3])
        check_finite(form.companions[2], scales, reader)
        g_idx = reader.read(form.companions[3]) if len(form.companions) > 3 else None
        group_of = group_table(reader, key, form.shape[1], form.group_size, g_idx)
        bits = 32 * len(qweight) // form.shape[1]
        version = _version(reader, key)
        found = int_packing.from_gptq(qweight, qzeros, scales, group_of, bits, version)
        if found.zeros is None or form.has_zeros:
            return found
        # Older releases of auto-round say something else; of symmetric codes the zero points themselves tell.
        middle, other = 1 << (bits - 1), 1 if version == 1 else -1
        if reader.quantization.get("quant_method") in AUTO_ROUND and bool(
            (found.zeros == middle + other).all()
        ):
            return Codes(found.codes, found.scales, None, found.group_of, bits)
        text = f"zero points other than {middle}, and config.json says symmetric"
        raise refused(reader, key, f"{text}. Correct quantization_config.sym.")


def _from_tensors(reader: Reader, held: tuple[str, ...], said: object) -> tuple[tuple[int, int], int, int]:
    """The weight's shape, bits of a code, and inputs that share a scale. Raises CheckpointError."""
    weight, zeros, scales = (reader.tensors[name] for name in held[:3])
    check_part(reader, weight.name, ("I32",), None)
    check_part(reader, zeros.name, ("I32",), None)
    rows, n = weight.shape
    bits = next((b for b in BITS if zeros.shape[1] == -(-n * b // 32)), 0)
    varied = any(reader.quantization.get(name) for name in OVERRIDES)
    if said not in BITS and not varied:
        raise unread(reader, weight.name, f"GPTQ of {shown(said)} bits; 4 and 8 are read")
    if bits == 0 or (bits != said and not varied):
        needed = f"I32 [groups, {-(-n * (said if said in BITS else 4) // 32)}]"
        text = f"{zeros.dtype} {list(zeros.shape)}; {needed} is needed for {shown(said)} bits"
        raise refused(reader, zeros.name, f"{text}. {DOWNLOAD_AGAIN}")
    k = rows * 32 // bits
    group = group_size_of(reader, scales.name, k, scales.shape[0] if scales.shape else 0, varied)
    groups = -(-k // group)
    check_part(reader, scales.name, ("F16", "BF16", "F32"), (groups, n))
    check_part(reader, zeros.name, ("I32",), (groups, zeros.shape[1]))
    if len(held) > 3:
        check_part(reader, held[3], ("I32", "I64"), (k,))
    return (n, k), bits, group
