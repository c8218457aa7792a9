"""Which modules are decoder layers, and what modules are called."""

from __future__ import annotations

import models
import pytest
import torch
from double import on_meta
from models import multimodal
from transformers import AutoModelForCausalLM

from ktinject.hf.layers import Layers, class_names, layer_configs


@pytest.mark.skipif("dots3_note" not in multimodal.AVAILABLE, reason="transformers has no dots3_note")
def test_configs_of_layers_that_differ_and_of_such_that_do_not() -> None:
    other = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 28,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
    }
    config = multimodal.config("dots3_note", per_layer_config={1: other})
    assert [layer.num_attention_heads for layer in layer_configs(config)] == [4, 2]
    [same] = layer_configs(models.config("qwen3_moe"))
    assert same.num_attention_heads == 4


def test_decoder_layers() -> None:
    model = on_meta(models.tiny("qwen3_moe"))
    layers = Layers(model)
    assert layers.count == 2
    assert layers.of("model.layers.1.mlp.experts") == 1
    assert layers.of("model.layers.1") == 1
    assert layers.of("model.layers") is None and layers.of("lm_head") is None and layers.of("") is None


def test_numbers_of_other_lists_are_no_layers() -> None:
    model = AutoModelForCausalLM.from_config(models.config("qwen3_moe"))
    model.visual = torch.nn.Module()
    model.visual.blocks = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    layers = Layers(model)
    assert layers.of("visual.blocks.1") is None and layers.of("model.layers.0.mlp") == 0


def test_class_names_follow_the_bases() -> None:
    class Mine(torch.nn.Linear):
        pass

    assert class_names(Mine(1, 1)) == ("Mine", "Linear", "Module")
