"""GGUF files: byte by byte, so that they can be wrong, and from a model's folder, as llama.cpp's converter makes them.

`converted` takes names, blocks and the file's layout from the gguf package, which shares no line with ktinject.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import k_quants
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def entry(key: str | bytes, kind: int, value: Any) -> bytes:
    """One of the metadata; `value` bytes stand as they are."""
    if isinstance(value, str):
        value = text(value)
    if not isinstance(value, bytes):
        value = struct.pack("<" + CODES[kind], value)
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, values: Sequence[Any], count: int | None = None) -> bytes:
    each = [text(v) if kind == STRING else struct.pack("<" + CODES[kind], v) for v in values]
    return struct.pack("<IQ", kind, len(values) if count is None else count) + b"".join(each)


def tensor(
    name: str | bytes, extents: Sequence[int], kind: int = 0, offset: int = 0, dimensions: int | None = None
) -> bytes:
    """An entry; extents with the innermost first."""
    count = len(extents) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", count, *extents, kind, offset)


def image(
    metadata: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: bytes = b"\3\0\0\0",
    counts: tuple[int | None, int | None] = (None, None),
    alignment: int = 32,
) -> bytes:
    """A file; `counts` are what it says of tensors and metadata, the truth where None."""
    said = [len(each) if n is None else n for n, each in zip(counts, (tensors, metadata))]
    raw = magic + version + struct.pack("<QQ", *said) + b"".join(metadata) + b"".join(tensors)
    return raw + bytes(-len(raw) % alignment) + data


def converted(
    folder: Path,
    file: Path,
    kind: str,
    *,
    exact: bool = False,
    split_kv_b: bool = True,
    k_kinds: Mapping[str, str] | None = None,
) -> Path:
    """A model's folder as GGUF.

    kind        of matrices whose rows divide into blocks; the others, norms and routers are F32
    k_kinds     part of a name → K-quant of the matrices that have it, whose rows must divide into its blocks
    exact       only values that `kind` holds anyway come from `folder`; else they are quantised
    """
    gguf = pytest.importorskip("gguf")
    config = json.loads((folder / "config.json").read_text())
    name, arch = {
        "qwen2_moe": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
        "qwen3_moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
        "deepseek_v3": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    }[config["model_type"]]
    writer = gguf.GGUFWriter(file, name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_expert_count(
        config.get("num_experts") or config.get("num_local_experts") or config["n_routed_experts"]
    )
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"word {i}" for i in range(config["vocab_size"])])
    writer.add_token_types([1] * config["vocab_size"])
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])

    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for key, value in _stacked(load_file(folder / "model.safetensors"), config, split_kv_b).items():
        key = key.replace("e_score_correction_bias", "e_score_correction.bias")
        target = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert target is not None, key
        plain = value.dim() == 1 or "ffn_gate_inp" in target or value.shape[-1] % 32
        k_kind = next((k for part, k in (k_kinds or {}).items() if part in target), None)
        wanted = gguf.GGMLQuantizationType[k_kind or ("F32" if plain else kind)]
        if k_kind is not None:
            made = k_quants.quantised(value, k_kind.lower()).numpy()
        else:
            made = gguf.quants.quantize(value.float().numpy(), wanted)
        if exact:
            assert torch.equal(torch.from_numpy(gguf.quants.dequantize(made, wanted)), value.float()), key
        writer.add_tensor(target, made, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _stacked(tensors: dict[str, Tensor], config: dict[str, Any], split_kv_b: bool) -> dict[str, Tensor]:
    """With experts in one tensor, and `kv_b_proj` in two, one of them transposed."""
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if ".experts." in key:
            before, _, after = key.partition(".experts.")
            stacked = f"{before}.experts.{after.partition('.')[2]}"
            if stacked not in found:
                count = sum(
                    k.startswith(f"{before}.experts.") and k.endswith(after.partition(".")[2])
                    for k in tensors
                )
                parts = [tensors[f"{before}.experts.{e}.{after.partition('.')[2]}"] for e in range(count)]
                found[stacked] = torch.stack(parts)
        elif split_kv_b and key.endswith("kv_b_proj.weight"):
            heads, d, v = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
            k_b, v_b = value.view(heads, d + v, -1).split([d, v], dim=1)
            found[key.replace("kv_b_proj", "k_b_proj")] = k_b.mT.contiguous()
            found[key.replace("kv_b_proj", "v_b_proj")] = v_b.contiguous()
        else:
            found[key] = value
    return found
