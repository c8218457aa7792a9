"""A refusal with the line of the file that it is about, and a caret below what is wrong in it."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len

from ktinject.errors import RuleError
from ktinject.rules.node import Where

_BEFORE, _SHOWN = 60, 100  # characters of a long line


def pointed(error: RuleError) -> str:
    """All refusals that an error is made of, each with its column, its line and a caret."""
    return "\n".join(_pointed(part) for part in _in_order(error))


def places(error: RuleError) -> list[dict[str, Any]]:
    """The same, for programs: `text`; and `file`, `line` and `column` from 1, where the refusal is about a line."""
    found: list[dict[str, Any]] = []
    for part in _in_order(error):
        place: dict[str, Any] = {"text": str(part)}
        if isinstance(part.where, Where):
            file = part.where.split(f":{part.where.line}")[0]
            place |= {"file": file, "line": part.where.line, "column": part.where.column}
        found.append(place)
    return found


def _in_order(error: RuleError) -> list[RuleError]:
    """As one reads: by line and column, file by file; what is about no line comes first."""

    def place(part: RuleError) -> tuple[int, int, int]:
        if not isinstance(part.where, Where):
            return -1, 0, 0
        return files.setdefault(part.where.rpartition(":")[0], len(files)), part.where.line, part.where.column

    files: dict[str, int] = {}
    return sorted(error.parts or (error,), key=place)


def _pointed(error: RuleError) -> str:
    text, where = str(error), error.where
    if not isinstance(where, Where):
        return text
    named = f"{where.line}:{where.column}"
    if not where.endswith(f":{named}"):
        text = f"{where}:{where.column}{text.removeprefix(where)}"
    if not 0 < where.line <= len(where.lines):
        return text
    line = where.lines[where.line - 1].rstrip("\r").replace("\t", " ")
    first = max(0, where.column - 1 - _BEFORE)
    shown = line[first : first + _SHOWN]
    caret = " " * cell_len(line[first : where.column - 1])
    width = max(1, cell_len(shown[where.column - 1 - first :][: where.width]))
    number = str(where.line)
    return f"{text}\n  {number} | {shown}\n  {' ' * len(number)} | {caret}{'^' * width}"
