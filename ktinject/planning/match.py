"""Checks from names and headers whether a checkpoint fits a model. One error lists all that is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import LISTED, CheckpointError, few, listed
from ktinject.hf import extras
from ktinject.hf.key_map import Conversion, KeyMap

_LINES = 20  # of a report
_NUMBER = re.compile(r"(?<=\.)[0-9]{1,6}(?=\.|$)")


def check(
    checkpoint: Checkpoint, model: PreTrainedModel, mapping: KeyMap, ignore: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint unless its tensors are exactly those of the model, in the right shapes and a known format.

    What may be there beside them goes from `mapping.unexpected` to `mapping.skipped`.

    model    not swapped
    mapping  of the checkpoint's keys to the model's parameters
    ignore   patterns of names that need no place in the model
    Raises   CheckpointError that lists all tensors that are missing, unexpected, misshapen or unreadable
    """
    state = model.state_dict()
    mapping.skipped = [*extras.of(mapping.unexpected, model, checkpoint, ignore)]
    needless = {*mapping.skipped}
    mapping.unexpected = [key for key in mapping.unexpected if key not in needless]
    shapes, unreadable = [], []
    seen: set[str] = set()
    for name, pieces in mapping.targets.items():
        for piece in pieces:
            if piece.key in seen:
                continue
            seen.add(piece.key)
            fault = _unreadable(checkpoint, piece.key, state[name])
            unreadable += fault
            expected = _shape(state[name], piece.expert is not None, mapping.parts.get(name, 1))
            if checkpoint.complete and not fault:
                shape = checkpoint.shape(piece.key)
                if shape != expected:
                    shapes.append(f"{piece.key}: found {list(shape)}, expected {list(expected)}")
    for conversion in {id(found): found for found in mapping.conversions.values()}.values():
        faults = [_unreadable(checkpoint, key, state[conversion.name]) for key in conversion.keys]
        unreadable += [line for fault in faults for line in fault]
        if checkpoint.complete and not any(faults):
            shapes += _misconverted(checkpoint, conversion, model, state)

    found = {
        "missing": mapping.missing,
        "not expected by the model": mapping.unexpected,
        "of the wrong shape": shapes,
        "in a format that is not read": unreadable,
    }
    found = {title: lines for title, lines in found.items() if lines}
    if found:
        # Twenty lines in all: one before and one behind, and of each section a title and "and so many more".
        most = (_LINES - 2) // len(found) - 2
        sections = [f"\n{title}:{listed(grouped(lines), most=most)}" for title, lines in found.items()]
        raise CheckpointError(
            f"{checkpoint.path}: this does not fit {type(model).__name__} with the given config; tensors are"
            f"{''.join(sections)}\nUse the config.json that came with the weights, and a complete download"
            f"{', or do without some by ignore=[patterns] (--ignore)' if mapping.unexpected else ''}."
        )


def grouped(names: list[str], at_once: int = LISTED) -> list[str]:
    """Shorten a long list of names: names that differ only in numbers share a line.

    `model.layers.{3-60}.mlp.gate.weight (58 tensors)`; a list of up to `at_once` names stays as it is.
    """
    if len(names) <= at_once:
        return names
    alike: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern = _NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}"))
        alike.setdefault(pattern, []).append(tuple(map(int, _NUMBER.findall(name))))
    lines = []
    for pattern, numbers in alike.items():
        # A name may be listed twice, so its numbers may repeat.
        columns = {column: sorted(set(column)) for column in zip(*numbers)}
        if len(numbers) > 1 and len(set(numbers)) == math.prod(map(len, columns.values())):
            ranges = [_ranges(columns[column]) for column in zip(*numbers)]
            lines.append(f"{pattern.format(*ranges)} ({len(numbers)} tensors)")
        else:
            lines += [pattern.format(*row) for row in numbers]
    return lines


def _ranges(numbers: list[int]) -> str:
    """Sorted numbers as ranges: `{0-2,5}`; a single number without braces."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"


def _shape(parameter: Tensor, is_slice: bool, parts: int) -> tuple[int, ...]:
    """The shape of the part of a parameter [experts, outputs, inputs] that one tensor of the checkpoint fills."""
    shape = list(parameter.shape)
    if parts > 1:
        shape[1] //= parts
    return tuple(shape[1:] if is_slice else shape)


def _unreadable(checkpoint: Checkpoint, key: str, parameter: Tensor) -> list[str]:
    if not parameter.is_floating_point():
        return []  # a counter or a table of indices, which is never quantised; transformers loads it
    try:
        checkpoint.format_of(key)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{checkpoint.path}: ")]
    return []


def _misconverted(
    checkpoint: Checkpoint,
    conversion: Conversion,
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
) -> list[str]:
    """Run a conversion on meta tensors and compare the shapes of its results with the model's."""

    def without_data(key: str) -> Tensor:
        return torch.empty(checkpoint.shape(key), device="meta", dtype=torch.float32)

    try:
        made = conversion.run(without_data, model)
    except Exception as error:  # transformers' own code, on shapes that it was not written for
        return [f"{', '.join(few(conversion.keys))}: transformers cannot convert them: {error}"]
    return [
        f"{name}: converted to {list(made[name].shape)}, expected {list(state[name].shape)}"
        for name in conversion.targets
        if name in made and name in state and made[name].shape != state[name].shape
    ] + [f"{name}: not made by its conversion" for name in conversion.targets if name not in made]
