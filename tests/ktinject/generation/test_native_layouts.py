"""Native decode steps of layers that are one part (Nemotron-H), or have their norms behind the parts (FlexOlmo).

What layers with states have in common is in test_native_states.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_generate import prompt
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_tokens,
    doubled,
    varied,
)
from test_native_windows import assert_native
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import feed_forward_spec, layer_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec, OtherFeedForward
from ktinject.generation.layer_spec import DecoderLayerSpec, GroupedAttentionSpec
from ktinject.generation.recurrent_spec import Mamba2Spec
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
# All experts are taken, so none can turn over.
SURE: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "num_experts_per_tok": 6,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "moe_latent_size": None,
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "ssm_state_size": 24,
        "n_groups": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "flex_olmo": {"num_experts_per_tok": 6},
}
FAMILIES = [name for name in SURE if name in AVAILABLE]
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in FAMILIES]
CASES += [
    ("nemotron_h", {"moe_latent_size": 20, "layers_block_type": ["attention", "moe", "mamba"]}),
    ("nemotron_h", {"n_group": 2, "topk_group": 2, "n_groups": 4, "mlp_bias": True, "use_bias": True}),
    ("nemotron_h", {"use_conv_bias": False, "conv_kernel": 2, "layers_block_type": ["moe", "attention"]}),
    ("flex_olmo", {"attention_bias": True, "norm_topk_prob": True}),
]


def made(
    family: str,
    weights: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    wide: bool = False,
    **changes: Any,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: routers stay in fp32, as from_pretrained leaves them."""
    changes = SURE[family] | changes
    model, truth = (varied(doubled(tiny(family, **changes).bfloat16())) for _ in range(2))
    model = model.to(dtype)
    if wide:
        for path, module in model.named_modules():
            if path.endswith(".gate"):
                module.float()
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth.float()


@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(family, **changes))


@pytest.mark.parametrize("wide", [False, True], ids=["bf16 router", "fp32 router"])
def test_routers_as_they_are_loaded(wide: bool) -> None:
    assert_as_exact_as_its_own(*made("nemotron_h", wide=wide))


@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_fp32(family: str) -> None:
    assert_as_exact_as_its_own(*made(family, "int8", torch.float32), INT8_TOLERANCE)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formats(family: str, weights: str) -> None:
    changes: dict[str, Any] = {"moe_latent_size": 20} if family == "nemotron_h" else {}
    assert_as_exact_as_its_own(*made(family, weights, **changes), INT8_TOLERANCE)


@pytest.mark.parametrize("case", [{}, {"cache_implementation": "static"}, {"max_time": 1e6}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_stock_loop_s(family: str, case: dict[str, Any]) -> None:
    """Also of rows with padding on their left."""
    changes: dict[str, Any] = {"moe_latent_size": 20} if family == "nemotron_h" else {}
    model, _ = made(family, **changes)
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, **case})
        assert_native(model)


class TestSpecs:
    def test_of_layers_of_one_part(self) -> None:
        model = tiny("nemotron_h", **SURE["nemotron_h"])
        state, moe, attention, dense = (layer_spec.of_layer(layer) for layer in model.model.layers)
        epsilon = model.config.layer_norm_epsilon
        assert isinstance(state, DecoderLayerSpec)
        assert state.attention == Mamba2Spec("mixer", 0, 4, 2, 20, 24, epsilon)
        assert state.input_norm is not None and state.input_norm.path == "norm"
        assert state.feed_forward is None and state.post_attention_norm is None
        assert isinstance(moe, DecoderLayerSpec) and isinstance(moe.feed_forward, MoeSpec)
        assert moe.attention is None and moe.input_norm is None and moe.feed_forward.narrow == ()
        assert moe.feed_forward.shared == DenseSpec("shared_experts", ("up_proj", "down_proj"))
        router = moe.feed_forward.router
        assert (router.scores, router.factor, router.is_corrected) == ("sigmoid", 2.5, True)
        assert isinstance(attention, DecoderLayerSpec) and isinstance(
            attention.attention, GroupedAttentionSpec
        )
        assert isinstance(dense, DecoderLayerSpec)
        assert dense.feed_forward == DenseSpec("mixer", ("up_proj", "down_proj"))

    def test_of_narrow_experts(self) -> None:
        model = tiny("nemotron_h", **SURE["nemotron_h"] | {"moe_latent_size": 20})
        found = layer_spec.of_layer(model.model.layers[1])
        assert isinstance(found, DecoderLayerSpec) and isinstance(found.feed_forward, MoeSpec)
        assert found.feed_forward.narrow == ("fc1_latent_proj", "fc2_latent_proj")

    @pytest.mark.skipif("flex_olmo" not in AVAILABLE, reason="transformers has no flex_olmo")
    def test_of_norms_behind(self) -> None:
        found = layer_spec.of_layer(tiny("flex_olmo").model.layers[0])
        assert isinstance(found, DecoderLayerSpec)
        assert found.input_norm is None and found.post_attention_norm is None
        assert found.attention_behind is not None and found.feed_forward_behind is not None
        assert found.attention_behind.path == "post_attention_layernorm"
        assert found.feed_forward_behind.path == "post_feedforward_layernorm"


def changed(module: Any, forward: Callable[..., Any]) -> None:
    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


class TestRefusals:
    @pytest.mark.parametrize(
        "index, forward",
        [
            (0, lambda self, x, **_: x + 0.5 * self.mixer(x)),  # the norm is left out
            (1, lambda self, x, **_: self.mixer(self.norm(x))),  # what came in is left out
            (2, lambda self, x, **_: x + self.norm(self.mixer(x)[0])),  # the norm is behind
        ],
        ids=["no norm", "no residual", "norm behind"],
    )
    def test_of_another_layout(self, index: int, forward: Any) -> None:
        layer = tiny("nemotron_h", **SURE["nemotron_h"]).model.layers[index]
        changed(layer, forward)
        found = layer_spec.of_layer(layer)
        assert not isinstance(found, DecoderLayerSpec)
        assert found.reason.startswith(("it is not x + attention", "its forward fails"))

    def test_of_another_activation(self) -> None:
        layer = tiny("nemotron_h", **SURE["nemotron_h"]).model.layers[3]
        layer.mixer.act_fn = nn.SiLU()
        found = feed_forward_spec.of_feed_forward(layer.mixer)
        assert found == OtherFeedForward("", "its NemotronHMLP is no unit with a squared ReLU")

    def test_of_other_ways_to_narrow_experts(self) -> None:
        config = SURE["nemotron_h"] | {"moe_latent_size": 20}
        block = tiny("nemotron_h", **config).model.layers[1].mixer
        own = type(block).forward
        changed(block, lambda self, x: own(self, x) + self.fc2_latent_proj(self.fc1_latent_proj(x)))
        found = feed_forward_spec.of_moe(block)
        assert not isinstance(found, MoeSpec)
        assert found.reason == "its Odd does not add shared experts to routed ones"
        block = tiny("nemotron_h", **config).model.layers[1].mixer
        block.fc2_latent_proj = nn.Identity()
        found = feed_forward_spec.of_moe(block)
        assert not isinstance(found, MoeSpec) and "its NemotronHMoE holds" in found.reason

    def test_of_layers_without_attention_that_keep_something(self) -> None:
        model, _ = made("nemotron_h")
        state, _, attention, dense = model.config.layers_block_type
        model.config.layers_block_type = [state, attention, attention, dense]
        refused = NativeDecoder(model).support.reason
        assert refused == "layer 1: its cache is not what a layer without attention needs"


def linear(out: int, size: int) -> tuple[Any, Tensor]:
    """A packed layer, and its weight in fp32."""
    native = _native.Linear(
        out_features=out, in_features=size, weights="bf16", group_size=0, has_bias=False, kernel="auto"
    )
    weight = (torch.randn(out, size) * size**-0.5).bfloat16()
    native.allocate()
    native.load(weight)
    return native, weight.float()


class TestNative:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_parts_and_norms_behind_them(self, dtype: torch.dtype) -> None:
        (up, up_weight), (down, down_weight) = linear(56, 40), linear(40, 56)
        before, behind = (torch.rand(40).add(0.5).to(dtype) for _ in range(2))
        decoder = _native.Decoder(40, str(dtype).removeprefix("torch."))
        norms = [_native.Norm(weight, 1e-6) for weight in (before, behind)]
        decoder.add(
            None,
            None,
            norms[0],
            _native.PlainUnit(up, down),
            feed_forward_sum=(1.0, 0.5),
            behind_feed_forward=norms[1],
        )
        x, out = torch.randn(3, 40).to(dtype), torch.empty(3, 40, dtype=dtype)
        held = torch.empty(3, 1, 1)
        decoder.forward(
            x=x, cos=None, sin=None, mask=None, position=0, cache=_native.DecoderCache([held], [held]), first=0,
            last=1, final_norm=None, out=out,
        )  # fmt: skip

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return functional.rms_norm(x.float(), (40,), None, 1e-6).to(dtype).float() * weight.float()

        inner = functional.relu(normed(x, before) @ up_weight.T).square()
        want = x.float() + 0.5 * normed(inner @ down_weight.T, behind)
        # Products of packed layers take their inputs in bf16.
        torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)

    def test_what_does_not_fit(self) -> None:
        decoder = _native.Decoder(40, "bfloat16")
        norm, narrow = (_native.Norm(torch.ones(size).bfloat16(), 1e-6) for size in (40, 39))
        unit = _native.PlainUnit(linear(56, 40)[0], linear(40, 56)[0])
        with pytest.raises(ValueError, match="needs attention or a feed-forward part"):
            decoder.add(norm, None, None, None)
        with pytest.raises(ValueError, match="norm must be one of 40 values"):
            decoder.add(None, None, norm, unit, behind_feed_forward=narrow)
        with pytest.raises(ValueError, match="of the model's dtype"):
            decoder.add(None, None, _native.Norm(torch.ones(40), 1e-6), unit)
        with pytest.raises(ValueError, match="up and down do not fit together"):
            _native.PlainUnit(linear(56, 40)[0], linear(40, 55)[0])
        other = _native.PlainUnit(linear(56, 40)[0], linear(39, 56)[0])
        with pytest.raises(ValueError, match="feed-forward: expected 40 values in and out"):
            decoder.add(None, None, norm, other)

    def test_narrow_experts_that_do_not_fit(self) -> None:
        model, _ = made("nemotron_h", moe_latent_size=20)
        experts = model.model.layers[1].mixer.experts.native

        def mixture(**changes: Any) -> Any:
            given = {
                "router": None, "weight": torch.randn(6, 40), "scores": "sigmoid", "correction": None, "top_k": 2,
                "groups": 1, "top_groups": 1, "normed": True, "factor": 1.0, "rounds_logits": False,
                "rounds_scores": False, "rounds_weights": False, "experts": experts, "shared": None, "gate": None,
            }  # fmt: skip
            return _native.Mixture(**given | changes)

        to, back = linear(20, 40)[0], linear(40, 20)[0]
        norm, decoder = _native.Norm(torch.ones(40).bfloat16(), 1e-6), _native.Decoder(40, "bfloat16")
        decoder.add(None, None, norm, mixture(narrow_in=to, narrow_out=back))
        for odd in (
            {"narrow_in": to},
            {"narrow_in": linear(24, 40)[0], "narrow_out": back},
            {"narrow_in": to, "narrow_out": linear(40, 24)[0]},
        ):
            with pytest.raises(ValueError, match="what leads to them and back must have their 20 values"):
                mixture(**odd)
        with pytest.raises(ValueError, match=r"the weight must be \[experts, hidden\]"):
            mixture(narrow_in=to, narrow_out=back, weight=torch.randn(6, 20))
        with pytest.raises(ValueError, match="feed-forward: expected 40 values in and out"):
            decoder.add(None, None, norm, mixture(narrow_in=to, narrow_out=linear(39, 20)[0]))
