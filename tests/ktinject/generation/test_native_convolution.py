"""Native decode steps of short convolutions: LFM2-MoE."""

from __future__ import annotations

from typing import Any

import answers
import pytest
import torch
from test_generate import prompt
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_but_for_roundings,
    assert_same_tokens,
    swapped,
)
from test_native_windows import assert_native
from torch import nn
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import cache_layers, layer_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec
from ktinject.generation.layer_spec import GroupedAttentionSpec
from ktinject.generation.recurrent_spec import ShortConvolutionSpec
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif("lfm2_moe" not in AVAILABLE, reason="transformers has no lfm2_moe")
# All experts are taken, so none can turn over.
SURE: dict[str, Any] = {"num_experts_per_tok": 6, "layer_types": ["conv", "full_attention"]}
SIZES: list[dict[str, Any]] = [
    {},
    {"layer_types": ["full_attention", "conv"]},
    {"conv_L_cache": 1},
    {"conv_L_cache": 2, "use_expert_bias": False},
    {"conv_L_cache": 5, "hidden_size": 1040, "num_attention_heads": 8},  # several tasks, the last one smaller
]


def made(weights: str = "bf16", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    return answers.made("lfm2_moe", weights, **SURE | changes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(sizes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(**sizes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(weights), INT8_TOLERANCE)


def test_the_correction_of_a_choice() -> None:
    model = tiny("lfm2_moe", **SURE | {"num_experts_per_tok": 2}).bfloat16()
    ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    block = model.model.layers[1].feed_forward
    block.expert_bias[3:] = 4.0
    changed = model.generate(**arguments)
    assert not torch.equal(before, changed)
    assert_same_tokens(model, arguments)
    assert_native(model)
    block.expert_bias = torch.zeros(6)
    assert_same_tokens(model, arguments)
    assert_native(model)
    assert_same_but_for_roundings(model, arguments, model.generate(**arguments), before)


def test_specs() -> None:
    model = tiny("lfm2_moe", **SURE)
    convolution, full = (layer_spec.of_layer(layer) for layer in model.model.layers)
    assert convolution.attention == ShortConvolutionSpec("conv", 0)
    assert convolution.feed_forward == DenseSpec("feed_forward", ("w1", "w3", "w2"))
    assert isinstance(full.attention, GroupedAttentionSpec) and full.attention.output == "out_proj"
    assert full.attention.q_norm.path == "q_layernorm"
    assert isinstance(full.feed_forward, MoeSpec)
    router = full.feed_forward.router
    assert router.correction == "expert_bias" and router.of_block and router.scores == "sigmoid"
    assert router.rounds_logits and router.rounds_scores and router.rounds
    assert [kind.is_state for kind in cache_layers.kinds_of(model.config)] == [True, False]


class TestRefusals:
    def test_a_bias_or_gaps(self) -> None:
        refused = NativeDecoder(swapped("lfm2_moe", **SURE, conv_bias=True)).support.reason
        assert refused == "layer 0: its convolution has a bias"
        model = swapped("lfm2_moe", **SURE)
        model.model.layers[0].conv.conv.dilation = (2,)
        assert NativeDecoder(model).support.reason == "layer 0: its convolution has strides or gaps"

    def test_sizes_that_do_not_fit(self) -> None:
        def linear(out: int) -> Any:
            made = CpuLinear.build(nn.Linear(40, out, bias=False).bfloat16(), CpuLinearConfig(device="cpu"))
            return made.native

        taps = torch.zeros(40, 3, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match="in_proj: expected 120 outputs"):
            _native.ShortConvolution(in_proj=linear(80), out_proj=linear(40), taps=taps)
        with pytest.raises(ValueError, match=r"the weight must be \[40, taps\]"):
            _native.ShortConvolution(in_proj=linear(120), out_proj=linear(40), taps=taps[:39])
        made = _native.ShortConvolution(in_proj=linear(120), out_proj=linear(40), taps=taps)
        norm = _native.Norm(torch.ones(40, dtype=torch.bfloat16), 1e-6)
        unit = _native.GatedUnit(linear(40), linear(40), linear(40))
        decoder = _native.Decoder(40, "bfloat16")
        decoder.add(norm, made, norm, unit)
        x = torch.zeros(1, 40, dtype=torch.bfloat16)
        for shape in ((1, 40, 2), (2, 40, 3), (1, 39, 3)):
            state = torch.zeros(shape, dtype=torch.bfloat16)
            cache = _native.DecoderCache([state], [state])
            with pytest.raises(ValueError, match=r"expected inputs of the convolution, .*\[1, 40, 3\]"):
                decoder.forward(
                    x=x,
                    cos=x,
                    sin=x,
                    mask=None,
                    position=0,
                    cache=cache,
                    first=0,
                    last=1,
                    final_norm=None,
                    out=x,
                )
