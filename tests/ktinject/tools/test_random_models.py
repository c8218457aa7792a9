"""Models of random weights."""

from __future__ import annotations

import pytest
import torch

from ktinject.errors import PlanError
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.tools import random_models

SMALL = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape, changes",
    [
        (
            "qwen3-30b-a3b",
            {"num_experts": 8, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2},
        ),
        ("deepseek-v3", {"n_routed_experts": 16, "num_attention_heads": 4, "num_key_value_heads": 4}),
        ("mixtral-8x7b", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ],
)
def test_a_shape_generates_and_has_nothing_on_meta(
    shape: str, changes: dict[str, int], dtype: torch.dtype
) -> None:
    model = random_models.build(
        random_models.config(shape, 2, **SMALL, **changes), dtype=dtype, devices="cpu"
    )
    assert not [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta
    ]
    assert len(model.ktinject.matched["routed experts"]) == 2, "every layer has experts"
    tokens = model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 9)
    logits = model(tokens).logits
    assert logits.isfinite().all() and logits.std() > 0
    inverse = next(buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq"))
    assert inverse[0] == 1 and (inverse.diff() < 0).all()


def test_a_table_from_tokens_to_experts_gives_each_token_different_ones() -> None:
    small = {"head_dim": 16, "num_attention_heads": 4, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 8}
    changes = {**SMALL, **small, "n_routed_experts": 16, "index_n_heads": 2, "index_head_dim": 16}
    changes["hidden_size"] = 40
    config = random_models.config("deepseek-v4-flash", 4, **changes)
    # In bf16, transformers 5.17 has no forward of it that works.
    model = random_models.build(config, devices="cpu", dtype=torch.float32)
    tables = [table for name, table in model.named_buffers() if name.endswith("tid2eid")]
    assert len(tables) == 3
    for table in tables:
        assert table.shape == (200, 6) and all(len({*row}) == 6 for row in table.tolist())
        assert len(table.unique()) == 16
    tokens = model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 9)


@pytest.mark.parametrize("experts", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"])
def test_codes_that_only_files_have_are_random_too(experts: str) -> None:
    small = {"vocab_size": 200, "hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8}
    heads = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = random_models.config("qwen3-30b-a3b", 1, **small, **heads)
    model = random_models.build(config, devices="cpu", variables={"experts": experts})
    layer = next(module for module in model.modules() if isinstance(module, CpuExperts))
    assert layer.describe()["weights"] == experts
    x, ids, weights = torch.randn(3, 256), torch.tensor([[0, 1], [2, 3], [4, 7]]), torch.ones(3, 2)
    out = layer(x, ids, weights)
    assert out.isfinite().all() and out.std() > 0


def test_full_size_is_the_models_own() -> None:
    config = random_models.config("deepseek-v3")
    assert (config.num_hidden_layers, config.first_k_dense_replace) == (61, 3)
    assert random_models.config("deepseek-v3", 6).first_k_dense_replace == 0


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(PlanError, match="'llama' is not known; allowed: qwen3-30b-a3b"):
        random_models.config("llama")
