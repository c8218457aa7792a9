"""The plan: which operator replaces which module, on which device, in how many bytes; and its text for people."""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ktinject.distributed.tensor_parallel import Cut, Style
from ktinject.errors import PlanError, listed
from ktinject.grid import Grid, Lines
from ktinject.hf.key_map import KeyMap
from ktinject.planning.devices import show_bytes
from ktinject.planning.memory import RuntimeMemory
from ktinject.planning.modules import blaming, some
from ktinject.planning.replacements import Replacement
from ktinject.rules import KEEP, Rule, RuleSet


@dataclass(frozen=True)
class Remedy:
    """A change with which a plan fits.

    arguments  of `plan`, `load` and `optimize`, to be given in addition; None: the machine needs more memory
    text       the same for people: options of the command line
    """

    arguments: dict[str, Any] | None
    text: str


@dataclass
class Plan:
    """All decisions of one call. `str(plan)` is a table, `to_dict()` is ready for JSON.

    matched         rule → paths of the modules that it matches, in the order of the rules; also for `replace: keep`
    replacements    the replaced modules, in the order of the model
    rest_bytes      device → bytes of everything that is not replaced
    device_map      module path → device of the modules that are not replaced, in transformers' form
    limits          device → bytes that the plan may use
    to_load         device → bytes of weights that are not in memory yet
    runtime_memory  device → memory that the model takes while it runs, beside its weights
    problems        sentences about what does not fit
    remedies        what makes it fit, each of them by itself; empty if it fits
    notes           other remarks for the user
    mapping         of the checkpoint's keys to parameters; None if the model has its weights already
    styles          path of a linear layer → how tensor parallelism cuts it
    cuts            checkpoint key → the part of the tensor that this rank holds
    asked           rules and variables as they were given, for config.json; None if they were a RuleSet
    tied            parameter that an operator takes → the parameter that it is tied to; the operator holds a copy
    """

    model: str
    model_type: str
    ruleset: RuleSet
    checkpoint: str | None
    matched: dict[str, tuple[str, ...]]
    replacements: tuple[Replacement, ...]
    rest_bytes: dict[str, int]
    device_map: dict[str, str]
    limits: dict[str, int]
    to_load: dict[str, int]
    runtime_memory: dict[str, RuntimeMemory] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remedies: list[Remedy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mapping: KeyMap | None = field(default=None, repr=False)
    styles: dict[str, Style] = field(default_factory=dict, repr=False)
    cuts: dict[str, Cut] = field(default_factory=dict, repr=False)
    tied: dict[str, str] = field(default_factory=dict, repr=False)
    asked: dict[str, Any] | None = field(default=None, repr=False)

    def blaming(self, *paths: str) -> AbstractContextManager[None]:
        """Inside the `with` block, errors of the operator of these modules name the rule, the modules and itself."""
        replacement = self._replacements_by_path[paths[0]]
        rule = next(rule for rule in self.ruleset.rules if rule.name == replacement.rule)
        return blaming(rule, some(paths), replacement.operator)

    @functools.cached_property
    def _replacements_by_path(self) -> dict[str, Replacement]:
        return {replacement.path: replacement for replacement in self.replacements}

    @property
    def bytes(self) -> dict[str, int]:
        """Device → bytes of the swapped model's weights."""
        return total([*(replacement.bytes for replacement in self.replacements), self.rest_bytes])

    @property
    def swapped(self) -> dict[str, tuple[int, ...]]:
        """Full name → shape of the parameters that operators take."""
        return {
            f"{replacement.path}.{name}": shape
            for replacement in self.replacements
            for name, shape in replacement.parameter_shapes.items()
        }

    @property
    def elsewhere(self) -> set[str]:
        """Full names of the parameters that only another rank loads."""
        return {
            f"{replacement.path}.{name}"
            for replacement in self.replacements
            if replacement.elsewhere
            for name in replacement.parameter_shapes
        }

    def in_bytes(self) -> list[str]:
        """Lines on what is loaded, what may be used, and what is left for requests, of each device."""
        lines = [
            f"{device}: {show_bytes(size)} to load, {show_bytes(self.limits[device])} may be used"
            for device, size in self.to_load.items()
        ]
        return lines + [
            line for device, running in self.runtime_memory.items() for line in running.lines(device)
        ]

    def check(self) -> None:
        """Raise PlanError if something does not fit."""
        if self.problems:
            ways = [remedy.text for remedy in self.remedies]
            fit = f"\nIt fits with{' one of' if len(ways) > 1 else ''}:{listed(ways)}" if ways else ""
            raise PlanError(f"the plan does not fit:{listed(self.problems)}{fit}")

    def to_dict(self) -> dict[str, Any]:
        """The plan as lists, dicts, numbers and strings, for JSON."""
        fields = [f.name for f in dataclasses.fields(Replacement) if f.repr]
        return {
            "model": self.model,
            "model_type": self.model_type,
            "rules": self.ruleset.source,
            "extends": list(self.ruleset.bases),
            "checkpoint": self.checkpoint,
            "matched": {name: list(paths) for name, paths in self.matched.items()},
            "from": {rule.name: _origin(rule) for rule in self.ruleset.rules},
            "modules": [
                {name: getattr(replacement, name) for name in fields} for replacement in self.replacements
            ],
            "rest": {"bytes": self.rest_bytes, "device_map": self.device_map},
            "bytes": self.bytes,
            "to_load": self.to_load,
            "runtime_memory": {device: running.to_dict() for device, running in self.runtime_memory.items()},
            "limits": self.limits,
            "problems": list(self.problems),
            "remedies": [dataclasses.asdict(remedy) for remedy in self.remedies],
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        return rich(self)

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return as_html(self)


def _origin(rule: Rule) -> dict[str, Any]:
    """Where a rule stands, and where each of its arguments does, of which some may be set."""
    file, _, line = rule.where.rpartition(":")
    in_file = line.isdecimal()
    return {
        "file": file if in_file else rule.where,
        "line": int(line) if in_file else None,
        "arguments": {name: str(where) for name, where in rule.argument_where.items()},
    }


TITLES = ("rule", "modules", "operator", "kernel", "weights", "device", "bytes", "from")


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """The table's rows, with a cell for each of TITLES. Modules of one rule that run alike share a row."""
    groups: dict[tuple[str, ...], list[Replacement]] = {}
    for replacement in plan.replacements:
        runs = (str(replacement.runs.get("kernel", "")), str(replacement.runs.get("weights", "")))
        groups.setdefault(
            (replacement.rule, replacement.module, replacement.operator, *runs, replacement.device), []
        ).append(replacement)
    table: list[tuple[str, ...]] = []
    for rule in plan.ruleset.rules:
        matched = plan.matched[rule.name]
        # An operator may leave a module as it is (`Operator.resolve`), so a replacing rule may keep some modules.
        count = len(matched) - sum(replacement.rule == rule.name for replacement in plan.replacements)
        if not matched:
            table.append((rule.name, "none (optional)", rule.operator, "", "", "", "", rule.where))
        elif count:
            table.append((rule.name, f"{count} modules", KEEP, "", "", "", "", rule.where))
        for (name, module, *columns), replacements in groups.items():
            if name == rule.name:
                size = sum(total(replacement.bytes for replacement in replacements).values())
                table.append(
                    (name, f"{len(replacements)} × {module}", *columns, show_bytes(size), rule.where)
                )
    for device, size in plan.rest_bytes.items():
        table.append(("(everything else)", "", "transformers", "", "", device, show_bytes(size), ""))
    return table


def remarks(plan: Plan) -> list[str]:
    """The lines below the table."""
    lines = plan.in_bytes()
    lines += [
        f"{rule.name}: {argument} = {rule.arguments[argument]} is set"
        for rule in plan.ruleset.rules
        for argument, where in rule.argument_where.items()
        if where.startswith("override ")
    ]
    lines += dict.fromkeys(
        f"{replacement.rule}: {key}: {value}"
        for replacement in plan.replacements
        for key, value in replacement.runs.items()
        if key not in ("kernel", "weights")
    )
    lines += plan.notes + [f"does not fit: {problem}" for problem in plan.problems]
    return lines + [f"fits with {remedy.text}" for remedy in plan.remedies]


def grid(plan: Plan) -> Grid:
    """The table. On a narrow terminal, the kernel is below the operator and the device below the weights."""
    found = rows(plan)
    narrow = [
        (
            f"{rule}\n{where}".strip(),
            modules,
            f"{operator}\n{kernel}".strip(),
            f"{weights}\n{device}".strip(),
            size,
        )
        for rule, modules, operator, kernel, weights, device, size, where in found
    ]
    titles = ("rule, from", "modules", "operator, kernel", "weights, device", "bytes")
    return Grid(TITLES, found, ["bytes"], Grid(titles, narrow, ["bytes"]))


def rich(plan: Plan) -> Any:
    """The plan as an object that a rich console prints."""
    from rich.console import Group

    return Group(grid(plan), Lines(remarks(plan)))


def text(plan: Plan) -> str:
    """The plan as plain text, as wide as its content needs."""
    return "\n".join([str(grid(plan)), "", *remarks(plan)])


def as_html(plan: Plan) -> str:
    """The plan as HTML for notebooks."""
    head = "".join(f"<th>{title}</th>" for title in TITLES)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(plan)
    )
    below = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(plan))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>{below}</ul>"


def total(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Device → the sum of its bytes over all parts; the CPU comes first."""
    result: dict[str, int] = {}
    for part in parts:
        for device, size in part.items():
            result[device] = result.get(device, 0) + size
    return dict(sorted(result.items(), key=lambda item: (item[0] != "cpu", item[0])))
