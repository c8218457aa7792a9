"""The conditions of a rule's `match`, one key each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regex

from ktinject.errors import RuleError
from ktinject.rules.node import Node
from ktinject.rules.pattern import MAX_SIZES, Patterns, compiled
from ktinject.rules.roles import ROLES
from ktinject.rules.variables import Variables
from ktinject.rules.wording import Enough, Place, closest, listing, show

_MAX_LAYER = 999
_LAYERS = regex.compile(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*")
IMPORT_MARKS = regex.compile(r"[./:\\]+")


def condition(key: str, item: Node, at: Place, variables: Variables, patterns: Patterns) -> Any:
    """What one key of `match` says, checked: text, or numbers of layers. Raises RuleError, or Enough after it."""
    value = variables.fill(item, at)
    if key == "layers":
        return _layers(value, at)
    if not isinstance(value, str) or not value:
        raise at.refusal(f"{key} is {show(value)}; it is text. Write it in single quotes.")
    try:
        if key != "path":
            _CHECKS[key](value)
        elif patterns.has_room(value):
            compiled(value)
        else:
            raise at.refusal(
                f"all patterns together are too large; characters times counts may be at most {MAX_SIZES:,}. "
                "Write smaller counts, such as + in place of {1,1000}.",
                Enough,
            )
    except RuleError:
        raise
    except ValueError as error:
        raise at.refusal(f"{key} {show(value)} {error}. Correct it.") from error
    return value


def _check_role(name: str) -> None:
    if name not in ROLES:
        near = closest(name, ROLES)
        hint = f" (closest: {near[0]})" if near else ""
        raise ValueError(f"is no role{hint}; it is {listing(ROLES)}")


def _check_class(name: str) -> None:
    if IMPORT_MARKS.search(name):
        parts = reversed(IMPORT_MARKS.split(name))
        last = next((part for part in parts if part.isidentifier()), "Linear")
        raise ValueError(
            f"is an import path; classes are compared by name and nothing is imported: write {last!r}"
        )
    if not name.isidentifier():
        raise ValueError("is not the name of a class; a name has letters, digits and _")


_CHECKS: dict[str, Callable[[str], object]] = {
    "class": _check_class,
    "role": _check_role,
    "inside": _check_role,
}


def _layers(value: object, place: Place) -> frozenset[int]:
    """`3-60`, `3`, `[3, 5, 7]` or `'3-10,20-30'`."""
    if isinstance(value, list):
        parts = [str(item) if type(item) is int else "" for item in value]
    else:
        parts = value.split(",") if isinstance(value, str) else [str(value)]
    numbers: list[int] = []
    for part in parts:
        found = _LAYERS.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last <= _MAX_LAYER:
            numbers.clear()
            break
        numbers.extend(range(first, last + 1))
        if len(numbers) > _MAX_LAYER + 1:
            break
    if not numbers or len(set(numbers)) < len(numbers):
        found_text = listing(map(show, value), "and") if isinstance(value, list) and value else show(value)
        raise place.refusal(
            f"layers is {found_text}; it is 3-60 (first to last), 3, [3, 5, 7] or '3-10,20-30', "
            f"each layer once, none above {_MAX_LAYER}. Write one of these forms."
        )
    return frozenset(numbers)
