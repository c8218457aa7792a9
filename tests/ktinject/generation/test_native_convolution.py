"""Native decode steps of short convolutions: LFM2-MoE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_but_for_roundings,
    assert_same_tokens,
    doubled,
    swapped,
    varied,
)
from test_native_windows import assert_native, taking_turns
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import cache_layers, layer_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec
from ktinject.generation.layer_spec import GroupedAttentionSpec
from ktinject.generation.recurrent_spec import ShortConvolutionSpec
from ktinject.hf import compat
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
    """A swapped model, and the same before in fp32."""
    model, truth = (varied(doubled(tiny("lfm2_moe", **SURE | changes).bfloat16())) for _ in range(2))
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth.float()


@pytest.fixture
def model() -> PreTrainedModel:
    model = tiny("lfm2_moe", **SURE).bfloat16()
    return ktinject.optimize(model, "auto", devices=["cpu"], progress=False)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(sizes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(**sizes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(weights), INT8_TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"cache_implementation": "static"},
        {"max_time": 1e6},
        {"max_time": 1e6, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_tokens_are_the_stock_loop_s(model: PreTrainedModel, case: dict[str, Any]) -> None:
    """Also of rows with padding on their left."""
    for batch in (3, 1, 3):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, **case})
        assert_native(model)


@pytest.mark.parametrize("length", [1, 2, 5, 70])
def test_prompts_shorter_than_the_convolution(model: PreTrainedModel, length: int) -> None:
    model.generate(**prompt(2))  # whose inputs must leave no trace
    assert_same_tokens(model, {**prompt(2, length, padding=length // 5), "eos_token_id": None})
    assert_native(model)


def test_steps_take_turns_with_the_model_s_own(model: PreTrainedModel) -> None:
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)
    streamer, calls = taking_turns(model)
    found = model.generate(**arguments, streamer=streamer)
    assert calls[0] == 12
    assert_same_but_for_roundings(model, arguments, found, stock(model, **arguments))


def test_a_cache_of_the_callers(model: PreTrainedModel) -> None:
    """Two turns."""
    cache = DynamicCache(config=model.config)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    for _ in range(2):
        found = model.generate(**arguments, past_key_values=cache)
        assert_native(model)
        assert_same_but_for_roundings(model, arguments, found, stock(model, **arguments))
        assert cache.get_seq_length() == found.shape[1] - 1
        ids = torch.cat([found, arguments["input_ids"]], dim=1)
        arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class TestWhatChanges:
    """Of what the steps read or are made of; each must change the tokens, to be seen at all."""

    @pytest.mark.parametrize("name", ["conv.conv.weight", "operator_norm.weight", "ffn_norm.weight"])
    def test_weights_in_place_and_replaced(self, model: PreTrainedModel, name: str) -> None:
        arguments = {**prompt(), "eos_token_id": None}
        before = model.generate(**arguments)
        path, _, last = name.rpartition(".")
        holder: Any = model.model.layers[0].get_submodule(path)
        with torch.no_grad():
            getattr(holder, last).neg_().add_(0.7)
        assert not torch.equal(before, model.generate(**arguments))
        assert_same_tokens(model, arguments)
        assert_native(model)
        setattr(holder, last, nn.Parameter(0.7 - getattr(holder, last).detach()))
        assert_same_tokens(model, arguments)
        assert_native(model)

    def test_the_correction_of_a_choice(self) -> None:
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

    def test_hooks_on_a_part(self, model: PreTrainedModel) -> None:
        model.generate(**prompt())
        handle = model.model.layers[0].conv.conv.register_forward_hook(lambda *_: None)
        model.generate(**prompt())
        assert "conv has forward hooks" in model.ktinject_decoding.reason
        handle.remove()
        model.generate(**prompt())
        assert_native(model)


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


def scaled(module: Any, change: Any) -> None:
    own = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(self, own(self, *args, **kwargs), kwargs)

    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


class TestRefusals:
    def test_a_bias_or_gaps(self) -> None:
        refused = NativeDecoder(swapped("lfm2_moe", **SURE, conv_bias=True)).support.reason
        assert refused == "layer 0: its convolution has a bias, strides or gaps"
        model = swapped("lfm2_moe", **SURE)
        model.model.layers[0].conv.conv.dilation = (2,)
        assert NativeDecoder(model).support.reason == refused

    @pytest.mark.parametrize("what", ["output", "state"])
    def test_what_computes_something_else_keeps_its_steps(self, model: PreTrainedModel, what: str) -> None:
        def change(self: Any, out: Tensor, kwargs: Any) -> Tensor:
            if what == "output":
                return out * 0.8
            for state in cache_layers.tensors_of(compat.cache_of(kwargs).layers[0]):
                state.mul_(0.8)
            return out

        scaled(model.model.layers[0].conv, change)
        arguments = {**prompt(), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert model.ktinject_decoding.last == "eager loop"
        assert model.ktinject_decoding.reason.startswith("layer 0: relative difference")

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
