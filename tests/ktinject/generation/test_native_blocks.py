"""Native decode steps of A.X-K1, Flint and MiniMax-M3: a norm within a block of experts, sinks beside norms of heads,
limits of gate and up.
"""

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
)
from test_native_gates import derived, made
from test_native_kimi import linear
from test_native_windows import assert_lookup_changes_no_token, assert_native
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from ktinject import _native
from ktinject.generation import feed_forward_spec, layer_probes, layer_spec
from ktinject.generation.attention_probes import BY_HALVES, Turning
from ktinject.generation.cpu import native_ends
from ktinject.generation.cpu.native_parts import UnknownLayer
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec
from ktinject.generation.layer_probes import Gating
from ktinject.generation.layer_spec import DecoderLayerSpec, GroupedAttentionSpec
from ktinject.support import Support
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
# All experts are taken, so none can turn over. Windows are shorter than the texts.
SURE: dict[str, Any] = {"num_experts_per_tok": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": {**SURE, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    "flint": {**SURE, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
    "minimax_m3_vl_text": {**SURE, "mlp_layer_types": ["dense", "sparse"]},
}
FAMILIES = {name: changes for name, changes in FAMILIES.items() if name in AVAILABLE}


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_as_exact_as_the_model_s_own(family: str) -> None:
    assert_as_exact_as_its_own(*made(family, **FAMILIES[family]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_formats(weights: str, family: str) -> None:
    assert_as_exact_as_its_own(*made(family, weights, **FAMILIES[family]), INT8_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_fp32(family: str) -> None:
    assert_as_exact_as_its_own(*made(family, "int8", torch.float32, **FAMILIES[family]), INT8_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_stock_loop_s(family: str) -> None:
    """Also of rows with padding on their left, and of a choice of experts."""
    model, _ = made(family, **FAMILIES[family] | {"num_experts_per_tok": 2})
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None})
        assert_native(model)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_two_turns(family: str) -> None:
    model, _ = made(family, **FAMILIES[family])
    cache = DynamicCache(config=model.config)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    for _ in range(2):
        found = model.generate(**arguments, past_key_values=cache)
        assert_native(model)
        assert_same_but_for_roundings(model, arguments, found, stock(model, **arguments))
        ids = torch.cat([found, arguments["input_ids"]], dim=1)
        arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("family", FAMILIES)
def test_several_tokens_of_a_text(family: str) -> None:
    model, _ = made(family, **FAMILIES[family])
    assert_lookup_changes_no_token(model)


@pytest.mark.skipif("axk1" not in AVAILABLE, reason="transformers has no axk1")
class TestNormWithinABlock:
    def test_the_spec(self) -> None:
        dense, spec = (layer_spec.of_layer(layer) for layer in made("axk1")[0].model.layers)
        assert isinstance(dense, DecoderLayerSpec) and dense.feed_forward_behind is None
        assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.feed_forward, MoeSpec)
        assert spec.feed_forward.norm == "post_mlp_layernorm"
        assert spec.feed_forward_behind is not None
        assert spec.feed_forward_behind.path == "mlp.post_mlp_layernorm"

    @pytest.mark.parametrize(
        "behind, why",
        [
            (lambda norm, x: 2 * norm(x), "its Odd does something behind post_mlp_layernorm"),
            (lambda norm, x: x, "its Odd does something behind post_mlp_layernorm"),
            (lambda norm, x: norm(x.square()), "its Odd does not add shared experts to routed ones"),
        ],
        ids=["doubled", "left out", "squared before"],
    )
    def test_of_another_place(self, behind: Any, why: str) -> None:
        block = tiny("axk1").model.layers[1].mlp

        def forward(self: Any, x: Tensor) -> Tensor:
            _, weights, ids = self.gate(x)
            found = self.experts(x.flatten(0, -2), ids, weights).view(x.shape) + self.shared_experts(x)
            return behind(self.post_mlp_layernorm, found)

        derived(block, forward)
        found = feed_forward_spec.of_moe(block)
        assert isinstance(found, Support) and found.reason == why

    def test_that_is_none(self) -> None:
        layer = made("axk1")[0].model.layers[1]
        layer.mlp.post_mlp_layernorm = nn.GroupNorm(1, 40)
        found = layer_spec.of_layer(layer)
        assert isinstance(found, Support) and found.reason.startswith("mlp.post_mlp_layernorm: ")


@pytest.mark.skipif("flint" not in AVAILABLE, reason="transformers has no flint")
class TestFlint:
    def test_the_spec(self) -> None:
        specs = [layer_spec.of_layer(layer) for layer in tiny("flint", **FAMILIES["flint"]).model.layers]
        for spec, turning in zip(specs, (Turning(is_none=True), BY_HALVES)):
            assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.attention, GroupedAttentionSpec)
            assert spec.attention.has_sinks and spec.attention.turning == turning

    def test_what_from_pretrained_leaves_in_fp32(self) -> None:
        model, truth = made("flint", **FAMILIES["flint"])
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks = nn.Parameter(module.sinks.detach().float())
        assert_as_exact_as_its_own(model, truth)


class Unit(nn.Module):
    """down(function(gate(x), up(x))), both of one linear layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(40, 48, bias=False), nn.Linear(24, 40, bias=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self.function(*self.gate_up_proj(x).chunk(2, -1)))
        return found


OAI = Gating(1.702, 7.0, 7.0, 1.0)
GATINGS = [
    (lambda g, u: functional.silu(g) * u, Gating()),
    (lambda g, u: functional.silu(g.clamp(max=7.0)) * u.clamp(-5.0, 5.0), Gating(1.0, 7.0, 5.0)),
    (lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)), OAI),
]


class TestGating:
    @pytest.mark.parametrize("function, gating", GATINGS, ids=["plain", "limits", "MiniMax-M3"])
    def test_of_units(self, function: Any, gating: Gating) -> None:
        assert feed_forward_spec.of_dense(Unit(function)) == DenseSpec(
            "", ("gate_up_proj", "down_proj"), gating
        )

    @pytest.mark.parametrize(
        "function",
        [
            lambda g, u: functional.gelu(g) * u,
            lambda g, u: functional.silu(u) * g,
            lambda g, u: functional.silu(g) * u.clamp(-7.0, 9.0),
            lambda g, u: functional.silu(g.clamp(min=-7.0)) * u,
            lambda g, u: 0.9 * functional.silu(g) * u,
        ],
        ids=["gelu", "exchanged", "other limits", "another limit", "a factor"],
    )
    def test_of_others(self, function: Any) -> None:
        found = feed_forward_spec.of_dense(Unit(function))
        assert (
            isinstance(found, Support)
            and found.reason == "its Unit is no gated unit with SiLU, or GELU by tanh"
        )

    def test_of_something_behind(self) -> None:
        class Capped(Unit):
            def forward(self, x: Tensor) -> Tensor:
                return 0.5 * super().forward(x)

        found = layer_probes.gating(Capped(GATINGS[0][0]), ("gate_up_proj", "down_proj"))
        assert isinstance(found, Support)

    @pytest.mark.skipif("minimax_m3_vl_text" not in FAMILIES, reason="transformers has no MiniMax-M3")
    def test_of_minimax_m3(self) -> None:
        layers = tiny("minimax_m3_vl_text", **FAMILIES["minimax_m3_vl_text"]).model.layers
        dense, spec = (layer_spec.of_layer(layer) for layer in layers)
        gating = Gating(1.702, 1.5, 1.5, 1.0)
        assert isinstance(dense, DecoderLayerSpec) and isinstance(dense.feed_forward, DenseSpec)
        assert dense.feed_forward.gating == gating
        assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.feed_forward, MoeSpec)
        assert spec.feed_forward.shared is not None and spec.feed_forward.shared.gating == gating
        assert spec.feed_forward.factors == (2.0, 1.0)

    @pytest.mark.parametrize("gating", [one for _, one in GATINGS], ids=str)
    def test_the_formula(self, gating: Gating) -> None:
        """In fp32, as tensors give it."""
        (both, w_both), (down, w_down) = linear(48, 40), linear(40, 24)
        decoder = _native.Decoder(40, "float32")
        decoder.add(None, None, None, _native.GatedUnit(both, None, down, **vars(gating)))
        x = 8 * torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16().float()
        gate, up = (x @ w_both.T).chunk(2, -1)
        assert (gate > 7).any() and (up < -7).any()
        gate = gate.clamp(max=gating.gate_max)
        h = (
            gate
            * (gating.alpha * gate).sigmoid()
            * (up.clamp(-gating.up_limit, gating.up_limit) + gating.up_offset)
        )
        found = torch.empty_like(x)
        decoder.forward(
            x=x, cos=None, sin=None, mask=None, position=0, first=0, last=1, final_norm=None, out=found,
            cache=_native.DecoderCache([torch.empty(1, 1, 1)], [torch.empty(1, 1, 1)]),
        )  # fmt: skip
        torch.testing.assert_close(found - x, h @ w_down.T, rtol=2e-2, atol=0.2)

    def test_a_limit_below_zero(self) -> None:
        (both, _), (down, _) = linear(48, 40), linear(40, 24)
        with pytest.raises(ValueError, match="up_limit must not be negative"):
            _native.GatedUnit(both, None, down, up_limit=-1.0)


class TestOutputLayer:
    def test_within_the_language_part(self) -> None:
        inner = nn.ModuleDict({"model": nn.Identity(), "lm_head": nn.Identity()})
        both = nn.ModuleDict({"language_model": inner, "lm_head": nn.Identity()})
        assert native_ends.head_path(nn.ModuleDict({"language_model": inner}), "language_model.model") == (
            "language_model.lm_head"
        )
        assert native_ends.head_path(both, "language_model.model") == "language_model.lm_head"
        assert native_ends.head_path(inner, "model") == "lm_head"

    def test_that_is_none(self) -> None:
        with pytest.raises(UnknownLayer, match="the model has nothing as lm_head"):
            native_ends.head_path(nn.ModuleDict({"model": nn.Identity()}), "model")
