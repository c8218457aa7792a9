"""int4 of GPTQ, AWQ and compressed-tensors: which tensors hold a weight, whether they fit, what they say.

int_packing.py draws them, and knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats import int_packing
from ktinject.checkpoints.formats.base import (
    Codes,
    Format,
    OwnTensors,
    SourceFormat,
    check_finite,
    refused,
    unread,
)
from ktinject.checkpoints.reader import Reader
from ktinject.errors import CheckpointError, shown


class Int4(SourceFormat):
    title = "int4 of GPTQ, AWQ and compressed-tensors"
    methods = ("gptq", "awq", "compressed-tensors")
    own = (
        OwnTensors((".qweight", ".qzeros", ".scales"), (".g_idx",)),
        OwnTensors(
            (".weight_packed", ".weight_scale"), (".weight_shape", ".weight_zero_point", ".weight_g_idx")
        ),
    )

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        name, group_size, zeros = _as_configured(reader, key, held)
        if not reader.complete:
            size = group_size if type(group_size) is int else -1
            return Format(name, held, group_size=size, has_zeros=zeros, encoding="int4")
        shape, group_size = _check_tensors(reader, key, held, name)
        return Format(name, held, shape=shape, group_size=group_size, has_zeros=zeros, encoding="int4")

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        if index is not None:
            raise refused(
                reader, key, f"there is no expert {index} in a matrix; int4 is read as whole matrices."
            )
        return self.stored(reader, key, form).values()

    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        read = {name.removeprefix(key.removesuffix("weight")): reader.read(name) for name in form.companions}
        scales = read.get("scales", read.get("weight_scale"))
        assert form.shape is not None and scales is not None, "detect gave it"
        check_finite(form.companions[2 if "scales" in read else 1], scales)
        group_of = read.get("g_idx", read.get("weight_g_idx"))
        if group_of is not None and (
            group_of.min() < 0 or group_of.max() >= form.shape[1] // form.group_size
        ):
            raise refused(reader, key, f"g_idx names a group that is not there. {DOWNLOAD_AGAIN}")
        if form.name == "packed":
            claimed = read.get("weight_shape")
            if claimed is not None and tuple(claimed.tolist()) != form.shape:
                text = f"weight_shape says {claimed.tolist()}; weight_packed holds {list(form.shape)}"
                raise refused(reader, key, f"{text}. {DOWNLOAD_AGAIN}")
            zero_point = read.get("weight_zero_point")
            found = int_packing.from_packed(read["weight_packed"], scales, zero_point, group_of)
        elif form.name == "awq":
            found = int_packing.from_awq(read["qweight"], read["qzeros"], scales)
        else:
            version = 2 if reader.quantization.get("checkpoint_format") == "gptq_v2" else 1
            found = int_packing.from_gptq(read["qweight"], read["qzeros"], scales, group_of, version)
        if found.zeros is not None and not form.has_zeros:
            text = (
                "zero points other than 8, and config.json says symmetric. Correct quantization_config.sym."
            )
            raise refused(reader, key, text)
        return found


def _as_configured(reader: Reader, key: str, held: tuple[str, ...]) -> tuple[str, Any, bool]:
    """What config.json says: the format's name, the inputs that share a scale, whether zero points vary."""
    quantization = reader.quantization
    method = quantization.get("quant_method")
    stem = key.removesuffix("weight")
    if f"{stem}weight_packed" in held:
        scheme = _packed_scheme(reader, key)
        return "packed", scheme.get("group_size") or -1, f"{stem}weight_zero_point" in held
    if method not in ("gptq", "awq"):
        raise refused(
            reader,
            key,
            f"GPTQ or AWQ; quantization_config.quant_method is {shown(method)} and does not say which. "
            "Correct config.json.",
        )
    bits = quantization.get("bits", quantization.get("w_bit", 4))
    if bits != 4:
        raise unread(reader, key, f"{method} with {bits} bits; 4 are read")
    if method == "awq" and str(quantization.get("version", "gemm")).lower() != "gemm":
        raise unread(reader, key, f"AWQ of version {quantization['version']}; gemm is read")
    group_size = quantization.get("group_size", quantization.get("q_group_size", -1))
    return method, group_size, method == "awq" or not quantization.get("sym", True)


def _check_tensors(reader: Reader, key: str, held: tuple[str, ...], name: str) -> tuple[tuple[int, int], int]:
    """The weight's shape, and the inputs that share a scale. Raises CheckpointError for tensors that do not fit."""
    stem = key.removesuffix("weight")
    found = {part.removeprefix(stem): reader.tensors[part] for part in held}

    def refuse(part: str, needed: str) -> CheckpointError:
        info = found[part]
        text = f"{info.dtype} {list(info.shape)}; {needed} is needed. {DOWNLOAD_AGAIN}"
        return refused(reader, stem + part, text)

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
    return (n, k), k // groups


def _packed_scheme(reader: Reader, key: str) -> Mapping[str, Any]:
    """compressed-tensors says in config.json how its packed weights are made; all in one way."""
    groups = reader.quantization.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    for scheme in schemes:
        if (
            not isinstance(scheme, Mapping)
            or scheme.get("num_bits") != 4
            or scheme.get("type", "int") != "int"
        ):
            raise unread(reader, key, f"compressed-tensors packed as {shown(scheme)}; int of 4 bits is read")
    if not schemes:
        raise refused(
            reader,
            key,
            "compressed-tensors packed, and quantization_config.config_groups does not say how. Correct config.json.",
        )
    return schemes[0]
