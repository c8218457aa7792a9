"""What `weights: auto` and `kept` stand for: the formats, the most accurate first. Linear layers have `kept` alone.

The order is that of the mean KL divergence of the two trained models in examples/models (docs/explanation/numbers.md).
mxfp4, nvfp4, fp8_channel and mxfp8 are there only for a checkpoint that is stored in them: from other weights, int4 in
groups of 64 is as small as the first two and more accurate, and fp8 as small as the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from ktinject.checkpoints.formats.base import Codes, GgufRows
from ktinject.errors import OperatorError
from ktinject.operators.probes import experts as routed_experts

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format
    from ktinject.operators.probes.experts import ExpertsSpec

GROUPS = (32, 64, 128)  # inputs that share a scale, in int4
KQuant = Literal["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "q8_0"]
K_QUANTS = get_args(KQuant)  # kept from checkpoints, never made
# What the CPU's kernels multiply by.
CpuWeights = Literal["bf16", "int8", "int4", "fp8", "mxfp4", "fp8_channel", "nvfp4", "mxfp8", KQuant]
FLOATS = ("fp8_channel", "nvfp4", "mxfp8")  # whose scales are for single outputs
_Q8_0_INPUTS = 32  # that share a scale
FP8_SIDE = 128  # of fp8's blocks, as the native core keeps them


def choices(
    config: Any, stored: Collection[Format], kept: Mapping[str, Any] | None = None
) -> list[tuple[int, Any]]:
    """Rank and config of each format that the config leaves open; empty unless its `weights` are auto or kept.

    Of kept, the first one for which the operator takes the weights as they are is meant.

    config   a dataclass with `weights` and `group_size`, which is the largest group that int4 may have
    stored   formats of the weights in the checkpoint
    kept     as `k_quants` gives it
    """
    if config.weights not in ("kept", "auto"):
        return []
    ways: list[tuple[int, dict[str, Any]]] = [*enumerate(_formats(config.group_size, stored, kept))]
    if config.weights == "kept":
        ways = [(0, _as_stored(stored, max(GROUPS))), (0, {"weights": "bf16"})]
        if kept:
            ways.insert(0, (0, {**kept}))
    found = []
    for rank, values in ways:
        try:
            found.append((rank, dataclasses.replace(config, **values)))
        except ValueError:
            continue  # another argument of the rule asks for a kernel, or a copy on the GPU, of another format
    if config.weights == "kept" and not found:
        dataclasses.replace(config, weights="bf16")  # says what forbids it
    return found


def _formats(
    largest_group: int, stored: Collection[Format], kept: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """The same places for all: what the checkpoint has, bf16, int8, fp8, and int4 in groups of 32, 64 and 128."""
    yield {**kept} if kept else _as_stored(stored, largest_group)
    for weights in ("bf16", "int8", "fp8"):
        yield {"weights": weights, "symmetric": True}
    for group in GROUPS:
        if group <= largest_group:
            yield {"weights": "int4", "group_size": group}


def k_quants(stored: Collection[tuple[str, Format]]) -> dict[str, Any]:
    """The arguments for one format of K_QUANTS for gate and up, and one for down, as GGUF files mix them; or {}."""
    down = {form.encoding for name, form in stored if name.startswith("down_proj")}
    others = {form.encoding for name, form in stored if not name.startswith("down_proj")}
    if len(down) != 1 or len(others) != 1 or not down | others <= {*K_QUANTS}:
        return {}
    (weights,), (down_weights,) = others, down
    return {"weights": weights, "down_weights": "same" if down_weights == weights else down_weights}


def of_linear(source: Format) -> dict[str, Any]:
    """The arguments of `kept` for a linear layer; bf16 where the CPU's kernels have no format as exact."""
    return {"weights": source.encoding} if source.encoding in K_QUANTS else _as_stored([source], max(GROUPS))


def keeping(word: str, weights: str, source: Format) -> str:
    """What `Operator.keeping` says of weights in that format, more exactly."""
    if word == "kept" and source.is_divided:
        return "kept, 1 / scale rounded to fp32"
    if word == "kept" and weights == "int4" and source.scales != "BF16":
        return "kept, scales rounded to bf16"
    if word == "kept" and source.encoding == "q8_0" and source.scales not in ("", "F16"):
        return "kept, scales rounded to fp16"
    return word


def blocks(stored: GgufRows | Codes) -> Tensor:
    """Rows of a GGUF file's blocks [..., n, bytes]; of codes of 8 bits in groups those of Q8_0, with scales in fp16.

    Raises   OperatorError for groups that are not in order, zero points, and scales that fp16 does not hold
    """
    if isinstance(stored, GgufRows):
        return stored.rows
    check_order(stored)
    if stored.bits != 8 or stored.zeros is not None:
        raise OperatorError(
            "it has zero points, of which quantization_config says nothing. Correct config.json"
        )
    scales = stored.scales.half()
    if not bool(scales.isfinite().all()):
        most = float(stored.scales.abs().max())
        raise OperatorError(f"a scale is {most:g}; q8_0's are fp16, up to 65504. Choose weights: bf16")
    each = (stored.codes ^ 128).unflatten(-1, (-1, _Q8_0_INPUTS))
    scales = scales.repeat_interleave(each.shape[-2] // scales.shape[-1], -1)
    return torch.cat((scales[..., None].view(torch.uint8), each), -1).flatten(-2)


def check_order(stored: Codes) -> None:
    """Raise OperatorError for groups that are not in order, which config.json does not announce."""
    if stored.group_of is not None:
        raise OperatorError(
            "its g_idx puts the inputs of a group apart, and quantization_config says desc_act: false. "
            "Correct config.json"
        )


def _as_stored(stored: Collection[Format], largest_group: int) -> dict[str, Any]:
    """The format in which nothing is rounded a second time; bf16 where there is no smaller one."""
    encodings = {form.encoding for form in stored}
    if encodings == {"mxfp4"}:
        return {"weights": "mxfp4"}
    if len(encodings) == 1 and (found := next(iter(encodings)).removesuffix(" across")) in FLOATS:
        return {"weights": found}
    if encodings == {"fp8"} and all(form.block == (FP8_SIDE, FP8_SIDE) for form in stored):
        return {"weights": "fp8"}
    groups = {form.group_size for form in stored}
    if encodings == {"int8"}:
        return {"weights": "int8"}
    if encodings == {"int4"} and len(groups) == 1 and not any(form.is_ordered for form in stored):
        (group,) = groups
        if group in GROUPS and group <= largest_group:
            symmetric = not any(form.has_zeros for form in stored)
            return {"weights": "int4", "group_size": group, "symmetric": symmetric}
    return {"weights": "bf16"}


def integers(
    spec: ExpertsSpec, name: str, stored: Codes, expert: int | None, part: int | None
) -> Iterator[tuple[str, int, Tensor, Tensor, Tensor | None]]:
    """Cut codes into projections, as `routed_experts.views` cuts weights.

    Yields   projection, expert, codes [n, k] of any strides, scales fp32 [n, groups] and zero points or None
    Raises   OperatorError for groups that are not in order, and as `views`
    """
    check_order(stored)
    groups = stored.scales.shape[-2 if spec.is_transposed else -1]
    # What belongs to groups is cut as a weight that has them for inputs.
    if name == "down_proj":
        grid = dataclasses.replace(spec, intermediate_size=groups)
    else:
        grid = dataclasses.replace(spec, hidden_size=groups)
    scales = routed_experts.views(grid, name, stored.scales.float(), expert, part)
    zeros = [] if stored.zeros is None else routed_experts.views(grid, name, stored.zeros, expert, part)
    for place, (projection, e, codes) in enumerate(
        routed_experts.views(spec, name, stored.codes, expert, part)
    ):
        points = zeros[place][2].contiguous() if zeros else None
        yield projection, e, codes, scales[place][2].contiguous(), points
