"""Configs with which a model loads and cannot generate are refused by the names of their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
from double import EXPERTS, saved

import ktinject
from ktinject.errors import CheckpointError, PlanError
from ktinject.hf import config_values


def changed(folder: Path, file: str, **values: Any) -> Path:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(
    ("family", "value", "text"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 33}, "num_experts_per_tok is 33; of 6 experts, 1 to 6 can be"),
        ("qwen3_moe", {"num_experts_per_tok": -1}, "num_experts_per_tok is -1; of 6 experts"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; of 6 experts"),
        ("ernie4_5_moe", {"moe_k": 33}, "moe_k is 33; of 6 experts"),
        ("gemma4_text", {"top_k_experts": 0}, "top_k_experts is 0; of 6 experts"),
        ("qwen3_moe", {"is_encoder_decoder": True}, "is_encoder_decoder is true, and a Qwen3MoeConfig has"),
        ("qwen3_moe", {"return_dict": False}, "return_dict is false, and transformers' models need"),
    ],
    ids=str,
)
def test_a_value_is_refused_by_its_name(family: str, value: Any, text: str, tmp_path: Path) -> None:
    folder = changed(saved(models.tiny(family), tmp_path), "config.json", **value)
    with pytest.raises(PlanError) as caught:
        ktinject.load(folder, [EXPERTS], devices="cpu", progress=False)
    assert text in str(caught.value) and str(folder) in str(caught.value)
    assert str(caught.value).count(next(iter(value))) == 1


@pytest.mark.parametrize("family", models.AVAILABLE)
def test_the_configs_of_families_are_served(family: str) -> None:
    config_values.check(models.config(family))


def test_a_model_without_experts_may_say_anything_of_them() -> None:
    for count in (0, 1):
        config_values.check(models.config("jamba", num_experts=count, num_experts_per_tok=2))


@pytest.mark.parametrize("value", ["a", 2.5, [2, "b"], {"a": 1}, True], ids=str)
def test_an_end_token_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    folder = changed(saved(models.tiny("qwen3_moe"), tmp_path), "generation_config.json", eos_token_id=value)
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: eos_token_id is .*; allowed are a whole"
    ):
        ktinject.load(folder, [EXPERTS], devices="cpu", progress=False)
