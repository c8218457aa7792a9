"""The bundled rule files: which there are, what they hold, and the modules they find."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rule_texts import FAMILIES

from ktinject import rules
from ktinject.operators import REGISTRY


def test_bundled_files_are_the_promised_ones() -> None:
    assert set(rules.bundled()) == {*FAMILIES.values(), "moe-auto"}
    assert all(path.is_file() for path in rules.bundled().values())


def test_choose() -> None:
    for model_type, name in FAMILIES.items():
        assert rules.choose(model_type) == name
        assert model_type in rules.read(name).model_types
    for other in ("olmoe", "llama", "phimoe", ""):
        assert rules.choose(other) == "moe-auto"
    assert rules.read("moe-auto").model_types == ()


@pytest.mark.parametrize("name", rules.bundled())
def test_bundled_files_hold_no_device_number_and_only_known_arguments(name: str) -> None:
    assert not re.search(
        r"\b(cuda|cpu|xpu|npu)\b(?!_experts)|:\d+['\"]?$",
        rules.bundled()[name].read_text().replace("CPU", ""),
        re.M,
    )
    for weights in ("bf16", "int8", "int4"):
        values: dict[str, Any] = {"experts": weights, "group_size": 32}
        declared = rules.read(name).variables
        values |= {variable: weights for variable in ("dense", "head") if variable in declared}
        for found in rules.read(name, variables=values).rules:
            if found.operator == rules.KEEP:
                continue
            config = rules.check_arguments(found, REGISTRY[found.operator].Config)
            assert found.operator in (
                "hybrid_experts",
                "dense_linear",
                "absorbed_mla",
                "cpu_router",
                "rms_norm",
            )
            if found.operator in ("hybrid_experts", "dense_linear"):
                exact = found.name.endswith(", exact")
                assert (config.weights, config.group_size) == ("bf16" if exact else weights, 32)


TINY = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def modules_of(model_type: str) -> list[rules.Module]:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**TINY)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    def layer(path: str) -> int | None:
        found = re.search(r"layers\.(\d+)", path)
        return int(found[1]) if found else None

    return [(path, [c.__name__ for c in type(m).__mro__], layer(path)) for path, m in model.named_modules()]


@pytest.mark.parametrize("model_type", [*FAMILIES, "olmoe", "granitemoe", "phimoe", "minimax_m2"])
def test_bundled_files_find_the_experts_of_transformers_models(model_type: str) -> None:
    modules = modules_of("deepseek_v3" if model_type == "kimi_k2" else model_type)  # which has its modules
    experts = {path for path, _, _ in modules if path.endswith(".experts")}
    assert len(experts) >= 2
    keeps = {name: operator.keeps for name, operator in REGISTRY.items()}
    for name in {rules.choose(model_type), "moe-auto"}:
        found = rules.assign(rules.read(name), modules, keeps=keeps)
        assert set(found.matched["routed experts"]) == experts
        assert {path for path, rule in found.rules.items() if rule.operator == "hybrid_experts"} == experts
        if name == "moe-auto":
            continue
        # Every linear layer but the matrix that absorbed_mla reads itself is somebody's.
        linears = {
            path for path, classes, _ in modules if "Linear" in classes and not path.endswith("kv_b_proj")
        }
        assert linears == {path for path in found.rules if path in linears}
        attention = {path for path, rule in found.rules.items() if rule.operator == "absorbed_mla"}
        assert attention == {
            path for path, _, _ in modules if path + ".kv_b_proj" in {p for p, _, _ in modules}
        }
