"""Native decode steps of AFMoE, Laguna, MiMo-V2, Mellum and FlexOlmo: gates of heads, values of another width, norms
behind a layer's parts, rotations of each kind of layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import made
from test_generate import prompt
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_tokens,
)
from test_native_windows import assert_lookup_changes_no_token, assert_native
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import layer_spec, router_probes
from ktinject.generation.attention_probes import BY_HALVES, Outputs, Turning
from ktinject.generation.cpu.native_rotation import Rotations
from ktinject.generation.feed_forward_spec import MoeSpec
from ktinject.generation.layer_spec import DecoderLayerSpec, GroupedAttentionSpec
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig
from ktinject.support import Support
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
# All experts are taken, so none can turn over. Both kinds of layer, and windows shorter than the texts.
BOTH: dict[str, Any] = {
    "num_experts_per_tok": 6,
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 6,
}
# Each kind of layer turns by other angles, and another number of them.
ROTATIONS = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    }
}
HEADS = {"num_attention_heads_per_layer": [4, 6]}
LAGUNA = {**BOTH, **ROTATIONS, **HEADS, "moe_routed_scaling_factor": 2.3}
# A head's values are of another width than its keys.
MIMO = {**BOTH, **ROTATIONS, "n_group": 1, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**BOTH, "mup_enabled": True, "route_scale": 1.7},
    "laguna": LAGUNA,
    "mellum": BOTH,
    "mimo_v2_flash": {**MIMO, "v_head_dim": 12},
    "flex_olmo": {"num_experts_per_tok": 6, "num_key_value_heads": 4},
}
FAMILIES = {name: changes for name, changes in FAMILIES.items() if name in AVAILABLE}
CASES = [
    *FAMILIES.items(),
    ("laguna", {**LAGUNA, "gating": "per-element"}),
    ("mimo_v2_flash", {**MIMO, "v_head_dim": 24, "attention_value_scale": None}),
    ("mimo_v2_flash", {**MIMO, "v_head_dim": 8, "attention_bias": True}),
]
CASES = [case for case in CASES if case[0] in AVAILABLE]


@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(family, **changes))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str, family: str) -> None:
    assert_as_exact_as_its_own(*made(family, weights, **FAMILIES[family]), INT8_TOLERANCE)


@pytest.mark.parametrize(
    "case",
    [
        {},
        *(
            pytest.param(case, marks=pytest.mark.nightly)
            for case in ({"cache_implementation": "static"}, {"max_time": 1e6}, {"prefill_chunk_size": 4})
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_tokens_are_the_stock_loop_s(family: str, changes: dict[str, Any], case: dict[str, Any]) -> None:
    model, _ = made(family, **changes)
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, **case})
        assert_native(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_of_a_text(family: str) -> None:
    """Those that are taken back leave rings of values as they were."""
    model, _ = made(family, **FAMILIES[family])
    assert_lookup_changes_no_token(model)


# Of what the steps were made of: a family, a holder, an attribute of it, and another value.
CHANGES = [
    ("mimo_v2_flash", "model.layers.0.self_attn", "v_scale", 3.0),
    ("laguna", "model.layers.1.mlp", "routed_scaling_factor", 0.1),
]


@pytest.mark.parametrize("family, path, name, value", [case for case in CHANGES if case[0] in FAMILIES])
def test_a_factor_that_is_changed_is_seen(family: str, path: str, name: str, value: float) -> None:
    model, _ = made(family, **FAMILIES[family])
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    setattr(model.get_submodule(path), name, value)
    assert not torch.equal(before, model.generate(**arguments))
    assert_same_tokens(model, arguments)
    assert_native(model)


def layers_of(family: str) -> list[DecoderLayerSpec]:
    if family not in FAMILIES:
        pytest.skip(f"transformers has no {family}")
    found = [layer_spec.of_layer(layer) for layer in tiny(family, **FAMILIES[family]).model.layers]
    return [spec for spec in found if isinstance(spec, DecoderLayerSpec)]


class TestSpecs:
    def test_afmoe(self) -> None:
        full, sliding = layers_of("afmoe")
        for spec, turning in ((full, Turning(is_none=True)), (sliding, BY_HALVES)):
            assert isinstance(spec.attention, GroupedAttentionSpec)
            assert (spec.attention.turning, spec.attention.gate) == (turning, "gate_proj")
            assert spec.attention.outputs == Outputs(1.0, "sigmoid")
            names = [
                spec.input_norm,
                spec.attention_behind,
                spec.post_attention_norm,
                spec.feed_forward_behind,
            ]
            assert [norm and norm.path for norm in names] == [
                "input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm",
            ]  # fmt: skip
        assert isinstance(sliding.feed_forward, MoeSpec) and sliding.feed_forward.router.factor == 1.7
        assert sliding.feed_forward.factors == (1.0, 1.0) and sliding.feed_forward.router.of_block

    def test_laguna(self) -> None:
        _, spec = layers_of("laguna")
        assert isinstance(spec.attention, GroupedAttentionSpec) and isinstance(spec.feed_forward, MoeSpec)
        assert spec.attention.outputs == Outputs(1.0, "softplus") and spec.attention.gate == "g_proj"
        assert spec.feed_forward.factors == (2.3, 1.0)

    def test_mimo(self) -> None:
        full, sliding = layers_of("mimo_v2_flash")
        for spec, has_sinks in ((full, False), (sliding, True)):
            assert isinstance(spec.attention, GroupedAttentionSpec)
            assert spec.attention.outputs == Outputs(0.707) and spec.attention.has_sinks == has_sinks

    def test_flex_olmo(self) -> None:
        spec, _ = layers_of("flex_olmo")
        assert spec.input_norm is None and spec.post_attention_norm is None
        assert [norm and norm.path for norm in (spec.attention_behind, spec.feed_forward_behind)] == [
            "post_attention_layernorm", "post_feedforward_layernorm",
        ]  # fmt: skip

    def test_factors_of_a_block(self) -> None:
        routed, shared = (torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
        for a, b in ((1.0, 1.0), (2.5, 1.0), (1.0, 0.5), (0.3, 1.7)):
            assert router_probes._factors(b * (a * routed + shared), routed, shared) == pytest.approx((a, b))
            assert router_probes._factors(a * routed, routed, torch.zeros(1, 3, 8)) == pytest.approx((a, 1.0))
        assert router_probes._factors(routed + shared.abs(), routed, shared) is None
        assert router_probes._factors(-routed, routed, torch.zeros(1, 3, 8)) is None


def derived(module: Any, forward: Any) -> None:
    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


def packed(out: int, size: int = 40) -> Any:
    like = nn.Linear(size, out, bias=False).bfloat16()
    return CpuLinear.build(like, CpuLinearConfig(device="cpu")).native


class TestRefusals:
    def test_a_gate_of_another_function(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if "afmoe" not in FAMILIES:
            pytest.skip("transformers has no afmoe")
        attention = tiny("afmoe", **FAMILIES["afmoe"]).model.layers[0].self_attn
        monkeypatch.setattr(torch, "sigmoid", torch.tanh)
        found = layer_spec.of_attention(attention)
        assert isinstance(found, Support) and found.reason == "AfmoeAttention makes something else of values"

    def test_norms_of_sums(self) -> None:
        if "afmoe" not in FAMILIES:
            pytest.skip("transformers has no afmoe")
        layer = tiny("afmoe", **FAMILIES["afmoe"]).model.layers[0]

        def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            mixed, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = self.post_attention_layernorm(hidden_states + mixed)
            return hidden_states + self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(hidden_states)))

        derived(layer, forward)
        found = layer_spec.of_layer(layer)
        assert isinstance(found, Support) and "it is not x + attention(norm(x))" in found.reason

    def test_a_rotation_of_another_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which layer is given which is compared in the first step."""
        if "mellum" not in FAMILIES:
            pytest.skip("transformers has no mellum")
        model, _ = made("mellum", **BOTH)
        other = lambda self, rotation, index: rotation[1 - self._kind[index]]  # noqa: E731
        monkeypatch.setattr(Rotations, "of_layer", other)
        model.generate(**prompt())
        assert model.ktinject_decoding.last == "eager loop"
        assert "is given another rotation" in model.ktinject_decoding.reason

    def test_arguments_of_attention(self) -> None:
        def attention(**changes: Any) -> Any:
            arguments: dict[str, Any] = {
                "q": packed(64), "k": packed(32), "v": packed(24), "o": packed(40, 48), "q_norm": None,
                "k_norm": None, "heads": 4, "groups": 2, "size": 16, "scale": 1.0, "window": 0, "sinks": None,
                "gated": False, "value": 12, "gate": packed(48),
            }  # fmt: skip
            return _native.GroupedAttention(**arguments | changes)

        attention()
        attention(gate=packed(4))
        with pytest.raises(ValueError, match="the projection to gates: expected 48 outputs"):
            attention(gate=packed(5))
        with pytest.raises(ValueError, match="v_proj: expected 32 outputs"):
            attention(value=0)
        with pytest.raises(ValueError, match="beside values of another size"):
            attention(gated=True, q=packed(128), gate=None)

    def test_angles_of_a_layer(self) -> None:
        arguments: dict[str, Any] = {
            "q": packed(64), "k": packed(32), "v": packed(32), "o": packed(40, 64), "q_norm": None,
            "k_norm": None, "heads": 4, "groups": 2, "size": 16, "scale": 1.0, "window": 0, "sinks": None,
            "gated": False,
        }  # fmt: skip
        attention = _native.GroupedAttention(**arguments)
        unit = _native.GatedUnit(packed(24), packed(24), packed(40, 24))
        decoder = _native.Decoder(40, "bfloat16")
        for first, count in ((-2, 4), (0, 3), (0, -2)):
            with pytest.raises(ValueError, match="angles must be an even number"):
                decoder.add(None, attention, None, unit, first_angle=first, angles=count)
        decoder.add(None, attention, None, unit, first_angle=6, angles=4)
        x, table, keys = torch.zeros(1, 40), torch.ones(1, 8), torch.zeros(1, 2, 4, 16)
        with pytest.raises(ValueError, match="columns that the rotation does not have"):
            decoder.forward(
                x=x.bfloat16(), cos=table.bfloat16(), sin=table.bfloat16(), mask=None, position=0, first=0, last=1,
                cache=_native.DecoderCache([keys.bfloat16()], [keys.bfloat16()]), final_norm=None,
                out=x.bfloat16(),
            )  # fmt: skip
