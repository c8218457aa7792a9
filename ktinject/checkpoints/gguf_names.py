"""The names of GGUF's tensors as the same model has them in safetensors, and its metadata as a config.

    blk.3.ffn_up_exps.weight [experts, n, k]  ──►  model.layers.3.mlp.experts.{0 …}.up_proj.weight [n, k]
    blk.3.attn_q.weight                       ──►  model.layers.3.self_attn.q_proj.weight
    blk.3.attn_k_b.weight, attn_v_b.weight    ──►  model.layers.3.self_attn.kv_b_proj.{k_b,v_b}, see formats/kv_b.py

Behind the reader, a GGUF file looks like a safetensors file of the same model. Only those architectures are served
whose values llama.cpp's converter does not change. (Of llama it permutes the rows of q and k; to gemma's norms it adds
one.)

Source: llama.cpp's conversion/qwen.py, conversion/deepseek.py and gguf-py's tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats import gguf_blocks
from ktinject.checkpoints.reader import MAX_TENSORS, Entry
from ktinject.errors import CheckpointError, shown

# What is served of `general.architecture` → what its shared experts are called.
ARCHITECTURES = {
    "qwen2moe": "mlp.shared_expert",
    "qwen3moe": "",
    "deepseek2": "mlp.shared_experts",  # DeepSeek-V2, DeepSeek-V3, Kimi-K2
}

MAX_EXPERTS = 4096  # of a layer; known models have up to 512
TYPES = ("F32", "F16", "BF16", *gguf_blocks.TYPES)

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_WHOLE = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "attn_k_b.weight": "self_attn.kv_b_proj.k_b",
    "attn_v_b.weight": "self_attn.kv_b_proj.v_b",
}
_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
_OF_EXPERTS = re.compile(r"ffn_(gate|up|down)_(exps|shexp)\.weight")


def rename(
    headers: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Entry]]], path: Path
) -> dict[str, dict[str, Entry]]:
    """File → its tensors by the names that they have in safetensors, stacked experts one by one; unknown names stay.

    headers  file → metadata and tensors; of a model in parts, all of them in order
    path     what was opened, for messages
    Raises   CheckpointError for architectures and types that are not served, experts that are not stacked, and parts
             that do not belong together
    """
    _check_parts([metadata for metadata, _ in headers.values()], path)
    architecture = next(iter(headers.values()))[0].get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {shown(architecture)}; of GGUF, {', '.join(ARCHITECTURES)} are read. "
            "Use the safetensors checkpoint that the file was made from."
        )
    seen: dict[str, str] = {}
    renamed: dict[str, dict[str, Entry]] = {}
    for file, (_, tensors) in headers.items():
        _check_types(tensors, f"{path}: {file}")
        pairs = (pair for name, entry in tensors.items() for pair in _of(name, entry, architecture, path))
        found: dict[str, Entry] = {}
        for name, entry in pairs:
            found[name] = entry
            if len(seen) >= MAX_TENSORS:
                raise CheckpointError(
                    f"{path}: more than {MAX_TENSORS:,} tensors, each expert counted as one. {DOWNLOAD_AGAIN}"
                )
            if name in seen:
                raise CheckpointError(
                    f"{path}: two tensors stand for {shown(name)}, in {seen[name]} and in {file}. {DOWNLOAD_AGAIN}"
                )
            seen[name] = file
        renamed[file] = found
    return renamed


def _check_parts(metadata: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Refuse parts that say themselves that they do not belong together, or that there are more."""
    for number, each in enumerate(metadata):
        said = each.get("split.no", 0), each.get("split.count", 1) or 1
        if said != (number, len(metadata)):
            raise CheckpointError(
                f"{path}: part {number + 1} of {len(metadata)} says it is number {shown(said[0])} (from 0) of "
                f"{shown(said[1])}. Keep the names the files came with (…-00001-of-00003.gguf), and download all."
            )


def _check_types(tensors: Mapping[str, Entry], where: str) -> None:
    if other := {name: entry.dtype for name, entry in tensors.items() if entry.dtype not in TYPES}:
        raise CheckpointError(
            f"{where}: {len(other)} of {len(tensors)} tensors are {', '.join(sorted({*other.values()}))}, such as "
            f"{shown(next(iter(other)))}; of GGUF, {', '.join(TYPES)} are read. Use such a file of the same model, "
            "or the safetensors checkpoint that it was made from."
        )


def _of(name: str, entry: Entry, architecture: str, where: Path) -> list[tuple[str, Entry]]:
    stem, _, end = name.rpartition(".")
    if stem in _TOP:
        return [(f"{_TOP[stem]}.{end}", entry)]
    if not (found := _IN_LAYER.fullmatch(name)):
        return [(name, entry)]
    layer, inner = f"model.layers.{found[1]}", found[2]
    if inner in _WHOLE:
        return [(f"{layer}.{_WHOLE[inner]}", entry)]
    if experts := _OF_EXPERTS.fullmatch(inner):
        if experts[2] == "exps":
            return _one_by_one(name, entry, f"{layer}.mlp.experts", f"{experts[1]}_proj.weight", where)
        return [(f"{layer}.{ARCHITECTURES[architecture]}.{experts[1]}_proj.weight", entry)]
    stem, _, end = inner.rpartition(".")
    if stem not in _LAYER:
        return [(name, entry)]
    if stem == "ffn_gate_inp_shexp" and len(entry.shape) == 1:
        entry = entry._replace(shape=(1, *entry.shape))  # GGUF drops the extent of one
    return [(f"{layer}.{_LAYER[stem]}.{end}", entry)]


def _one_by_one(name: str, entry: Entry, prefix: str, suffix: str, where: Path) -> list[tuple[str, Entry]]:
    if len(entry.shape) != 3:
        raise CheckpointError(
            f"{where}: tensor {shown(name)}: shape {list(entry.shape)}; [experts, outputs, inputs] is needed. "
            "Convert the original checkpoint again."
        )
    count, *shape = entry.shape
    if count > MAX_EXPERTS:
        raise CheckpointError(
            f"{where}: tensor {shown(name)}: {count} experts; at most {MAX_EXPERTS} are read. {DOWNLOAD_AGAIN}"
        )
    size = entry.bytes // count
    return [
        (f"{prefix}.{e}.{suffix}", Entry(entry.dtype, tuple(shape), entry.offset + e * size, size))
        for e in range(count)
    ]


# Values of a config, and the keys that hold them behind the architecture's name; without the marked ones it goes, too.
_QWEN = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_values(metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What config.json would say, of a Qwen3-MoE model; `tensors` as `rename` gives them.

    Raises   CheckpointError for another architecture, or what the metadata cannot say
    """
    if metadata.get("general.architecture") != "qwen3moe" or "qwen3moe.rope.scaling.type" in metadata:
        raise CheckpointError(
            f"{where}: its metadata does not say all that a {shown(metadata.get('general.architecture'))} model needs. "
            "Put the config.json of the original model beside the file."
        )
    found = {name: metadata.get(f"qwen3moe.{key}") for name, key in _QWEN.items()}
    wrong = [
        f"qwen3moe.{_QWEN[name]} is {shown(value)}"
        for name, value in found.items()
        if type(value) is not (float if name in ("rms_norm_eps", "rope_theta") else int)
        or not 0 < value < 2**31
    ]
    embeddings = tensors.get("model.embed_tokens.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        wrong.append("there is no token_embd.weight [vocabulary, hidden]")
    if wrong:
        raise CheckpointError(
            f"{where}: {'; '.join(wrong)}. Put the config.json of the original model beside the file."
        )
    assert embeddings is not None
    tokens = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _TOKENS.items()}
    for name, key in _TOKENS.items():
        token = tokens[name]
        if token is not None and not (type(token) is int and 0 <= token < embeddings.shape[0]):
            raise CheckpointError(
                f"{where}: tokenizer.ggml.{key}_token_id is {shown(token)}; a number below the vocabulary's "
                f"{embeddings.shape[0]} is needed. Put the config.json of the original model beside the file."
            )
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": embeddings.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "norm_topk_prob": True,  # as llama.cpp computes it, whatever a file says
        **found,
        **tokens,
    }
