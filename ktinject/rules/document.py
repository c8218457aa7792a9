"""Step one of reading: bytes or Python values become nodes that know where they stand.

Nothing here knows what a rule is. YAML is taken as PyYAML's safe *events*, one at a time, so a limit stops a
document before anything is built from it, and no input is deep enough to recurse on. Plain scalars have the
types of the YAML 1.2 core schema: `yes`, `no`, `on` and `0o17` are text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ktinject.errors import RuleError
from ktinject.rules.wording import show

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 16
_MAX_DIGITS = 18

# Also the line breaks that only YAML knows: with them our line numbers and an editor's would differ.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
_CONSTANTS = {word: value for value, words in (
    (None, ("", "~", "null", "Null", "NULL")),
    (True, ("true", "True", "TRUE")),
    (False, ("false", "False", "FALSE")),
) for word in words}  # fmt: skip
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+", re.ASCII)

PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the document. `where` is "file:line"; a mapping's value stands where its key does."""

    value: bool | int | float | str | list[Node] | dict[str, Node] | None
    where: str

    def plain(self) -> Any:
        """The value without the places."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value


def from_file(path: Path, source: str) -> Node:
    """Read a file. Raises RuleError for what cannot be read and for everything `from_bytes` refuses."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise RuleError(f"{source}: {reason}; a rule file must be readable. Check the path.") from error
    return from_bytes(data, source)


def from_bytes(data: bytes, source: str, parser: Any = PARSER) -> Node:
    """Read one YAML document.

    Raises   RuleError with "source:line:column" for text that is not UTF-8, malformed or too large, and with
             "source:line" for anchors, aliases, tags, duplicate or non-text keys and several documents
    """
    if len(data) > MAX_BYTES:
        raise RuleError(f"{source}: larger than 1 MiB; a rule file is at most 1 MiB. Split the rules.")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise RuleError(
            f"{source}:{line}:{column}: byte 0x{data[error.start]:02x} is not UTF-8; "
            "a rule file is UTF-8 text. Save it as UTF-8."
        ) from error
    bad = _FORBIDDEN.search(text)
    if bad:
        line, column = text.count("\n", 0, bad.start()) + 1, bad.start() - text.rfind("\n", 0, bad.start())
        raise _control_character(f"{source}:{line}:{column}", bad)
    try:
        root = _compose(yaml.parse(text, Loader=parser), source)
    except RuleError:
        raise
    except yaml.MarkedYAMLError as error:
        raise _malformed(error, text, source) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML's own int() and chr() calls
        raise RuleError(_ill_formed(f"{source}:1:1", error, "Correct it.")) from error
    if root is None:
        raise RuleError(f"{source}:1: the file is empty; it needs version: 1 and rules. Write them.")
    return root


def from_python(value: object, source: str, where: str = "") -> Node:
    """The same nodes from dicts and lists; `where` then names the item, as in "source:rules[2].match".

    Raises   RuleError for types YAML does not have, non-text keys, and what is too deep or too large
    """
    budget = iter(range(MAX_NODES))

    def build(value: object, where: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise RuleError(_too_deep(f"{source}:{where}"))
        if next(budget, None) is None:
            raise RuleError(_too_many(source))
        place = f"{source}:{where}" if where else source
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise RuleError(f"{place}: the key {show(key)} is not text; keys are text. Quote it.")
            prefix = f"{where}." if where else ""
            return Node(
                {k: build(v, f"{prefix}{_clean(k, place)}", depth + 1) for k, v in value.items()}, place
            )
        if isinstance(value, list | tuple):
            return Node([build(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)], place)
        if isinstance(value, str):
            return Node(_clean(value, place), place)
        if isinstance(value, int):
            if abs(value) >= 10**_MAX_DIGITS:
                raise RuleError(_too_long(place))
            return Node(value, place)
        if isinstance(value, float):
            return Node(_finite(value, place), place)
        if value is None:
            return Node(value, place)
        raise RuleError(
            f"{place}: {type(value).__name__} is not a value of the rule language; allowed are text, "
            "numbers, true, false, null, lists and mappings. Convert it."
        )

    return build(value, where, 0)


def scalar(text: str, where: str) -> bool | int | float | str | None:
    """What a plain scalar means. Raises RuleError for a number too long or too large."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise RuleError(_too_long(where))
        return int(text)
    if _FLOAT.fullmatch(text) and not _LEADING_ZERO.fullmatch(text):
        return _finite(float(text), where)
    return text


class _Open:
    """A list or mapping whose end has not been read yet."""

    __slots__ = ("items", "key", "where")

    def __init__(self, items: list[Node] | dict[str, Node], where: str) -> None:
        self.items, self.where = items, where
        self.key: tuple[str, str] | None = None  # the key that waits for its value, and where it stands

    def wants_key(self) -> bool:
        return isinstance(self.items, dict) and self.key is None


def _compose(events: Iterator[yaml.Event], source: str) -> Node | None:
    root: Node | None = None
    stack: list[_Open] = []
    documents = nodes = 0
    for event in events:
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = stack.pop()
            node = Node(done.items, done.where)
        elif isinstance(event, yaml.NodeEvent):
            where = f"{source}:{_line(event)}"
            nodes += 1
            if nodes > MAX_NODES:
                raise RuleError(_too_many(where))
            _refuse_references(event, where)
            parent = stack[-1] if stack else None
            if not isinstance(event, yaml.ScalarEvent):
                if parent and parent.wants_key():
                    raise RuleError(f"{where}: a key that is a list or mapping; keys are text. Write a word.")
                if len(stack) == MAX_DEPTH:
                    raise RuleError(_too_deep(where))
                stack.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], where))
                continue
            value = scalar(event.value, where) if event.implicit[0] else event.value
            if isinstance(value, str):
                _clean(value, where)
            if parent and parent.wants_key():
                _open_key(parent, value, where)
                continue
            node = Node(value, where)
        else:
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                where = f"{source}:{_line(event)}"
                raise RuleError(f"{where}: a second document; a rule file holds one. Use a file for each.")
            continue
        if not stack:
            root = node
            continue
        parent = stack[-1]
        if isinstance(parent.items, list):
            parent.items.append(node)
        elif parent.key is not None:
            (key, where), parent.key = parent.key, None
            parent.items[key] = Node(node.value, where)
    return root


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def _refuse_references(event: yaml.NodeEvent, where: str) -> None:
    anchor = event.anchor
    if anchor is not None:
        mark = "*" if isinstance(event, yaml.AliasEvent) else "&"
        raise RuleError(
            f"{where}: {show(mark + anchor)}; anchors and aliases are not part of the rule language. "
            "Write the value out, or make it a variable."
        )
    tag = getattr(event, "tag", None)
    if tag is not None:
        raise RuleError(
            f"{where}: the tag {show(tag)}; tags are not part of the rule language, and nothing is "
            "constructed because a file says so. Remove it."
        )


def _open_key(parent: _Open, key: object, where: str) -> None:
    if not isinstance(key, str):
        raise RuleError(f"{where}: the key {show(key)} is not text; keys are text. Quote it, or use a word.")
    if key in parent.items:
        raise RuleError(f"{where}: the key {show(key)} is given twice; a key stands once. Remove one.")
    parent.key = (key, where)


def _malformed(error: yaml.MarkedYAMLError, text: str, source: str) -> RuleError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark else (0, 0)
    said = " ".join(part for part in (error.context, error.problem) if part)
    lines = text.split("\n", line + 1)
    if line < len(lines) and "${" in lines[line]:
        advice = "Put ${…} in quotes where it stands inside { } or [ ]."
    else:
        advice = "Correct it."
    return RuleError(_ill_formed(f"{source}:{line + 1}:{column + 1}", said, advice))


def _ill_formed(where: str, said: object, advice: str) -> str:
    return f"{where}: malformed YAML: {said}; a rule file is well-formed YAML. {advice}"


def _clean(text: str, where: str) -> str:
    bad = _FORBIDDEN.search(text)
    if bad:
        raise _control_character(where, bad)
    return text


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):
        raise RuleError(
            f"{where}: a number beyond the range of floats; use a finite number. Write a smaller one."
        )
    return value


def _control_character(where: str, found: re.Match[str]) -> RuleError:
    return RuleError(
        f"{where}: control character U+{ord(found[0]):04X}; text holds printable characters, tabs and "
        "newlines. Remove it."
    )


def _too_deep(where: str) -> str:
    return f"{where}: nested deeper than {MAX_DEPTH} levels; rules need fewer. Flatten it."


def _too_many(where: str) -> str:
    return f"{where}: more than {MAX_NODES:,} values; a rule file holds fewer. Split the rules."


def _too_long(where: str) -> str:
    return f"{where}: a number of more than {_MAX_DIGITS} digits; no argument needs one. Write a smaller one."
