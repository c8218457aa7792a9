"""What GGUF calls the tensors of each architecture, and what its converter has changed in them.

    general.architecture          model
    llama                         Mixtral, Llama
    qwen2moe, qwen3moe            Qwen2-MoE, Qwen3-MoE
    qwen3vlmoe                    the language part of Qwen3-VL-MoE, which of text alone computes what Qwen3-MoE does
    qwen3next, qwen35moe          Qwen3-Next, Qwen3.5-MoE
    deepseek2, deepseek32         DeepSeek-V2, DeepSeek-V3, Kimi-K2, GLM-4.7-Flash; DeepSeek-V3.2
    glm4moe, glm-dsa              GLM-4.5 to GLM-4.7; GLM-5
    gpt-oss                       gpt-oss
    minimax-m2                    MiniMax-M2
    llama4                        Llama 4
    dots1, ernie4_5-moe, olmoe    dots.llm1, ERNIE-4.5-MoE, OLMoE
    granitemoe                    Granite-MoE, with shared experts or without

To add one, compare the names in a converted file with those in safetensors, and read what the converter's class does in
`modify_tensors`. Its config is in gguf_config.py.

Source: llama.cpp's conversion/ and the tensor names of its gguf-py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ktinject.checkpoints import gguf_recipes as recipes
from ktinject.checkpoints.gguf_recipes import Recipe

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
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
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_LINEAR_ATTENTION = {
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


@dataclass(frozen=True)
class Architecture:
    """Names behind `model.layers.<n>.`, and recipes.

    moe           the block of routed experts; `dense` is one without them
    experts       the experts' module in the block; "" if recipes make the stacked weights of all
    projections   what gate, up and down of an expert are called
    router        within the block
    bias          the router's correction, behind the layer
    shared        the module of shared experts within the block
    names         stems that differ from the common ones, or are missing there
    whole         names with their ending
    flat          names with their ending of tensors [1, n] that may come as [n]
    made          weight → its recipe
    top           the same, of names outside of layers
    """

    moe: str = "mlp"
    dense: str = "mlp"
    experts: str = "experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    shared: str = "shared_experts"
    names: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    flat: tuple[str, ...] = ("ffn_gate_inp_shexp.weight",)
    made: Mapping[str, Recipe] = field(default_factory=dict)
    top: Mapping[str, Recipe] = field(default_factory=dict)

    def stems(self) -> dict[str, str]:
        """Name of a tensor without ending → that of the weight."""
        parts = dict(zip(("gate", "up", "down"), ("gate_proj", "up_proj", "down_proj")))
        return {
            **_LAYER,
            **{f"ffn_{ours}": f"{self.dense}.{theirs}" for ours, theirs in parts.items()},
            **{f"ffn_{ours}_shexp": f"{self.moe}.{self.shared}.{theirs}" for ours, theirs in parts.items()},
            "ffn_gate_inp": f"{self.moe}.{self.router}",
            "ffn_gate_inp_shexp": f"{self.moe}.shared_expert_gate",
            **self.names,
        }

    def wholes(self) -> dict[str, str]:
        """The same, of names with their ending."""
        return {"exp_probs_b.bias": self.bias, "exp_probs_b": self.bias, **self.whole}


def _rope_rows() -> dict[str, Recipe]:
    """Of q and k, as llama.cpp rotates llama's heads."""
    return {
        f"self_attn.{ours}_proj.{end}": Recipe(
            (f"attn_{ours}.{end}",), recipes.rope_rows(heads), rows="moved"
        )
        for ours, heads in (("q", "attention.head_count"), ("k", "attention.head_count_kv"))
        for end in ("weight", "bias")
    }


_KV_B = {"self_attn.kv_b_proj.weight": Recipe(("attn_k_b.weight", "attn_v_b.weight"), recipes.kv_b)}
_DEEPSEEK = Architecture(made=_KV_B)

# Their norms are stored plus one, but for that of linear attention.
_NORMS = {
    f"{theirs}.weight": Recipe((f"{ours}.weight",), recipes.minus_one)
    for ours, theirs in {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    }.items()
}
_LAST_NORM = {"model.norm.weight": Recipe(("output_norm.weight",), recipes.minus_one)}
_DT = {"ssm_dt.bias": "linear_attn.dt_bias"}


def _linear(
    name: str, part: str, find: recipes.Callable[..., recipes.Found], rows: Literal["", "moved"] = ""
) -> tuple[str, Recipe]:
    return f"linear_attn.{name}", Recipe((part,), find, rows=rows)


_QWEN3_NEXT = Architecture(
    shared="shared_expert",
    names=_LINEAR_ATTENTION,
    whole=_DT,
    top=_LAST_NORM,
    made={
        **_NORMS,
        "linear_attn.in_proj_qkvz.weight": Recipe(
            ("attn_qkv.weight", "attn_gate.weight"), recipes.qkvz, rows="moved"
        ),
        **dict(
            [
                _linear("A_log", "ssm_a", recipes.log),
                _linear("conv1d.weight", "ssm_conv1d.weight", recipes.conv),
            ]
        ),
    },
)
_HEADS = recipes.heads_of_rows(wide=False)
_QWEN35 = Architecture(
    shared="shared_expert",
    names=_LINEAR_ATTENTION,
    top=_LAST_NORM,
    made={
        **_NORMS,
        **dict(
            [
                _linear("in_proj_qkv.weight", "attn_qkv.weight", recipes.heads_of_last_rows, "moved"),
                _linear("in_proj_z.weight", "attn_gate.weight", recipes.heads_of_rows(wide=True), "moved"),
                _linear("in_proj_a.weight", "ssm_alpha.weight", _HEADS),
                _linear("in_proj_b.weight", "ssm_beta.weight", _HEADS),
                _linear("out_proj.weight", "ssm_out.weight", recipes.heads_of_columns),
                _linear("A_log", "ssm_a", recipes.chain(recipes.log, _HEADS)),
                _linear("dt_bias", "ssm_dt.bias", _HEADS),
                _linear(
                    "conv1d.weight",
                    "ssm_conv1d.weight",
                    recipes.chain(recipes.heads_of_last_rows, recipes.conv),
                ),
            ]
        ),
    },
)

_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")
_DOWN = ("ffn_down_exps.weight",)
_GPT_OSS = Architecture(
    experts="",
    router="router",
    whole={"attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias"},
    made={
        "mlp.experts.gate_up_proj": Recipe(_GATE_UP, recipes.interleaved, by_slice=True, rows="across"),
        "mlp.experts.gate_up_proj_bias": Recipe(
            ("ffn_gate_exps.bias", "ffn_up_exps.bias"), recipes.interleaved_bias, by_slice=True
        ),
        "mlp.experts.down_proj": Recipe(_DOWN, recipes.transposed, by_slice=True, rows="across"),
    },
)
_LLAMA4 = Architecture(
    moe="feed_forward",
    dense="feed_forward",
    experts="",
    router="router",
    shared="shared_expert",
    made={
        "feed_forward.experts.gate_up_proj": Recipe(
            _GATE_UP, recipes.side_by_side, by_slice=True, rows="across"
        ),
        "feed_forward.experts.down_proj": Recipe(_DOWN, recipes.transposed, by_slice=True, rows="across"),
    },
)
_BLOCK = {"moe": "block_sparse_moe", "projections": ("w1", "w3", "w2")}
_GRANITE = Architecture(
    moe="block_sparse_moe",
    experts="",
    router="router.layer",
    whole={
        "ffn_down_exps.weight": "block_sparse_moe.output_linear.weight",
        "ffn_down_shexp.weight": "shared_mlp.output_linear.weight",
    },
    made={
        **_rope_rows(),
        "block_sparse_moe.input_linear.weight": Recipe(
            _GATE_UP, recipes.stacked(3), by_slice=True, rows="moved"
        ),
        "shared_mlp.input_linear.weight": Recipe(
            ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), recipes.stacked(2), rows="moved"
        ),
    },
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(**_BLOCK, made=_rope_rows()),  # type: ignore[arg-type]
    "qwen2moe": Architecture(shared="shared_expert"),
    "qwen3moe": Architecture(),
    "qwen3vlmoe": Architecture(),
    "qwen3next": _QWEN3_NEXT,
    "qwen35moe": _QWEN35,
    "deepseek2": _DEEPSEEK,
    "deepseek32": _DEEPSEEK,
    "glm-dsa": _DEEPSEEK,
    "glm4moe": Architecture(),
    "gpt-oss": _GPT_OSS,
    "minimax-m2": Architecture(**_BLOCK, bias="block_sparse_moe.e_score_correction_bias"),  # type: ignore[arg-type]
    "llama4": _LLAMA4,
    "dots1": Architecture(),
    "ernie4_5-moe": Architecture(
        bias="mlp.moe_statics.e_score_correction_bias", flat=("exp_probs_b.bias", "exp_probs_b")
    ),
    "olmoe": Architecture(),
    "granitemoe": _GRANITE,
}
