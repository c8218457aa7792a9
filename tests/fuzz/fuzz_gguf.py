"""Mutate GGUF headers, in structure and in bytes, and read them.

Only `CheckpointError` may come out, whatever a file claims, in little time and memory. What is accepted must lie in the
file: tensors apart from each other, each as long as its type and shape take. Of what a checkpoint accepts, weights are
decoded: each has its shape, and of blocks no NaN.

    python tests/fuzz/fuzz_gguf.py --runs 1000000 --seed 1
    python tests/fuzz/fuzz_gguf.py --seed 1 --first 4711 --runs 1      # one run again
"""

from __future__ import annotations

import functools
import math
import os
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import fuzzer

from ktinject.checkpoints.beside import check_counts
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.gguf import TYPES, read_header
from ktinject.checkpoints.gguf_architectures import ARCHITECTURES
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
ARCHITECTURE_NAMES = [*ARCHITECTURES, "gemma3"]
# Keys that mean something to these alone; others refuse them.
OWN = {"attention.sliding_window": "gpt-oss", "attention.scale": "granitemoe"}
# Keys of metadata behind the architecture's, by the type of what they hold.
COUNTS = """embedding_length block_count attention.head_count attention.head_count_kv attention.key_length
    attention.value_length feed_forward_length expert_feed_forward_length expert_shared_feed_forward_length
    expert_count expert_used_count expert_shared_count context_length nextn_predict_layers expert_gating_func
    expert_group_count expert_group_used_count leading_dense_block_count attention.q_lora_rank
    attention.kv_lora_rank attention.key_length_mla attention.value_length_mla rope.dimension_count ssm.conv_kernel
    ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size full_attention_interval
    attention.sliding_window attention.indexer.head_count attention.indexer.key_length attention.indexer.top_k
    rope.scaling.original_context_length""".split()
REALS = """attention.layer_norm_rms_epsilon rope.freq_base expert_weights_scale rope.scaling.factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.yarn_log_multiplier attention.scale
    embedding_scale residual_scale logit_scale""".split()
ARRAYS = {"rope.dimension_sections": 5, "attention.recurrent_layers": 7, "attention.indexer.types": 7}
TOKENS = ("bos", "eos", "padding", "eot")
KEYS = [
    "general.architecture",
    "general.alignment",
    "qwen3moe.block_count",
    "tokenizer.ggml.tokens",
    "k",
    "",
    "é",
]
NAMES = """token_embd.weight output.weight output_norm.weight rope_freqs.weight blk.0.attn_norm.weight
    blk.0.attn_q.weight blk.0.attn_k.weight blk.0.attn_qkv.weight blk.0.attn_gate.weight blk.0.attn_k_b.weight
    blk.0.attn_v_b.weight blk.0.ssm_a blk.0.ssm_conv1d.weight blk.0.ssm_out.weight blk.0.ssm_dt.bias
    blk.0.ffn_gate_exps.weight blk.0.ffn_up_exps.weight blk.0.ffn_down_exps.weight blk.0.ffn_gate_up_exps.weight
    blk.0.ffn_gate_exps.bias blk.0.ffn_gate_inp_shexp.weight blk.0.exp_probs_b.bias blk.0.indexer.proj.weight
    blk.9.nextn.eh_proj.weight v.blk.0.ln1.weight blk.x a""".split()
BY_NAME = {name: (number, values, size) for number, (name, values, size) in TYPES.items()}
# Pieces of a file that are numbers: struct code and value; anything else is bytes as they are.
Piece = bytes | tuple[str, int]


def text(value: str) -> list[Piece]:
    raw = value.encode()
    return [("Q", len(raw)), raw]


def config_entries(rng: random.Random, architecture: str) -> dict[str, list[Piece]]:
    """What a config is made of, some of it of another type, absent or odd."""
    entries: dict[str, list[Piece]] = {}
    odd = rng.choice((0.0, 0.0, 0.01, 0.04))  # how often one value is

    def add(key: str, kind: int, *pieces: Piece) -> None:
        if rng.random() < odd or (OWN.get(key, architecture) != architecture and rng.random() >= odd):
            return
        if rng.random() < odd:
            kind = rng.choice((0, 1, 5, 7, 8, 9, 10, 11, 12))
            pieces = (*value(rng, kind),)
        entries[f"{architecture}.{key}"] = [("I", kind), *pieces]

    usual = {
        "block_count": 2,
        "nextn_predict_layers": 1,
        "rope.dimension_count": rng.choice((4, 8)),
        "expert_gating_func": 2,
        "ssm.inner_size": 16,
    }
    for key in COUNTS:
        number = rng.choice(NUMBERS) % 2**32 if rng.random() < odd else usual.get(key, 8)
        add(key, 4, ("I", number))
    for key in REALS:
        number = rng.choice((1e-6, 1e4, 0.0, -1.0, math.inf, math.nan)) if rng.random() < odd else 1.0
        add(key, 6, struct.pack("<f", number))
    for key, kind in ARRAYS.items():
        count = 2 if rng.random() >= 5 * odd else rng.choice((0, 1, 4))
        pieces = [piece for _ in range(count) for piece in value(rng, kind)]
        add(key, 9, ("I", kind), ("Q", count), *pieces)
    if rng.random() < 5 * odd:
        add("rope.scaling.type", 8, *text(rng.choice(("none", "yarn", "linear", "su"))))
    if rng.random() < 0.5:
        words = [rng.choice(("a", "b", "ab", "Ġ", "<s>", "", "é")) for _ in range(rng.randrange(4))]
        merges = [rng.choice(("a b", "ab a", "ab", " ", "a b c")) for _ in range(rng.randrange(2))]
        entries["tokenizer.ggml.model"] = [("I", 8), *text(rng.choice(("gpt2", "llama", "bert")))]
        for key, found in (("tokens", words), ("merges", merges)):
            pieces = [piece for word in found for piece in text(word)]
            entries[f"tokenizer.ggml.{key}"] = [("I", 9), ("I", 8), ("Q", len(found)), *pieces]
        count = len(words) if rng.random() >= odd else 3
        ones = [("I", 1) for _ in range(count)]
        entries["tokenizer.ggml.token_type"] = [
            ("I", 9),
            ("I", rng.choice((5, 5, 5, 6))),
            ("Q", count),
            *ones,
        ]
    for name in TOKENS:
        if rng.random() < 0.5:
            kind = rng.choice((4, 5, 10, 11) if odd == 0 else (4, 5, 7, 8, 10, 11, 12))
            entries[f"tokenizer.ggml.{name}_token_id"] = [("I", kind), *value(rng, kind)]
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
    architecture = rng.choice(ARCHITECTURE_NAMES)
    entries: dict[str, list[Piece]] = {"general.architecture": [("I", 8), *text(architecture)]}
    if alignment != 32:
        entries["general.alignment"] = [("I", 4), ("I", alignment)]
    for _ in range(rng.randrange(4)):
        kind = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 12))
        entries.setdefault(f"k{rng.randrange(6)}", [("I", kind), *value(rng, kind)])
    if is_model := rng.random() < 0.25:
        entries |= config_entries(rng, architecture)
    tensors: list[Piece] = []
    end, names = 0, [*NAMES[:is_model], *rng.sample(NAMES[is_model:], rng.randrange(8))]
    for name in names:
        number, values, size = BY_NAME["F32" if rng.random() < 0.5 else rng.choice([*BY_NAME])]
        extents = (*(8 for _ in range(3)), 1, 2, 4, 16, 24, 32)
        shape = [values if values > 1 else rng.choice(extents)]
        shape += [
            rng.choice(extents) for _ in range(rng.choice((0, 1, 1, 2, 2)) if not name == NAMES[0] else 1)
        ]
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


def image(rng: random.Random, base: tuple[list[Piece], int, int]) -> bytes:
    """A file: mutated header, anything for data.

    base   as `header` gives it
    """
    pieces, alignment, size = [*base[0]], *base[1:]
    is_whole = rng.random() < 0.3  # what is odd then are values of the config, shapes and data
    for _ in range(0 if is_whole else rng.choice((0, 1, 1, 1, 2, 4))):
        if pieces:
            mutate(rng, pieces)
    raw = bytearray(b"".join(p if isinstance(p, bytes) else struct.pack("<" + p[0], p[1]) for p in pieces))
    for _ in range(0 if is_whole else rng.choice((0, 0, 0, 1, 2, 6))):
        mutate_bytes(rng, raw)
    raw += bytes(-len(raw) % alignment)
    if rng.random() < 0.05:
        size = max(0, size + rng.choice((-32, -1, 1, 31, 32)))
    data = bytes(size) if rng.random() < 0.4 else rng.randbytes(size)
    file = bytes(raw) + data
    return file[: rng.randrange(len(file) + 1)] if rng.random() < 0.02 else file


def refused(error: CheckpointError, path: Path) -> None:
    """A refusal names the file or the tensor, and is short."""
    text = str(error)
    assert (
        (str(path) in text or text.startswith("tensor ")) and len(text) < 4000 and text.count("\n") <= 22
    ), text


def attempt(content: bytes, path: Path) -> str:
    path.write_bytes(content)
    with path.open("rb") as file:
        try:
            found = read_header(path, file.fileno())
        except CheckpointError as error:
            refused(error, path)
            return "refused"
    end = 0
    for entry in found.tensors.values():
        _, values, size = BY_NAME[entry.dtype]
        assert entry.offset >= end and all(extent > 0 for extent in entry.shape)
        assert entry.bytes * values == math.prod(entry.shape) * size
        end = entry.offset + entry.bytes
    assert end <= len(content)
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        refused(error, path)
        return "names refused"
    with checkpoint:
        left = sum(entry.bytes for name, entry in found.tensors.items() if name in checkpoint.skipped)
        assert sum(info.bytes for info in checkpoint.tensors.values()) + left == sum(
            entry.bytes for entry in found.tensors.values()
        )
        decoded = decode(checkpoint, path)
        try:
            found_words = checkpoint.vocabulary()
            assert found_words is None or max(found_words.tokens.values(), default=0) < len(found_words.words)
        except CheckpointError as error:
            refused(error, path)
        try:
            config = checkpoint.config_values()
            assert config is not None
            check_counts(config, str(path))
        except CheckpointError as error:
            refused(error, path)
            return decoded
    check_config(config)
    return "made a config"


def decode(checkpoint: Checkpoint, path: Path) -> str:
    """Read some weights. Returns the outcome."""
    outcome = "accepted"
    for key in sorted(checkpoint.weights)[:4]:
        try:
            values = checkpoint.decode(key)
        except CheckpointError as error:
            refused(error, path)
            outcome = "values refused"
            continue
        form = checkpoint.format_of(key)
        assert tuple(values.shape) == checkpoint.shape(key), key
        assert form.is_plain or "made" in form.name or not values.isnan().any(), (key, form)
    return outcome


def check_config(config: dict[str, Any]) -> None:
    """Nothing in it is out of proportion."""
    for name, found in config.items():
        if type(found) in (int, float):
            assert 0 <= found < 2**31, (name, found)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = config[name] if isinstance(config[name], list) else [config[name]]
        assert all(n is None or (type(n) is int and 0 <= n < config["vocab_size"]) for n in found), name
    assert config["num_hidden_layers"] <= 1000 and isinstance(config["rope_parameters"], dict)


def fuzz(runs: int, seed: int, first: int = 0) -> fuzzer.Outcomes:
    """Count the outcomes of `runs` runs from `first` on. Raises AssertionError, or whatever else came out."""
    base = functools.lru_cache(maxsize=1)(
        lambda number: header(fuzzer.base_of(number * fuzzer.RUNS_A_FILE, seed))
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = Path(folder) / "fuzz.gguf"
        return fuzzer.count(
            range(first, first + runs),
            seed,
            lambda run, rng: image(rng, base(run // fuzzer.RUNS_A_FILE)),
            lambda _, content: attempt(content, path),
        )


if __name__ == "__main__":
    fuzzer.main(__doc__, fuzz)
