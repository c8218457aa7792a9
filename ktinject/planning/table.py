"""The plan as people read it: a table with a line for each rule; below it totals, notes and what does not fit."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ktinject.grid import Grid, Lines
from ktinject.planning.devices import show_bytes
from ktinject.rules import KEEP

if TYPE_CHECKING:
    from ktinject.planning.plan import Plan
    from ktinject.planning.replacements import Entry

TITLES = ("rule", "modules", "operator", "kernel", "weights", "device", "bytes")


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells under TITLES; modules of one rule that run alike share a line."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in plan.entries:
        runs = (str(entry.runs.get("kernel", "")), str(entry.runs.get("weights", "")))
        groups.setdefault((entry.rule, entry.module, entry.operator, *runs, entry.device), []).append(entry)
    table: list[tuple[str, ...]] = []
    for rule in plan.ruleset.rules:
        matched = plan.matched[rule.name]
        # Under a rule that replaces, too, modules may stay as they are.
        count = len(matched) - sum(entry.rule == rule.name for entry in plan.entries)
        if not matched:
            table.append((rule.name, "none (optional)", rule.operator, "", "", "", ""))
        elif count:
            table.append((rule.name, f"{count} modules", KEEP, "", "", "", ""))
        for (name, module, *columns), entries in groups.items():
            if name == rule.name:
                size = sum(total(entry.bytes for entry in entries).values())
                table.append((name, f"{len(entries)} × {module}", *columns, show_bytes(size)))
    for device, size in plan.rest_bytes.items():
        table.append(("(everything else)", "", "transformers", "", "", device, show_bytes(size)))
    return table


def remarks(plan: Plan) -> list[str]:
    """The lines below the table."""
    lines = [
        f"{device}: {show_bytes(size)} to load, {show_bytes(plan.limits[device])} may be used"
        for device, size in plan.to_load.items()
    ]
    for device, running in plan.running.items():
        lines += running.lines(device)
    lines += dict.fromkeys(
        f"{entry.rule}: {key}: {value}"
        for entry in plan.entries
        for key, value in entry.runs.items()
        if key not in ("kernel", "weights")
    )
    return lines + plan.notes + [f"does not fit: {problem}" for problem in plan.problems]


def grid(plan: Plan) -> Grid:
    """The table; on a narrow terminal, kernel and device stand below operator and weights."""
    found = rows(plan)
    narrow = [
        (rule, modules, f"{operator}\n{kernel}".strip(), f"{weights}\n{device}".strip(), size)
        for rule, modules, operator, kernel, weights, device, size in found
    ]
    titles = ("rule", "modules", "operator, kernel", "weights, device", "bytes")
    return Grid(TITLES, found, ["bytes"], Grid(titles, narrow, ["bytes"]))


def rich(plan: Plan) -> Any:
    """Something that a rich console prints."""
    from rich.console import Group

    return Group(grid(plan), Lines(remarks(plan)))


def text(plan: Plan) -> str:
    """Plain text, as wide as its content needs."""
    return "\n".join([str(grid(plan)), "", *remarks(plan)])


def as_html(plan: Plan) -> str:
    """A table for notebooks."""
    head = "".join(f"<th>{title}</th>" for title in TITLES)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(plan)
    )
    below = "".join(f"<li>{html.escape(line)}</li>" for line in remarks(plan))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><ul>{below}</ul>"


def total(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Bytes per device, summed, the CPU first."""
    result: dict[str, int] = {}
    for part in parts:
        for device, size in part.items():
            result[device] = result.get(device, 0) + size
    return dict(sorted(result.items(), key=lambda item: (item[0] != "cpu", item[0])))
