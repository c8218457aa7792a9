"""One tiny random model of text and images per family, as `tests/models` has them of text alone.

The language part is a family of that table, or one of the composite's own. Vision towers have one layer and patches of
4 × 4 pixels.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from models import (
    COMMON,
    DENSE_FIRST,
    EXPERTS,
    FAMILIES,
    HEADS,
    INDEXER,
    LINEAR_ATTENTION,
    LOCAL,
    MLA,
    SHARED_EXPERT,
    SIGMOID_GROUPS,
)

IMAGE, VIDEO, START, END = 90, 91, 92, 93  # tokens
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
BETWEEN = {"vision_start_token_id": START, "vision_end_token_id": END}
GLM = {
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}

# Axes of time, height and width, for heads of 16 that are rotated as a whole or in half.
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
HALF_MROPE = {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}

# Of Mistral 4, whose queries depend on their position; here from one that short texts reach.
TUNED_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
    "partial_rotary_factor": 8 / 24,
}

# Two by two patches become one token.
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 40,
    "num_position_embeddings": 16,
}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
CLIP_LIKE = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "window_size": 2,
    "global_attn_indexes": [0],
    "downsample_channels": [16, 32],
    "mlp_dim": 48,
}


def text(family: str, **more: Any) -> dict[str, Any]:
    """The text config of a composite whose language part is a family of the table."""
    return {"model_type": family, **COMMON, **FAMILIES[family], **more}


# model_type → its text config, its vision config and the rest
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "aria": (
        text("aria_text"),
        {**CLIP_LIKE, "model_type": "idefics3_vision"},
        {"image_token_index": IMAGE, "projector_patch_to_query_dict": {16: 4}},
    ),
    "dots3_note": (
        {
            **COMMON,
            **MLA,
            **SIGMOID_GROUPS,
            **INDEXER,
            **DENSE_FIRST,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "sliding_window": 8,
            "n_group": 1,
            "shared_experts_intermediate_size": 24,
            "head_dim": 24,
            "per_layer_config": {},
        },
        {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_attention_heads": 2,
            "patch_size": 4,
            "mlp_layer_types": ["dense", "sparse"],
            "num_local_experts": 4,
            "adapter_in_dim": 32,
            "adapter_out_dim": 40,
            "per_layer_config": {},
        },
        {
            **IDS,
            "audio_token_id": 89,
            "audio_config": {
                "num_hidden_layers": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "downsample_hidden_size": 8,
                "adapter_input_size": 32,
                "adapter_out_dim": 40,
                "conv_output_size": 128,
            },
        },
    ),
    "ernie4_5_vl_moe": (
        {
            **COMMON,
            **HEADS,
            "moe_intermediate_size": [24, 24],
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            **DENSE_FIRST,
            "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]},
        },
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4},
        {**IDS, **GLM},
    ),
    "glm4v_moe": (
        {**COMMON, **HEADS, **SIGMOID_GROUPS, "rope_parameters": HALF_MROPE},
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 40,
            "image_size": 16,
        },
        {**IDS, **GLM},
    ),
    "glm5_next": (
        {
            **COMMON,
            **MLA,
            **INDEXER,
            **DENSE_FIRST,
            "qk_rope_head_dim": 0,
            "n_routed_experts": 6,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "hc_mult": 2,
            "index_kpool": 2,
        },
        {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 40,
            "image_size": 16,
            "projection_intermediate_size": 48,
        },
        {**IDS, **GLM},
    ),
    "internvl": (
        text("qwen3_moe"),
        {**CLIP_LIKE, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_token_id": IMAGE, "image_seq_length": 4},
    ),
    "kimi_k25": (
        text("deepseek_v3"),
        {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        {**IDS, **BETWEEN, "projection_hidden_size": 32},
    ),
    "lfm2_vl": (
        text("lfm2_moe"),
        {**CLIP_LIKE, "model_type": "siglip2_vision_model", "num_patches": 16},
        {"image_token_id": IMAGE, "projector_hidden_size": 40},
    ),
    "minimax_m3_vl": (
        text("minimax_m3_vl_text"),
        CLIP_LIKE,
        {"image_token_index": IMAGE, "video_token_index": VIDEO, "projector_hidden_size": 40},
    ),
    "mistral3": (
        {
            "model_type": "mistral4",
            **COMMON,
            **MLA,
            **SIGMOID_GROUPS,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "rope_parameters": TUNED_YARN,
        },
        {**CLIP_LIKE, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE},
    ),
    "mistral_large4": (
        {
            **COMMON,
            **MLA,
            **SIGMOID_GROUPS,
            **INDEXER,
            **DENSE_FIRST,
            "n_group": 1,
            "indexer_types": ["full", "full"],
            "kv_source_layers": [0, 1],
            "no_rope_layers": [1, 1],
            "layer_types": ["indexed_attention"] * 2,
        },
        {**CLIP_LIKE, "model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE},
    ),
    "nemotron_h_omni": (
        text("nemotron_h"),
        {
            "model_type": "radio",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
            "max_img_size": 16,
            "video_temporal_patch_size": 2,
        },
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "projector_hidden_size": 40,
            "vision_hidden_size": 32,
        },
    ),
    "qwen3_5_moe": (
        {**COMMON, **HEADS, **SHARED_EXPERT, **LINEAR_ATTENTION, "rope_parameters": HALF_MROPE},
        QWEN_VISION,
        {**IDS, **BETWEEN},
    ),
    "qwen3_omni_moe_thinker": (
        {**COMMON, **HEADS, **EXPERTS, "rope_parameters": MROPE},
        {**QWEN_VISION, **DEEPSTACK},
        {
            **IDS,
            **BETWEEN,
            "audio_token_id": 89,
            "audio_start_token_id": 88,
            "audio_config": {
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "output_dim": 40,
                "downsample_hidden_size": 8,
            },
        },
    ),
    "qwen3_vl_moe": (
        {**COMMON, **HEADS, **EXPERTS, **LOCAL, "rope_parameters": MROPE},
        {**QWEN_VISION, **DEEPSTACK},
        {**IDS, **BETWEEN},
    ),
    "step3p7": (
        {
            **COMMON,
            **HEADS,
            **DENSE_FIRST,
            "n_routed_experts": 6,
            "share_expert_dim": 24,
            "layer_types": ["full_attention", "full_attention"],
            "sliding_window": 8,
        },
        {**CLIP_LIKE},
        {"image_token_id": IMAGE},
    ),
    "unlimited_ocr": (
        {
            **COMMON,
            **DENSE_FIRST,
            "head_dim": 10,
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "layer_types": ["reference_sliding_attention"] * 2,
            "sliding_window": 8,
        },
        {
            "sam_config": {**SAM},
            "encoder_config": {**CLIP_LIKE},
        },
        {"image_token_id": IMAGE},
    ),
    "deepseek_ocr2": (
        {
            **COMMON,
            **DENSE_FIRST,
            "head_dim": 10,
            "num_key_value_heads": 4,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
        },
        {
            "sam_config": {**SAM, "downsample_channels": [16, 40]},
            "encoder_config": {**COMMON, "num_hidden_layers": 1},
        },
        {"image_token_id": IMAGE},
    ),
}

# Older versions of transformers have others of the same name, and lack some.
VERSION = tuple(map(int, version("transformers").split(".")[:2]))
NEW = {"aria", "glm5_next"} if VERSION < (5, 23) else set()
AVAILABLE = [name for name in CONFIGS if name in CONFIG_MAPPING and name not in NEW]


def config(name: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a family, with some values changed that its language part has."""
    text_config, vision_config, rest = CONFIGS[name]
    text_config = {**text_config, **{key: changes[key] for key in changes.keys() & text_config.keys()}}
    return AutoConfig.for_model(name, text_config=text_config, vision_config=vision_config, **rest)


def tiny(name: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny fp32 model on the CPU with Gaussian weights that bf16 has, the same for the same seed."""
    torch.manual_seed(seed)
    model = AutoModelForMultimodalLM.from_config(config(name, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            parameter.copy_(parameter.bfloat16())
    return model


# What a picture of 16 × 16 pixels (of the last two, 64 × 64) is to a family: its tokens in the text, the shape of its
# pixel values, and what goes with them.
_GRID = {"image_grid_thw": [[1, 4, 4]]}
_PATCHES, _PIXELS = (16, 3 * 4 * 4), (1, 3, 16, 16)
PICTURES: dict[str, tuple[int, tuple[int, ...], dict[str, Any]]] = {
    "aria": (4, _PIXELS, {"pixel_mask": [[[1] * 16] * 16]}),
    "dots3_note": (4, _PATCHES, _GRID),
    "ernie4_5_vl_moe": (4, _PATCHES, _GRID),
    "internvl": (4, _PIXELS, {}),
    "kimi_k25": (4, (16, 3, 4, 4), _GRID),
    "lfm2_vl": (4, (1, *_PATCHES), {"pixel_attention_mask": [[1] * 16], "spatial_shapes": [[4, 4]]}),
    "mistral3": (4, _PIXELS, {"image_sizes": [[16, 16]]}),
    "mistral_large4": (4, _PIXELS, {"image_sizes": [[16, 16]]}),
    "nemotron_h_omni": (4, _PATCHES, {"image_grid_hw": [[4, 4]]}),
    "step3p7": (1, _PIXELS, {}),
    "unlimited_ocr": (21, (1, 3, 64, 64), {}),
    "deepseek_ocr2": (145, (1, 3, 64, 64), {}),
}
# Those whose models are told which tokens are of a picture.
_TYPED = {"ernie4_5_vl_moe", "glm4v_moe", "glm5_next", "qwen3_5_moe", "qwen3_vl_moe"}


def image_prompt(name: str, *, rows: int = 1, padding: int = 0) -> dict[str, Any]:
    """What `generate` takes for a text with a picture in each row.

    padding  tokens before the text of the first row; the others have as many words more
    """
    tokens, shape, others = PICTURES.get(name, (4, (16, 2 * 3 * 4 * 4), _GRID))
    words = torch.randint(3, 88, (rows, 9 + padding), generator=torch.Generator().manual_seed(1))
    words[0, :padding] = 0
    picture = torch.tensor([[START, *[IMAGE] * tokens, END]]).expand(rows, -1)
    ids = torch.cat([words[:, : padding + 4], picture, words[:, padding + 4 :]], dim=1)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    values = torch.randn(shape[0] * rows, *shape[1:], generator=torch.Generator().manual_seed(2))
    found = {"input_ids": ids, "attention_mask": mask, "pixel_values": values}
    for key, value in others.items():
        one = torch.tensor(value)
        found[key] = one.expand(rows, *one.shape[1:])
    if name in _TYPED:
        found["mm_token_type_ids"] = (ids == IMAGE).int()
    return found
