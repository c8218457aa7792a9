"""Mutate GGUF headers, in structure and in bytes, and read them.

Only `CheckpointError` may come out, whatever a file claims, in little time and memory. What is accepted must lie in the
file: tensors apart from each other, each as long as its type and shape take.

    python tests/fuzz/fuzz_gguf.py --runs 1000000 --seed 1
    python tests/fuzz/fuzz_gguf.py --seed 1 --first 4711 --runs 1      # one run again
"""

from __future__ import annotations

import math
import os
import random
import struct
from collections import Counter
from pathlib import Path

import fuzzer

from ktinject.checkpoints import gguf_names
from ktinject.checkpoints.beside import check_counts
from ktinject.checkpoints.gguf import TYPES, read_header
from ktinject.errors import CheckpointError

NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    8,
    9,
    13,
    16,
    31,
    32,
    33,
    64,
    255,
    256,
    2**16,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**61,
]
NUMBERS += [2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]
KEYS = [
    "general.architecture",
    "general.alignment",
    "qwen3moe.block_count",
    "tokenizer.ggml.tokens",
    "k",
    "",
    "é",
]
NAMES = [
    "token_embd.weight",
    "output.weight",
    "blk.0.ffn_up_exps.weight",
    "blk.1.attn_k_b.weight",
    "blk.x",
    "a",
    "",
]
BY_NAME = {name: (number, values, size) for number, (name, values, size) in TYPES.items()}
# Pieces of a file that are numbers: struct code and value; anything else is bytes as they are.
Piece = bytes | tuple[str, int]


def text(value: str) -> list[Piece]:
    raw = value.encode()
    return [("Q", len(raw)), raw]


def config_entries(rng: random.Random) -> dict[str, list[Piece]]:
    """What a config is made of, some of it of another type, absent or odd."""
    entries: dict[str, list[Piece]] = {}
    for name, key in gguf_names._QWEN.items():
        if rng.random() < 0.02:
            continue
        if name in ("rms_norm_eps", "rope_theta"):
            number = (
                rng.choice((1e-6, 1e4, 1e4, 0.0, -1.0, math.inf, math.nan)) if rng.random() < 0.2 else 1e-6
            )
            pieces: list[Piece] = [("I", 6), struct.pack("<f", number)]
        else:
            pieces = [("I", 4), ("I", rng.choice(NUMBERS) % 2**32 if rng.random() < 0.1 else 8)]
        if rng.random() < 0.03:
            kind = rng.choice((0, 1, 5, 7, 8, 9, 10, 11, 12))
            pieces = [("I", kind), *value(rng, kind)]
        entries[f"qwen3moe.{key}"] = pieces
    for key in gguf_names._TOKENS.values():
        if rng.random() < 0.5:
            kind = rng.choice((4, 4, 4, 5, 7, 8, 10, 11, 12))
            entries[f"tokenizer.ggml.{key}_token_id"] = [("I", kind), *value(rng, kind)]
    return entries


def value(rng: random.Random, kind: int) -> list[Piece]:
    if kind == 8:
        return text(rng.choice(("qwen3moe", "deepseek2", "", "words")))
    if kind == 9:
        inner = rng.choice((4, 4, 5, 6, 7, 8, 8, 10))
        count = rng.randrange(5)
        return [("I", inner), ("Q", count), *(piece for _ in range(count) for piece in value(rng, inner))]
    code = {0: "B", 1: "B", 2: "H", 3: "H", 4: "I", 5: "I", 6: "I", 7: "B", 10: "Q", 11: "Q", 12: "Q"}[kind]
    return [(code, rng.randrange(2))]


def header(rng: random.Random) -> tuple[list[Piece], int, int]:
    """The pieces of a valid header, its alignment and the bytes of data it describes."""
    alignment = rng.choice((32, 32, 8, 64))
    entries: dict[str, list[Piece]] = {"general.architecture": [("I", 8), *text("qwen3moe")]}
    if alignment != 32:
        entries["general.alignment"] = [("I", 4), ("I", alignment)]
    for _ in range(rng.randrange(4)):
        kind = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12))
        entries.setdefault(f"k{rng.randrange(6)}", [("I", kind), *value(rng, kind)])
    is_model = rng.random() < 0.3
    if is_model:
        entries |= config_entries(rng)
    tensors: list[Piece] = []
    end, names = 0, NAMES[:1] if is_model else rng.sample(NAMES[:4], rng.randrange(4))
    for name in names:
        number, values, size = BY_NAME[
            "F32" if is_model else rng.choice(["F32", "BF16", "Q8_0", "Q4_0", *BY_NAME])
        ]
        shape = [values * rng.choice((1, 1, 2)), *(rng.choice((1, 2, 3)) for _ in range(rng.randrange(3)))]
        if "exps" in name or is_model:
            shape = [*shape, 1, 1][: 3 - is_model]
        tensors += [
            *text(name),
            ("I", len(shape)),
            *(("Q", extent) for extent in shape),
            ("I", number),
            ("Q", end),
        ]
        end += -(-(math.prod(shape) // values * size) // alignment) * alignment
    raw: list[Piece] = [b"GGUF", ("I", rng.choice((2, 3, 3))), ("Q", len(names)), ("Q", len(entries))]
    for key, pieces in entries.items():
        raw += [*text(key), *pieces]
    return raw + tensors, alignment, end


def mutate(rng: random.Random, pieces: list[Piece]) -> None:
    at = rng.randrange(len(pieces))
    action = rng.randrange(6)
    if action == 0:
        del pieces[at]
    elif action == 1:
        pieces.insert(at, pieces[at])
    elif action == 2:
        pieces[at] = (
            rng.choice(pieces) if rng.random() < 0.5 else rng.choice((b"", b"\xff", b"\0" * 8, b"GGUF"))
        )
    elif isinstance(found := pieces[at], tuple):
        code, number = found
        bits = 8 * struct.calcsize("<" + code)
        changed = rng.choice(NUMBERS) if action < 5 else number + rng.choice((-1, 1, 32, -32))
        pieces[at] = (code, changed % (1 << bits))
    else:
        pieces[at] = rng.choice((*KEYS, *NAMES)).encode()


def mutate_bytes(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    until = min(len(data), at + rng.choice((1, 1, 4, 8, 16)))
    action = rng.randrange(4)
    if action == 0:
        data[at:until] = b""
    elif action == 1:
        data[at:at] = data[at:until]
    elif at < len(data):
        data[at] = data[at] ^ 1 << rng.randrange(8) if action == 2 else rng.choice((0, 1, 127, 128, 255))


def image(rng: random.Random) -> bytes:
    """A file: mutated header, zeros for data."""
    pieces, alignment, size = header(rng)
    is_whole = rng.random() < 0.2  # what is odd then are values of the config
    for _ in range(0 if is_whole else rng.choice((0, 1, 1, 1, 2, 4))):
        if pieces:
            mutate(rng, pieces)
    raw = bytearray(b"".join(p if isinstance(p, bytes) else struct.pack("<" + p[0], p[1]) for p in pieces))
    for _ in range(0 if is_whole else rng.choice((0, 0, 0, 1, 2, 6))):
        mutate_bytes(rng, raw)
    raw += bytes(-len(raw) % alignment)
    if rng.random() < 0.05:
        size = max(0, size + rng.choice((-32, -1, 1, 31, 32)))
    file = bytes(raw) + bytes(size)
    return file[: rng.randrange(len(file) + 1)] if rng.random() < 0.02 else file


def attempt(content: bytes, fd: int) -> str:
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)
    try:
        found = read_header("fuzz.gguf", fd)
    except CheckpointError as error:
        assert str(error).startswith("fuzz.gguf: ") and len(str(error)) < 2000, error
        return "refused"
    end = 0
    for entry in found.tensors.values():
        _, values, size = BY_NAME[entry.dtype]
        assert entry.offset >= end and all(extent > 0 for extent in entry.shape)
        assert entry.bytes * values == math.prod(entry.shape) * size
        end = entry.offset + entry.bytes
    assert end <= len(content)
    try:
        header = found.metadata, found.tensors
        renamed = gguf_names.rename({"fuzz.gguf": header}, Path("fuzz.gguf"))["fuzz.gguf"]
    except CheckpointError as error:
        assert str(error).startswith("fuzz.gguf: ") and len(str(error)) < 2000, error
        return "names refused"
    assert sum(entry.bytes for entry in renamed.values()) == sum(
        entry.bytes for entry in found.tensors.values()
    )
    try:
        config = gguf_names.config_values(found.metadata, renamed, "fuzz.gguf")
        check_counts(config, "fuzz.gguf")
    except CheckpointError as error:
        assert str(error).startswith("fuzz.gguf: ") and len(str(error)) < 5000, error
        return "accepted"
    for name in gguf_names._QWEN:
        assert type(config[name]) in (int, float) and 0 < config[name] < 2**31, (name, config[name])
    for name in gguf_names._TOKENS:
        assert config[name] is None or (
            type(config[name]) is int and 0 <= config[name] < config["vocab_size"]
        )
    assert config["num_hidden_layers"] <= 1000 and config["num_experts"] <= 4096
    return "made a config"


def fuzz(runs: int, seed: int, first: int = 0) -> Counter[str]:
    """Count the outcomes of `runs` runs from `first` on. Raises AssertionError, or whatever else came out."""
    fd = os.memfd_create("fuzz")
    try:
        return fuzzer.count(
            range(first, first + runs),
            seed,
            lambda _, rng: image(rng),
            lambda _, content: attempt(content, fd),
        )
    finally:
        os.close(fd)


if __name__ == "__main__":
    fuzzer.main(__doc__, fuzz)
