"""Tiny models of many families as GGUF files, as llama.cpp's converter makes them.

`write` takes names from the gguf package, which shares no line with ktinject. What the converter changes in the tensors
and which metadata it writes stands here, in its own direction. Each family's file was compared with the one that
convert_hf_to_gguf.py makes of the same model: tensors are equal to the bit (the rope's factors to a rounding), and so
is the metadata, less what is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import models
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel

WORDS = 264
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}

# Model type → general.architecture, changes of the tiny config.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("llama", {"rope_parameters": LLAMA3}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {"rope_parameters": YARN}),
    "qwen3_next": ("qwen3next", {}),
    "qwen3_5_moe_text": ("qwen35moe", {}),
    "deepseek_v2": ("deepseek2", {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek2", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v32": ("deepseek32", {}),
    "glm4_moe": ("glm4moe", {"attention_bias": True, "use_qk_norm": True}),
    "glm_moe_dsa": ("glm-dsa", {}),
    "gpt_oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "llama4_text": ("llama4", {"interleave_moe_layer_step": 2}),
    "minimax_m2": ("minimax-m2", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "dots1": ("dots1", {}),
    "ernie4_5_moe": ("ernie4_5-moe", {}),
    "olmoe": ("olmoe", {}),
    "granitemoeshared": ("granitemoe", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
}


def model(family: str, **sizes: int) -> PreTrainedModel:
    """A tiny model with the tests' tokenizer's words. Norms, biases and the like are not what they begin as."""
    _, changes = FAMILIES[family]
    changes = {**changes, **sizes}
    made = models.tiny(
        family, vocab_size=WORDS, bos_token_id=None, eos_token_id=256, pad_token_id=256, **changes
    )
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) / 4)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return made


# What the converter makes of tensors; each gives name → tensor with the names that the gguf package knows.


def _rope_halves(t: Tensor, heads: int) -> Tensor:
    return t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _apart(t: Tensor, dim: int, keys: int, per_key: int) -> Tensor:
    """Heads of values, those of a key head beside each other → key heads in turn."""
    return t.unflatten(dim, (keys, per_key, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def _plain(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    yield key, t


def _llama(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        if f".{name}_proj." in key:
            t = _rope_halves(t, heads)
    yield (
        key.replace("block_sparse_moe.experts", "feed_forward.experts").removeprefix(
            "model." if "block_sparse_moe.experts" in key else ""
        ),
        t,
    )


def _granite(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if not key.endswith("input_linear.weight"):
        yield from _llama(key, t, config)
        return
    gate, up = t.chunk(2, -2)
    routed = "block_sparse_moe" in key
    layer = key.partition(".block_sparse_moe" if routed else ".shared_mlp")[0].replace("model.layers", "blk")
    for name, half in (("gate", gate), ("up", up)):
        yield f"{layer}.ffn_{name}_{'exps' if routed else 'shexp'}.weight", half


def _qwen3_next(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if key.endswith(".A_log"):
        t = -torch.exp(t)
    elif "conv1d" in key:
        t = t.squeeze()
    elif key.endswith("norm.weight") and not key.endswith("linear_attn.norm.weight"):
        t = t + 1
    elif key.endswith("in_proj_qkvz.weight"):
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        d = config.linear_key_head_dim
        per_key = values // keys * config.linear_value_head_dim
        q, k, v, z = t.unflatten(0, (keys, -1)).split((d, d, per_key, per_key), 1)
        layer = key.partition(".linear_attn")[0].replace("model.layers", "blk")
        yield f"{layer}.attn_qkv.weight", torch.cat([each.flatten(0, 1) for each in (q, k, v)])
        yield f"{layer}.attn_gate.weight", z.flatten(0, 1)
        return
    yield key.replace(".dt_bias", ".dt_proj.bias"), t


def _qwen35(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    keys = config.linear_num_key_heads
    per_key = config.linear_num_value_heads // keys
    if any(each in key for each in ("in_proj_z", "in_proj_a.", "in_proj_b.", "A_log", "dt_bias")):
        t = _apart(t, 0, keys, per_key)
    elif "in_proj_qkv." in key or "conv1d" in key:
        first = 2 * keys * config.linear_key_head_dim
        t = torch.cat((t[:first], _apart(t[first:], 0, keys, per_key)))
    elif "linear_attn.out_proj" in key:
        t = _apart(t, 1, keys, per_key)
    yield from _qwen3_next(key, t, config)


def _latent(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if not key.endswith("kv_b_proj.weight"):
        yield key, t
        return
    heads, d = config.num_attention_heads, config.qk_nope_head_dim
    k_b, v_b = t.unflatten(0, (heads, -1)).split((d, config.v_head_dim), 1)
    yield key.replace("kv_b_proj", "k_b_proj"), k_b.mT
    yield key.replace("kv_b_proj", "v_b_proj"), v_b


def _gpt_oss(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if "gate_up_proj" in key:
        rows = t if "bias" in key else t.mT
        end = ".bias" if "bias" in key else ".weight"
        for name, part in (("gate_proj", rows[:, ::2]), ("up_proj", rows[:, 1::2])):
            yield key.partition("gate_up_proj")[0] + name + end, part
    elif "down_proj" in key:
        end = ".bias" if "bias" in key else ".weight"
        yield key.partition("down_proj")[0] + "down_proj" + end, (t if "bias" in key else t.mT)
    else:
        yield (f"{key}.weight" if key.endswith("sinks") else key), t


def _llama4(key: str, t: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    if key.endswith("experts.gate_up_proj"):
        for name, part in zip(("gate_proj", "up_proj"), t.mT.chunk(2, -2)):
            yield key.replace("gate_up_proj", f"{name}.weight"), part
    elif key.endswith("experts.down_proj"):
        yield f"{key}.weight", t.mT
    else:
        yield key, t


CHANGES: dict[str, Callable[[str, Tensor, Any], Iterator[tuple[str, Tensor]]]] = {
    "llama": _llama,
    "granitemoe": _granite,
    "qwen3next": _qwen3_next,
    "qwen35moe": _qwen35,
    "deepseek2": _latent,
    "deepseek32": _latent,
    "glm-dsa": _latent,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
}


def tensors(made: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """GGUF's name → tensor, of a model whose weights have the names of published checkpoints."""
    config = made.config
    layers = config.num_hidden_layers
    # The package does not know deepseek32 yet, whose names are those of the other one with an index.
    name = {"deepseek32": "glm-dsa"}.get(architecture, architecture)
    known = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == name), layers)
    change = CHANGES.get(architecture, _plain)
    found: dict[str, Tensor] = {}
    for key, value in _stacked(published(made)).items():
        for name, t in change(
            key.replace("e_score_correction_bias", "e_score_correction.bias"), value, config
        ):
            target = name if name.startswith("blk.") else known.get_name(name, (".weight", ".bias"))
            assert target is not None, name
            found[target] = t.contiguous()
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _llama3(config.head_dim, rope)
    return found


def published(made: PreTrainedModel) -> dict[str, Tensor]:
    """The weights as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: value.detach() for name, value in made.state_dict().items()}
    if made.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return revert_weight_conversion(made, state)


def _stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the experts of a layer in one tensor."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        before, experts, after = key.partition(".experts.")
        number, _, rest = after.partition(".")
        if experts and number.isdigit():
            found.setdefault(f"{before}.experts.{rest}", {})[int(number)] = value
        else:
            found[key] = value
    return {
        key: torch.stack([value[n] for n in range(len(value))]) if isinstance(value, dict) else value
        for key, value in found.items()
    }


def _fused(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """As the converter's --fuse-qkv and --fuse-gate-up-exps make them."""
    found = dict(found)
    for name in [*found]:
        layer, _, inner = name.partition(".attn_q.")
        if inner:
            rows = [found.pop(f"{layer}.attn_{part}.{inner}") for part in "qkv"]
            found[f"{layer}.attn_qkv.{inner}"] = torch.cat(rows)
        layer, gate, _ = name.partition(".ffn_gate_exps.")
        if gate:
            parts = [found.pop(f"{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            found[f"{layer}.ffn_gate_up_exps.weight"] = torch.cat(parts, 1)
    return found


def _llama3(width: int, rope: dict[str, Any]) -> Tensor:
    factors = []
    for i in range(0, width, 2):
        wave = 2 * torch.pi * rope["rope_theta"] ** (i / width)
        low, high = (
            rope["original_max_position_embeddings"] / rope[f"{n}_freq_factor"] for n in ("low", "high")
        )
        smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wave < high else rope["factor"] if wave > low else between)
    return torch.tensor(factors)


# Config → key of the metadata, where the config has it.
_COMMON = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "num_experts_per_tok": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "moe_num_experts": "expert_count",
    "moe_k": "expert_used_count",
    "moe_num_shared_experts": "expert_shared_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_ROPE = {
    "rope_theta": "rope.freq_base",
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}


def metadata(config: Any, architecture: str) -> dict[str, Any]:
    """Key behind the architecture's name → number, truth value, text or list."""
    said: dict[str, Any] = {}
    for name, key in _COMMON.items():
        if (value := getattr(config, name, None)) is not None:
            said[key] = value
    if architecture in ("llama", "olmoe", "granitemoe"):
        said.pop("expert_feed_forward_length")  # the tiny configs have one that the models do not know
    experts = getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None)
    said.setdefault("expert_count", experts or getattr(config, "num_experts", None))
    rope = dict(config.rope_parameters)
    said |= {
        key: rope.get(name)
        for name, key in _ROPE.items()
        if name == "rope_theta" or rope["rope_type"] == "yarn"
    }
    head = getattr(config, "head_dim", None)
    said |= {"attention.key_length": head, "attention.value_length": head}
    if rope["rope_type"] == "yarn":
        said["rope.scaling.type"] = "yarn"
    if getattr(config, "norm_topk_prob", False) and architecture in (
        "deepseek2",
        "deepseek32",
        "glm-dsa",
        "glm4moe",
        "dots1",
    ):
        said["expert_weights_norm"] = True
    width = head or config.hidden_size // config.num_attention_heads
    if architecture == "llama4":
        said["expert_feed_forward_length"] = config.intermediate_size
        said["feed_forward_length"] = config.intermediate_size_mlp
    if architecture in ("llama", "granitemoe", "llama4"):
        said["rope.dimension_count"] = width
    if architecture in ("glm4moe", "minimax-m2", "qwen3next", "qwen35moe"):
        default = {"glm4moe": 0.5, "minimax-m2": 1.0}.get(architecture, 0.25)
        said["rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", default))
    if architecture == "glm4moe":
        said["expert_gating_func"] = 2
    if architecture in ("gpt-oss", "minimax-m2"):
        said["expert_feed_forward_length"] = config.intermediate_size
    if architecture == "gpt-oss":
        said["attention.sliding_window"] = config.sliding_window
    if hasattr(config, "kv_lora_rank"):
        said |= _latent_metadata(config, rope)
    if architecture == "glm-dsa":
        said["attention.indexer.types"] = [kind == "full" for kind in config.indexer_types]
    if architecture in ("qwen3next", "qwen35moe"):
        said["ssm.inner_size"] = config.linear_value_head_dim * config.linear_num_value_heads
        said["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
        said["full_attention_interval"] = 4
    if architecture == "qwen35moe":
        said["rope.dimension_sections"] = [*rope.get("mrope_section", (11, 11, 10)), 0]
    return {key: value for key, value in said.items() if value is not None}


def _latent_metadata(config: Any, rope: dict[str, Any]) -> dict[str, Any]:
    found = {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
    }
    if "mscale_all_dim" in rope:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return found


def write(
    made: PreTrainedModel,
    file: Path,
    kind: str = "F32",
    *,
    decoded: bool = False,
    words: bool = False,
    architecture: str = "",
    fused: bool = False,
    **more: Any,
) -> Path:
    """A model as GGUF.

    kind     of matrices whose rows divide into blocks
    words    with the tests' tokenizer
    architecture  another one of the same names
    fused    q, k and v in one tensor, and gate and up of experts
    decoded  what `kind` makes of the values is written as F32
    more     further metadata, behind the architecture's name
    """
    architecture = architecture or FAMILIES[made.config.model_type][0]
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in {**metadata(made.config, architecture), **more}.items():
        full = f"{architecture}.{key}"
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        add.get(type(value), writer.add_array)(full, value)
    if words:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*alphabet, "<|end|>", *(f"[PAD{n}]" for n in range(257, WORDS))])
        writer.add_token_types([1] * 256 + [3] + [5] * (WORDS - 257))
    writer.add_eos_token_id(256)
    writer.add_pad_token_id(256)
    found = tensors(made, architecture)
    for name, value in (_fused(found) if fused else found).items():
        wanted = gguf.GGMLQuantizationType[kind]
        rows, _ = gguf.GGML_QUANT_SIZES[wanted]
        plain = value.dim() == 1 or "ffn_gate_inp" in name or value.shape[-1] % rows
        wanted = gguf.GGMLQuantizationType["F32" if plain else kind]
        blocks = gguf.quants.quantize(value.float().numpy(), wanted)
        if decoded:
            blocks, wanted = gguf.quants.dequantize(blocks, wanted), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, blocks, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
