"""Every way a GGUF header can lie is refused with the file, the tensor or key and the reason; what is true is read."""

from __future__ import annotations

import os
import resource
import struct
import tracemalloc
from pathlib import Path

import pytest
from gguf_by_hand import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I8,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    entry,
    image,
    tensor,
    text,
)

from ktinject.checkpoints.gguf import MAX_HEADER_BYTES, TYPES, read_header
from ktinject.checkpoints.reader import Header
from ktinject.errors import CheckpointError

A, B = "a.weight", "b.weight"
Q4_0, Q8_0 = 2, 8
DATA = bytes(16)
GOOD = image([entry("k", U32, 7)], [tensor(A, (4,))], DATA)


def one(*arguments: object, data: bytes = DATA, **named: object) -> bytes:
    return image([], [tensor(*arguments, **named)], data)  # type: ignore[arg-type]


def meta(*entries: bytes, count: int | None = None) -> bytes:
    return image(entries, counts=(None, count))


def two(first: bytes, second: bytes, data: bytes = bytes(48)) -> bytes:
    return image([], [first, second], data)


# id: (bytes of the file, what must be named, words that must be there)
CORRUPT: dict[str, tuple[bytes, str | None, str]] = {
    # the first 24 bytes
    "empty file": (b"", None, "too few"),
    "magic only": (b"GGUF", None, "too few"),
    "cut in the counts": (GOOD[:23], None, "23 bytes are too few"),
    "another magic": (image(magic=b"GGML"), None, "starts with b'GGML'"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{"dtype":"U8"}}', None, "a GGUF file starts with b'GGUF'"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None, "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html></html>", None, "starts with b'<!DO'"),
    "version 0": (image(version=b"\0\0\0\0"), None, "version 0 of GGUF; 2 and 3"),
    "version 1": (image(version=b"\1\0\0\0"), None, "version 1"),
    "version 4": (image(version=b"\4\0\0\0"), None, "version 4"),
    "big-endian": (image(version=b"\0\0\0\3"), None, "It is big-endian"),
    "one tensor claimed": (image(counts=(1, None)), None, "1 entries of tensors, but"),
    "2^63 tensors": (image(counts=(2**63, None)), None, "entries of tensors"),
    "all ones of tensors": (image(counts=(2**64 - 1, None)), None, "entries of tensors"),
    "tensors times their size is 0": (image(counts=(2**59, None)), None, "entries of tensors"),
    "one entry claimed": (image(counts=(None, 1)), None, "1 entries of metadata, but"),
    "2^60 entries": (image(counts=(None, 2**60)), None, "entries of metadata"),
    "all ones of entries": (image(counts=(None, 2**64 - 1)), None, "entries of metadata"),
    # metadata
    "key of 2^64 - 1 bytes": (meta(text(b"k", 2**64 - 1) + bytes(9)), None, "at most 65535"),
    "key of 2^63 bytes": (meta(text(b"k", 2**63) + bytes(9)), None, "at most 65535"),
    "key past the end": (meta(text(b"k", 4000) + bytes(9)), None, "takes 4000 bytes, but"),
    "key not UTF-8": (meta(entry(b"k\xff", U8, 1)), None, "not UTF-8 (byte 1)"),
    "key twice": (meta(entry("k", U8, 1), entry("k", U8, 2)), "k", "given twice"),
    "type 13": (meta(entry("k", 13, bytes(8))), "k", "type 13, which is not known"),
    "type 2^32 - 1": (meta(entry("k", 2**32 - 1, bytes(8))), "k", "not known"),
    "truth value 2": (meta(entry("k", BOOL, 2)), "k", "is 2; a truth value"),
    "value cut": (meta(entry("k", U64, b""), count=1)[:37], "k", "the file is truncated"),
    "string past the end": (meta(entry("k", STRING, text(b"v", 5000))), "k", "takes 5000 bytes"),
    "string of 2^64 - 1 bytes": (meta(entry("k", STRING, text(b"v", 2**64 - 1))), "k", "at most"),
    "string not UTF-8": (meta(entry("k", STRING, text(b"\xed\xa0\x80"))), "k", "not UTF-8"),
    "array of arrays": (meta(entry("k", ARRAY, array(ARRAY, [], 1) + bytes(16))), "k", "an array of type 9"),
    "array of type 99": (meta(entry("k", ARRAY, array(99, [], 1) + bytes(16))), "k", "an array of type 99"),
    "array past the end": (meta(entry("k", ARRAY, array(U8, [1], 999))), "k", "takes 999 bytes"),
    "array of 2^64 - 1": (meta(entry("k", ARRAY, array(F64, [], 2**64 - 1))), "k", "but"),
    "array whose bytes overflow to 8": (meta(entry("k", ARRAY, array(F64, [1.0], 2**61 + 1))), "k", "but"),
    "strings of 2^61": (meta(entry("k", ARRAY, array(STRING, [], 2**61))), "k", "claims 2305843009213693952 strings"),
    "strings of 2^64 - 1": (meta(entry("k", ARRAY, array(STRING, ["a"], 2**64 - 1))), "k", "strings; "),
    "string in an array past the end": (
        meta(entry("k", ARRAY, array(STRING, [], 1) + struct.pack("<Q", 2**64 - 1))), "k", "but",
    ),
    "truth values in an array": (meta(entry("k", ARRAY, array(BOOL, [1, 0, 2]))), "k", "has a 2; a truth value"),
    "alignment 0": (meta(entry("general.alignment", U32, 0)), "general.alignment", "power of two"),
    "alignment 4": (meta(entry("general.alignment", U32, 4)), "general.alignment", "power of two"),
    "alignment 24": (meta(entry("general.alignment", U32, 24)), "general.alignment", "is 24; a power of two"),
    "alignment 2^31": (meta(entry("general.alignment", U32, 2**31)), "general.alignment", "to 2^20"),
    "alignment as text": (meta(entry("general.alignment", STRING, "32")), "general.alignment", "is '32'"),
    "alignment as a float": (meta(entry("general.alignment", F32, 32.0)), "general.alignment", "is 32.0"),
    "alignment true": (meta(entry("general.alignment", BOOL, 1)), "general.alignment", "is True"),
    "alignment negative": (meta(entry("general.alignment", I8, -32)), "general.alignment", "is -32"),
    "alignment as an array": (
        meta(entry("general.alignment", ARRAY, array(U32, [32]))), "general.alignment", "is (32,)",
    ),
    # entries of tensors
    "name of 2^64 - 1 bytes": (image([], [text(b"a", 2**64 - 1) + bytes(40)]), None, "at most 65535"),
    "name not UTF-8": (one(b"a\xfe", (4,)), None, "not UTF-8"),
    "tensor twice": (two(tensor(A, (4,)), tensor(A, (4,), offset=32)), A, "given twice"),
    "no dimension": (one(A, ()), A, "0 dimensions; 1 to 4"),
    "five dimensions": (one(A, (1, 1, 1, 1, 4)), A, "5 dimensions"),
    "2^32 - 1 dimensions": (one(A, (4,), dimensions=2**32 - 1), A, "dimensions; 1 to 4"),
    "an extent of 0": (one(A, (0, 4)), A, "shape [4, 0]; integers from 1"),
    "an extent of 2^63": (one(A, (2**63,)), A, "below 2^63"),
    "an extent of 2^64 - 1": (one(A, (2**64 - 1,)), A, "below 2^63"),
    "product overflows to 4": (one(A, (2**32, 2**32, 4)), A, "below 2^63"),
    "product 2^64 + 4": (one(A, (4, 2**62 + 1)), A, "below 2^63"),
    "bytes overflow": (one(A, (2**61,)), A, "ends outside the file"),
    "type 4, given up": (one(A, (32,), 4), A, "type 4 is not known; allowed: F32"),
    "type 36, given up": (one(A, (32,), 36), A, "type 36"),
    "type 2^32 - 1 of a tensor": (one(A, (32,), 2**32 - 1), A, "is not known"),
    "half a block": (one(A, (16,), Q4_0), A, "rows of 16 values; Q4_0 comes in blocks of 32"),
    "blocks across rows": (one(A, (16, 2), Q8_0), A, "rows of 16 values"),
    "K-quants of 32": (one(A, (32,), 12), A, "Q4_K comes in blocks of 256"),
    "cut in an entry": (one(A, (4, 1, 1))[:66], A, "the file is truncated"),
    # places
    "offset not aligned": (one(A, (4,), offset=16), A, "no multiple of the alignment 32"),
    "offset 2^64 - 32": (one(A, (4,), offset=2**64 - 32), A, "ends outside the file's 16 bytes of data"),
    "offset past the end": (one(A, (4,), offset=64), A, "outside the file's 16 bytes"),
    "truncated data": (GOOD[:-1], A, "15 bytes of data; it is truncated"),
    "no data": (GOOD[:-16], A, "0 bytes of data"),
    "padding cut, too": (GOOD[:-17], A, "0 bytes of data"),
    "same data twice": (two(tensor(A, (4,)), tensor(B, (4,))), B, "overlaps that of tensor 'a.weight'"),
    "one inside the other": (two(tensor(A, (12,)), tensor(B, (1,), offset=32)), B, "overlaps that of"),
    "hole at the start": (one(A, (4,), offset=32, data=bytes(48)), A, "32 bytes before its data"),
    "hole in the middle": (two(tensor(A, (4,)), tensor(B, (1,), offset=64), bytes(68)), B, "48 bytes before"),
    "data after the last": (GOOD + bytes(32), None, "the last 32 bytes belong to no tensor"),
    "no tensors, but data": (image(data=bytes(64)), None, "the last 64 bytes"),
}  # fmt: skip


def read(path: Path) -> Header:
    with path.open("rb") as file:
        return read_header(path, file.fileno())


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, named, words = CORRUPT[case]
    path = tmp_path / "model-00003-of-00007.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert named is None or named in message
    assert message.endswith((".", "`git lfs pull`.")) and len(message) < 1000


def test_there_are_enough_corruptions() -> None:
    assert len(CORRUPT) >= 70


GOOD_FILES: dict[str, bytes] = {
    "nothing": image(),
    "version 2": image(version=b"\2\0\0\0"),
    "every type of value": image(
        [entry(f"k{kind}", kind, 1) for kind in (U8, I8, U16, U32, F32, U64, F64)]
        + [entry("truth", BOOL, 0), entry("text", STRING, "é"), entry("empty", STRING, "")]
        + [entry(f"a{kind}", ARRAY, array(kind, [1, 0, 1])) for kind in (U8, F32, U64, BOOL)]
        + [entry("words", ARRAY, array(STRING, ["a", "", "😀"])), entry("none", ARRAY, array(STRING, []))]
    ),
    "alignment 64": image(
        [entry("general.alignment", U32, 64)],
        [tensor(A, (4,)), tensor(B, (4,), offset=64)],
        bytes(80),
        alignment=64,
    ),
    "padding after the last": GOOD + bytes(16),
    "not in the order of the data": two(tensor(B, (4,), offset=32), tensor(A, (8,))),
}


@pytest.mark.parametrize("case", GOOD_FILES)
def test_a_good_file_is_read(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD_FILES[case])
    header = read(path)
    places = [tensor.offset for tensor in header.tensors.values()]
    assert places == sorted(places)
    if case == "every type of value":
        assert (
            header.metadata["truth"] is False
            and header.metadata["text"] == "é"
            and header.metadata["k6"] == 1.0
        )
        assert header.metadata["words"] is None and len(header.metadata) == 16
        assert header.metadata["a0"] == (1, 0, 1) and header.metadata["a7"] == (True, False, True)
    if case == "alignment 64":
        assert [place % 64 for place in places] == [0, 0]


@pytest.mark.parametrize("kind", TYPES)
def test_bytes_and_shape_of_every_type(kind: int, tmp_path: Path) -> None:
    name, values, size = TYPES[kind]
    path = tmp_path / "model.gguf"
    path.write_bytes(image([], [tensor(A, (2 * values, 3), kind)], bytes(6 * size)))
    (found,) = read(path).tensors.values()
    assert (found.dtype, found.shape, found.bytes) == (name, (3, 2 * values), 6 * size)


def test_types_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf").constants
    in_files = {kind.value for kind in constants.GGMLQuantizationType} - {9, 15}  # Q8_1, Q8_K: in memory only
    theirs = {n: constants.GGMLQuantizationType(n) for n in in_files}
    sizes = {n: (kind.name, *constants.GGML_QUANT_SIZES[kind]) for n, kind in theirs.items()}
    assert {n: TYPES[n] for n in sizes} == sizes


def test_claims_cost_nothing(tmp_path: Path) -> None:
    """Time and memory follow the bytes that are there, not what they say."""
    path = tmp_path / "model.gguf"
    for case in ("2^63 tensors", "all ones of entries", "strings of 2^61", "array of 2^64 - 1"):
        path.write_bytes(CORRUPT[case][0])
        used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        tracemalloc.start()
        try:
            with pytest.raises(CheckpointError):
                read(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 1


def test_a_header_may_not_be_longer_than_its_limit(tmp_path: Path) -> None:
    """A sparse file has the bytes that an array claims; its zeros are not gone through."""
    path = tmp_path / "model.gguf"
    path.write_bytes(image([entry("k", ARRAY, array(STRING, [], 1 << 34))], [tensor(A, (4,))]))
    os.truncate(path, 1 << 38)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with pytest.raises(CheckpointError, match=f"claims {1 << 34} strings; .* {MAX_HEADER_BYTES}"):
        read(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 1
