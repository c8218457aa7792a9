"""Files out of proportion to their use, and what refusing them costs.

    python tests/ktinject/proportions.py FOLDER        JSON: case → error, seconds of CPU, bytes on top of the start

Each case runs in a fork of a process that has imported everything, so that its peak is its own.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 8}


def safetensors(header: bytes) -> Callable[[Path], Any]:
    def attempt(folder: Path) -> Any:
        from ktinject.checkpoints.checkpoint import Checkpoint

        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
        return Checkpoint.open(folder)

    return attempt


def index(names: int) -> Callable[[Path], Any]:
    """Two shards, of which one is there and has another tensor."""

    def attempt(folder: Path) -> Any:
        from ktinject.checkpoints.checkpoint import Checkpoint

        files = ",".join(f'"model.layers.{n}.mlp.experts.weight":"a.safetensors"' for n in range(names))
        (folder / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{files}}}}}')
        entry = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
        (folder / "a.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry + b"x")
        return Checkpoint.open(folder)

    return attempt


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = entry("general.architecture", 8, text("qwen3moe"))


def tensor(name: str, *extents: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, 0, offset)


def gguf(entries: int, tensors: int, content: bytes, zeros: int = 0) -> Callable[[Path], Any]:
    """`zeros`: how many follow the header; they take no room on the disk."""

    def attempt(folder: Path) -> Any:
        from ktinject.checkpoints.checkpoint import Checkpoint
        from ktinject.hf import models

        path = folder / "model.gguf"
        head = b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + content
        path.write_bytes(head + bytes(-len(head) % 32))
        os.truncate(path, path.stat().st_size + zeros)
        with Checkpoint.open(path) as checkpoint:
            return models.meta_model(models.read_config(path, checkpoint))

    return attempt


def gguf_model(**changes: tuple[int, bytes]) -> Callable[[Path], Any]:
    """A whole Qwen3-MoE without weights but one, whose metadata say what a config needs."""
    values: dict[str, tuple[int, bytes]] = {
        "block_count": (4, struct.pack("<I", 1)),
        "attention.layer_norm_rms_epsilon": (6, struct.pack("<f", 1e-6)),
        "rope.freq_base": (6, struct.pack("<f", 1e4)),
    }
    names = "embedding_length feed_forward_length expert_feed_forward_length expert_count expert_used_count "
    names += "context_length attention.head_count attention.head_count_kv attention.key_length"
    values = dict.fromkeys(names.split(), (4, struct.pack("<I", 8))) | values | changes
    entries = [ARCHITECTURE]
    for name, (kind, raw) in values.items():
        entries.append(entry(name if name.startswith("tokenizer") else f"qwen3moe.{name}", kind, raw))
    content = b"".join(entries) + tensor("token_embd.weight", 8, 8)
    return gguf(len(entries), 1, content, 256)


def config(content: str | None = None, **values: Any) -> Callable[[Path], Any]:
    def attempt(folder: Path) -> Any:
        from ktinject.hf import models

        (folder / "config.json").write_text(content or json.dumps({"model_type": "llama", **SIZES, **values}))
        return models.meta_model(models.read_config(folder))

    return attempt


def pipe(name: str) -> Callable[[Path], Any]:
    def attempt(folder: Path) -> Any:
        from ktinject.cli.options import load_tokenizer
        from ktinject.hf import models
        from ktinject.operators.offload.gpu_experts import read_profile

        os.mkfifo(folder / name)
        if name == "profile.json":
            return read_profile(str(folder / name))
        return models.read_config(folder) if name == "config.json" else load_tokenizer(folder)

    return attempt


def profile(content: str | None) -> Callable[[Path], Any]:
    def attempt(folder: Path) -> Any:
        from ktinject.operators.offload.gpu_experts import read_profile

        path = folder / "profile.json"
        if content is None:
            return read_profile("/dev/zero")
        path.write_text(content)
        return read_profile(str(path))

    return attempt


def generation(content: str) -> Callable[[Path], Any]:
    def attempt(folder: Path) -> Any:
        from transformers import LlamaConfig

        from ktinject.hf import models

        model = models.meta_model(LlamaConfig(**SIZES, num_hidden_layers=1))
        (folder / "generation_config.json").write_text(content)
        return models.generation_config(model, folder)

    return attempt


def words(count: int, form: str) -> bytes:
    return ",".join(form.format(n) for n in range(count)).encode()


U8 = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
# Made when they are run, one after the other: some have 16 MiB.
CASES: dict[str, Callable[[], Callable[[Path], Any]]] = {
    "brackets that open": lambda: safetensors(b"{" + b"[" * (15 * MIB)),
    "nested": lambda: safetensors(b'{"a":' + b"[" * (7 * MIB) + b"]" * (7 * MIB) + b"}"),
    "quotes": lambda: safetensors(b'{"a":' + b'"' * (15 * MIB) + b"}"),
    "a number": lambda: safetensors(b'{"a":' + b"9" * (15 * MIB) + b"}"),
    "strings": lambda: safetensors(b'{"a":[' + words(790_000, '"{}"') + b"]}"),
    "pairs": lambda: safetensors(b"{" + words(399_000, '"{0}":"{0}"') + b"}"),
    "a long string": lambda: safetensors('{{"😀{}":1}}'.format("a" * 15 * MIB).encode()),
    "tensors": lambda: safetensors(b"{" + words(99_000, U8) + b"}"),
    "an index": lambda: index(399_000),
    "keys": lambda: gguf(4 * MIB, 0, b"", 90 * MIB),
    "words": lambda: gguf(1, 0, entry("k", 9, struct.pack("<IQ", 8, 1_499_999) + bytes(8 * 1_499_999))),
    "more words": lambda: gguf(1, 0, entry("k", 9, struct.pack("<IQ", 8, 10 * MIB)), 90 * MIB),
    "text": lambda: gguf(1, 0, entry("k", 8, text("😀" + "x" * (15 * MIB)))),
    "texts": lambda: gguf(20, 0, b"".join(entry(f"{n}", 8, text("x" * MIB)) for n in range(20))),
    "gguf tensors": lambda: gguf(
        1, 131_072, ARCHITECTURE + b"".join(tensor(f"{n}", 1, offset=32 * n) for n in range(131_072))
    ),
    "experts": lambda: gguf(1, 1, ARCHITECTURE + tensor("blk.0.ffn_up_exps.weight", 1, 1, 2**30), 2**32),
    "experts of layers": lambda: gguf(
        1,
        999,
        ARCHITECTURE
        + b"".join(tensor(f"blk.{n}.ffn_up_exps.weight", 2, 1, 4096, offset=n << 15) for n in range(999)),
        999 << 15,
    ),
    "block_count": lambda: gguf_model(block_count=(4, struct.pack("<I", 2**31 - 1))),
    "block_count in 64 bits": lambda: gguf_model(block_count=(10, struct.pack("<Q", 2**31))),
    "gguf heads": lambda: gguf_model(**{"attention.head_count": (4, struct.pack("<I", 2**30))}),
    "gguf epsilon": lambda: gguf_model(
        **{"attention.layer_norm_rms_epsilon": (6, struct.pack("<f", float("nan")))}
    ),
    "gguf base": lambda: gguf_model(**{"rope.freq_base": (6, struct.pack("<f", float("inf")))}),
    "gguf end token": lambda: gguf_model(**{"tokenizer.ggml.eos_token_id": (8, text("two"))}),
    "gguf first token": lambda: gguf_model(**{"tokenizer.ggml.bos_token_id": (5, struct.pack("<i", -2))}),
    "layers": lambda: config(num_hidden_layers=2_000_000),
    "layers inside": lambda: config(text_config={"num_hidden_layers": [2_000_000]}),
    "layers without end": lambda: config(num_hidden_layers=float("inf")),
    "heads": lambda: config(num_hidden_layers=1, num_attention_heads=2**31),
    "labels": lambda: config(num_hidden_layers=1, num_labels=2**31),
    "config nested": lambda: config(DEEP),
    "config of lists": lambda: config(f'{{"a":[{"1," * 1_000_000}1]}}'),
    "config of zeros": lambda: config(" " * (5 * MIB)),
    "generation config nested": lambda: generation(DEEP),
    "config in a pipe": lambda: pipe("config.json"),
    "tokenizer in a pipe": lambda: pipe("tokenizer.json"),
    "tokenizer config in a pipe": lambda: pipe("tokenizer_config.json"),
    "profile in a pipe": lambda: pipe("profile.json"),
    "profile on a device": lambda: profile(None),
    "profile nested": lambda: profile(DEEP),
    "profile of numbers": lambda: profile('{"experts": {"a": [' + "1," * (7 * MIB) + "1]}}"),
}


def cost(attempt: Callable[[Path], Any], folder: Path) -> tuple[str, float, int]:
    """Error, seconds and bytes, from a fork of this process."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        said = "accepted"
        try:
            attempt(folder)
        except BaseException as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
            if type(error).__module__ != "ktinject.errors":
                traceback.print_exc()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(sending, json.dumps([said, time.process_time() - start, used * 1024]).encode())
        os._exit(0)
    os.close(sending)
    answer = os.read(receiving, 1 << 16)
    os.close(receiving)
    os.waitpid(child, 0)
    return tuple(json.loads(answer)) if answer else ("killed", 0.0, 0)


def main(folder: Path) -> None:
    from ktinject.hf import models

    models.meta_model(models.AutoConfig.for_model("llama", **SIZES, num_hidden_layers=1))  # imports the class
    results = {}
    for number, (name, make) in enumerate(CASES.items()):
        (own := folder / str(number)).mkdir()
        results[name] = cost(make(), own)
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
