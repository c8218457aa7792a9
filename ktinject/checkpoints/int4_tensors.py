"""Weights that GPTQ, AWQ and compressed-tensors keep in several tensors: which ones, whether they fit, what they say.

int4.py draws them, and knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktinject.checkpoints import int4
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.safetensors import DOWNLOAD_AGAIN, shown
from ktinject.checkpoints.stored import READ, Codes, Format, check_finite, refused
from ktinject.errors import CheckpointError

# The tensors that hold an int4 weight, by what replaces ".weight" in its name: needed ones, then optional ones.
TENSORS = (
    ((".qweight", ".qzeros", ".scales"), (".g_idx",)),
    ((".weight_packed", ".weight_scale"), (".weight_shape", ".weight_zero_point", ".weight_g_idx")),
)


def detect(
    checkpoint: Checkpoint, key: str, held: tuple[str, ...], quantization: Mapping[str, Any]
) -> Format:
    """How an int4 weight is stored.

    held     its tensors
    Raises   CheckpointError if config.json does not say how, or tensors do not fit together
    """
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
            raise refused(checkpoint, key, f"{method} with {bits} bits; 4 are read. {READ}")
        if name == "awq" and str(quantization.get("version", "gemm")).lower() != "gemm":
            raise refused(checkpoint, key, f"AWQ of version {quantization['version']}; gemm is read. {READ}")
        zeros = name == "awq" or not quantization.get("sym", True)
        group_size = quantization.get("group_size", quantization.get("q_group_size", -1))
    else:
        raise refused(
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
        return refused(checkpoint, stem + part, text)

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


def codes(checkpoint: Checkpoint, key: str, form: Format, quantization: Mapping[str, Any]) -> Codes:
    """Read an int4 weight as it is stored.

    form     of a complete checkpoint
    Raises   CheckpointError as `Checkpoint.read`, or if scales, shape or groups make no sense
    """
    read = {name.removeprefix(key.removesuffix("weight")): checkpoint.read(name) for name in form.companions}
    scales = read.get("scales", read.get("weight_scale"))
    assert form.shape is not None and scales is not None, "asked for int4 only"
    check_finite(form.companions[2 if "scales" in read else 1], scales)
    group_of = read.get("g_idx", read.get("weight_g_idx"))
    if group_of is not None and (group_of.min() < 0 or group_of.max() >= form.shape[1] // form.group_size):
        raise refused(checkpoint, key, f"g_idx names a group that is not there. {DOWNLOAD_AGAIN}")
    if form.name == "packed":
        claimed = read.get("weight_shape")
        if claimed is not None and tuple(claimed.tolist()) != form.shape:
            raise refused(
                checkpoint,
                key,
                f"weight_shape says {claimed.tolist()}; weight_packed holds {list(form.shape)}. {DOWNLOAD_AGAIN}",
            )
        found = int4.from_packed(read["weight_packed"], scales, read.get("weight_zero_point"), group_of)
    elif form.name == "awq":
        found = int4.from_awq(read["qweight"], read["qzeros"], scales)
    else:
        version = 2 if quantization.get("checkpoint_format") == "gptq_v2" else 1
        found = int4.from_gptq(read["qweight"], read["qzeros"], scales, group_of, version)
    if found.zeros is not None and not form.has_zeros:
        raise refused(
            checkpoint,
            key,
            "zero points other than 8, and config.json says symmetric. Correct quantization_config.sym.",
        )
    return found


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
            raise refused(
                checkpoint,
                key,
                f"compressed-tensors packed as {shown(scheme)}; int of 4 bits is read. {READ}",
            )
    if not schemes:
        raise refused(
            checkpoint,
            key,
            "compressed-tensors packed, and quantization_config.config_groups does not say how. Correct config.json.",
        )
    return schemes[0]
