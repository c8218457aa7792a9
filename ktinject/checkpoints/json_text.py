"""JSON of strangers: refused where it is out of proportion, or where two readers could disagree.

Before a parser makes objects of a text, its brackets, commas and quotes are counted, so that a refusal takes little
memory (256 MiB) and time (5 s).
"""

from __future__ import annotations

import json
import re
from typing import Any

from ktinject.errors import CheckpointError, shown

_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTH = 3
# Objects made of a JSON text take up to 300 bytes for a pair of key and value, 80 for a value in a list.
_MAX_PAIRS, _MAX_VALUES, _MAX_STRING = 400_000, 1_500_000, 65_535


def parse_json(raw: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Parse one JSON object, refusing what JSON readers disagree on.

    Refused besides bad JSON: bytes that are not UTF-8, a key given twice in one object, NaN and Infinity,
    lone surrogates, deep nesting. An integer of 20 digits or more, and -0, come back as floats.

    Raises   CheckpointError, starting with `where` and ending with `remedy`
    """

    def refused(found: str) -> CheckpointError:
        return CheckpointError(f"{where}: {found}. {remedy}")

    if found := out_of_proportion(raw, _DEPTH):
        raise refused(found)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refused(f"byte {error.start} is not UTF-8") from None

    repeated: list[tuple[dict[str, Any], str]] = []

    def table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            seen: set[str] = set()
            repeated.append((table, next(key for key, _ in pairs if key in seen or seen.add(key))))  # type: ignore[func-returns-value]
        return table

    try:
        table = json.loads(text, object_pairs_hook=table_of, parse_int=_integer, parse_constant=_no_constant)
        if b"\\u" in raw:
            json.dumps(table, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise refused("a string holds half of a surrogate pair") from None
    except ValueError as error:
        raise refused(f"not JSON: {error}") from None
    if not isinstance(table, dict):
        raise refused(f"found {shown(table)}; a JSON object is needed")
    if repeated:
        inner, key = repeated[0]
        owner = next((f" in {shown(name)}" for name, value in table.items() if value is inner), "")
        raise refused(f"key {shown(key)} is given twice{owner}")
    return table


def out_of_proportion(raw: bytes, depth: int) -> str | None:
    """What makes a JSON text one that no parser should be given; a count of quotes counts those in strings, too."""
    pairs = max(raw.count(b":"), raw.count(b'"') // 4)
    values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
    if pairs > _MAX_PAIRS or values > _MAX_VALUES:
        most = f"{_MAX_PAIRS:,} with a key and {_MAX_VALUES:,} in all"
        return f"it has {max(pairs, values):,} values; at most {most} are read"
    # A text that is not ASCII takes up to four bytes a character, and a long string as much again.
    if len(raw) > 4 * _MAX_STRING and not raw.isascii():
        longest = max((found.end() - found.start() for found in _JSON_STRING.finditer(raw)), default=0)
        if longest > _MAX_STRING:
            return f"a string of {longest:,} bytes; at most {_MAX_STRING:,} are allowed"
    # `json` recurses in C as deep as the text nests, so the depth is bounded before it runs: each round
    # takes away at least the innermost level.
    brackets = _JSON_STRING.sub(b"", raw).translate(None, _NOT_BRACKETS)
    for _ in range(depth):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    return "the JSON's brackets do not pair up, or nest too deep" if brackets else None


def _integer(text: str) -> int | float:
    # A float is refused wherever an integer is needed; the safetensors library reads -0 as a float too.
    return int(text) if len(text) < 20 and text != "-0" else float(text)


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
