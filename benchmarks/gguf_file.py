"""Write a GGUF file of a known shape with random weights, so that llama.cpp can run what ktinject runs.

    python benchmarks/gguf_file.py /dev/shm/a.gguf --layers 8 --type q4_0          # Qwen3-30B-A3B
    python benchmarks/gguf_file.py /dev/shm/b.gguf --shape qwen3.5-35b-a3b --layers 40       # or gpt-oss-20b
    python benchmarks/bench_generate.py --vocab 32768 --llama-bench ./llama-bench --gguf int4=/dev/shm/a.gguf
    python benchmarks/gguf_file.py /dev/shm/c.gguf --layers 48 --tokenizer           # for llama.cpp's server
    python benchmarks/gguf_file.py /dev/shm/d.gguf --type q4_k --head q6_k           # K-quants, as published files

Time depends on shapes, and on which experts tokens choose: as many different ones as with ktinject's own random
weights. One MiB of these is written again and again.
"""

from __future__ import annotations

import argparse
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ktinject.tools import random_models

# Name → number of the type, values in a block, bytes of a block.
TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (30, 1, 2),
    "q8_0": (8, 32, 34),
    "q4_0": (2, 32, 18),
    "q4_k": (12, 256, 144),
    "q6_k": (14, 256, 210),
}
MATRICES = [kind for kind in TYPES if kind not in ("f32", "f16")]
ALIGNMENT = 32

Tensor = tuple[str, str, Sequence[int]]  # name, type, shape with the outermost extent first


def size(kind: str, shape: Sequence[int]) -> int:
    _, values, block_bytes = TYPES[kind]
    return math.prod(shape) // values * block_bytes


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(found: Any) -> bytes:
    """Type and value of an entry of the metadata."""
    if isinstance(found, bool):
        return struct.pack("<I?", 7, found)
    if isinstance(found, int):
        return struct.pack("<II", 4, found)
    if isinstance(found, float):
        return struct.pack("<If", 6, found)
    if isinstance(found, str):
        return struct.pack("<I", 8) + text(found)
    if len(found) > 0 and isinstance(found[0], int):
        return struct.pack(f"<IIQ{len(found)}i", 9, 5, len(found), *found)
    return struct.pack("<IIQ", 9, 8, len(found)) + b"".join(map(text, found))


def header(metadata: Mapping[str, Any], tensors: Sequence[Tensor]) -> bytes:
    """Everything before the data of the first tensor."""
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    raw += b"".join(text(key) + value(found) for key, found in metadata.items())
    offset = 0
    for name, kind, shape in tensors:
        extents = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        raw += text(name) + struct.pack("<I", len(shape)) + extents
        raw += struct.pack("<IQ", TYPES[kind][0], offset)
        offset += padded(size(kind, shape))
    return raw + bytes(padded(len(raw)) - len(raw))


def padded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _of_experts(config: Any) -> tuple[int, int]:
    """How many there are, and the values within one."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    return getattr(config, "num_experts", None) or config.num_local_experts, inner


def _metadata(config: Any, architecture: str, **more: Any) -> dict[str, Any]:
    experts, inner = _of_experts(config)
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": inner,
        "vocab_size": config.vocab_size,
        **more,
    }
    named = {f"{architecture}.{key}": value for key, value in found.items()}
    return {
        "general.architecture": architecture,
        "general.name": "random",
        **named,
        "tokenizer.ggml.model": "none",
    }


def tokenizer(vocab: int) -> dict[str, Any]:
    """A byte-level one of so many tokens without merges: a server does not start without any."""
    # The 256 characters that stand for bytes: printable ones for themselves, others from 256 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in plain] + [chr(256 + n) for n in range(256 - len(plain))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": letters + [f"t{number}" for number in range(256, vocab)],
        "tokenizer.ggml.token_type": [1] * vocab,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": vocab - 1,
    }


def _tensors(config: Any, layers: Sequence[Mapping[str, tuple[str, Sequence[int]]]]) -> list[Tensor]:
    """layers  names without the layer's number, and without ".weight" where they have no dot."""
    table = (config.vocab_size, config.hidden_size)
    tensors: list[Tensor] = [("token_embd.weight", "bf16", table)]
    for number, layer in enumerate(layers):
        for name, each in layer.items():
            whole = name.removesuffix(".") if "." in name else f"{name}.weight"
            tensors.append((f"blk.{number}.{whole}", *each))
    return [*tensors, ("output_norm.weight", "f32", (config.hidden_size,)), ("output.weight", "bf16", table)]


def _experts(config: Any, kind: str) -> dict[str, tuple[str, Sequence[int]]]:
    hidden, (experts, inner) = config.hidden_size, _of_experts(config)
    return {
        "ffn_gate_inp": ("f32", (experts, hidden)),
        "ffn_gate_exps": (kind, (experts, inner, hidden)),
        "ffn_up_exps": (kind, (experts, inner, hidden)),
        "ffn_down_exps": (kind, (experts, hidden, inner)),
    }


def _attention(config: Any, kind: str, gates: int = 1) -> dict[str, tuple[str, Sequence[int]]]:
    """gates  2: a query's head has as many values again, its gate."""
    hidden, size = config.hidden_size, config.head_dim
    q, kv = (n * size for n in (config.num_attention_heads, config.num_key_value_heads))
    return {
        "attn_norm": ("f32", (hidden,)),
        "attn_q": (kind, (gates * q, hidden)),
        "attn_k": (kind, (kv, hidden)),
        "attn_v": (kind, (kv, hidden)),
        "attn_output": (kind, (hidden, q)),
        "attn_q_norm": ("f32", (size,)),
        "attn_k_norm": ("f32", (size,)),
    }


def qwen3_moe(config: Any, kind: str) -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata and tensors; matrices of the layers in `kind`, embeddings bf16, norms and routers f32."""
    metadata = _metadata(config, "qwen3moe", feed_forward_length=config.intermediate_size)
    norm = {"ffn_norm": ("f32", (config.hidden_size,))}
    layer = {**_attention(config, kind), **norm, **_experts(config, kind)}
    return metadata, _tensors(config, [layer] * config.num_hidden_layers)


def qwen3_5_moe(config: Any, kind: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The same of layers with linear attention, whose convolution and its small parts are f32, among others."""
    hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    size, taps = config.linear_value_head_dim, config.linear_conv_kernel_dim
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    channels = 2 * key_heads * config.linear_key_head_dim + heads * size
    metadata = _metadata(
        config,
        "qwen35moe",
        expert_shared_feed_forward_length=shared,
        full_attention_interval=4,
        **{
            "rope.dimension_count": rotated,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": taps,
            "ssm.inner_size": heads * size,
            "ssm.state_size": size,
            "ssm.time_step_rank": heads,
            "ssm.group_count": key_heads,
        },
    )
    behind = {
        "post_attention_norm": ("f32", (hidden,)),
        **_experts(config, kind),
        "ffn_gate_inp_shexp": ("f32", (hidden,)),
        "ffn_gate_shexp": (kind, (shared, hidden)),
        "ffn_up_shexp": (kind, (shared, hidden)),
        "ffn_down_shexp": (kind, (hidden, shared)),
    }
    linear = {
        "attn_norm": ("f32", (hidden,)),
        "attn_qkv": (kind, (channels, hidden)),
        "attn_gate": (kind, (heads * size, hidden)),
        "ssm_conv1d": ("f32", (channels, taps)),
        "ssm_dt.bias": ("f32", (heads,)),
        "ssm_a.": ("f32", (heads,)),
        "ssm_beta": (kind, (heads, hidden)),
        "ssm_alpha": (kind, (heads, hidden)),
        "ssm_norm": ("f32", (size,)),
        "ssm_out": (kind, (hidden, heads * size)),
    }
    full = _attention(config, kind, gates=2)
    kinds = [full if kind == "full_attention" else linear for kind in config.layer_types]
    return metadata, _tensors(config, [{**layer, **behind} for layer in kinds])


def gpt_oss(config: Any, kind: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The same of layers with biases and sinks, of which every other one has a window; without its YaRN scaling."""
    hidden, (experts, inner) = config.hidden_size, _of_experts(config)
    metadata = _metadata(config, "gpt-oss", **{"attention.sliding_window": config.sliding_window})
    parts = _attention(config, kind)
    widths = {name: shape[0] for name, (_, shape) in parts.items()}
    layer = {
        "attn_norm": parts["attn_norm"],
        **{name: parts[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
        **{
            f"{name}.bias": ("f32", (widths[name],)) for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        },
        "attn_sinks": ("f32", (config.num_attention_heads,)),
        "post_attention_norm": ("f32", (hidden,)),
        **_experts(config, kind),
        "ffn_gate_inp.bias": ("f32", (experts,)),
        "ffn_gate_exps.bias": ("f32", (experts, inner)),
        "ffn_up_exps.bias": ("f32", (experts, inner)),
        "ffn_down_exps.bias": ("f32", (experts, hidden)),
    }
    return metadata, _tensors(config, [layer] * config.num_hidden_layers)


WRITERS = {"qwen3-30b-a3b": qwen3_moe, "qwen3.5-35b-a3b": qwen3_5_moe, "gpt-oss-20b": gpt_oss}


def some(kind: str, std: float, rng: np.random.Generator) -> bytes:
    """About a MiB of weights, as many below as above zero: with a mean, all tokens would soon be alike.

    Their number is prime, so that no two rows of a matrix are equal.
    """
    if kind in ("f32", "bf16"):
        values = rng.standard_normal(262_147 if kind == "f32" else 524_309, dtype=np.float32) * np.float32(
            std
        )
        return (
            values.tobytes() if kind == "f32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        )
    blocks = rng.integers(0, 256, (32_771, TYPES[kind][2]), dtype=np.uint8)
    if kind == "q4_0":
        low, high = rng.integers(1, 16, (2, len(blocks), 16), dtype=np.uint8)  # -7 to 7
        blocks[:, 2:] = low | high << 4
    # Deviation of the codes; those of q4_k are 0 to 15 in steps of its scale, less 7.5 of them.
    step = std / {"q8_0": 74, "q4_0": 4.3, "q4_k": 32 * 4.61, "q6_k": 32 * 18.5}[kind]
    scale = np.array([step], dtype=np.float16).view(np.uint8)
    if kind == "q6_k":  # codes are -32 to 31 in steps of a scale, which is as often negative
        blocks[:, 192:208] = np.array([32, -32] * 8, dtype=np.int8).view(np.uint8)
        blocks[:, 208:] = scale
        return blocks.tobytes()
    if kind == "q4_k":
        blocks[:, 2:4] = np.array([7.5 * step], dtype=np.float16).view(np.uint8)
        blocks[:, 4:16] = [160] * 8 + [0] * 4  # eight scales and eight minima of six bits, each 32
    blocks[:, :2] = scale
    return blocks.tobytes()


def data(tensors: Sequence[Tensor], rng: np.random.Generator) -> Iterator[bytes]:
    pieces = {kind: some(kind, 0.02, rng) for _, kind, _ in tensors}
    # As in ktinject.tools.random_models: the token decides on the experts, not the context.
    embeddings = some("bf16", 1.0, rng)
    ones = np.ones(1 << 16, dtype=np.float32).tobytes()
    minus_ones = (-np.ones(1 << 16, dtype=np.float32)).tobytes()  # the state's decay, which must not grow
    for name, kind, shape in tensors:
        piece = ones if len(shape) == 1 else embeddings if name.startswith("token_embd") else pieces[kind]
        piece = minus_ones if name.endswith("ssm_a") else piece
        left = total = size(kind, shape)
        while left > 0:
            yield piece[:left]
            left -= len(piece)
        yield bytes(padded(total) - total)


def with_head(tensors: Sequence[Tensor], kind: str) -> list[Tensor]:
    """The same with an output layer of this type."""
    return [(name, kind if name == "output.weight" else own, shape) for name, own, shape in tensors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=WRITERS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--type", default="q4_0", choices=MATRICES)
    parser.add_argument("--head", default="bf16", choices=MATRICES, help="type of the output layer")
    parser.add_argument("--tokenizer", action="store_true", help="write one, which llama.cpp's server needs")
    arguments = parser.parse_args()
    config = random_models.config(arguments.shape, arguments.layers, vocab_size=arguments.vocab)
    metadata, tensors = WRITERS[arguments.shape](config, arguments.type)
    tensors = with_head(tensors, arguments.head)
    for name, kind, shape in tensors:
        if shape[-1] % TYPES[kind][1]:
            parser.error(
                f"{kind} has blocks of {TYPES[kind][1]} values, which do not divide the rows of {name}."
            )
    if arguments.tokenizer:
        metadata |= tokenizer(arguments.vocab)
    with arguments.file.open("wb") as file:
        file.write(header(metadata, tensors))
        for piece in data(tensors, np.random.default_rng(0)):
            file.write(piece)


if __name__ == "__main__":
    main()
