"""safetensors: the files of a checkpoint, what their index says, and the header of each file, checked.

    folder ─┬─ model.safetensors
            ├─ model.safetensors.index.json ── its shards
            └─ the only *.safetensors file

A file:

    0       8 bytes   n, little-endian
    8       n bytes   UTF-8 JSON {name: {"dtype": "BF16", "shape": [n, k], "data_offsets": [begin, end]}, …}
    8 + n   the rest  the tensors, row-major, back to back: no holes, no overlap, nothing before or after

No number is trusted before it is compared with the size of the file: what is allocated depends on the
header's own bytes (at most `MAX_HEADER_BYTES`, and really in the file), never on what they claim. A file out of
proportion to its use is refused with little memory (256 MiB) and time (5 s).

Source: the format section of the safetensors README. Stricter than that library where two readers could
disagree; docs/reference/checkpoints.md lists where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ktinject.checkpoints.files import CONVERT, DOWNLOAD_AGAIN, PICKLES, check_inside, names_in, open_file
from ktinject.checkpoints.json_text import parse_json
from ktinject.checkpoints.reader import MAX_ELEMENTS, Entry, Header, Reader, Shard, open_shards
from ktinject.errors import CheckpointError, few, listed, shown

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 << 20  # the index of DeepSeek-V3, with some 91,000 names, has 9 MB
MAX_HEADER_BYTES = 16 << 20  # of 100,000 tensors; shards have a thousand or two

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}

_FIELDS = {"dtype", "shape", "data_offsets"}


class SafetensorsReader(Reader):
    """A file, or an index and its shards."""

    container = "safetensors"
    suffixes = (".safetensors", ".json")

    @classmethod
    def main_file(cls, folder: Path) -> str | None:
        # In the order of transformers, which loads what is not swapped.
        for name in (SINGLE, INDEX):
            if os.path.isfile(folder / name):
                return name
        found = [name for name in names_in(folder) if name.endswith(".safetensors")]
        if len(found) > 1:
            raise CheckpointError(
                f"{folder}: {len(found)} safetensors files but no {INDEX}, which says what belongs together:"
                f"{listed(map(shown, found))}\nDownload the index, or give the path of one file or index."
            )
        return found[0] if found else None

    @classmethod
    def open(cls, path: Path, file: Path, quantization: Mapping[str, Any]) -> Self:
        folder = file.parent
        if file.suffix.lower() != ".json":
            with ExitStack() as opened:
                shards = open_shards(folder, [file.name], opened, _read_tensors)
                opened.pop_all()
            return cls(path, shards, quantization)
        weight_map, total_bytes = _read_index(file)
        files = sorted(set(weight_map.values()))
        for name in files:
            check_inside(folder, name)
        absent = [shown(name) for name in files if not os.path.exists(folder / name)]
        if len(absent) == len(files):
            return cls(path, {}, quantization, weight_map, total_bytes)
        if absent:
            raise CheckpointError(
                f"{file}: {len(absent)} of its {len(files)} shards are not there:{listed(absent)}\n"
                "Download them, or, to plan from the index alone, keep no shard beside it."
            )
        with ExitStack() as opened:
            shards = open_shards(folder, files, opened, _read_tensors)
            _agree(file, weight_map, shards)
            opened.pop_all()
        return cls(path, shards, quantization)


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    """name → file name, and the bytes of all tensors if the index says so. Raises CheckpointError."""
    remedy = "Download the index again."
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_INDEX_BYTES:
            raise CheckpointError(
                f"{path}: {size} bytes; an index of at most {MAX_INDEX_BYTES} is read. {remedy}"
            )
        index = parse_json(os.pread(file.fileno(), size, 0), str(path), remedy)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map is {shown(weight_map)}; tensor names with files are needed. {remedy}"
        )
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{path}: metadata is {shown(metadata)}; an object is allowed. {remedy}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is in {shown(shard)}; a file name is needed. {remedy}"
            )
        if shard.endswith(PICKLES):
            raise CheckpointError(f"{path}: tensor {shown(name)} is in {shown(shard)}. {CONVERT}")
        if not shard.endswith(".safetensors") or not {"/", "\\", "\0"}.isdisjoint(shard):
            raise CheckpointError(
                f"{path}: tensor {shown(name)} is in {shown(shard)}; "
                f"the name of a .safetensors file in the same folder is needed. {remedy}"
            )
    total = metadata.get("total_size")
    return weight_map, total if type(total) is int and total >= 0 else None


def _agree(index: Path, weight_map: dict[str, str], shards: dict[str, Shard]) -> None:
    """Refuse shards that do not hold exactly what the index says, with everything that differs."""
    held: dict[str, list[str]] = {}
    for file, shard in shards.items():
        for name in shard.entries:
            held.setdefault(name, []).append(file)
    missing = [name for name in weight_map if name not in held]
    doubled = [name for name, files in held.items() if len(files) > 1]
    single = [(name, files[0]) for name, files in held.items() if len(files) == 1]
    moved = [name for name, file in single if weight_map.get(name, file) != file]
    unnamed = [name for name, _ in single if name not in weight_map]
    report = ""
    for title, names, where in (
        ("named by the index but in no shard", missing, lambda name: f"should be in {weight_map[name]}"),
        ("in more than one shard", doubled, lambda name: f"in {' and '.join(few(held[name]))}"),
        (
            "not in the shard that the index names",
            moved,
            lambda name: f"in {held[name][0]}, not in {weight_map[name]}",
        ),
        ("in a shard but not named by the index", unnamed, lambda name: f"in {held[name][0]}"),
    ):
        if names:
            lines = listed(names, lambda name, where=where: f"{shown(name)} ({where(name)})")  # type: ignore[misc]
            report += f"\n{len(names)} tensors are {title}:{lines}"
    if report:
        raise CheckpointError(
            f"{index}: the index and its shards do not agree.{report}\n"
            "Download the index and the shards again, from one revision."
        )


def _read_tensors(path: Path, fd: int) -> Header:
    """The header without its metadata, which nobody asks for."""
    return Header(read_header(path, fd).tensors, {})


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
