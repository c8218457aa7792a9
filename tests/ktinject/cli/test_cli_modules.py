"""`ktinject modules` and `ktinject operators`: what there is to replace, and what to replace it with."""

from __future__ import annotations

from ktinject.operators import REGISTRY


def ours(kind) -> list[str]:
    """The package's own operators; tests register others."""
    return [name for name in kind["operators"] if REGISTRY[name].__module__.startswith("ktinject.")]


def test_modules_by_kind(as_json, tiny_deepseek_v3):
    kinds = {kind["path"]: kind for kind in as_json("modules", tiny_deepseek_v3, "--dtype", "bfloat16")}
    experts = kinds["model.layers.{1-2}.mlp.experts"]
    assert experts["class_name"] == "DeepseekV3Experts" and experts["roles"] == ["routed_experts"]
    assert experts["count"] == 2 and experts["bytes"] == 2 * 8 * 3 * 64 * 32 * 2
    assert ours(experts) == ["cpu_experts", "hybrid_experts"]
    assert ours(kinds["model.layers.{1-2}.mlp"]) == ["deferred_moe"]
    assert kinds["model.layers.{0-2}.self_attn"]["roles"] == ["attention", "latent_attention"]
    assert ours(kinds["model.layers.{1-2}.mlp.gate"]) == ["cpu_router"]
    assert ours(kinds["model.embed_tokens"]) == []
    assert kinds["lm_head"]["roles"] == ["linear", "output_layer"]
    assert {"cpu_linear", "dense_linear"} <= {*ours(kinds["lm_head"])}
    assert not any(path.endswith("act_fn") for path in kinds), "neither tensors nor a role"


def test_modules_as_a_table(ktinject, tiny_qwen3_moe):
    text = ktinject("modules", tiny_qwen3_moe).stdout
    assert "routed_experts" in text and "model.layers.{0-2}.mlp.experts" in text


def test_operators(ktinject, as_json):
    listed = ktinject("operators").stdout
    assert (
        "hybrid_experts" in listed and "Runs routed experts on the CPU from inside a CUDA stream." in listed
    )
    found = as_json("operators", "hybrid_experts")
    assert as_json("operators")["hybrid_experts"] == found and found["computes_on"] == ["cuda", "cpu"]
    arguments = {argument.pop("name"): argument for argument in found["arguments"]}
    assert arguments["group_size"]["allowed"] == "128 | 64 | 32" and arguments["group_size"]["default"] == 128
    assert arguments["group_size"]["meaning"].endswith("how many inputs share a scale")
    text = ktinject("operators", "hybrid_experts").stdout
    assert "gpu_experts" in text and "a number, a share below 1" in text


def test_an_operator_that_is_not_there(ktinject):
    said = ktinject("operators", "cpu_expert", exit_code=2).stderr
    assert (
        "operator 'cpu_expert': there is none of this name" in said and "Did you mean 'cpu_experts'?" in said
    )


def test_an_operator_of_ones_own(as_json, tmp_path):
    plugin = tmp_path / "operator_for_the_list.py"
    plugin.write_text(
        '''from dataclasses import dataclass
from ktinject import register_operator
from ktinject.operators import Config
from ktinject.operators.keep import Keep


@dataclass(frozen=True)
class Own(Config):
    factor: float = 2.0  # what it multiplies with


@register_operator("operator_for_the_list")
class ForTheList(Keep):
    """Multiplies."""

    Config = Own
'''
    )
    found = as_json("operators", "operator_for_the_list", "--plugin", plugin)
    assert found["summary"] == "Multiplies."
    assert found["arguments"][1]["meaning"] == "what it multiplies with"
