"""Mutate safetensors headers and index files, in structure and in bytes, and read them.

Only `CheckpointError` may come out. What is accepted, the safetensors library must accept and describe alike;
what is refused although the library accepts it must be refused for one of the reasons in STRICTER.

    python tests/fuzz/fuzz_safetensors.py --runs 1000000 --seed 1
    python tests/fuzz/fuzz_safetensors.py --seed 1 --first 4711 --runs 1      # one run again
"""

from __future__ import annotations

import copy
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import fuzzer
from safetensors import SafetensorError, deserialize

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.safetensors import BITS, INDEX, read_header
from ktinject.errors import CheckpointError

# See docs/reference/checkpoints.md, "Where the safetensors library reads more".
STRICTER = (
    "must start with '{'",
    "is given twice",
    "__metadata__ is None",
    "exactly dtype, shape and data_offsets are allowed",
    "dtype {",
    "with a product below 2^63",
    "nest too deep",  # under keys that the library does not look at
)
INDEX_EVERY = 8


class Object(list):
    """A JSON object as pairs, so that a key can be there twice."""


class Raw(str):
    """JSON as text, valid or not."""


# fmt: off
VALUES = [
    0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
    2**64, -1, -8, -(2**63), 0.5, 1.0, 1e308, True, False, None, "", "U8", "F32", "a", "__metadata__",
    [], [0], [[]], Object(), Object([("a", 1)]), Object([("U8", None)]), "\ud800", "\0", "é", "😀",
    "[{", "\\", '"',
    *map(Raw, ("-0", "1e0", "1E400", "007", "+1", "0x1", "9" * 400, "1.", ".5", "NaN", "-Infinity", "nul")),
    *map(Raw, ("", "[", "}", "[" * 300, '{"a":' * 300, "[" * 99 + "]" * 99)),
    *map(Raw, ('"\\ud83d"', '"\\u00"', '"\\x"', '"\n"')),
]
TOKENS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"0", b"9", b"-", b"e", b" ", b"\0", b"\xff"]
# fmt: on
FIELDS = ("dtype", "shape", "data_offsets")


def dumps(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, Object):
        return "{" + ",".join(f"{dumps(key)}:{dumps(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps, value)) + "]"
    return json.dumps(value)


def header(rng: random.Random) -> tuple[Object, int]:
    """A valid header, and how many bytes of data it describes."""
    end, entries = 0, []
    for i in range(rng.choice((0, 1, 1, 2, 3, 6))):
        dtype = rng.choice([*BITS, "BF16", "U8"])
        shape = [rng.choice((0, 1, 2, 3, 5)) for _ in range(rng.randrange(4))] + (
            [8] if BITS[dtype] % 8 else []
        )
        size = BITS[dtype] // 2
        for extent in shape:
            size *= extent
        size = size * 2 // 8
        fields = Object(zip(FIELDS, (dtype, shape, [end, end + size])))
        rng.shuffle(fields)
        entries.append((f"model.{i}.weight", fields))
        end += size
    rng.shuffle(entries)
    if rng.random() < 0.2:
        entries.append(("__metadata__", Object([("format", "pt")])))
    return Object(entries), end


def index(rng: random.Random) -> Object:
    names = [(f"model.{i}.weight", f"{'one' if i < 2 else 'two'}.safetensors") for i in range(4)]
    return Object([("metadata", Object([("total_size", 16)])), ("weight_map", Object(names))])


def places(value: Any, found: list[tuple[list, int]]) -> list[tuple[list, int]]:
    """Every item of every list and object below a value, as the list and the position in it."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            found.append((value, i))
            places(item[1] if isinstance(value, Object) else item, found)
    return found


def some(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(VALUES))


def mutate_structure(rng: random.Random, root: Object) -> None:
    found = places(root, [])
    if not found:
        root.append((rng.choice(("a", "__metadata__")), some(rng)))
        return
    parent, i = rng.choice(found)
    action = rng.randrange(6)
    if action == 0:
        del parent[i]
    elif action == 1:
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[i]))
    elif action == 2:
        other, j = rng.choice(found)
        if isinstance(other, Object) == isinstance(parent, Object):
            parent[i] = copy.deepcopy(other[j])
    elif isinstance(parent, Object):
        key, value = parent[i]
        names = ("a", "", "__metadata__", *FIELDS, "weight_map", some(rng))
        parent[i] = (rng.choice(names), value) if action == 3 else (key, some(rng))
    elif isinstance(parent[i], int) and action < 5:
        parent[i] += rng.choice((-8, -1, 1, 8, 2**32))
    else:
        parent[i] = some(rng)


def mutate_bytes(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    until = min(len(data), at + rng.choice((1, 1, 2, 4, 16)))
    action = rng.randrange(5)
    if action == 0:
        data[at:until] = b""
    elif action == 1:
        data[at:at] = data[at:until]
    elif action == 2 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif action == 3:
        data[at:until] = rng.choice(TOKENS)
    else:
        data[at:at] = rng.choice(TOKENS)


def mutated(rng: random.Random, root: Object) -> bytes:
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        mutate_structure(rng, root)
    raw = bytearray(dumps(root).encode())
    for _ in range(rng.choice((0, 0, 0, 1, 2, 6))):
        mutate_bytes(rng, raw)
    return bytes(raw)


def image(rng: random.Random) -> bytes:
    """A file: length, mutated header, zeros for data."""
    root, size = header(rng)
    raw = mutated(rng, root)
    length = len(raw)
    if rng.random() < 0.05:
        length = rng.choice((length - 1, length + 1, length + 8, 0, 2**27, 2**31, 2**63, 2**64 - 1)) % 2**64
    if rng.random() < 0.05:
        size = max(0, size + rng.choice((-8, -1, 1, 8)))
    file = length.to_bytes(8, "little") + raw + bytes(size)
    return file[: rng.randrange(len(file) + 1)] if rng.random() < 0.02 else file


def try_header(content: bytes, fd: int) -> str:
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)
    try:
        theirs = {name: (view["dtype"], tuple(view["shape"])) for name, view in deserialize(content)}
    except SafetensorError:
        theirs = None
    try:
        ours = read_header("fuzz.safetensors", fd)
    except CheckpointError as error:
        assert "fuzz.safetensors: " in str(error) and len(str(error)) < 2000, error
        assert theirs is None or any(reason in str(error) for reason in STRICTER), f"only we refuse: {error}"
        return "refused by both" if theirs is None else "refused by us"
    found = {name: (entry.dtype, entry.shape) for name, entry in ours.tensors.items()}
    assert found == theirs, f"accepted as {found}, the library says {theirs}"
    return "accepted"


def try_index(content: bytes, folder: Path) -> str:
    (folder / INDEX).write_bytes(content)
    try:
        with Checkpoint.open(folder) as checkpoint:
            if checkpoint.complete:
                assert checkpoint.total_bytes == 4 * len(checkpoint.names)
                assert all(not checkpoint.read(name).any() for name in checkpoint.names)
            assert checkpoint.names == json.loads(content)["weight_map"].keys()
    except CheckpointError as error:
        assert str(folder) in str(error) and len(str(error)) < 5000, error
        return "index refused"
    return "index accepted"


def fuzz(runs: int, seed: int, first: int = 0) -> fuzzer.Outcomes:
    """Count the outcomes of `runs` runs from `first` on. Raises AssertionError, or whatever else came out."""
    fd = os.memfd_create("fuzz")
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        for shard, tensors in (("one", (0, 1)), ("two", (2, 3))):
            entries = {
                f"model.{t}.weight": dict(zip(FIELDS, ("F32", [1], [4 * i, 4 * i + 4])))
                for i, t in enumerate(tensors)
            }
            raw = json.dumps(entries).encode()
            (folder / f"{shard}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))

        def make(run: int, rng: random.Random) -> bytes:
            return image(rng) if run % INDEX_EVERY else mutated(rng, index(rng))

        def attempt(run: int, content: bytes) -> str:
            return try_header(content, fd) if run % INDEX_EVERY else try_index(content, folder)

        try:
            return fuzzer.count(range(first, first + runs), seed, make, attempt)
        finally:
            os.close(fd)


if __name__ == "__main__":
    fuzzer.main(__doc__, fuzz)
