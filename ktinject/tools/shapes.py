"""Sizes of published Mixture-of-Experts models, as their config.json has them, for models of random weights.

What differs from the default of its config class, and the sizes of all that takes time. Ids of end and other special
tokens are left out.
"""

from __future__ import annotations

from typing import Any


def _types(layers: int, usual: str, other: str, at: tuple[int, ...]) -> list[str]:
    return [other if index in at else usual for index in range(layers)]


def _blocks(pattern: str) -> list[str]:
    """Nemotron-H's layers, as its pattern has them."""
    names = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    return [names[letter] for letter in pattern]


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    },
    "qwen3.5-35b-a3b": {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 248320,
        "max_position_embeddings": 262144,
    },
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "norm_topk_prob": True, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "vocab_size": 151936, "max_position_embeddings": 262144,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True, "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8,
        "o_lora_rank": 1024, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "sliding_window": 128, "index_topk": 512, "index_n_heads": 64, "index_head_dim": 128, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "routed_scaling_factor": 1.5, "vocab_size": 129280,
        "max_position_embeddings": 1048576,
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384,
        "moe_intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 192, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1,
        "topk_group": 1, "sliding_window": 128, "vocab_size": 152576, "max_position_embeddings": 262144,
    },
    "kimi-k2": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128, "routed_scaling_factor": 2.827, "norm_topk_prob": True, "vocab_size": 163840,
        "max_position_embeddings": 131072,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "attention_bias": True, "norm_topk_prob": True, "vocab_size": 151552,
        "max_position_embeddings": 131072,
    },
    "minimax-m2": {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
        "num_experts_per_tok": 8, "vocab_size": 200064, "max_position_embeddings": 196608,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1e6,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe", "hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "vocab_size": 50304, "max_position_embeddings": 4096,
    },
    "ernie-4.5-21b-a3b": {
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64,
        "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "vocab_size": 103424,
        "max_position_embeddings": 131072,
    },
    "dots.llm1": {
        "model_type": "dots1", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 128,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "vocab_size": 152064, "max_position_embeddings": 32768,
    },
    "hunyuan-a13b": {
        "model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 64, "moe_topk": 8,
        "vocab_size": 128167, "max_position_embeddings": 32768,
    },
    "lfm2-8b-a1b": {
        "model_type": "lfm2_moe", "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792,
        "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 32,
        "num_experts_per_tok": 4, "num_dense_layers": 2, "vocab_size": 65536, "max_position_embeddings": 128000,
        "layer_types": _types(24, "conv", "full_attention", (2, 6, 10, 14, 18, 21)),
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768,
        "shared_intermediate_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10, "mamba_n_heads": 128,
        "mamba_d_head": 64, "mamba_d_state": 128, "position_embedding_type": "nope", "vocab_size": 100352,
        "max_position_embeddings": 131072, "layer_types": _types(40, "mamba", "attention", (5, 15, 25, 35)),
    },
    "nemotron-3-nano-30b-a3b": {
        "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "num_hidden_layers": 52, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "mamba_num_heads": 64, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 8, "vocab_size": 131072, "max_position_embeddings": 262144,
        "layers_block_type": _blocks("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
    },
    "kimi-linear-48b-a3b": {
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "num_local_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32, "vocab_size": 163840,
        "max_position_embeddings": 1048576,
        "layer_types": _types(27, "linear_attention", "full_attention", (3, 7, 11, 15, 19, 23, 26)),
    },
    "llama-4-scout": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048,
        "max_position_embeddings": 262144,
    },
}  # fmt: skip
