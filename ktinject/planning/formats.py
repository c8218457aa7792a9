"""The weight formats that rules leave open (`weights: auto`): all rules step down together until a plan fits.

    level 0  what the checkpoint has     level 1  bf16     level 2  int8   …

A level is a rank of `Operator.weight_formats`. At each, a module has the most accurate of its formats that is no better
than that. So what a level takes depends on no budget, and more memory never means a less accurate format.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ktinject.planning.modules import MatchedModule

_WORDS = ("bf16", "int8", "fp8", "int4")  # the most accurate first
_LARGEST_GROUP = 128


@dataclass(frozen=True)
class Level:
    """The modules of a plan, with all formats settled.

    settled   rule → the format of its modules here, in words; of rules that leave one open (`weights: auto`)
    """

    modules: tuple[MatchedModule, ...]
    settled: dict[str, str]


def levels(modules: Sequence[MatchedModule]) -> Iterator[Level]:
    """The levels, the most accurate first; one where no rule leaves a format open."""
    choices = {module.path: module.weight_formats(module.config) for module in modules}
    ranks = sorted({rank for found in choices.values() for rank, _ in found})
    before: Level | None = None
    for least in ranks or [0]:
        settled: dict[str, str] = {}
        taken = []
        for module in modules:
            if found := choices[module.path]:
                config = next((config for rank, config in found if rank >= least), found[-1][1])
                if module.config.weights == "auto":
                    settled.setdefault(module.rule.name, in_words(config))
                module = dataclasses.replace(module, config=config)
            taken.append(module)
        level = Level(tuple(taken), settled)
        if before is None or any(a.config != b.config for a, b in zip(level.modules, before.modules)):
            yield level
        before = level


def in_words(config: Any) -> str:
    """`int4 in groups of 32`, `int8`."""
    groups = f" in groups of {config.group_size}" if config.weights == "int4" else ""
    down = getattr(config, "down_weights", "same")
    return f"{config.weights}{groups}" + ("" if down == "same" else f", down {down}")


def smaller_experts(module: MatchedModule) -> list[tuple[int, Any]]:
    """Rank and config of the formats that are less accurate than the module's own; of an operator that chooses them."""
    names = {field.name for field in dataclasses.fields(module.config)}
    if not {"weights", "group_size"} <= names:
        return []
    try:
        same = {"down_weights": "same"} if "down_weights" in names else {}
        opened = dataclasses.replace(module.config, weights="auto", group_size=_LARGEST_GROUP, **same)
    except ValueError:
        return []
    found = module.weight_formats(opened)
    own = [rank for rank, config in found if in_words(config) == in_words(module.config)]
    return [(rank, config) for rank, config in found if rank > max(own, default=-1)]


def smaller_others(module: MatchedModule) -> list[tuple[int, Any]]:
    """The same of an operator whose formats are a list of words alone, such as `dense_linear`."""
    hints = typing.get_type_hints(type(module.config)).get("weights")
    words = typing.get_args(hints)
    if not words or "auto" in words or module.config.weights not in _WORDS:
        return []
    own = _WORDS.index(module.config.weights)
    return [
        (rank, dataclasses.replace(module.config, weights=word))
        for rank, word in enumerate(_WORDS)
        if rank > own and word in words
    ]
