"""Native decode steps of the family BEAM: weighted sums around norms before and behind the parts, gates of heads with a
bias, layers that turn nothing and scale queries by their position, and rotations and logits in fp32.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from answers import made
from test_generate import prompt, stock
from test_native_decoder import INT8_TOLERANCE, assert_as_exact_as_its_own, assert_same_tokens, logits_of
from test_native_gates import derived, packed
from test_native_windows import assert_lookup_changes_no_token, assert_native, assert_steps_take_turns
from torch import Tensor, nn
from transformers import DynamicCache

from ktinject import _native
from ktinject.generation import attention_probes, layer_probes, layer_spec
from ktinject.generation.attention_probes import BY_HALVES, SCALE, Outputs
from ktinject.generation.cpu import native_ends
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cpu.native_ends import NO_POWER, Cap
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec
from ktinject.generation.layer_spec import DecoderLayerSpec, GroupedAttentionSpec
from ktinject.hf import compat
from ktinject.support import Support
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif("beam" not in AVAILABLE, reason="transformers has no beam")
NIGHTLY = pytest.mark.nightly
# A window shorter than the texts, and a layer of each kind: all experts are taken, so none can turn over.
SURE: dict[str, Any] = {
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 5.0,
}  # fmt: skip
POWER = (2048.0, 0.1)
FULL = {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": None}}


def steep(monkeypatch: pytest.MonkeyPatch, known: bool = True) -> None:
    """Queries grow much sooner, so that it shows in short texts; known: ktinject knows that law, too."""
    from transformers.models.beam import modeling_beam  # older versions have none

    law = lambda positions: ((1 + (positions.float() + 1) / 4) ** 0.5)[:, None, :, None]  # noqa: E731
    monkeypatch.setattr(modeling_beam, "compute_attention_scaling", law)
    if known:
        monkeypatch.setattr(native_ends, "_POWERS", ((4.0, 0.5),))


def in_fp32(**changes: Any) -> Any:
    """A swapped model whose steps differ from its own in last places alone."""
    model, _ = made("beam", "int8", torch.float32, **SURE | changes)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FULL,
        pytest.param({"layer_types": ["sliding_attention"] * 2, "attention_bias": True}, marks=NIGHTLY),
        pytest.param({"final_logit_softcapping": None}, marks=NIGHTLY),
        pytest.param({"mlp_layer_types": ["sparse", "dense"], "routed_scaling_factor": 0.7}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_steps_are_as_exact_as_the_model_s_own(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steep(monkeypatch)
    assert_as_exact_as_its_own(*made("beam", **SURE | changes))


@NIGHTLY
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made("beam", weights, **SURE), INT8_TOLERANCE)


def test_tokens_in_fp32_are_the_stock_loop_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the window, also of rows with padding on their left, which are not counted in their positions."""
    steep(monkeypatch)
    model = in_fp32(num_experts_per_tok=2, n_group=2)
    for batch in (3, 1):
        arguments = {**prompt(batch), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@NIGHTLY
@pytest.mark.parametrize("case", [{"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str)
def test_tokens_of_other_requests_are_the_stock_loop_s(case: dict[str, Any]) -> None:
    model = in_fp32()
    for batch in (3, 1):
        arguments = {**prompt(batch), "eos_token_id": None, **case}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


def test_two_turns_and_several_tokens_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    steep(monkeypatch)
    model = in_fp32()
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    arguments = {**prompt(2), "eos_token_id": None, "max_new_tokens": 12}
    for _ in range(2):
        found = model.generate(**arguments, **{compat.CACHE: caches[0]})
        assert_native(model)
        assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: caches[1]}))
        ids = torch.cat([found, arguments["input_ids"][:, 4:]], dim=1)
        mask = torch.ones_like(ids)
        mask[:, :9] = prompt(2)["attention_mask"]
        arguments |= {"input_ids": ids, "attention_mask": mask}
    assert_lookup_changes_no_token(model)


@NIGHTLY
def test_steps_take_turns_with_the_model_s_own() -> None:
    model, _ = made("beam", **SURE)
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)
    assert_steps_take_turns(model, arguments)


@pytest.mark.parametrize("name, value", [("attn_residual_add_idx", 30), ("gate_bias", None)])
def test_what_is_changed_later_is_seen(name: str, value: int | None) -> None:
    model, _ = made("beam", **SURE)
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    for layer in model.model.layers:
        if value is None:
            layer.self_attn.gate_bias.data.copy_(torch.tensor([4.0, -4.0, 4.0, -4.0]))
        else:
            setattr(layer, name, value)
    found = model.generate(**arguments)
    assert_native(model)
    assert not torch.equal(found, before)
    assert_same_tokens(model, arguments)


def test_power_of_positions() -> None:
    """As transformers computes it, at places that no text of these tests reaches: as of scores of another scale."""
    from transformers.models.beam.modeling_beam import compute_attention_scaling  # older versions have none

    def drawn(seed: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()

    attention = in_fp32().model.layers[1].self_attn
    linears = {name: attention.get_submodule(f"{name}_proj").native for name in "qkvo"}
    x, out = drawn(0, 1, 40), [torch.empty(1, 40), torch.empty(1, 40)]
    for position in (0, 2047, 100_000):
        times = compute_attention_scaling(torch.tensor([[position]])).item()
        keys, values = drawn(1, 1, 2, position + 1, 16), drawn(2, 1, 2, position + 1, 16)
        for (scale, power), one in zip(((2.0, POWER), (2.0 * times, NO_POWER)), out):
            native = _native.GroupedAttention(
                **linears, q_norm=None, k_norm=None, heads=4, groups=2, size=16, scale=scale, window=0,
                sinks=None, gated=False, power=power,
            )  # fmt: skip
            decoder = _native.Decoder(40, "float32")
            decoder.add(None, native, None, None)
            decoder.forward(
                x=x, cos=None, sin=None, mask=None, position=position, first=0, last=1, final_norm=None, out=one,
                cache=_native.DecoderCache([keys], [values]),
            )  # fmt: skip
        assert torch.allclose(*out, rtol=1e-4, atol=1e-5), position


class TestSpecs:
    def test_layers(self) -> None:
        model = tiny("beam", **SURE)
        for index, layer in enumerate(model.model.layers):
            spec = layer_spec.of_layer(layer)
            assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.attention, GroupedAttentionSpec)
            assert spec.attention.turning == replace(BY_HALVES, scaled=True)
            assert spec.attention.outputs == Outputs(1.0, "sigmoid", biased=True)
            norms = (
                spec.input_norm,
                spec.attention_behind,
                spec.post_attention_norm,
                spec.feed_forward_behind,
            )
            assert [norm and norm.path for norm in norms] == [
                "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ]  # fmt: skip
            assert spec.sums is not None and not spec.sums.keeps_normed
            for found, count in (
                (spec.sums.attention, 2 * index + 2),
                (spec.sums.feed_forward, 2 * index + 3),
            ):
                assert found == pytest.approx((((count - 1) / count) ** 0.5, count**-0.5))
            if index == 0:
                assert isinstance(spec.feed_forward, DenseSpec) and spec.feed_forward.gating.is_wide
            else:
                assert isinstance(spec.feed_forward, MoeSpec) and spec.feed_forward.factors == (2.5, 1.0)

    def test_of_the_model(self) -> None:
        model = tiny("beam", **SURE)
        assert native_ends.query_powers(model.model, "embed_tokens", "rotary_emb") == [NO_POWER, POWER]
        assert native_ends.logits_scale(model, "model") == Cap(5.0, is_wide=True)
        native, _ = made("beam", **SURE)
        rotations = NativeDecoder(native)._layers.rotations
        assert [rotations.columns(index) for index in (0, 1)] == [(0, 16), (0, 0)]

    def test_units_of_others_round_the_activation(self) -> None:
        unit = tiny("qwen3_moe", mlp_only_layers=[0]).model.layers[0].mlp
        found = layer_probes.gating(unit, ("gate_proj", "up_proj", "down_proj"))
        assert found == layer_probes.PLAIN


class TestRefusals:
    def test_another_law(self, monkeypatch: pytest.MonkeyPatch) -> None:
        steep(monkeypatch, known=False)
        model, _ = made("beam", **SURE)
        refused = "the model scales queries by their position in another way"
        assert NativeDecoder(model).support.reason == refused

    def test_a_layer_that_changes_the_scale(self) -> None:
        model, _ = made("beam", **SURE)
        own = type(model.model.layers[1]).forward

        def doubling(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            return own(self, hidden_states, **kwargs | {SCALE: 2 * kwargs[SCALE]})

        derived(model.model.layers[1], doubling)
        refused = "the model scales queries by their position in another way"
        assert NativeDecoder(model).support.reason == refused

    @pytest.mark.parametrize("of_keys", [False, True])
    def test_attention_that_scales_something_else(self, of_keys: bool) -> None:
        model, _ = made("beam", **SURE)
        attention = model.model.layers[1].self_attn
        own = type(attention).forward

        def odd(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            scale = kwargs.pop(SCALE, None)
            if scale is None:
                return own(self, hidden_states, **kwargs)
            if of_keys:
                cache = kwargs[compat.CACHE]
                kwargs[compat.CACHE] = _Scaling(cache, scale)
            return own(self, hidden_states, **kwargs, **{SCALE: scale if of_keys else scale + 1})

        odd.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
        derived(attention, odd)
        refused = f"layer 1: self_attn: Odd makes something else of {SCALE}"
        assert NativeDecoder(model).support.reason == refused

    def test_attention_without_a_scale(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention_probes, "scaled_queries", lambda *_: False)
        model, _ = made("beam", **SURE)
        refused = "layer 1: its attention does not scale queries by what the model gives for that"
        assert NativeDecoder(model).support.reason == refused

    def test_a_bias_that_is_no_gate_s(self) -> None:
        layer = tiny("qwen3_moe").model.layers[0]
        layer.self_attn.gate_bias = nn.Parameter(torch.zeros(4))
        found = layer_spec.of_attention(layer.self_attn)
        assert isinstance(found, Support) and found.reason == "Qwen3MoeAttention itself holds gate_bias"

    def test_a_gate_that_takes_its_bias_in_another_way(self) -> None:
        attention = tiny("beam", **SURE).model.layers[0].self_attn
        own = type(attention).forward

        def negative(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            self.gate_bias = nn.Parameter(-self.gate_bias, False)
            return own(self, hidden_states, **kwargs)

        derived(attention, negative)
        found = layer_spec.of_attention(attention)
        assert isinstance(found, Support) and found.reason == "Odd makes something else of values"

    def test_sums_of_other_sides(self) -> None:
        layer = tiny("beam", **SURE).model.layers[0]

        def squared(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + self.post_attention_layernorm(mixed).square()
            return hidden_states + self.mlp(self.pre_feedforward_layernorm(hidden_states))

        derived(layer, squared)
        found = layer_spec.of_layer(layer)
        assert isinstance(found, Support) and "it is not x + attention(norm(x))" in found.reason

    def test_a_rotation_that_should_be_none(self) -> None:
        """The config says that full layers turn nothing; of a model that turns them, the first step tells."""
        model, _ = made("beam", **SURE)
        own, angles = type(model.model.layers[1]).forward, torch.ones(3, 1, 16)

        def turning(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            turned = {"position_embeddings": (angles.cos(), angles.sin())}
            return own(self, hidden_states, **kwargs | turned)

        derived(model.model.layers[1], turning)
        native = NativeDecoder(model)
        logits_of(model, native)
        assert not native.is_proven and native.support.reason.startswith("layer 1: relative difference")

    def test_arguments(self) -> None:
        arguments: dict[str, Any] = {
            "q": packed(64), "k": packed(32), "v": packed(32), "o": packed(40, 64), "q_norm": None, "k_norm": None,
            "heads": 4, "groups": 2, "size": 16, "scale": 1.0, "window": 0, "sinks": None, "gated": False,
        }  # fmt: skip
        _native.GroupedAttention(**arguments, gate=packed(64), gate_bias=torch.zeros(4), power=POWER)
        with pytest.raises(ValueError, match="one bias of gates a head is needed"):
            _native.GroupedAttention(**arguments, gate=packed(64), gate_bias=torch.zeros(64))
        with pytest.raises(ValueError, match="a bias of gates that there are none of"):
            _native.GroupedAttention(**arguments, gate_bias=torch.zeros(4))
        with pytest.raises(ValueError, match="queries grow by less than one position"):
            _native.GroupedAttention(**arguments, power=(-1.0, 0.1))
        with pytest.raises(ValueError, match="an activation that is not rounded beside limits"):
            _native.GatedUnit(packed(24), packed(24), packed(40, 24), is_wide=True, up_limit=1.0)


class _Scaling:
    """A cache that is given keys that are scaled."""

    def __init__(self, cache: Any, scale: Tensor) -> None:
        self._cache, self._scale = cache, scale

    def update(self, keys: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._cache.update(keys * self._scale, *args, **kwargs)
