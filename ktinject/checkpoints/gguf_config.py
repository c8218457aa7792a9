"""GGUF's metadata as the config.json of the same model.

    qwen3moe.attention.head_count_kv  ──►  num_key_value_heads

The metadata leaves out what llama.cpp does alike for all models of an architecture, such as whether weights of experts
are normalised; that is written in gguf_configs.py. What one model has in another way, and metadata cannot say, is
refused: a config that is almost right answers almost right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ktinject.checkpoints import gguf_rope
from ktinject.checkpoints.gguf_configs import CONFIGS
from ktinject.checkpoints.gguf_said import Config, Said
from ktinject.errors import CheckpointError, listed, shown

_BESIDE = "Put the config.json of the original model beside the file."


def config_values(
    metadata: Mapping[str, Any],
    weights: Collection[str],
    shape: Callable[[str], tuple[int, ...]],
    rope_factors: list[float] | None,
    where: str,
) -> Config:
    """What config.json would say.

    weights       names as in safetensors
    shape         weight → its shape
    rope_factors  rope_freqs.weight: what each frequency is divided by
    Raises        CheckpointError for what the metadata cannot say
    """
    said = Said(metadata, weights, shape)
    vocabulary = _vocabulary(said)
    tokens = _tokens(said, vocabulary)
    found = {**_common(said), "vocab_size": vocabulary, **CONFIGS[said.name](said), **tokens}
    if rope_factors is not None:
        gguf_rope.llama3(said, found, rope_factors)
    said.must_mean_nothing()
    if said.wrong:
        raise CheckpointError(f"{where}: its metadata makes no config:{listed(said.wrong)}\n{_BESIDE}")
    return found


def _tokens(said: Said, vocabulary: int) -> Config:
    """Numbers of special tokens. Where a turn of a chat ends with another one than a text, both end generation."""
    found: dict[str, int | None] = {}
    for key in ("bos", "eos", "padding", "eot", "eom"):
        token = said.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and not (type(token) is int and 0 <= token < vocabulary):
            said.wrong.append(
                f"tokenizer.ggml.{key}_token_id is {shown(token)}; a number below the vocabulary's {vocabulary} "
                "is needed"
            )
            token = None
        found[key] = token
    ends = [*dict.fromkeys(found[key] for key in ("eos", "eot", "eom") if found[key] is not None)]
    end = ends if len(ends) > 1 else ends[0] if ends else None
    return {"bos_token_id": found["bos"], "eos_token_id": end, "pad_token_id": found["padding"]}


def _vocabulary(said: Said) -> int:
    key = "model.embed_tokens.weight"
    shape = said.shape(key) if key in said.weights else ()
    if len(shape) != 2:
        said.wrong.append("there is no token_embd.weight [vocabulary, hidden]")
        return 2**31
    return shape[0]


def _common(said: Said) -> Config:
    heads = said.count("attention.head_count")
    return {
        "hidden_size": said.count("embedding_length"),
        "num_hidden_layers": said.layers(),
        "num_attention_heads": heads,
        "num_key_value_heads": said.count("attention.head_count_kv", heads),
        "max_position_embeddings": said.count("context_length"),
        "rms_norm_eps": said.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "lm_head.weight" not in said.weights,
        "hidden_act": "silu",
    }
