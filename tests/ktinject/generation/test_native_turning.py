"""Native decode steps of Hunyuan-A13B, ERNIE-4.5 and Mellum: norms behind the rotation, pairs that are neighbours,
tables in fp32, routers that hold more than a weight or that nothing packs, and rotations by layers' types."""

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
    logits_of,
    swapped,
    varied,
)
from test_native_windows import assert_native
from torch import Tensor
from transformers import PreTrainedModel

import ktinject
from ktinject.generation import attention_probes, feed_forward_spec, layer_spec
from ktinject.generation.attention_probes import Outputs, Turning
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cpu.native_parts import UnknownLayer
from ktinject.generation.cpu.native_rotation import Rotations
from ktinject.generation.feed_forward_spec import MoeSpec
from ktinject.generation.layer_spec import GroupedAttentionSpec
from ktinject.support import Support
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
# All experts are taken, so none can turn over.
SURE = {
    "ernie4_5_moe": {"moe_k": 6, "num_experts_per_tok": 6},
    "hunyuan_v1_moe": {"moe_topk": 6},
    "mellum": {
        "num_experts_per_tok": 6,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "sliding_window": 6,
    },
}
FAMILIES = [name for name in SURE if name in AVAILABLE]
SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 3e3}
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in FAMILIES]
CASES += [
    ("ernie4_5_moe", {"use_bias": True}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "rope_parameters": SCALED}),
    ("hunyuan_v1_moe", {"attention_bias": True, "rope_parameters": SCALED}),
    ("mellum", {"rope_parameters": {"full_attention": SCALED, "sliding_attention": PLAIN}}),
]


def with_wide_routers(model: PreTrainedModel) -> PreTrainedModel:
    """As from_pretrained leaves what a family keeps in fp32; Mellum keeps nothing."""
    for path, module in model.named_modules() if model.config.model_type != "mellum" else ():
        if path.endswith((".gate", ".gate.wg", ".moe_statics")):
            module.float()
    return model


def made(
    family: str, weights: str = "bf16", wide: bool = False, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32."""
    changes = SURE[family] | changes
    model, truth = (varied(doubled(tiny(family, **changes).bfloat16())) for _ in range(2))
    model = with_wide_routers(model) if wide else model
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth.float()


@pytest.mark.parametrize("wide", [False, True], ids=["bf16 routers", "fp32 routers"])
@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any], wide: bool) -> None:
    assert_as_exact_as_its_own(*made(family, wide=wide, **changes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formats(family: str, weights: str) -> None:
    assert_as_exact_as_its_own(*made(family, weights), INT8_TOLERANCE)


@pytest.mark.parametrize("case", [{}, {"cache_implementation": "static"}, {"max_time": 1e6}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_stock_loop_s(family: str, case: dict[str, Any]) -> None:
    model = swapped(family, **SURE[family])
    for batch in (3, 1):
        # At Hunyuan's 21st token, transformers' own step in bf16 is 0.4 off that in fp32; ours is 0.02 off.
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, "max_new_tokens": 16, **case})
        assert_native(model)


# What the steps read: each must change the tokens, to be seen at all.
READ = {
    "hunyuan_v1_moe": ["self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight", "mlp.gate.wg.weight"],
    "ernie4_5_moe": ["mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"],
    "mellum": ["self_attn.k_norm.weight"],
}  # fmt: skip


@pytest.mark.parametrize("family, name", [(family, name) for family in FAMILIES for name in READ[family]])
@pytest.mark.parametrize("wide", [False, True], ids=["bf16 routers", "fp32 routers"])
def test_weights_in_place_are_read(family: str, name: str, wide: bool) -> None:
    model = doubled(tiny(family).bfloat16())  # two of six experts are chosen
    model = with_wide_routers(model) if wide else model
    ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    before = model.generate(**arguments)
    assert_native(model)
    with torch.no_grad():
        weight = model.model.layers[1].get_parameter(name)
        weight.copy_(torch.linspace(-4, 4, weight.numel()).view(weight.shape))
    after = model.generate(**arguments)
    assert_native(model)
    assert not torch.equal(before, after)
    assert_same_but_for_roundings(model, arguments, after, stock(model, **arguments))


class TestSpecs:
    def test_of_hunyuan(self) -> None:
        spec = layer_spec.of_layer(tiny("hunyuan_v1_moe").model.layers[1])
        assert isinstance(spec, layer_spec.DecoderLayerSpec) and isinstance(spec.feed_forward, MoeSpec)
        assert isinstance(spec.attention, GroupedAttentionSpec)
        assert spec.attention.turning == Turning(before_norms=True)
        assert spec.attention.q_norm is not None and spec.attention.q_norm.path == "query_layernorm"
        router = spec.feed_forward.router
        assert (router.weight, router.is_plain, router.is_corrected) == ("wg.weight", False, False)
        assert spec.feed_forward.shared is not None and spec.feed_forward.shared.path == "shared_mlp"

    def test_of_ernie(self) -> None:
        spec = layer_spec.of_layer(tiny("ernie4_5_moe").model.layers[1])
        assert isinstance(spec, layer_spec.DecoderLayerSpec) and isinstance(spec.feed_forward, MoeSpec)
        assert isinstance(spec.attention, GroupedAttentionSpec)
        assert spec.attention.turning == Turning(by_neighbours=True)
        router = spec.feed_forward.router
        assert router.correction == "moe_statics.e_score_correction_bias" and not router.is_plain
        assert router.is_corrected and router.scores == "softmax" and router.is_normed
        assert router.rounds and not router.rounds_logits and not router.rounds_scores

    @pytest.mark.parametrize("is_wide", [False, True])
    def test_of_routers_in_fp32(self, is_wide: bool) -> None:
        """Hunyuan's rounds nothing then, and else its logits."""
        model = tiny("hunyuan_v1_moe").bfloat16()
        block = (with_wide_routers(model) if is_wide else model).model.layers[0].mlp
        spec = feed_forward_spec.of_moe(block)
        assert isinstance(spec, MoeSpec)
        assert spec.router.rounds_logits == spec.router.rounds == (not is_wide)


def derived(module: Any, forward: Any) -> None:
    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


class TestRefusals:
    def test_norms_in_another_place(self) -> None:
        """Between two rotations: with weights of one, nothing of it would show in a step."""
        model = swapped("hunyuan_v1_moe", **SURE["hunyuan_v1_moe"])
        attention = model.model.layers[1].self_attn
        own = type(attention.key_layernorm).forward
        for name in ("query_layernorm", "key_layernorm"):
            derived(getattr(attention, name), lambda self, x: own(self, x))
        forward = type(attention).forward

        def twice(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
            cos, sin = kwargs.pop("position_embeddings")
            return forward(self, hidden_states, position_embeddings=(cos * 2, sin * 2), **kwargs)

        derived(attention, twice)
        found = layer_spec.of_attention(attention)
        assert isinstance(found, Support) and found.reason == "Odd makes keys in another way"
        assert NativeDecoder(model).support.reason == "layer 1: self_attn: Odd makes keys in another way"

    def test_a_router_of_two_linear_layers(self) -> None:
        block = tiny("hunyuan_v1_moe").model.layers[0].mlp
        block.gate.second = torch.nn.Linear(40, 6)
        found = feed_forward_spec.of_moe(block)
        assert isinstance(found, Support)
        assert found.reason == "its HunYuanMoEV1Gate holds something else than a weight and a bias"

    def test_a_router_that_corrects_its_weights_too(self) -> None:
        block = tiny("ernie4_5_moe").model.layers[1].mlp
        own = type(block.gate).forward

        def forward(self: Any, x: Tensor) -> Any:
            logits, weights, ids = own(self, x)
            added = self.moe_statics.e_score_correction_bias.flatten()[ids]
            return logits, weights + added.to(weights.dtype), ids

        derived(block.gate, forward)
        found = feed_forward_spec.of_moe(block)
        assert isinstance(found, Support) and "chooses in another way" in found.reason

    @pytest.mark.parametrize("least", [1e-12, 0.1, 0.3, 0.5, 0.9, 1.2])
    def test_a_floor_under_the_sum_of_weights(self, least: float) -> None:
        """Sums of Gaussian scores are above some of them; of other scores they are not. Above 1, it is a factor."""
        block = tiny("ernie4_5_moe", moe_norm_min=least).model.layers[1].mlp
        found = feed_forward_spec.of_moe(block)
        assert isinstance(found, MoeSpec) == (least in (1e-12, 1.2))
        if not isinstance(found, MoeSpec):
            assert "Ernie4_5_MoeTopKRouter" in found.reason

    def test_a_bound_of_weights(self) -> None:
        block = tiny("ernie4_5_moe").model.layers[1].mlp
        own = type(block.gate).forward

        def forward(self: Any, x: Tensor) -> Any:
            logits, weights, ids = own(self, x)
            return logits, weights.clamp(max=self.most), ids

        derived(block.gate, forward)
        block.gate.most = 1.5  # more than any weight is
        assert isinstance(feed_forward_spec.of_moe(block), MoeSpec)
        block.gate.most = 1e-3
        assert isinstance(feed_forward_spec.of_moe(block), Support)


def test_a_bound_of_keys_that_gaussian_ones_do_not_reach() -> None:
    """OLMoE's clip_qkv, which is refused by its name, too."""
    heads, norms = ("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")
    for bound, is_known in ((None, True), (5.0, False)):
        attention = tiny("olmoe", clip_qkv=bound).model.layers[0].self_attn
        assert isinstance(attention_probes.turning(attention, heads, norms), Turning) == is_known
        assert isinstance(attention_probes.outputs(attention, heads, norms), Outputs) == is_known


def test_groups_by_their_best_expert() -> None:
    """DeepSeek-V2's: by the sum of the best two, three rows may choose the same."""
    block = tiny("deepseek_v2").model.layers[1].mlp
    found = feed_forward_spec.of_moe(block)
    assert isinstance(found, Support) and "DeepseekV2TopkRouter chooses in another way" in found.reason
    one = tiny("deepseek_v2", topk_method="greedy", n_group=1).model.layers[1].mlp
    assert isinstance(feed_forward_spec.of_moe(one), MoeSpec)


@pytest.mark.skipif("mellum" not in AVAILABLE, reason="transformers has no mellum")
class TestRotationsByTypes:
    def test_layers_that_get_another_type_s_rotation_keep_their_steps(self) -> None:
        model, _ = made("mellum")
        native = NativeDecoder(model)
        native._layers.rotations._kind[1] = native._layers.rotations._kind[0]
        logits_of(model, native)
        assert native.support.reason == "layer 1: it is given another rotation than the model's own"

    def test_types_that_are_missing(self) -> None:
        model, _ = made("mellum")
        model.config.layer_types = model.config.layer_types[:3]
        with pytest.raises(UnknownLayer, match="its config has 3 layer_types, the model 4 layers"):
            Rotations(model.model.rotary_emb, model.config, torch.zeros(1, 1, 8))
