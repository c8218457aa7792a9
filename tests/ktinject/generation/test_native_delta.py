"""Native decode steps of linear attention by the gated delta rule: Qwen3-Next and Qwen3.5-MoE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_tokens,
    exact,
    swapped,
)
from test_native_windows import assert_native
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

import ktinject
from ktinject.generation import cache_layers, layer_spec, masks, recurrent_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.layer_spec import GatedDeltaSpec, GroupedAttentionSpec
from tests.models import tiny

torch.set_num_threads(1)
FAMILIES = ["qwen3_next", "qwen3_5_moe_text"]
SURE: dict[str, Any] = {"num_experts_per_tok": 6}  # all experts are taken, so none can turn over
# Heads of 64 values and more are computed in vectors, with a rest or without.
SIZES: list[dict[str, Any]] = [
    {},
    {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
    {"linear_key_head_dim": 12, "linear_value_head_dim": 72, "linear_num_value_heads": 2},
    {"linear_conv_kernel_dim": 2, "linear_num_key_heads": 1},
]


def model_of(family: str) -> PreTrainedModel:
    model = tiny(family, **SURE).bfloat16()
    return ktinject.optimize(model, "auto", devices=["cpu"], progress=False)


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return model_of(request.param)


def attention_of(model: Any) -> Any:
    return model.model.layers[0].linear_attn


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_as_exact_as_the_model_s_own(family: str, sizes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(swapped(family, **SURE, **sizes), exact(family, **SURE, **sizes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    changes = {**SURE, **SIZES[1]}
    model, truth = swapped("qwen3_next", weights, **changes), exact("qwen3_next", **changes)
    assert_as_exact_as_its_own(model, truth, INT8_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_fp32(family: str) -> None:
    """Whose gates stay as they are: no operator of the CPU computes in fp32."""
    variables = dict.fromkeys(("experts", "dense", "head"), "int8")
    model = exact(family, **SURE)
    model = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    assert_as_exact_as_its_own(model, exact(family, **SURE), INT8_TOLERANCE)


def test_a_cache_that_grows() -> None:
    model = model_of("qwen3_next")
    assert_same_tokens(model, {**prompt(1, 250, padding=0), "eos_token_id": None})
    assert model.ktinject_decoding.runners[1].cache.capacity == 512
    assert_native(model)


def test_states_are_those_of_transformers_layers() -> None:
    """What a native step leaves, transformers' own modules go on from."""
    model = model_of("qwen3_next")
    model.generate(**prompt(1, padding=0))
    native = model.ktinject_decoding.native
    [runner] = model.ktinject_decoding.runners.values()
    bucket = runner.cache.bucket(runner.cache.capacity)
    state = bucket.layers[0]
    assert type(state) is LinearAttentionLayer and state.has_previous_state[0]
    kept = [tensor.data_ptr() for tensor in cache_layers.tensors_of(state)]
    assert kept == [tensor.data_ptr() for tensor in runner.cache.layers[0]]
    before = [tensor.clone() for tensor in cache_layers.tensors_of(state)]
    arguments = (runner.ids, runner.cache.mask, runner.cache.positions, bucket)
    ours, found = native(*arguments), []
    found.append([tensor.clone() for tensor in cache_layers.tensors_of(state)])
    for tensor, value in zip(cache_layers.tensors_of(state), before):
        tensor.copy_(value)
    with torch.no_grad():
        theirs = model(
            input_ids=arguments[0],
            attention_mask=arguments[1][:, 0, 0],
            position_ids=arguments[2],
            past_key_values=bucket,
        ).logits[:, -1]
    assert kept == [tensor.data_ptr() for tensor in cache_layers.tensors_of(state)]
    torch.testing.assert_close(ours, theirs.float(), atol=3e-2, rtol=0)
    for mine, own, old in zip(found[0], cache_layers.tensors_of(state), before):
        assert not torch.equal(own, old)
        torch.testing.assert_close(mine, own, atol=1e-2, rtol=1e-2)


def test_numbers_of_the_norm(model: PreTrainedModel) -> None:
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    attention_of(model).norm.variance_epsilon = 30.0
    assert not torch.equal(before, model.generate(**arguments))
    assert_same_tokens(model, arguments)
    assert_native(model)


class TestSpecs:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_families(self, family: str) -> None:
        model = tiny(family)
        linear, full = (layer_spec.of_layer(layer) for layer in model.model.layers)
        assert linear.attention == GatedDeltaSpec(
            "linear_attn", 0, 2, 4, 8, 8, 1e-6, is_interleaved=family == "qwen3_next"
        )
        assert isinstance(full.attention, GroupedAttentionSpec) and full.attention.has_output_gate
        norm = full.attention.q_norm.rms
        assert norm.has_unit_offset and not norm.rounds_before_weight
        assert [kind.is_state for kind in cache_layers.kinds_of(model.config)] == [True, False]

    def test_other_parts_are_refused(self) -> None:
        attention = attention_of(tiny("qwen3_next"))
        attention.temperature = nn.Parameter(torch.ones(1))
        assert (
            "holds A_log, conv1d, dt_bias, in_proj_ba" in recurrent_spec.of_linear_attention(attention).reason
        )
        attention = attention_of(tiny("qwen3_next"))
        attention.conv1d.bias = nn.Parameter(torch.ones(64))
        assert "has a conv1d with a bias" in recurrent_spec.of_linear_attention(attention).reason
        attention = attention_of(tiny("qwen3_next"))
        del attention.norm.variance_epsilon
        assert "its norm no variance_epsilon" in recurrent_spec.of_linear_attention(attention).reason

    def test_other_families_say_why(self) -> None:
        model = tiny("zaya").bfloat16()
        ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
        model.generate(**prompt(1, padding=0))
        assert model.ktinject_decoding.last == "eager loop"
        assert model.ktinject_decoding.reason.startswith("its layers keep keys and states at once (")

    def test_a_cache_of_states_alone_is_refused(self) -> None:
        held = DynamicCache(config=tiny("qwen3_next").config)
        assert cache_layers.kind_support(held)
        held.layers[:] = held.layers[:1]
        assert cache_layers.kind_support(held).reason == "no layer of the cache counts tokens"


def scaled(module: Any, change: Any) -> None:
    own = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, own, args, kwargs)

    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


class TestOtherLayers:
    def test_with_a_mask(self) -> None:
        model = model_of("qwen3_next")

        def change(self: Any, own: Any, args: Any, kwargs: Any) -> Any:
            layer = self.layers[0]
            had, inner = "forward" in vars(layer), layer.forward
            vars(layer)["forward"] = lambda x, **k: inner(
                x, **{**k, "attention_mask": torch.ones(x.shape[:2])}
            )
            try:
                return own(self, *args, **kwargs)
            finally:
                if had:
                    vars(layer)["forward"] = inner
                else:
                    del vars(layer)["forward"]

        assert isinstance(masks.of_model(model), masks.Masks)
        scaled(model.model, change)
        assert NativeDecoder(model).support.reason == "layer 0: its linear attention has a mask"
