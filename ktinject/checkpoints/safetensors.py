"""Read and check the header of a safetensors file: names, dtypes, shapes and places, no data.

    0       8 bytes   n, little-endian
    8       n bytes   UTF-8 JSON {name: {"dtype": "BF16", "shape": [n, k], "data_offsets": [begin, end]}, …}
    8 + n   the rest  the tensors, row-major, back to back: no holes, no overlap, nothing before or after

No number is trusted before it is compared with the size of the file: what is allocated depends on the
header's own bytes (at most `MAX_HEADER_BYTES`, and really in the file), never on what they claim. And before a parser
makes objects of them, brackets, commas and quotes are counted: a file out of proportion to its use is refused with
little memory (256 MiB) and time (5 s).

Source: the format section of the safetensors README. Stricter than that library where two readers could
disagree; docs/reference/checkpoints.md lists where.
"""

from __future__ import annotations

import io
import json
import os
import re
import reprlib
import stat
from dataclasses import dataclass
from typing import Any, NamedTuple

from ktinject.errors import CheckpointError

MAX_HEADER_BYTES = 16 << 20  # of 100,000 tensors; shards have a thousand or two
MAX_TENSORS = 400_000  # of all files of a checkpoint; Kimi-K2's int4 has 210,000
MAX_ELEMENTS = 2**63 - 1  # torch counts in int64
DOWNLOAD_AGAIN = "Download the file again."

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

_FIELDS = {"dtype", "shape", "data_offsets"}
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_JSON_DEPTH = 3
# Objects made of a JSON text take up to 300 bytes for a pair of key and value, 80 for a value in a list.
_MAX_PAIRS, _MAX_VALUES, _MAX_STRING = 400_000, 1_500_000, 65_535

# A found value is shown in part: a name or a list may be as long as the header.
_repr = reprlib.Repr()
_repr.maxstring, _repr.maxlist, _repr.maxdict, _repr.maxlevel, _repr.maxlong = 200, 8, 4, 3, 40
shown = _repr.repr


class Entry(NamedTuple):
    """One tensor of a file; `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """A checked header; `tensors` is in the order of the data."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]


def open_file(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a regular file for reading, unbuffered. Raises CheckpointError for anything else."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        file = io.FileIO(path, opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{os.fspath(path)}: cannot be opened: {why}. Put a readable file there."
        ) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(
            f"{os.fspath(path)}: not a regular file; only those are read. Put the file itself there."
        )
    return file


def read_header(path: str | os.PathLike[str], fd: int | None = None) -> Header:
    """Read and check the header of a safetensors file.

    path     the file; with `fd` it only names the file in messages
    fd       an open descriptor; its position is neither used nor moved
    Raises   CheckpointError naming the file, and the tensor where there is one
    """
    if fd is None:
        with open_file(path) as file:
            return read_header(path, file.fileno())
    where = os.fspath(path)
    size = os.fstat(fd).st_size
    start = os.pread(fd, 9, 0)
    length = int.from_bytes(start[:8], "little")
    if start.startswith(b"version "):
        raise CheckpointError(f"{where}: a Git LFS pointer, not the weights. Fetch them with `git lfs pull`.")
    if len(start) < 9:
        raise CheckpointError(
            f"{where}: {size} bytes are too few for a safetensors file; it is truncated. {DOWNLOAD_AGAIN}"
        )
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: the file claims a header of {length} bytes; at most {MAX_HEADER_BYTES} are allowed. "
            f"It is damaged, or not a safetensors file. {DOWNLOAD_AGAIN}"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{where}: the file claims a header of {length} bytes, but {size - 8} follow; it is truncated. "
            f"{DOWNLOAD_AGAIN}"
        )
    if start[8:] != b"{":
        raise CheckpointError(
            f"{where}: the header starts with {start[8:]!r}; it must start with '{{'. "
            f"It is damaged, or not a safetensors file. {DOWNLOAD_AGAIN}"
        )
    raw = os.pread(fd, length, 8)
    if len(raw) != length:
        raise CheckpointError(f"{where}: the file became shorter while its header was read. Load it again.")
    table = parse_json(raw, f"{where}: header", DOWNLOAD_AGAIN)
    metadata = _metadata(table.pop("__metadata__", {}), where)
    return Header(_entries(table, 8 + length, size, where), metadata)


def parse_json(raw: bytes, where: str, remedy: str) -> dict[str, Any]:
    """Parse one JSON object, refusing what JSON readers disagree on.

    Refused besides bad JSON: bytes that are not UTF-8, a key given twice in one object, NaN and Infinity,
    lone surrogates, deep nesting. An integer of 20 digits or more, and -0, come back as floats.

    Raises   CheckpointError, starting with `where` and ending with `remedy`
    """

    def refused(found: str) -> CheckpointError:
        return CheckpointError(f"{where}: {found}. {remedy}")

    if found := out_of_proportion(raw, _JSON_DEPTH):
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


def _metadata(metadata: Any, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise CheckpointError(
            f"{where}: __metadata__ is {shown(metadata)}; an object of strings is allowed. {DOWNLOAD_AGAIN}"
        )
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"{where}: __metadata__ {shown(key)} is {shown(value)}; a string is allowed. {DOWNLOAD_AGAIN}"
            )
    return metadata


def _entries(table: dict[str, Any], data_start: int, size: int, where: str) -> dict[str, Entry]:
    """Check every tensor's fields, then that all together cover the data exactly."""
    data_bytes = size - data_start

    def refused(name: str, found: str) -> CheckpointError:
        return CheckpointError(f"{where}: tensor {shown(name)}: {found}. {DOWNLOAD_AGAIN}")

    entries = []
    for name, fields in table.items():
        if not isinstance(fields, dict) or fields.keys() != _FIELDS:
            raise refused(name, f"found {shown(fields)}; exactly dtype, shape and data_offsets are allowed")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        bits = BITS.get(dtype) if isinstance(dtype, str) else None
        if bits is None:
            raise refused(name, f"dtype {shown(dtype)} is not known; allowed: {', '.join(BITS)}")
        count = _count(shape)
        if count is None:
            raise refused(
                name, f"shape {shown(shape)}; integers from 0, with a product below 2^63, are allowed"
            )
        if count * bits % 8:
            raise refused(name, f"shape {shown(shape)} of {dtype} does not fill whole bytes")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(x) is int for x in offsets)):
            raise refused(name, f"data_offsets {shown(offsets)}; two integers are allowed")
        begin, end = offsets
        if not 0 <= begin <= end:
            raise refused(name, f"data_offsets {offsets}; 0 <= begin <= end is needed")
        if end > data_bytes:
            raise refused(
                name,
                f"data_offsets {offsets} end outside the file's {data_bytes} bytes of data; it is truncated",
            )
        if end - begin != count * bits // 8:
            raise refused(
                name,
                f"data_offsets {offsets} hold {end - begin} bytes, "
                f"but {dtype} {shown(shape)} takes {count * bits // 8}",
            )
        entries.append((name, Entry(dtype, tuple(shape), data_start + begin, end - begin)))

    entries.sort(key=lambda item: item[1][2:])
    position, previous = data_start, ""
    for name, entry in entries:
        if entry.offset < position:
            raise refused(name, f"its data overlaps that of tensor {shown(previous)}")
        if entry.offset > position:
            raise refused(name, f"{entry.offset - position} bytes before its data belong to no tensor")
        position, previous = entry.offset + entry.bytes, name
    if position != size:
        raise CheckpointError(
            f"{where}: the last {size - position} bytes belong to no tensor. {DOWNLOAD_AGAIN}"
        )
    return dict(entries)


def _count(shape: Any) -> int | None:
    """The number of elements of a shape, None if it is not one that torch can hold."""
    if not isinstance(shape, list):
        return None
    count = 1
    for extent in shape:
        # Zero extents are left out of the bounded product: torch computes strides from the others.
        if type(extent) is not int or extent < 0 or (count := count * (extent or 1)) > MAX_ELEMENTS:
            return None
    return 0 if 0 in shape else count
