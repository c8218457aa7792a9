"""`ktinject plan` on tiny models."""

from __future__ import annotations

import json
import shutil

import pytest

EXPERTS = [f"model.layers.{layer}.mlp.experts" for layer in (1, 2)]


def test_as_table(ktinject, tiny_deepseek_v3):
    text = ktinject("plan", tiny_deepseek_v3).stdout
    assert "2 × DeepseekV3Experts" in text and "hybrid_experts" in text and "(everything else)" in text


def test_as_json(as_json, tiny_deepseek_v3):
    plan = as_json("plan", tiny_deepseek_v3)
    experts = [module for module in plan["modules"] if module["operator"] == "hybrid_experts"]
    assert [module["path"] for module in experts] == EXPERTS
    assert {module["runs"]["weights"] for module in experts} == {"bf16"}
    assert plan["problems"] == []


def test_variables(as_json, tiny_qwen3_moe):
    plan = as_json("plan", tiny_qwen3_moe, "--set", "experts=int4", "--set", "group_size=32")
    experts = [module for module in plan["modules"] if module["operator"] == "hybrid_experts"]
    assert {module["runs"]["weights"] for module in experts} == {"int4 group 32"}


def test_rules_of_ones_own(as_json, tiny_qwen3_moe, tmp_path):
    rules = tmp_path / "mine.yaml"
    rules.write_text(
        """version: 1
rules:
  - name: first layer only
    match: {class: Qwen3MoeExperts, layers: 0-0}
    replace: {operator: cpu_experts, weights: int8}
"""
    )
    plan = as_json("plan", tiny_qwen3_moe, "--rules", rules)
    assert [module["path"] for module in plan["modules"]] == ["model.layers.0.mlp.experts"]


def test_index_alone(as_json, tiny_deepseek_v3, tmp_path):
    """The plan of a model whose weights were never downloaded."""
    shutil.copy(tiny_deepseek_v3 / "config.json", tmp_path)
    from safetensors import safe_open

    with safe_open(tiny_deepseek_v3 / "model.safetensors", "pt") as weights:
        index = {
            "metadata": {},
            "weight_map": dict.fromkeys(weights.keys(), "model-00001-of-00001.safetensors"),
        }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = as_json("plan", tmp_path)
    assert {*EXPERTS} <= {module["path"] for module in plan["modules"]}
    assert any("index" in note for note in plan["notes"])


def test_budget_too_small_is_part_of_the_plan(as_json, tiny_deepseek_v3):
    plan = as_json("plan", tiny_deepseek_v3, "--budget", "cpu=1KiB")
    assert "the budget is 1.0 KiB" in plan["problems"][0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rules", "deepseek-v9"], "deepseek-v9"),
        (["--set", "experts=int9"], "int9"),
        (["--set", "expert=int8"], "experts"),
        (["--set", "experts"], "name=value"),
        (["--device", "cuda:7"], "cuda:7"),
        (["--budget", "24GiB"], "DEVICE=SIZE"),
        (["--budget", "cpu=1GiB", "--budget", "cpu=2GiB"], "twice"),
        (["--budget", "cpu=much"], "much"),
    ],
)
def test_refused(ktinject, tiny_deepseek_v3, arguments, says):
    result = ktinject("plan", tiny_deepseek_v3, *arguments, exit_code=2)
    assert says in result.stderr and result.stderr.startswith("ktinject: ") and not result.stdout


def test_no_model_in_the_folder(ktinject, tmp_path):
    assert str(tmp_path) in ktinject("plan", tmp_path, exit_code=2).stderr
