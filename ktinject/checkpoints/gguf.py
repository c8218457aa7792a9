"""GGUF: a file or all parts of a model, and the header of each: metadata, and names, types, shapes and places.

Tensors get the names that they have in safetensors (gguf_names.py). A file:

    "GGUF", version u32 (2 or 3), number of tensors u64, number of metadata entries u64; all little-endian
    entries of metadata   key, type u32, value; a string is its length u64 and so many bytes of UTF-8
    entries of tensors    name, dimensions u32, extents u64 (the innermost first), type u32, offset u64
    padding to a multiple of `general.alignment` (32 if not given), then the tensors, each padded alike

No number is trusted before it is compared with the bytes that are left: what is allocated depends on the header's own
bytes (at most `MAX_HEADER_BYTES`, and really in the file), never on what they claim. Long arrays, such as the
tokenizer's words, are passed over. Counts have limits far above those of any model, so that a file out of proportion
to its use is refused in little time and memory.

Source: docs/gguf.md of ggml, and the sizes of its blocks.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, Self

from ktinject.checkpoints import gguf_config, gguf_names, gguf_vocabulary
from ktinject.checkpoints.files import DOWNLOAD_AGAIN, check_inside, names_in
from ktinject.checkpoints.formats import gguf_blocks
from ktinject.checkpoints.reader import MAX_ELEMENTS, Entry, Header, Reader, Vocabulary, open_shards
from ktinject.errors import CheckpointError, few, listed, shown

MAX_HEADER_BYTES = 100_000_000  # words of a tokenizer are most of it
MAX_ENTRIES, MAX_TENSORS, MAX_WORDS = 65_536, 131_072, 1_500_000  # metadata; tensors; strings in arrays
MAX_TEXT_BYTES = 16 << 20  # of all names, and strings outside of arrays, such as a chat template
MAX_NAME_BYTES = 65_535  # the format's own limit for keys
MAX_DIMENSIONS = 4
MAX_WORD_BYTES = 4_096  # of a tokenizer's word or pair of words
MAX_NUMBERS = 4_096  # of an array that is kept, such as one with a number for each layer
MAX_ALL_NUMBERS = 1 << 20  # of all arrays that are kept
MAX_WIDTH = 4_096  # of a head
ALIGNMENT = 32

# Number of the type → its name, values in a block, bytes of a block. Numbers that are absent were given up by ggml, or
# stand for what is in memory only.
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_METADATA, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of the shortest entries
_READ_BYTES = 1 << 18


_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


class GgufReader(Reader):
    """A file, or all parts of a model, with its metadata."""

    container = "GGUF"
    suffixes = (".gguf",)
    states_formats = True
    block_dtypes = gguf_blocks.TYPES
    metadata: Mapping[str, Any]
    _skipped: Mapping[str, Mapping[str, Entry]]

    @classmethod
    def main_file(cls, folder: Path) -> str | None:
        # Towers for images lie beside language models, in files of their own.
        found = [
            name for name in names_in(folder) if name.endswith(".gguf") and not name.startswith("mmproj")
        ]
        if found and _parts(folder, found[0]) != found:
            raise CheckpointError(
                f"{folder}: {len(found)} GGUF files that are not one model:{listed(map(shown, found))}\n"
                "Give the path of one, of several parts the first."
            )
        return found[0] if found else None

    @classmethod
    def open(cls, path: Path, file: Path, quantization: Mapping[str, Any]) -> Self:
        parts = _parts(file.parent, file.name)
        for name in parts:
            if name != file.name:  # a link that the user named is followed, others are the folder's
                check_inside(file.parent, name)
        with ExitStack() as opened:
            shards = open_shards(file.parent, parts, opened, read_header)
            headers = {name: (shard.metadata, shard.entries) for name, shard in shards.items()}
            named = gguf_names.rename(headers, path)
            for name, entries in named.tensors.items():
                shards[name] = replace(shards[name], entries=entries)
            opened.pop_all()
        found = cls(path, shards, quantization)
        found.made, found._skipped = named.made, named.skipped
        found.skipped = [name for tensors in named.skipped.values() for name in tensors]
        found.metadata = shards[parts[0]].metadata  # the first part has it all
        return found

    def config_values(self) -> dict[str, Any]:
        weights = {*self.tensors, *self.made}
        return gguf_config.config_values(
            self.metadata, weights, self._shape, self._rope_factors(), str(self.path)
        )

    def vocabulary(self) -> Vocabulary | None:
        file = next(iter(self._shards.values())).file
        return gguf_vocabulary.vocabulary(
            read_header(file.path, file.fileno(), gguf_vocabulary.ARRAYS), file.path
        )

    def _rope_factors(self) -> list[float] | None:
        """What the rope's frequencies are divided by, if the file says so. Raises CheckpointError."""
        for file, tensors in self._skipped.items():
            if (entry := tensors.get(gguf_names.ROPE)) is not None:
                where = f"{self._shards[file].file.path}: tensor {shown(gguf_names.ROPE)}"
                if entry.dtype != "F32" or len(entry.shape) != 1 or entry.shape[0] > MAX_WIDTH:
                    raise CheckpointError(
                        f"{where}: {entry.dtype} {list(entry.shape)}; F32 of at most {MAX_WIDTH} values is needed. "
                        f"{DOWNLOAD_AGAIN}"
                    )
                memory = bytearray(entry.bytes)
                self._shards[file].file.read_into(memoryview(memory), entry.offset, where)
                return list(struct.unpack(f"<{entry.shape[0]}f", memory))
        return None

    def _shape(self, weight: str) -> tuple[int, ...]:
        return self.made[weight].shape if weight in self.made else self.tensors[weight].shape


def _parts(folder: Path, name: str) -> list[str]:
    """The files that belong together with this one, in their order: itself, or all of a model cut into several.

    Raises   CheckpointError if some are not there
    """
    if not (found := _PART.fullmatch(name)):
        return [name]
    count = int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise CheckpointError(
            f"{folder / name}: the name says part {int(found[2])} of {count}; they are counted from 1. "
            "Give the file the name that it had where it was made."
        )
    names = [f"{found[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise CheckpointError(
            f"{folder / name}: one of {count} files, of which are not there: {', '.join(few(absent))}. Download them."
        )
    return names


class _Cursor:
    """Goes through the header, reading ahead."""

    def __init__(self, fd: int, where: str) -> None:
        self.size = os.fstat(fd).st_size
        self.at = 0
        self.text_bytes = self.words = self.numbers = 0
        self._fd, self._where = fd, where
        self._raw, self._start = b"", 0  # what was read ahead, and where that begins

    @property
    def left(self) -> int:
        return self.size - self.at

    def refuse(self, found: str) -> Never:
        raise CheckpointError(f"{self._where}: {found}. {DOWNLOAD_AGAIN}")

    def skip(self, count: int, what: str) -> int:
        """Move `count` bytes on. Returns where they begin."""
        if count > self.left:
            self.refuse(
                f"{what} takes {count} bytes, but {self.left} follow; the file is truncated or damaged"
            )
        if self.at + count > MAX_HEADER_BYTES:
            self.refuse(f"{what} ends beyond the {MAX_HEADER_BYTES} bytes that a header may have")
        self.at += count
        return self.at - count

    def take(self, count: int, what: str) -> bytes:
        start = self.skip(count, what)
        if self.at > self._start + len(self._raw):
            self._raw, self._start = (
                os.pread(self._fd, min(max(count, _READ_BYTES), self.size - start), start),
                start,
            )
            if len(self._raw) < count:
                self.refuse("the file became shorter while its header was read")
        return self._raw[start - self._start : self.at - self._start]

    def skip_texts(self, count: int, what: str) -> None:
        """Move behind so many strings; a tokenizer has some 300,000."""
        raw, at = self._raw, self.at - self._start
        for _ in range(count):
            if at + 8 > len(raw):
                self.at = self._start + at
                self.take(8, what)
                raw, at = self._raw, self.at - 8 - self._start
            length = int.from_bytes(raw[at : at + 8], "little")
            at += 8 + length
            if self._start + at > self.size or self._start + at > MAX_HEADER_BYTES:
                self.at = self._start + at - length
                self.skip(length, what)
        self.at = self._start + at

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def text(self, what: str, most: int = MAX_TEXT_BYTES) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > most:
            self.refuse(f"{what} claims {length} bytes; at most {most} are allowed")
        self.text_bytes += length
        if self.text_bytes > MAX_TEXT_BYTES:
            self.refuse(
                f"{what} ends beyond the {MAX_TEXT_BYTES} bytes that names and strings may have together"
            )
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8 (byte {error.start})")


def read_header(path: str | os.PathLike[str], fd: int, whole: Collection[str] = ()) -> Header:
    """Read and check the header of a GGUF file: its metadata is key → number, truth value, string or tuple of numbers.

    None stands for a longer array, or one of strings.


    path     only names the file in messages
    fd       an open descriptor; its position is neither used nor moved
    Raises   CheckpointError naming the file, and the tensor or key where there is one
    """
    cursor = _Cursor(fd, os.fspath(path))
    start = os.pread(fd, 8, 0)
    if start.startswith(b"version "):
        raise CheckpointError(
            f"{os.fspath(path)}: a Git LFS pointer, not the weights. Fetch them with `git lfs pull`."
        )
    if cursor.size < 24:
        cursor.refuse(f"{cursor.size} bytes are too few for a GGUF file; it is truncated")
    if start[:4] != b"GGUF":
        cursor.refuse(f"the file starts with {start[:4]!r}; a GGUF file starts with b'GGUF'")
    version = int.from_bytes(start[4:], "little")
    if version not in (2, 3):
        swapped = (
            " It is big-endian, which is not read." if int.from_bytes(start[4:], "big") in (2, 3) else ""
        )
        raise CheckpointError(
            f"{os.fspath(path)}: version {version} of GGUF; 2 and 3 are read.{swapped} "
            "Convert the original checkpoint again, on a little-endian machine."
        )
    cursor.at = 8
    tensors, entries = cursor.number("Q", "the header"), cursor.number("Q", "the header")
    for count, least, most, what in (
        (entries, _LEAST_METADATA, MAX_ENTRIES, "metadata"),
        (tensors, _LEAST_TENSOR, MAX_TENSORS, "tensors"),
    ):
        if count * least > cursor.left:
            cursor.refuse(
                f"the file claims {count} entries of {what}, but {cursor.left} bytes follow; it is truncated or damaged"
            )
        if count > most:
            cursor.refuse(f"the file claims {count} entries of {what}; at most {most} are read")
    metadata = _metadata(cursor, entries, whole)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        cursor.refuse(f"general.alignment is {shown(alignment)}; a power of two from 8 to 2^20 is allowed")
    return Header(_tensors(cursor, tensors, alignment), metadata)


def _metadata(cursor: _Cursor, entries: int, whole: Collection[str]) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(entries):
        key = cursor.text(f"key {number} of the metadata", MAX_NAME_BYTES)
        if key in metadata:
            cursor.refuse(f"key {shown(key)} is given twice")
        kind = cursor.number("I", f"the type of {shown(key)}")
        metadata[key] = _value(cursor, kind, shown(key), key in whole)
    return metadata


def _value(cursor: _Cursor, kind: int, what: str, whole: bool) -> Any:
    if kind == _STRING:
        return cursor.text(what)
    if kind == _BOOL:
        if (found := cursor.number("B", what)) > 1:
            cursor.refuse(f"{what} is {found}; a truth value is 0 or 1")
        return bool(found)
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    if kind != _ARRAY:
        cursor.refuse(f"{what} is of type {kind}, which is not known; allowed: 0 to 12")
    kind, count = cursor.number("I", what), cursor.number("Q", what)
    if kind in _SCALARS:
        return _numbers(cursor, kind, count, what, whole)
    if kind == _STRING:
        return _words(cursor, count, what, whole)
    cursor.refuse(f"{what} is an array of type {kind}; numbers, truth values and strings are allowed")


def _numbers(cursor: _Cursor, kind: int, count: int, what: str, whole: bool) -> tuple[Any, ...] | None:
    size = count * struct.calcsize("<" + _SCALARS[kind])
    cursor.numbers += count
    if (count > MAX_NUMBERS or cursor.numbers > MAX_ALL_NUMBERS) and not (whole and count <= MAX_WORDS):
        cursor.skip(size, what)
        return None
    raw = cursor.take(size, what)
    if kind == _BOOL and count and max(raw) > 1:
        cursor.refuse(f"{what} has a {max(raw)}; a truth value is 0 or 1")
    return struct.unpack(f"<{count}{_SCALARS[kind]}", raw)


def _words(cursor: _Cursor, count: int, what: str, whole: bool) -> tuple[str, ...] | None:
    if count * 8 > min(cursor.left, MAX_HEADER_BYTES):
        cursor.refuse(
            f"{what} claims {count} strings; {cursor.left} bytes follow, and a header may have {MAX_HEADER_BYTES}"
        )
    cursor.words += count
    if cursor.words > MAX_WORDS:
        cursor.refuse(f"{what} ends beyond the {MAX_WORDS} strings that arrays may have together")
    if whole:
        return tuple(cursor.text(what, MAX_WORD_BYTES) for _ in range(count))
    cursor.skip_texts(count, what)
    return None


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Entry]:
    """Check every entry, then that all together cover the data, padding left out."""
    found: dict[str, Entry] = {}
    for number in range(count):
        name = cursor.text(f"the name of tensor {number}", MAX_NAME_BYTES)
        what = f"tensor {shown(name)}"
        if name in found:
            cursor.refuse(f"{what} is given twice")
        dimensions = cursor.number("I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            cursor.refuse(f"{what}: {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))[::-1]
        kind, offset = cursor.number("I", what), cursor.number("Q", what)
        if kind not in TYPES:
            cursor.refuse(
                f"{what}: type {kind} is not known; allowed: {', '.join(t[0] for t in TYPES.values())}"
            )
        dtype, values, block_bytes = TYPES[kind]
        elements = 1
        for extent in shape:
            elements *= extent
            if not 0 < elements <= MAX_ELEMENTS:
                cursor.refuse(
                    f"{what}: shape {list(shape)}; integers from 1, with a product below 2^63, are allowed"
                )
        if shape[-1] % values:
            cursor.refuse(f"{what}: rows of {shape[-1]} values; {dtype} comes in blocks of {values}")
        if offset % alignment:
            cursor.refuse(f"{what}: offset {offset} is no multiple of the alignment {alignment}")
        found[name] = Entry(dtype, shape, offset, elements // values * block_bytes)

    data_start = -(-cursor.at // alignment) * alignment
    position, previous = data_start, ""
    placed = {}
    for name, entry in sorted(found.items(), key=lambda item: item[1].offset):
        begin = data_start + entry.offset
        if begin + entry.bytes > cursor.size:
            cursor.refuse(
                f"tensor {shown(name)}: {entry.dtype} {list(entry.shape)} at offset {entry.offset} ends outside the "
                f"file's {max(0, cursor.size - data_start)} bytes of data; it is truncated"
            )
        if begin < position:
            cursor.refuse(f"tensor {shown(name)}: its data overlaps that of tensor {shown(previous)}")
        if begin - position >= alignment:
            cursor.refuse(
                f"tensor {shown(name)}: {begin - position} bytes before its data belong to no tensor"
            )
        placed[name] = entry._replace(offset=begin)
        position, previous = begin + entry.bytes, name
    if cursor.size - position >= alignment:
        cursor.refuse(f"the last {cursor.size - position} bytes belong to no tensor")
    return placed
