"""Values that know where they stand, and what a value of the rule language may be.

Plain scalars have the types of the YAML 1.2 core schema: `yes`, `no`, `on` and `0o17` are text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktinject.errors import RuleError
from ktinject.rules.wording import Place

MAX_NODES = 20_000
MAX_DEPTH = 16
_MAX_DIGITS = 18

# Also the line breaks that only YAML knows: with them our line numbers and an editor's would differ.
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
_CONSTANTS = {word: value for value, words in (
    (None, ("", "~", "null", "Null", "NULL")),
    (True, ("true", "True", "TRUE")),
    (False, ("false", "False", "FALSE")),
) for word in words}  # fmt: skip
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+", re.ASCII)


class Where(str):
    """A place in a file as refusals name it, "file:line", and what it takes to point at it.

    line, column   both from 1
    width          characters
    lines          of the whole file
    """

    _at: tuple[int, int, int, Sequence[str]]

    def __new__(
        cls, text: str, line: int = 0, column: int = 0, width: int = 1, lines: Sequence[str] = ()
    ) -> Where:
        where = super().__new__(cls, text)
        where._at = line, column, width, lines  # in one piece: every node has one
        return where

    @property
    def line(self) -> int:
        return self._at[0]

    @property
    def column(self) -> int:
        return self._at[1]

    @property
    def width(self) -> int:
        return self._at[2]

    @property
    def lines(self) -> Sequence[str]:
        return self._at[3]

    def covering(self, other: str) -> Where:
        """The same place, pointing at another of the same line; a value stands where its key does."""
        if not isinstance(other, Where) or other._at[0] != self._at[0]:
            return self
        return Where(self, *other._at)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the document. `where` is "file:line"; a mapping's value stands where its key does, at `key`."""

    value: bool | int | float | str | list[Node] | dict[str, Node] | None
    where: str
    key: str = ""

    def plain(self) -> Any:
        """The value without the places."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value


def scalar(text: str, where: str) -> bool | int | float | str | None:
    """What a plain scalar means. Raises RuleError for a number too long or too large."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise too_long(where)
        return int(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return finite(float(text), where)
    return text


def integer(value: int, where: str) -> int:
    """The number. Raises RuleError if it is too long."""
    if abs(value) >= 10**_MAX_DIGITS:
        raise too_long(where)
    return value


def finite(value: float, where: str) -> float:
    """The number. Raises RuleError if it is none or infinite."""
    if not math.isfinite(value):
        raise Place(where).refusal(
            "a number beyond the range of floats; use a finite number. Write a smaller one."
        )
    return value


def clean(text: str, where: str) -> str:
    """The text. Raises RuleError if it has control characters."""
    bad = FORBIDDEN.search(text)
    if bad:
        raise control_character(where, bad)
    return text


def control_character(where: str, found: re.Match[str]) -> RuleError:
    return Place(where).refusal(
        f"control character U+{ord(found[0]):04X}; text holds printable characters, tabs and newlines. Remove it."
    )


def too_deep(where: str) -> RuleError:
    return Place(where).refusal(f"nested deeper than {MAX_DEPTH} levels; rules need fewer. Flatten it.")


def too_many(where: str) -> RuleError:
    return Place(where).refusal(
        f"more than {MAX_NODES:,} values, aliases written out; a rule file holds fewer. Split the rules."
    )


def too_long(where: str) -> RuleError:
    return Place(where).refusal(
        f"a number of more than {_MAX_DIGITS} digits; no argument needs one. Write a smaller one."
    )
