"""Every way a header can lie is refused with the file, the tensor and the reason; what is true is read."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from handmade import field, image
from safetensors import SafetensorError, safe_open

from ktinject.checkpoints.reader import Header
from ktinject.checkpoints.safetensors import BITS, MAX_HEADER_BYTES, read_header
from ktinject.errors import CheckpointError

DATA = b"1234"
A, B = "a.weight", "b.weight"


def one(*fields: Any, length: int | None = None, **named: Any) -> bytes:
    return image({A: field(*fields, **named)}, DATA, length)


def two(a: dict[str, Any], b: dict[str, Any]) -> bytes:
    return image({A: a, B: b}, DATA)


def inner(fields: str) -> bytes:
    return image(('{"a.weight":{' + fields + "}}").encode(), DATA)


GOOD = one()
LENGTH = len(GOOD) - 12


def numbers(shape: str = "[4]", begin: str = "0", end: str = "4") -> bytes:
    return inner(f'"dtype":"U8","shape":{shape},"data_offsets":[{begin},{end}]')


ENTRY = '"dtype":"U8","shape":[4],"data_offsets":[0,4]'

# id: (bytes of the file, tensor that must be named, words that must be there)
CORRUPT: dict[str, tuple[bytes, str | None, str]] = {
    # the first eight bytes
    "empty file": (b"", None, "too few"),
    "seven bytes": (GOOD[:7], None, "truncated"),
    "length only": (GOOD[:8], None, "truncated"),
    "length zero": (image({}, DATA, length=0), None, "not JSON"),
    "length one short": (one(length=LENGTH - 1), None, "brackets"),
    "length one long": (one(length=LENGTH + 1), None, "Extra data"),
    "length past the end": (one(length=400), None, "follow; it is truncated"),
    "length over the cap": (one(length=MAX_HEADER_BYTES + 1), None, f"at most {MAX_HEADER_BYTES}"),
    "length 8 EiB": (one(length=2**63), None, f"at most {MAX_HEADER_BYTES}"),
    "length all ones": (one(length=2**64 - 1), None, f"at most {MAX_HEADER_BYTES}"),
    "length big-endian": (len(GOOD[8:-4]).to_bytes(8, "big") + GOOD[8:], None, f"at most {MAX_HEADER_BYTES}"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None, "git lfs pull"),
    "html page": (b"<!DOCTYPE html><html></html>", None, f"at most {MAX_HEADER_BYTES}"),
    # JSON
    "byte order mark": (image(b"\xef\xbb\xbf{}"), None, "must start with '{'"),
    "leading space": (image(b" {}"), None, "must start with '{'"),
    "array": (image(b"[]"), None, "must start with '{'"),
    "cut in a string": (image(b'{"a.weight'), None, "brackets"),
    "cut after a comma": (image(b'{"a.weight":{},}'), None, "not JSON"),
    "single quotes": (image(b"{'a.weight':{}}"), None, "not JSON"),
    "comment": (image(b'{/**/"a.weight":{}}'), None, "not JSON"),
    "trailing NUL": (image(b"{}\0"), None, "Extra data"),
    "two objects": (image(b"{}{}"), None, "Extra data"),
    "not UTF-8": (image(b'{"a\xff":{}}'), None, "byte 3 is not UTF-8"),
    "overlong UTF-8": (image(b'{"a\xc0\x80":{}}'), None, "not UTF-8"),
    "UTF-8 surrogate": (image(b'{"a\xed\xa0\x80":{}}'), None, "not UTF-8"),
    "control character": (image(b'{"a\n":{}}'), None, "control character"),
    "half surrogate pair": (image(b'{"\\ud800":{' + ENTRY.encode() + b"}}", DATA), None, "surrogate"),
    "half pair in metadata": (image(b'{"__metadata__":{"k":"\\udc00"}}'), None, "surrogate"),
    "NaN": (numbers("[NaN]"), None, "NaN is not a JSON number"),
    "Infinity": (numbers(end="Infinity"), None, "Infinity is not"),
    "nested a million deep": (image(b'{"a":' * 1_000_000), None, "1,000,000 values"),
    "nested and closed": (image(b'{"a":' * 500 + b"0" + b"}" * 500), None, "nest too deep"),
    "lists nested a million deep": (image(b"{" + b"[" * 1_000_000), None, "brackets"),
    "tensor twice": (image(f'{{"a.weight":{{{ENTRY}}},"a.weight":{{{ENTRY}}}}}'.encode(), DATA), A, "twice"),
    "field twice": (inner(ENTRY + ',"dtype":"I8"'), A, "'dtype' is given twice"),
    "metadata twice": (image(b'{"__metadata__":{},"__metadata__":{}}'), None, "is given twice"),
    "metadata key twice": (image(b'{"__metadata__":{"k":"1","k":"2"}}'), None, "'k' is given twice"),
    # metadata
    "metadata null": (image({"__metadata__": None}), None, "__metadata__ is None"),
    "metadata list": (image({"__metadata__": ["format", "pt"]}), None, "an object of strings"),
    "metadata number": (image({"__metadata__": {"step": 3}}), None, "__metadata__ 'step' is 3"),
    "metadata object": (image({"__metadata__": {"step": {}}}), None, "a string is allowed"),
    # fields
    "entry null": (image({"a.weight": None}, DATA), A, "found None"),
    "entry as a list": (image({"a.weight": ["U8", [4], [0, 4]]}, DATA), A, "exactly dtype, shape and"),
    "entry empty": (image({"a.weight": {}}), A, "exactly dtype, shape and data_offsets"),
    "no dtype": (inner('"shape":[4],"data_offsets":[0,4]'), A, "exactly dtype"),
    "no shape": (inner('"dtype":"U8","data_offsets":[0,4]'), A, "exactly dtype"),
    "no offsets": (inner('"dtype":"U8","shape":[4]'), A, "exactly dtype"),
    "another field": (one(strides=[1]), A, "exactly dtype"),
    # dtype
    "dtype unknown": (one("F128"), A, "dtype 'F128' is not known; allowed: F64"),
    "dtype lower case": (one("u8"), A, "dtype 'u8'"),
    "dtype number": (one(8), A, "dtype 8"),
    "dtype list": (one(["U8"]), A, "dtype ['U8']"),
    "dtype object": (one({"U8": None}), A, "dtype {'U8': None}"),
    # shape
    "shape null": (one(shape=None), A, "shape None"),
    "shape number": (one(shape=4), A, "shape 4"),
    "shape negative": (one(shape=(-4,)), A, "shape [-4]"),
    "shape two negatives": (one(shape=(-2, -2)), A, "integers from 0"),
    "shape true": (one(shape=(True, 4)), A, "shape [True, 4]"),
    "shape float": (one(shape=(4.0,)), A, "shape [4.0]"),
    "shape exponent": (numbers("[4e0]"), A, "shape [4.0]"),
    "shape minus zero": (numbers("[-0]", end="0"), A, "shape [-0.0]"),
    "shape string": (one(shape=("4",)), A, "shape ['4']"),
    "shape of shapes": (one(shape=([4],)), A, "shape [[4]]"),
    "shape 5000 digits": (numbers("[" + "9" * 5000 + "]"), A, "shape [inf]"),
    "shape 2^64 + 4": (one(shape=(2**64 + 4,)), A, "below 2^63"),
    "product 2^64 + 4": (one(shape=(4, 2**62 + 1)), A, "below 2^63"),
    "product overflows to 4": (one(shape=(2**32, 2**32, 4)), A, "below 2^63"),
    "bits overflow": (one("F64", (2**61,)), A, f"takes {2**64}"),
    "zero hides an overflow": (image({"a.weight": field(shape=(0, 2**62, 4), end=0)}), A, "below 2^63"),
    "half a byte": (one("F4", (7,)), A, "whole bytes"),
    "18 bits": (image({"a.weight": field("F6_E2M3", (3,), end=3)}, DATA[:3]), A, "whole bytes"),
    # offsets
    "offsets null": (inner('"dtype":"U8","shape":[4],"data_offsets":null'), A, "data_offsets None"),
    "one offset": (inner('"dtype":"U8","shape":[4],"data_offsets":[4]'), A, "two integers"),
    "three offsets": (inner('"dtype":"U8","shape":[4],"data_offsets":[0,4,4]'), A, "two integers"),
    "offset float": (numbers(end="4.0"), A, "data_offsets [0, 4.0]"),
    "offset minus zero": (numbers(begin="-0"), A, "data_offsets [-0.0, 4]"),
    "offset true": (numbers("[1]", end="true"), A, "data_offsets [0, True]"),
    "offset string": (one(end="4"), A, "two integers"),
    "offset negative": (one(begin=-4, end=0), A, "0 <= begin <= end"),
    "offsets reversed": (one(begin=4, end=0), A, "0 <= begin <= end"),
    "offset past the end": (one(shape=(5,), end=5), A, "4 bytes of data; it is truncated"),
    "offset 2^63 - 1": (one(shape=(2**63 - 1,), end=2**63 - 1), A, "outside the file"),
    "offset 2^64": (one(begin=2**64, end=2**64 + 4), A, "two integers"),
    "too few bytes for the shape": (one(shape=(5,)), A, "hold 4 bytes, but U8 [5] takes 5"),
    "too many bytes for the dtype": (one("F16", (1,)), A, "F16 [1] takes 2"),
    "scalar with four bytes": (one(shape=()), A, "takes 1"),
    "empty shape with data": (one(shape=(0, 4)), A, "takes 0"),
    # the data as a whole
    "truncated data": (GOOD[:-1], A, "3 bytes of data; it is truncated"),
    "no data": (GOOD[:-4], A, "0 bytes of data; it is truncated"),
    "a byte too many": (GOOD + b"5", None, "the last 1 bytes belong to no tensor"),
    "no tensors, but data": (image({}, DATA), None, "the last 4 bytes"),
    "hole at the start": (one(shape=(3,), begin=1), A, "1 bytes before its data"),
    "hole in the middle": (two(field("U8", (1,), 0, 1), field("U8", (2,), 2, 4)), B, "1 bytes before"),
    "same data twice": (two(field(), field()), B, "overlaps that of tensor 'a.weight'"),
    "overlap by one": (two(field("U8", (3,), 0, 3), field("U8", (2,), 2, 4)), B, "overlaps that of"),
    "one inside the other": (two(field(), field("U8", (1,), 1, 2)), B, "overlaps that of"),
    "empty tensor inside another": (two(field(), field("U8", (0,), 2, 2)), B, "overlaps that of"),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRUPT)
def test_a_corrupt_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    content, tensor, words = CORRUPT[case]
    path = tmp_path / "model-00003-of-00007.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert tensor is None or f"{tensor!r}" in message
    assert message.endswith((".", "`git lfs pull`.")) and len(message) < 1000


def test_there_are_enough_corruptions() -> None:
    assert len(CORRUPT) >= 90


# What the safetensors library lets through, and why it is refused here: docs/reference/checkpoints.md.
STRICTER = {
    "leading space",  # the format says that a header begins with {
    "tensor twice",  # the format forbids it, and the library keeps the last
    "metadata key twice",
    "metadata null",
    "entry as a list",  # fields told apart by their order
    "dtype object",
    "another field",  # it may change what the bytes mean
    "zero hides an overflow",  # torch cannot hold such a tensor
}


def library_refuses(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return False
    except SafetensorError:
        return True


@pytest.mark.parametrize("case", CORRUPT)
def test_only_known_cases_are_stricter_than_the_library(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CORRUPT[case][0])
    assert library_refuses(path) == (case not in STRICTER)


GOOD_FILES: dict[str, bytes] = {
    "one tensor": GOOD,
    "nothing at all": image({}),
    "metadata only": image({"__metadata__": {"format": "pt", "json": '{"[": "}"}'}}),
    "trailing spaces": image(b"{}      "),
    "trailing newline": image(b"{}\n\t\r "),
    "scalar": image({"a": field(shape=(), end=1)}, b"1"),
    "empty tensors": two(field("U8", (0, 9), 0, 0), field()),
    "empty tensor at the end": two(field(), field("U8", (0,), 4, 4)),
    "data in another order than names": two(field("U8", (1,), 3, 4), field("U8", (3,), 0, 3)),
    "fields in another order": inner('"data_offsets":[0,4],"dtype":"U8","shape":[4]'),
    "spaces everywhere": inner(' "dtype" : "U8" , "shape" : [ 4 ] , "data_offsets" : [ 0 ,\n4 ] '),
    "brackets in names": image({'[[{{"\\': field(), "]}": field("U8", (0,), 4, 4)}, DATA),
    "odd names": image({"": field("U8", (1,), 0, 1), "\0\u00e9\U0001f600": field("U8", (3,), 1, 4)}, DATA),
    "escaped names": image(b'{"\\u0061\\ud83d\\ude00\\/":{' + ENTRY.encode() + b"}}", DATA),
    "rank 12": image({"a": field(shape=(1,) * 10 + (2, 2))}, DATA),
    "huge but empty": image({"a": field(shape=(2**62, 0), end=0)}),
    "four-bit": image({"a": field("F4", (8,))}, DATA),
    "six-bit": image({"a": field("F6_E3M2", (4,), end=3)}, b"123"),
}  # fmt: skip


@pytest.mark.parametrize("case", GOOD_FILES)
def test_a_good_file_reads_as_the_library_reads_it(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD_FILES[case])
    header = read_header(path)
    with safe_open(path, framework="pt") as theirs:
        assert set(header.tensors) == set(theirs.keys())
        assert header.metadata == (theirs.metadata() or {})
        for name, entry in header.tensors.items():
            view = theirs.get_slice(name)
            assert (entry.dtype, entry.shape) == (view.get_dtype(), tuple(view.get_shape()))


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_of_the_library_is_known(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(image({"a": field(dtype, (8, 2), end=2 * BITS[dtype])}, bytes(2 * BITS[dtype])))
    assert read_header(path).tensors["a"].bytes == 2 * BITS[dtype]
    assert not library_refuses(path)


def test_tensors_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD_FILES["data in another order than names"])
    header = read_header(path)
    assert list(header.tensors) == [B, A]
    begin = path.stat().st_size - 4
    assert [entry.offset for entry in header.tensors.values()] == [begin, begin + 3]


def test_a_descriptor_keeps_its_position(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    with path.open("rb") as file:
        file.seek(5)
        assert isinstance(read_header("elsewhere", file.fileno()), Header)
        assert file.tell() == 5


@pytest.mark.parametrize(
    "length, size",
    [(length, size) for length in (2**27, 2**31, 2**40, 2**63, 2**64 - 1) for size in (0, 9, 72, 2**40)]
    + [(MAX_HEADER_BYTES, size) for size in (14, 72, MAX_HEADER_BYTES)],
)
def test_a_claim_allocates_nothing(length: int, size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(image(b'{"a":', length=length))
    os.truncate(path, size)
    tracemalloc.start()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 4 << 10


def test_a_large_tensor_in_a_small_file_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(image({"a": field("F32", (2**61 - 1,), end=2**63 - 4)}, DATA))
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="outside the file"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_long_names_and_values_are_shown_in_part(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(image({"n" * 10**6: field("D" * 10**6, [7] * 10**5)}, DATA))
    with pytest.raises(CheckpointError, match=r"nnn.*DDD") as caught:
        read_header(path)
    assert len(str(caught.value)) < 1000


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "pipe", Path("/dev/null"), tmp_path / ("n" * 300)):
        with pytest.raises(CheckpointError, match=r"cannot be opened|not a regular file"):
            read_header(path)


def test_a_file_cut_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(GOOD)
    pread = os.pread

    def cut(fd: int, count: int, offset: int) -> bytes:
        got = pread(fd, count, offset)
        os.truncate(path, 20)
        return got

    monkeypatch.setattr(os, "pread", cut)
    with pytest.raises(CheckpointError, match="became shorter"):
        read_header(path)
