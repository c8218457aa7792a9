"""The configs of single architectures: what their metadata says, and what llama.cpp does alike for all of their models.

Source: `set_gguf_parameters` in llama.cpp's conversion/, `load_arch_hparams` in its src/models/, and the config classes
of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktinject.checkpoints.gguf_rope import partial_rope, rope, whole_rope
from ktinject.checkpoints.gguf_said import Config, Said
from ktinject.errors import shown

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_FULL, _LINEAR = "full_attention", "linear_attention"


def _head_dim(said: Said) -> int:
    heads, hidden = said.count("attention.head_count", 1), said.count("embedding_length", 1)
    found: int = said.count("attention.key_length", max(1, hidden // heads))
    said.must("attention.value_length", found)
    return found


def _experts(said: Said, name: str = "num_experts") -> Config:
    return {name: said.count("expert_count"), "num_experts_per_tok": said.count("expert_used_count")}


def _named(model_type: str, class_name: str) -> Config:
    return {"model_type": model_type, "architectures": [class_name]}


def _llama(said: Said) -> Config:
    head_dim = _head_dim(said)
    found = {
        "head_dim": head_dim,
        "rope_parameters": whole_rope(said, head_dim),
        "intermediate_size": said.count("feed_forward_length"),
    }
    if not said.few("expert_count", 0):
        biases = {
            "attention_bias": said.has("self_attn.q_proj.bias"),
            "mlp_bias": said.has("mlp.up_proj.bias"),
        }
        return {**_named("llama", "LlamaForCausalLM"), **found, **biases}
    return {**_named("mixtral", "MixtralForCausalLM"), **found, **_experts(said, "num_local_experts")}


def _qwen_moe(said: Said) -> Config:
    return {
        "moe_intermediate_size": said.count("expert_feed_forward_length"),
        "intermediate_size": said.count("feed_forward_length", said.count("embedding_length", 1)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **_experts(said),
    }


def _shared_width(said: Said) -> int | None:
    """Of the shared expert; older files have it in the tensor's shape alone."""
    key = "model.layers.0.mlp.shared_expert.up_proj.weight"
    there = said.shape(key)[0] if key in said.weights else ...
    found: int | None = said.count("expert_shared_feed_forward_length", there)
    return found


def _qwen2_moe(said: Said) -> Config:
    said.must("expert_weights_norm", False)
    return {
        **_named("qwen2_moe", "Qwen2MoeForCausalLM"),
        **_qwen_moe(said),
        "shared_expert_intermediate_size": _shared_width(said),
        "qkv_bias": said.has("self_attn.q_proj.bias"),
        "norm_topk_prob": False,  # as llama.cpp computes it
        "rope_parameters": whole_rope(said, _head_dim(said)),
        "use_sliding_window": False,
    }


def _qwen3_moe(said: Said) -> Config:
    head_dim = _head_dim(said)
    return {
        **_named("qwen3_moe", "Qwen3MoeForCausalLM"),
        **_qwen_moe(said),
        "head_dim": head_dim,
        "attention_bias": said.has("self_attn.q_proj.bias"),
        "norm_topk_prob": True,  # as llama.cpp computes it
        "rope_parameters": whole_rope(said, head_dim),
        "use_sliding_window": False,
    }


def _linear_attention(said: Said) -> Config:
    """Qwen3-Next and Qwen3.5-MoE."""
    count, head_dim = said.layers(), _head_dim(said)
    interval = said.count("full_attention_interval", 4)
    recurrent = said.metadata.get(f"{said.name}.attention.recurrent_layers")
    if recurrent is None:
        recurrent = tuple((layer + 1) % interval != 0 for layer in range(count))
    if not isinstance(recurrent, tuple) or len(recurrent) < count or {*map(type, recurrent)} != {bool}:
        said.wrong.append(f"{said.name}.attention.recurrent_layers is {shown(recurrent)}")
        recurrent = (True,) * count
    heads, inner = said.count("ssm.time_step_rank", 1), said.count("ssm.inner_size")
    return {
        "head_dim": head_dim,
        "layer_types": [_LINEAR if linear else _FULL for linear in recurrent[:count]],
        "linear_conv_kernel_dim": said.count("ssm.conv_kernel"),
        "linear_key_head_dim": said.count("ssm.state_size"),
        "linear_num_key_heads": said.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": (inner or 0) // heads,
        "shared_expert_intermediate_size": _shared_width(said),
        "attention_bias": said.has("self_attn.q_proj.bias"),
        **_qwen_moe(said),
    }


def _qwen3_next(said: Said) -> Config:
    found = _linear_attention(said)
    rotated = partial_rope(said, found["head_dim"])
    return {
        **_named("qwen3_next", "Qwen3NextForCausalLM"),
        **found,
        "norm_topk_prob": True,  # as llama.cpp computes it
        "rope_parameters": rotated,
    }


def _qwen35_moe(said: Said) -> Config:
    found = _linear_attention(said)
    rotated = partial_rope(said, found["head_dim"])
    sections = said.metadata.get(f"{said.name}.rope.dimension_sections")
    if isinstance(sections, tuple) and all(type(section) is int and section >= 0 for section in sections):
        rotated |= {"mrope_section": [section for section in sections if section], "mrope_interleaved": True}
    else:
        said.wrong.append(f"{said.name}.rope.dimension_sections is {shown(sections)}")
    return {
        **_named("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        **found,
        "rope_parameters": rotated,
    }


def _routing(said: Said, groups: Any) -> Config:
    """Of DeepSeek-V3 and its like. `groups` stands for absent numbers of groups; `...`: they are needed."""
    return {
        "n_routed_experts": said.count("expert_count"),
        "num_experts_per_tok": said.count("expert_used_count"),
        "n_shared_experts": said.count("expert_shared_count"),
        "moe_intermediate_size": said.count("expert_feed_forward_length"),
        "intermediate_size": said.count("feed_forward_length"),
        "first_k_dense_replace": said.few("leading_dense_block_count", 0),
        "n_group": said.count("expert_group_count", groups),
        "topk_group": said.count("expert_group_used_count", groups),
        "norm_topk_prob": said.flag("expert_weights_norm", False),
        "routed_scaling_factor": said.real("expert_weights_scale", 1.0),
    }


def _latent_attention(said: Said) -> Config:
    rotated = said.count("rope.dimension_count", 1)
    # Files from before kv_b_proj was cut in two have the widths of a head under other keys.
    cut = f"{said.name}.attention.key_length_mla" in said.metadata
    width = said.count("attention.key_length_mla" if cut else "attention.key_length", 1)
    found = rope(said)
    scale = said.real("rope.scaling.yarn_log_multiplier", None)
    if scale is not None and found["rope_type"] == "yarn":
        # Written times 0.1. Published models have both of them alike.
        found["mscale"] = found["mscale_all_dim"] = float(f"{scale / 0.1:.6g}")
    if width <= rotated:
        said.wrong.append(f"{said.name}: heads of {width}, of which {rotated} are rotated")
    return {
        "num_key_value_heads": said.count("attention.head_count"),
        "q_lora_rank": said.count("attention.q_lora_rank", None),
        "kv_lora_rank": said.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": said.count("attention.value_length_mla" if cut else "attention.value_length"),
        "head_dim": rotated,
        "rope_parameters": found,
        "attention_bias": False,
    }


def _deepseek(said: Said) -> Config:
    # The number of groups is not in older files, and llama.cpp did without them then. Models have them.
    found = {**_latent_attention(said), **_routing(said, ...)}
    sigmoid = said.few("expert_gating_func", 0) == _SIGMOID or said.has("mlp.gate.e_score_correction_bias")
    if sigmoid:
        said.must("expert_gating_func", 0, _SIGMOID)
        return {**_named("deepseek_v3", "DeepseekV3ForCausalLM"), **found, "rope_interleave": True}
    said.must("expert_gating_func", 0, _SOFTMAX)
    method = "group_limited_greedy" if (found["n_group"] or 1) > 1 else "greedy"
    return {**_named("deepseek_v2", "DeepseekV2ForCausalLM"), **found, "topk_method": method}


def _indexed(said: Said) -> Config:
    """Attention that an index over the tokens chooses for."""
    said.must("expert_gating_func", 0, _SIGMOID)
    dense, count = said.few("leading_dense_block_count", 0), said.layers()
    return {
        **_latent_attention(said),
        **_routing(said, ...),
        "mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(count)],
        "index_n_heads": said.count("attention.indexer.head_count"),
        "index_head_dim": said.count("attention.indexer.key_length"),
        "index_topk": said.count("attention.indexer.top_k"),
    }


def _deepseek_v32(said: Said) -> Config:
    return {**_named("deepseek_v32", "DeepseekV32ForCausalLM"), **_indexed(said)}


def _glm_dsa(said: Said) -> Config:
    found, count = _indexed(said), said.layers()
    types = said.metadata.get(f"{said.name}.attention.indexer.types", (True,) * count)
    if not isinstance(types, tuple) or len(types) < count or {*map(type, types)} != {bool}:
        said.wrong.append(f"{said.name}.attention.indexer.types is {shown(types)}")
        types = (True,) * count
    kinds = ["full" if full else "shared" for full in types[:count]]
    return {**_named("glm_moe_dsa", "GlmMoeDsaForCausalLM"), **found, "indexer_types": kinds}


def _glm4_moe(said: Said) -> Config:
    head_dim = _head_dim(said)
    said.must("expert_gating_func", 0, _SIGMOID)
    return {
        **_named("glm4_moe", "Glm4MoeForCausalLM"),
        **_routing(said, 1),
        "head_dim": head_dim,
        "rope_parameters": partial_rope(said, head_dim),
        "attention_bias": said.has("self_attn.q_proj.bias"),
        "use_qk_norm": said.has("self_attn.q_norm.weight"),
    }


def _gpt_oss(said: Said) -> Config:
    head_dim, count = _head_dim(said), said.layers()
    rotated = whole_rope(said, head_dim)
    if rotated["rope_type"] == "yarn":
        rotated["truncate"] = False
    said.must("attention.sliding_window_pattern", 2, tuple(layer % 2 == 0 for layer in range(count)))
    return {
        **_named("gpt_oss", "GptOssForCausalLM"),
        **_experts(said, "num_local_experts"),
        "head_dim": head_dim,
        "intermediate_size": said.count("expert_feed_forward_length"),
        "rope_parameters": rotated,
        "sliding_window": said.count("attention.sliding_window"),
        "layer_types": [_FULL if layer % 2 else "sliding_attention" for layer in range(count)],
        "attention_bias": True,
        "swiglu_limit": 7.0,  # as llama.cpp computes it
    }


def _llama4(said: Said) -> Config:
    head_dim = _head_dim(said)
    said.must("expert_weights_norm", False)
    return {
        **_named("llama4_text", "Llama4ForCausalLM"),
        **_experts(said, "num_local_experts"),
        "head_dim": head_dim,
        "intermediate_size": said.count("expert_feed_forward_length"),
        "intermediate_size_mlp": said.count("feed_forward_length"),
        "interleave_moe_layer_step": said.count("interleave_moe_layer_step"),
        "rope_parameters": whole_rope(said, head_dim),
        # As llama.cpp computes it: chunks of 8,192, and norms of q and k but for the model of 128 experts.
        "attention_chunk_size": said.count("attention.sliding_window", 8192),
        "use_qk_norm": said.count("expert_count", 1) != 128,
        "attn_temperature_tuning": True,
    }


def _minimax_m2(said: Said) -> Config:
    head_dim = _head_dim(said)
    said.must("expert_gating_func", 0, _SIGMOID)
    return {
        **_named("minimax_m2", "MiniMaxM2ForCausalLM"),
        **_experts(said, "num_local_experts"),
        "head_dim": head_dim,
        "intermediate_size": said.count("expert_feed_forward_length"),
        "rope_parameters": partial_rope(said, head_dim),
    }


def _dots1(said: Said) -> Config:
    head_dim = _head_dim(said)
    said.must("expert_gating_func", 0, _SIGMOID)
    return {
        **_named("dots1", "Dots1ForCausalLM"),
        **_routing(said, 1),
        "head_dim": head_dim,
        "rope_parameters": whole_rope(said, head_dim),
        "attention_bias": said.has("self_attn.q_proj.bias"),
    }


def _ernie(said: Said) -> Config:
    head_dim, count = _head_dim(said), said.layers()
    said.must("expert_gating_func", 0, _SOFTMAX)
    return {
        **_named("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        "head_dim": head_dim,
        "rope_parameters": whole_rope(said, head_dim),
        "intermediate_size": said.count("feed_forward_length"),
        "moe_intermediate_size": said.count("expert_feed_forward_length"),
        "moe_num_experts": said.count("expert_count"),
        "moe_k": said.count("expert_used_count"),
        "moe_num_shared_experts": said.few("expert_shared_count", 0),
        "moe_layer_start_index": said.few("leading_dense_block_count", 0),
        "moe_layer_end_index": count - 1,
        "moe_layer_interval": said.count("interleave_moe_layer_step", 1),
        "use_bias": said.has("self_attn.o_proj.bias"),
    }


def _olmoe(said: Said) -> Config:
    return {
        **_named("olmoe", "OlmoeForCausalLM"),
        **_experts(said),
        "intermediate_size": said.count("feed_forward_length"),
        "rope_parameters": whole_rope(said, _head_dim(said)),
        "clip_qkv": said.real("attention.clamp_kqv", None),
        "norm_topk_prob": False,  # as llama.cpp computes it
    }


def _granite_moe(said: Said) -> Config:
    found = {
        **_experts(said, "num_local_experts"),
        "intermediate_size": said.count("feed_forward_length"),
        "rope_parameters": whole_rope(said, _head_dim(said)),
        "attention_multiplier": said.real("attention.scale"),
        "embedding_multiplier": said.real("embedding_scale"),
        "residual_multiplier": said.real("residual_scale"),
        "logits_scaling": said.real("logit_scale"),
        "attention_bias": said.has("self_attn.q_proj.bias"),
    }
    if not said.has("shared_mlp.input_linear.weight"):
        return {**_named("granitemoe", "GraniteMoeForCausalLM"), **found}
    shared = said.count("expert_shared_feed_forward_length")
    return {
        **_named("granitemoeshared", "GraniteMoeSharedForCausalLM"),
        **found,
        "shared_intermediate_size": shared,
    }


# general.architecture → its config.
CONFIGS: dict[str, Callable[[Said], Config]] = {
    "llama": _llama,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "qwen3vlmoe": _qwen3_moe,
    "qwen3next": _qwen3_next,
    "qwen35moe": _qwen35_moe,
    "deepseek2": _deepseek,
    "deepseek32": _deepseek_v32,
    "glm-dsa": _glm_dsa,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
    "minimax-m2": _minimax_m2,
    "dots1": _dots1,
    "ernie4_5-moe": _ernie,
    "olmoe": _olmoe,
    "granitemoe": _granite_moe,
}
