"""Decode steps of MiniMax-01: states that decay at fixed rates, sums of which both sides are multiplied, and a cache of
the model's own class.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_layer_kinds import HostDecisions, request
from test_native_decoder import INT8_TOLERANCE, assert_same_tokens, difference
from test_native_gates import derived, made
from test_native_kimi import linear
from test_native_windows import assert_native, assert_steps_take_turns
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import layer_spec, layer_sums, recurrent_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.layer_probes import LayerNames
from ktinject.generation.layer_spec import DecoderLayerSpec
from ktinject.generation.layer_sums import Sums
from ktinject.generation.recurrent_spec import DecayingStateSpec
from ktinject.support import SUPPORTED, Support
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif("minimax" not in AVAILABLE, reason="transformers has no minimax")
# All experts are taken, so none can turn over.
SURE: dict[str, Any] = {"num_experts_per_tok": 6}
FACTORS = {
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 2.1,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 0.9,
    "mlp_beta_factor": 1.4,
}
LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention"]}
CASES: list[dict[str, Any]] = [
    {},
    FACTORS,
    {**FACTORS, **LINEAR_FIRST},
    {**FACTORS, "head_dim": 12, "num_attention_heads": 5, "num_key_value_heads": 5},
    # Heads on the pool.
    {**FACTORS, "head_dim": 72, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
     "num_hidden_layers": 3},
]  # fmt: skip


def assert_as_a_whole_pass(model: PreTrainedModel, arguments: dict[str, Any], tolerance: float) -> None:
    """The logits behind a request's last step are those of a pass over its whole text."""
    found = model.generate(**arguments)
    assert_native(model)
    mask = torch.cat([arguments["attention_mask"], torch.ones_like(found)], 1)[:, : found.shape[1] - 1]
    with torch.no_grad():
        want = model(found[:, :-1], attention_mask=mask, use_cache=False).logits[:, -1]
    runner = model.ktinject_decoding.runners[len(found)]
    assert difference(runner.logits[: len(found)], want) <= tolerance


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_compute_what_a_whole_pass_does(case: dict[str, Any]) -> None:
    model, _ = made("minimax", "int8", torch.float32, **SURE | case)
    padding = 0 if case.get("layer_types", [""])[0] == "linear_attention" else 3
    for batch, length in ((3, 9), (1, 37)):  # of which the latter is longer than two blocks of the prompt's
        assert_as_a_whole_pass(
            model, {**prompt(batch, length, padding=padding), "eos_token_id": None}, INT8_TOLERANCE
        )


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_models_in_fp32(case: dict[str, Any]) -> None:
    model, _ = made("minimax", "int8", torch.float32, **SURE | case)
    arguments = {**prompt(3, padding=0), "eos_token_id": None}
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))
    assert_as_a_whole_pass(model, arguments, INT8_TOLERANCE)


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_formats(weights: str) -> None:
    model, _ = made("minimax", weights, **SURE | FACTORS)
    model.generate(**prompt(2))
    assert_native(model)


@pytest.mark.parametrize("case", [CASES[1], pytest.param(CASES[0], marks=pytest.mark.nightly)], ids=str)
def test_tokens_are_the_stock_loop_s(case: dict[str, Any]) -> None:
    model, _ = made("minimax", **SURE | case)
    for batch in (3, 1, 3):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None})
        assert_native(model)


def test_steps_take_turns_with_the_model_s_own() -> None:
    model, _ = made("minimax", **SURE | FACTORS)
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)
    assert_steps_take_turns(model, arguments)


def test_rates_that_are_changed_are_seen() -> None:
    model, _ = made("minimax", **SURE | FACTORS)
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    attention = model.model.layers[1].self_attn
    attention.slope_rate.add_(1.0)
    for ours, decays in zip(
        ("query_decay", "key_decay", "diagonal_decay"), attention.decay_factors(attention.slope_rate)
    ):
        getattr(attention, ours).copy_(decays)
    assert not torch.equal(before, model.generate(**arguments))
    assert_same_tokens(model, arguments)
    assert_native(model)


def test_steps_on_a_graph_s_tensors() -> None:
    """As on a GPU, where they are captured: nothing grows, and the host decides nothing."""
    model = tiny("minimax", **SURE | FACTORS)
    ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    decoding = model.ktinject_decoding
    decoding.graphs = SUPPORTED
    for length, padding in ((17, 5), (7, 2)):
        arguments = request(2, length, 14, padding=padding)
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert decoding.reason == "cpu has no CUDA graphs"
    runner = decoding.runners[2]
    view = runner.cache.bucket(runner.cache.capacity)
    with HostDecisions() as decisions, torch.no_grad():
        runner._forward(runner.ids, runner.cache.mask, runner.cache.positions, view)
    assert not decisions.found


class TestRequestsThatStayWithTransformers:
    @pytest.mark.parametrize(
        "changes, why",
        [
            ({"num_beams": 2}, "MiniMaxForCausalLM makes a cache of its own kind"),
            ({"max_time": 1e6}, "MiniMaxForCausalLM makes a cache of its own kind"),
            ({"return_dict_in_generate": True}, "the cache is of the model's own kind, and returned"),
        ],
        ids=lambda value: str(value)[:20],
    )
    def test_other_loops_and_outputs(self, changes: dict[str, Any], why: str) -> None:
        model, _ = made("minimax", **SURE)
        arguments = {**prompt(1, padding=0), "eos_token_id": None, **changes}
        ours, theirs = model.generate(**arguments), stock(model, **arguments)
        if isinstance(ours, Tensor):
            assert torch.equal(ours, theirs)
        else:
            assert torch.equal(ours.sequences, theirs.sequences) and type(ours) is type(theirs)
        assert model.ktinject_decoding.reason.startswith(why)

    def test_padding_that_no_layer_counts(self) -> None:
        """transformers takes masks of another length there."""
        model, _ = made("minimax", **SURE | LINEAR_FIRST)
        arguments = {**prompt(2), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert model.ktinject_decoding.reason.startswith("a row has padding, and the model's first layer")


class TestSpecs:
    def test_of_minimax(self) -> None:
        full, decaying = (layer_spec.of_layer(layer) for layer in tiny("minimax", **FACTORS).model.layers)
        assert isinstance(full, DecoderLayerSpec) and full.sums == Sums((1.3, 0.8), (0.9, 1.4), True)
        assert isinstance(decaying, DecoderLayerSpec) and decaying.sums == Sums((2.1, 0.7), (0.9, 1.4), True)
        assert decaying.attention == DecayingStateSpec("self_attn", 1, 4, 16)

    def test_of_other_parts(self) -> None:
        attention = tiny("minimax").model.layers[1].self_attn
        attention.num_attention_heads = 3
        assert "not one rate of each head" in recurrent_spec.of_decaying_state(attention).reason
        attention.register_buffer("temperature", torch.ones(1))
        assert "known is attention whose heads decay" in recurrent_spec.of_decaying_state(attention).reason

    def test_of_rates_of_another_dtype(self) -> None:
        model, _ = made("minimax", **SURE)
        attention = model.model.layers[1].self_attn
        attention.slope_rate = attention.slope_rate.float()
        reason = NativeDecoder(model).support.reason
        assert reason == "layer 1: the rates of its MiniMaxLightningAttention are torch.float32"

    def test_of_sums_with_numbers(self) -> None:
        """Of x itself, with norms behind the parts, too."""

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for name in ("a", "f", "na", "nf", "ba"):
                    self.add_module(name, nn.Identity())

            def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
                x = 0.6 * hidden_states + 0.8 * self.ba(self.a(self.na(hidden_states)))
                return 0.3 * x + 2.5 * self.f(self.nf(x))

        names = LayerNames("a", "f", "na", "nf", "ba")
        assert layer_sums.of_layer(Layer(), names, False) == Sums((0.6, 0.8), (0.3, 2.5))
        odd = Layer()
        derived(odd, lambda self, x, **_: Layer.forward(self, x) + 0.01 * x)
        assert isinstance(layer_sums.of_layer(odd, names, False), Support)
        derived(odd, lambda self, x, **_: 0.3 * x + self.f(self.nf(x)))
        assert isinstance(layer_sums.of_layer(odd, names, False), Support)


def given(**changes: Any) -> dict[str, Any]:
    """Two heads of 8 values, from 40."""
    arguments = {
        "qkv": linear(48, 40)[0], "gate": linear(16, 40)[0], "o": linear(40, 16)[0],
        "norm": _native.Norm(torch.ones(16), 1e-6), "slopes": torch.tensor([0.1, 0.7]), "heads": 2, "size": 8,
    }  # fmt: skip
    return arguments | changes


def stepped(decoder: Any, x: Tensor, cache: Any, position: int, consecutive: bool = False) -> Tensor:
    out = torch.empty_like(x)
    decoder.forward(
        x=x, cos=None, sin=None, mask=None, position=position, cache=cache, first=0, last=1, final_norm=None,
        consecutive=consecutive, out=out,
    )  # fmt: skip
    return out


class TestNative:
    def test_the_formula(self) -> None:
        """A step in fp32, as tensors give it, in a layer of sums with numbers."""
        (qkv, w_qkv), (gate, w_gate), (o, w_o) = linear(48, 40), linear(16, 40), linear(40, 16)
        scale, slopes = torch.rand(16) + 0.5, torch.rand(2)
        norm, before = _native.Norm(scale, 1e-6), torch.rand(40) + 0.5
        decoder = _native.Decoder(40, "float32")
        ours = _native.DecayingState(**given(qkv=qkv, gate=gate, o=o, norm=norm, slopes=slopes))
        decoder.add(_native.Norm(before, 1e-6), ours, None, None, attention_sum=(0.5, 1.5), keeps_normed=True)
        x, states = torch.randn(2, 40), torch.randn(2, 2, 8, 8)
        taken = functional.rms_norm(x, (40,), before, 1e-6)
        q, k, v = functional.silu(taken @ w_qkv.T).view(2, 2, 3, 8).unbind(2)
        want = states * torch.exp(-slopes)[:, None, None] + k[..., None] * v[..., None, :]
        y = functional.rms_norm((q[..., None] * want).sum(-2).flatten(1), (16,), scale, 1e-6)
        y = (y * (taken @ w_gate.T).sigmoid()) @ w_o.T
        found = stepped(decoder, x, _native.DecoderCache([states], [states]), 0)
        # Products of cpu_linear take their inputs in bf16.
        torch.testing.assert_close(states, want, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(found, 0.5 * taken + 1.5 * y, rtol=5e-2, atol=5e-2)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kept", [0, 2, 5])
    def test_tokens_that_are_taken_back(self, dtype: torch.dtype, kept: int) -> None:
        """To the bit."""
        decoder = _native.Decoder(40, str(dtype).removeprefix("torch."))
        norm = _native.Norm(torch.ones(16).to(dtype), 1e-6)
        decoder.add(None, _native.DecayingState(**given(norm=norm)), None, None)
        x, states = torch.randn(5, 40).to(dtype), torch.randn(1, 2, 8, 8).to(dtype)
        alone = states.clone()
        ours, theirs = (_native.DecoderCache([one], [one]) for one in (states, alone))
        found = stepped(decoder, x, ours, 3, consecutive=True)
        decoder.keep(cache=ours, kept=kept)
        for token in range(kept):
            assert torch.equal(stepped(decoder, x[token : token + 1], theirs, 3 + token)[0], found[token])
        assert torch.equal(states, alone)

    @pytest.mark.parametrize(
        "changes, why",
        [
            ({"qkv": linear(47, 40)[0]}, "qkv_proj: expected 48 outputs"),
            ({"gate": linear(15, 40)[0]}, "output_gate: expected 16 outputs"),
            ({"norm": _native.Norm(torch.ones(15), 1e-6)}, "the norm must be one of 16 values"),
            ({"slopes": torch.zeros(3)}, "one slope a head"),
            ({"heads": 0, "slopes": torch.zeros(0)}, "no heads or no values"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_does_not_fit(self, changes: dict[str, Any], why: str) -> None:
        _native.DecayingState(**given())
        with pytest.raises(ValueError, match=why):
            _native.DecayingState(**given(**changes))

    def test_another_cache_or_layer(self) -> None:
        decoder = _native.Decoder(40, "float32")
        decoder.add(None, _native.DecayingState(**given()), None, None)
        for states in (torch.zeros(1, 2, 8, 7), torch.zeros(1, 2, 8, 8).bfloat16()):
            with pytest.raises(ValueError, match=r"states of the model's dtype \[1, 2, 8, 8\]"):
                stepped(decoder, torch.zeros(1, 40), _native.DecoderCache([states], [states]), 0)
        with pytest.raises(ValueError, match="needs norms before its parts"):
            decoder.add(None, _native.DecayingState(**given()), None, None, keeps_normed=True)
