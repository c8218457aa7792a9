"""One tiny random model per family: the real architecture at toy sizes.

`tiny(name)` takes milliseconds. To add a family, add one row to FAMILIES under the config's `model_type`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Sizes that most configs share. No two dimensions of an expert are equal, so that an exchange of them shows,
# and none is a multiple of a vector register or of an int4 group.
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 16}
MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
INDEXER = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 8}
SIGMOID_GROUPS = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
LOCAL = {"num_local_experts": 6}
EXPERTS = {"num_experts": 6}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 24}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
LIMIT = {"swiglu_limit": 1.5}  # low enough for random activations to reach it

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**HEADS, **EXPERTS, "num_dense_layers": 1},
    "aria_text": {**HEADS, "moe_num_experts": 6, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {**MLA, **SIGMOID_GROUPS},
    "beam": {**HEADS, **EXPERTS, **DENSE_FIRST, "n_group": 2, "topk_group": 1},
    "cohere2_moe": {**HEADS, **EXPERTS},
    "deepseek_v2": {**MLA, **SIGMOID_GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**MLA, **SIGMOID_GROUPS},
    "deepseek_v32": {**MLA, **SIGMOID_GROUPS, **INDEXER},
    "deepseek_v4": {
        **HEADS,
        **INDEXER,
        **LIMIT,
        "n_routed_experts": 6,
        "mlp_layer_types": ["moe", "moe"],
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 8,
        "num_key_value_heads": 1,
    },
    "dots1": {**HEADS, **SIGMOID_GROUPS},
    "ernie4_5_moe": {
        **HEADS,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone_moe": {**HEADS, **EXPERTS},
    "flex_olmo": {**EXPERTS},
    "flint": {**HEADS, **SHARED_EXPERT, "mlp_only_layers": [0]},
    "gemma4_text": {
        **HEADS,
        **EXPERTS,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe": {**HEADS, **SIGMOID_GROUPS},
    "glm4_moe_lite": {**MLA, **SIGMOID_GROUPS},
    "glm_moe_dsa": {**MLA, **SIGMOID_GROUPS, **INDEXER},
    "gpt_oss": {**HEADS, **LOCAL, **LIMIT},
    "granitemoe": {**LOCAL},
    "granitemoehybrid": {
        **LOCAL,
        "shared_intermediate_size": 24,
        "layer_types": ["attention", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 20,
    },
    "granitemoeshared": {**LOCAL, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {**HEADS, **EXPERTS, "moe_topk": 2},
    "hy_v3": {**HEADS, **EXPERTS},
    "hy_v4": {**MLA, **INDEXER, **LIMIT, **DENSE_FIRST, "head_dim": 24, "n_routed_experts": 6},
    "jamba": {
        **EXPERTS,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k2": {**MLA, **SIGMOID_GROUPS},
    "kimi_linear": {**MLA, **LOCAL, "linear_head_dim": 8, "linear_num_heads": 2},
    "laguna": {**HEADS, **EXPERTS},
    "lfm2_moe": {**EXPERTS, "layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "mellum": {**HEADS, **EXPERTS},
    "mimo_v2_flash": {**HEADS, **SIGMOID_GROUPS},
    "minimax": {**HEADS, **LOCAL, "layer_types": ["full_attention", "linear_attention"], "block_size": 16},
    "minimax_m2": {**HEADS, **LOCAL},
    "minimax_m3_vl_text": {
        **HEADS,
        **LOCAL,
        **LIMIT,
        "dense_intermediate_size": 32,
        "shared_intermediate_size": 24,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
    },
    "mixtral": {**HEADS, **LOCAL},
    "nemotron_h": {
        **HEADS,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_latent_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "layers_block_type": ["moe", "attention"],
    },
    "olmoe": {**EXPERTS},
    "phimoe": {**HEADS, **LOCAL},
    "qwen2_moe": {**SHARED_EXPERT},
    "qwen3_5_moe_text": {**HEADS, **SHARED_EXPERT, **LINEAR_ATTENTION},
    "qwen3_moe": {**HEADS, **EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**HEADS, **SHARED_EXPERT, **LINEAR_ATTENTION},
    "solar_open": {**HEADS, **SIGMOID_GROUPS},
    "zaya": {**HEADS, **EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 12},
}

# Experts that take rows alone, the rows of each expert together.
OF_ROWS: dict[str, dict[str, Any]] = {
    "llama4_text": {**HEADS, **LOCAL, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
}

# Leaves without the standard signature or layout: what the refusal must name.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "longcat_flash": (
        {
            **MLA,
            "head_dim": 8,
            "n_routed_experts": 6,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 24,
            "ffn_hidden_size": 48,
            "num_layers": 1,
        },
        r"gate_up_proj is \[8, 48, 40\], but with down_proj \[6, 40, 24\]",
    ),
}

with suppress(ImportError):
    import ktinject.hf.kimi_k2  # noqa: F401  registers it

# The oldest transformers that is supported lacks some of them.
AVAILABLE = [name for name in FAMILIES if name in CONFIG_MAPPING]


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a family, with some of its values changed."""
    row = (FAMILIES | OF_ROWS)[name] if name not in REFUSED else REFUSED[name][0]
    return AutoConfig.for_model(name, **{**COMMON, **row, **changes})


def tiny(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny fp32 model on the CPU with Gaussian weights, the same for the same seed."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # With transformers' own 0.02 every gate is as good as linear and no clamp is reached.
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return model


def leaf(model: nn.Module) -> tuple[str, nn.Module]:
    """The path and the module of the model's last routed-experts leaf."""
    return [(path, module) for path, module in model.named_modules() if path.endswith(".experts")][-1]
