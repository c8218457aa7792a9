"""Step one of reading: bytes or Python values become nodes that know where they stand.

Nothing here knows what a rule is. YAML is taken as PyYAML's safe *events* (see `compose`).
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ktinject.errors import RuleError
from ktinject.rules.compose import Composer
from ktinject.rules.node import (
    FORBIDDEN,
    MAX_DEPTH,
    MAX_NODES,
    Node,
    Where,
    clean,
    control_character,
    finite,
    integer,
    too_deep,
    too_many,
)
from ktinject.rules.wording import Place, Problems, show

MAX_BYTES = 1 << 20

PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def from_file(path: Path, source: str, problems: Problems | None = None, number_keys: bool = False) -> Node:
    """Read a file. Raises RuleError for what cannot be read and for everything `from_bytes` refuses."""
    return from_bytes(bytes_of(path, source), source, problems=problems, number_keys=number_keys)


def bytes_of(path: Path, source: str) -> bytes:
    """The bytes of a file, and one more than may be at most. Raises RuleError.

    No more than its size says: some files of the system are of no size, and whoever reads them waits for ever.
    """
    try:
        with io.FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return os.pread(file.fileno(), min(os.fstat(file.fileno()).st_size, MAX_BYTES + 1), 0)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise RuleError(f"{source}: {reason}; a rule file must be readable. Check the path.") from error


def from_bytes(
    data: bytes,
    source: str,
    parser: Any = PARSER,
    problems: Problems | None = None,
    number_keys: bool = False,
) -> Node:
    """Read one YAML document.

    problems     gets what is wrong with single keys and values, and the document is read on; None: it is raised
    number_keys  whether whole numbers are keys, too: their text is
    Raises    RuleError with "source:line:column" for text that is not UTF-8 or malformed, and with "source:line" for
              what is too large, tags, duplicate or non-text keys, aliases without an anchor, several documents
    """
    if len(data) > MAX_BYTES:
        raise RuleError(f"{source}: larger than 1 MiB; a rule file is at most 1 MiB. Split the rules.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig")
        where = _at(source, before.count("\n"), len(before) - before.rfind("\n") - 1, [])
        raise Place(where).refusal(
            f"byte 0x{data[error.start]:02x} is not UTF-8; a rule file is UTF-8 text. Save it as UTF-8."
        ) from error
    lines = text.split("\n")
    bad = FORBIDDEN.search(text)
    if bad:
        line, column = text.count("\n", 0, bad.start()), bad.start() - text.rfind("\n", 0, bad.start()) - 1
        raise control_character(_at(source, line, column, []), bad)  # a line that is not shown
    found = Problems()
    try:
        root = Composer(source, lines, found, number_keys).compose(yaml.parse(text, Loader=parser))
    except RuleError as error:
        found.last(error)
        raise found.together() from error.__cause__
    except yaml.MarkedYAMLError as error:
        found.last(_malformed(error, lines, source))
        raise found.together() from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML's own int() and chr() calls
        found.last(_ill_formed(_at(source, 0, 0, lines), error, "Correct it."))
        raise found.together() from error
    if problems is None:
        found.check()
    else:
        problems.extend(found)
    if root is None:
        raise RuleError(f"{source}:1: the file is empty; it needs version: 1 and rules. Write them.")
    return root


def _at(source: str, line: int, column: int, lines: list[str]) -> Where:
    """A place for a refusal that names the column, too; line and column from 0."""
    return Where(f"{source}:{line + 1}:{column + 1}", line + 1, column + 1, 1, lines)


def from_python(value: object, source: str, where: str = "") -> Node:
    """The same nodes from dicts and lists; `where` then names the item, as in "source:rules[2].match".

    Raises   RuleError for types YAML does not have, non-text keys, and what is too deep or too large
    """
    budget = iter(range(MAX_NODES))

    def build(value: object, where: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise too_deep(f"{source}:{where}")
        if next(budget, None) is None:
            raise too_many(source)
        place = f"{source}:{where}" if where else source
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise RuleError(f"{place}: the key {show(key)} is not text; keys are text. Quote it.")
            prefix = f"{where}." if where else ""
            return Node(
                {k: build(v, f"{prefix}{clean(k, place)}", depth + 1) for k, v in value.items()}, place
            )
        if isinstance(value, list | tuple):
            return Node([build(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)], place)
        if isinstance(value, str):
            return Node(clean(value, place), place)
        if isinstance(value, int):
            return Node(integer(value, place), place)
        if isinstance(value, float):
            return Node(finite(value, place), place)
        if value is None:
            return Node(value, place)
        raise RuleError(
            f"{place}: {type(value).__name__} is not a value of the rule language; allowed are text, "
            "numbers, true, false, null, lists and mappings. Convert it."
        )

    return build(value, where, 0)


def _malformed(error: yaml.MarkedYAMLError, lines: list[str], source: str) -> RuleError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    said = " ".join(part for part in (error.context, error.problem) if part)
    if "maximum nesting depth" in said:  # libyaml's own limit, which comes before ours where it has one
        return too_deep(_at(source, line, column, lines))
    if line < len(lines) and "${" in lines[line]:
        advice = "Put ${…} in quotes where it stands inside { } or [ ]."
    else:
        advice = "Correct it."
    return _ill_formed(_at(source, line, column, lines), said, advice)


def _ill_formed(where: Where, said: object, advice: str) -> RuleError:
    return Place(where).refusal(f"malformed YAML: {said}; a rule file is well-formed YAML. {advice}")
