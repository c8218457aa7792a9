"""What `weights: auto` of routed experts stands for: the formats, the most accurate first.

The order is that of the mean KL divergence of the two trained models in examples/models (docs/explanation/numbers.md).
mxfp4 is there only for a checkpoint that is stored in it: from other weights, int4 in groups of 64 is as small and more
accurate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktinject.checkpoints.formats.base import Format

GROUPS = (32, 64, 128)  # inputs that share a scale, in int4
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs")  # kept from GGUF files, never made
_MXFP4 = frozenset({"mxfp4", "gguf_mxfp4"})
_INT4 = frozenset({"gptq", "packed", "q4_0"})
_FP8_SIDE = 128  # of fp8's blocks, as the native core keeps them


def choices(config: Any, stored: Collection[tuple[str, Format]]) -> list[tuple[int, Any]]:
    """Rank and config of each format that the config leaves open; empty unless its `weights` are auto or kept.

    config   a dataclass with `weights` and `group_size`, which is the largest group that int4 may have
    stored   parameter name and format of the weights in the checkpoint
    """
    if config.weights == "kept":
        kept = _k_quants(stored) or _as_stored([form for _, form in stored], max(GROUPS))
        return [(0, dataclasses.replace(config, **kept))]
    if config.weights != "auto":
        return []
    found = []
    for rank, values in enumerate(_formats(config.group_size, [form for _, form in stored])):
        try:
            found.append((rank, dataclasses.replace(config, **values)))
        except ValueError:
            continue  # another argument of the rule asks for a kernel, or a copy on the GPU, of another format
    return found


def _formats(largest_group: int, stored: Collection[Format]) -> Iterator[dict[str, Any]]:
    """The same places for all: what the checkpoint has, bf16, int8, fp8, and int4 in groups of 32, 64 and 128."""
    yield _as_stored(stored, largest_group)
    for weights in ("bf16", "int8", "fp8"):
        yield {"weights": weights}
    for group in GROUPS:
        if group <= largest_group:
            yield {"weights": "int4", "group_size": group}


def _k_quants(stored: Collection[tuple[str, Format]]) -> dict[str, Any]:
    """One K-quant of gate and up, and one of down, as GGUF files mix them; {} for anything else."""
    down = {form.name for name, form in stored if name.startswith("down_proj")}
    others = {form.name for name, form in stored if not name.startswith("down_proj")}
    if len(down) != 1 or len(others) != 1 or not down | others <= {*K_QUANTS}:
        return {}
    (weights,), (down_weights,) = others, down
    return {"weights": weights, "down_weights": "same" if down_weights == weights else down_weights}


def _as_stored(stored: Collection[Format], largest_group: int) -> dict[str, Any]:
    """The format in which nothing is rounded a second time; bf16 where there is no smaller one."""
    names = {form.name for form in stored}
    if names and names <= _MXFP4:
        return {"weights": "mxfp4"}
    if names == {"fp8_blocks"} and all(form.block == (_FP8_SIDE, _FP8_SIDE) for form in stored):
        return {"weights": "fp8"}
    groups = {form.group_size for form in stored}
    if names and names <= _INT4 and len(groups) == 1 and not any(form.has_zeros for form in stored):
        (group,) = groups
        if group in GROUPS and group <= largest_group:
            return {"weights": "int4", "group_size": group}
    return {"weights": "bf16"}
