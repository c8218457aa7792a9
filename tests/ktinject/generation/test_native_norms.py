"""Native decode steps of Gemma 4, Llama 4, Cohere 2 MoE and Phi-3.5-MoE: layer norms, norms without a weight, experts
beside a dense unit, parts side by side, chunks, queries that their position tunes, and kinds of routers.
"""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from answers import made
from test_generate import prompt, stock
from test_native_decoder import INT8_TOLERANCE, assert_as_exact_as_its_own, varied
from test_native_gates import derived, packed
from test_native_windows import assert_lookup_changes_no_token, assert_native
from torch import Tensor, nn
from transformers import DynamicCache, Gemma4Config, Gemma4ForConditionalGeneration

import ktinject
from ktinject import _native
from ktinject.generation import (
    attention_probes,
    experts_beside,
    feed_forward_spec,
    layer_spec,
    normed_router,
    router_kinds,
)
from ktinject.generation.attention_probes import Outputs, Turning
from ktinject.generation.cpu import native_ends
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cpu.native_ends import Cap, Scale
from ktinject.generation.feed_forward_spec import MoeSpec
from ktinject.generation.layer_spec import DecoderLayerSpec, GroupedAttentionSpec
from ktinject.operators.probes import norm as norm_probe
from ktinject.operators.probes.norm import LayerNormSpec
from ktinject.support import Support
from tests.models import AVAILABLE, OF_ROWS, tiny

torch.set_num_threads(1)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
# Heads of other sizes and numbers in full layers, whose values are made of keys.
GEMMA: dict[str, Any] = {
    **SLIDING, "hidden_size_per_layer_input": 0, "top_k_experts": 6, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "global_head_dim": 32, "final_logit_softcapping": 5.0,
}  # fmt: skip
# Chunks and steps of tuning are shorter than the texts; a dense layer, then experts; the last layer turns nothing.
LLAMA: dict[str, Any] = {
    "num_experts_per_tok": 1, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attention_chunk_size": 8,
    "interleave_moe_layer_step": 2, "floor_scale": 4, "attn_scale": 0.5,
}  # fmt: skip
COHERE: dict[str, Any] = {
    **SLIDING, "num_experts_per_tok": 6, "num_hidden_layers": 3, "num_shared_experts": 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 48, "logit_scale": 0.3,
}  # fmt: skip
# So that experts are near each other now and then.
PHI: dict[str, Any] = {"router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True}
FAMILIES = {"gemma4_text": GEMMA, "llama4_text": LLAMA, "cohere2_moe": COHERE, "phimoe": PHI}
FAMILIES = {name: changes for name, changes in FAMILIES.items() if name in (*AVAILABLE, *OF_ROWS)}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_text", {**GEMMA, "attention_k_eq_v": False, "final_logit_softcapping": None, "attention_bias": True}),
    ("llama4_text", {**LLAMA, "use_qk_norm": False, "num_experts_per_tok": 2, "attention_bias": True}),
    ("llama4_text", {**LLAMA, "attn_temperature_tuning": False, "interleave_moe_layer_step": 1}),
    ("cohere2_moe", {**COHERE, "expert_selection_fn": "sigmoid", "shared_expert_combination_strategy": "sum"}),
    ("cohere2_moe", {**COHERE, "expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
    ("cohere2_moe", {**COHERE, "rms_norm_eps": 1e-5, "num_shared_experts": 0, "attention_bias": True}),
    ("phimoe", {"router_jitter_noise": 0.01, "sliding_window": 6}),
]  # fmt: skip
VARIANTS = [case for case in VARIANTS if case[0] in FAMILIES]


def in_fp32(family: str, **changes: Any) -> Any:
    """A swapped model whose steps differ from its own in last places alone."""
    model, _ = made(family, "int8", torch.float32, **FAMILIES[family] | changes)
    return model


@pytest.mark.parametrize("family, changes", [*FAMILIES.items(), *VARIANTS], ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(family, **changes))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str, family: str) -> None:
    model, truth = made(family, weights, **FAMILIES[family])
    assert_as_exact_as_its_own(model, truth, INT8_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_fp32_are_the_stock_loop_s(family: str) -> None:
    """Beyond windows and chunks, also of rows with padding on their left, of a choice of experts."""
    few = {"top_k_experts": 2} if family == "gemma4_text" else {"num_experts_per_tok": 2}
    model = in_fp32(family, **few)
    for batch in (3, 1):
        arguments = {**prompt(batch), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [{"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_other_requests_are_the_stock_loop_s(family: str, case: dict[str, Any]) -> None:
    model = in_fp32(family)
    for batch in (3, 1):
        arguments = {**prompt(batch), "eos_token_id": None, **case}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_turns_and_several_tokens_of_a_text(family: str) -> None:
    model = in_fp32(family)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    arguments = {**prompt(2), "eos_token_id": None, "max_new_tokens": 10}
    for _ in range(2):
        found = model.generate(**arguments, past_key_values=caches[0])
        assert_native(model)
        assert torch.equal(found, stock(model, **arguments, past_key_values=caches[1]))
        ids = torch.cat([found, arguments["input_ids"][:, 4:]], dim=1)
        mask = torch.ones_like(ids)
        mask[:, :9] = prompt(2)["attention_mask"]
        arguments |= {"input_ids": ids, "attention_mask": mask}
    assert_lookup_changes_no_token(model)


def test_the_language_part_of_a_model_with_images() -> None:
    """Gemma 4 is published as one."""
    if "gemma4_text" not in FAMILIES:
        pytest.skip("transformers has no gemma4_text")
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16,
    }  # fmt: skip
    ids = dict(zip(("image", "audio", "video", "boi", "eoi", "boa"), range(90, 96)))
    config = Gemma4Config(
        text_config=models.config("gemma4_text", **GEMMA).to_dict(), vision_config=vision, audio_config=None,
        eoa_token_index=89, **{f"{name}_token_id": value for name, value in ids.items()},
    )  # fmt: skip
    torch.manual_seed(0)
    plain = Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
    variables = dict.fromkeys(("experts", "dense", "head"), "int8")
    model = ktinject.optimize(varied(plain), "auto", devices=["cpu"], variables=variables, progress=False)
    arguments = {**prompt(), "eos_token_id": None}
    arguments["input_ids"] = arguments["input_ids"].clamp(max=88)
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))
    assert_native(model)


def layers_of(family: str) -> list[DecoderLayerSpec]:
    if family not in FAMILIES:
        pytest.skip(f"transformers has no {family}")
    model, _ = made(family, **FAMILIES[family])
    found = [layer_spec.of_layer(layer) for layer in model.model.layers]
    return [spec for spec in found if isinstance(spec, DecoderLayerSpec)]


def attentions_of(family: str) -> list[GroupedAttentionSpec]:
    found = [spec.attention for spec in layers_of(family)]
    return [one for one in found if isinstance(one, GroupedAttentionSpec)]


def norm_paths(norms: Any) -> list[str | None]:
    return [norm and norm.path for norm in norms]


class TestSpecs:
    def test_gemma(self) -> None:
        sliding, full = layers_of("gemma4_text")
        moe = sliding.feed_forward
        assert isinstance(moe, MoeSpec) and (moe.path, moe.experts, sliding.scale) == (
            "",
            "experts",
            "layer_scalar",
        )
        assert moe.shared is not None and (moe.shared.path, moe.shared.gating.activation) == (
            "mlp",
            "gelu_tanh",
        )
        assert norm_paths(moe.shared_norms) == ["pre_feedforward_layernorm", "post_feedforward_layernorm_1"]
        assert norm_paths(moe.experts_norms) == [
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_2",
        ]
        router = moe.router
        assert router.norm is not None and (router.norm.path, router.input_factor) == ("scale", 40**-0.5)
        assert (router.expert_factors, router.weight, router.rounds) == (
            "per_expert_scale",
            "proj.weight",
            False,
        )
        for spec, of_keys in ((sliding, False), (full, True)):
            assert isinstance(spec.attention, GroupedAttentionSpec)
            assert spec.attention.outputs == Outputs(normed=True, keys=of_keys)
            assert spec.attention.v_norm is not None and not spec.attention.v_norm.has_weight

    def test_llama(self) -> None:
        *chunked, full = attentions_of("llama4_text")
        for spec in chunked:
            assert spec.turning == Turning(by_neighbours=True, before_norms=True)
            assert norm_paths((spec.q_norm, spec.k_norm)) == ["qk_norm", "qk_norm"]
        assert full.turning == Turning(is_none=True, tuned=(4.0, 0.5)) and full.q_norm is None
        dense, sparse, *_ = layers_of("llama4_text")
        assert isinstance(sparse.feed_forward, MoeSpec) and not isinstance(dense.feed_forward, MoeSpec)
        router = sparse.feed_forward.router
        assert (router.scores, router.by_logits, router.scales_input, router.top_k) == (
            "sigmoid",
            True,
            True,
            1,
        )

    def test_cohere(self) -> None:
        first, *others = layers_of("cohere2_moe")
        assert all(spec.is_parallel for spec in (first, *others))
        assert first.input_norm is not None and first.input_norm.rms == LayerNormSpec(40, 1e-5, False)
        assert [one.turning.is_none for one in attentions_of("cohere2_moe")] == [False, True, False]
        assert attentions_of("cohere2_moe")[0].turning == Turning(by_neighbours=True, interleaved=True)
        assert isinstance(others[0].feed_forward, MoeSpec) and others[0].feed_forward.factors == (1.0, 0.5)

    def test_phi(self) -> None:
        spec, _ = layers_of("phimoe")
        assert spec.input_norm is not None and spec.input_norm.rms == LayerNormSpec(40, 1e-5, True)
        assert isinstance(spec.feed_forward, MoeSpec) and spec.feed_forward.router.nearness == 0.4

    def test_logits(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        for cap, want in ((5.0, Cap(5.0)), (None, Scale())):
            model = tiny("gemma4_text", **GEMMA | {"final_logit_softcapping": cap})
            assert native_ends.logits_scale(model, "model") == want

    def test_queries_at_other_positions(self) -> None:
        """By positions of their own, and by the length of the cache; another law than the one that is known."""
        attention = tiny("llama4_text", **LLAMA).model.layers[3].self_attn
        names, none = ("q_proj", "k_proj", "v_proj", "o_proj"), ()
        assert attention_probes.tuned_queries(attention, names, none) == (4.0, 0.5)
        attention.attn_temperature_tuning = False
        assert attention_probes.tuned_queries(attention, names, none) is None
        attention.attn_temperature_tuning, attention.scaling = True, attention.scaling * 1.5
        assert attention_probes.tuned_queries(attention, names, none) == (4.0, 0.5)
        own = type(attention).forward

        def sooner(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.floor_scale = 3
            try:
                return own(self, x, *args, **kwargs)
            finally:
                self.floor_scale = 4

        derived(attention, sooner)
        found = attention_probes.tuned_queries(attention, names, none)
        assert isinstance(found, Support) and "depend on their position in another way" in found.reason

    def test_weights_near_the_best_one(self) -> None:
        logits = torch.tensor([[1.0, 0.95, 0.2, 0.93]])
        ids, weights = router_kinds.near_weights(logits, 0.1)
        assert ids.tolist() == [[0, 1]]
        assert torch.allclose(weights[0, 0], logits[0, [0, 1, 3]].softmax(0)[0])
        assert torch.allclose(weights[0, 1], logits[0, [1, 3]].softmax(0)[0])


class TestRefusals:
    def test_inputs_of_layers(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        changes = {**GEMMA, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
        model, _ = made("gemma4_text", **changes)
        model.generate(**prompt())
        assert model.ktinject_decoding.last == "eager loop"
        assert "the model also holds embed_tokens_per_layer" in model.ktinject_decoding.reason

    def test_keys_of_other_layers(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        types = ["sliding_attention", "full_attention"] * 2
        changes = {"layer_types": types, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        model, _ = made("gemma4_text", **GEMMA | changes)
        refused = NativeDecoder(model).support.reason
        assert "Gemma4TextAttention holds o_proj, q_norm, q_proj" in refused or "its cache has" in refused

    def test_a_layer_that_adds_experts_elsewhere(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        layer = tiny("gemma4_text", **GEMMA).model.layers[0]
        assert experts_beside.residual(layer) == 1.0
        own = layer.post_feedforward_layernorm_1
        layer.post_feedforward_layernorm_1, layer.post_feedforward_layernorm_2 = nn.Identity(), own
        found = experts_beside.feed_forward(layer)
        assert isinstance(found, feed_forward_spec.OtherFeedForward)
        derived(layer, lambda self, x, *args, **kwargs: x + self.mlp(x) * self.layer_scalar)
        found = experts_beside.residual(layer)
        assert isinstance(found, Support) and "does not add experts to a dense unit" in found.reason

    def test_a_router_of_other_weights(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        router = tiny("gemma4_text", **GEMMA).model.layers[0].router
        own = type(router).forward
        assert isinstance(normed_router.of_router(router), dict)

        def shifted(self: Any, x: Tensor) -> Any:
            probabilities, weights, ids = own(self, x)
            return probabilities, weights + 0.01 * self.per_expert_scale[ids], ids

        derived(router, shifted)
        found = normed_router.of_router(router)
        assert isinstance(found, Support) and "TextRouter" not in found.reason

    def test_a_router_whose_factor_does_more(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        router = tiny("gemma4_text", **GEMMA).model.layers[0].router
        own = type(router).forward

        def bounded(self: Any, x: Tensor) -> Any:
            probabilities, weights, ids = own(self, x)
            return probabilities, weights / max(1.0, self.scalar_root_size), ids

        derived(router, bounded)
        router.scalar_root_size = 3.0
        found = normed_router.of_router(router)
        assert isinstance(found, Support) and found.reason.endswith("does something else by scalar_root_size")

    def test_a_factor_that_is_another_one(self) -> None:
        if "gemma4_text" not in FAMILIES:
            pytest.skip("transformers has no gemma4_text")
        router = tiny("gemma4_text", **GEMMA).model.layers[0].router
        router.scalar_root_size = 0.25
        found = normed_router.of_router(router)
        assert isinstance(found, dict) and found["input_factor"] == 0.25

    def test_routers_of_rows(self) -> None:
        model, _ = made("llama4_text", **LLAMA)
        block = model.model.layers[1].feed_forward
        assert isinstance(feed_forward_spec.of_moe(block), MoeSpec)
        own = type(block).forward

        def scaled(self: Any, x: Tensor) -> Any:
            out, logits = own(self, x)
            return 0.5 * out, logits

        derived(block, scaled)
        found = feed_forward_spec.of_moe(block)
        assert isinstance(found, Support) and "gives its experts something else" in found.reason

    def test_cos_and_sin_in_another_order(self) -> None:
        if "cohere2_moe" not in FAMILIES:
            pytest.skip("transformers has no cohere2_moe")
        model, _ = made("cohere2_moe", **COHERE)
        own = type(model.model.rotary_emb).forward

        def halves(self: Any, x: Tensor, position_ids: Tensor) -> Any:
            return tuple(torch.cat([one[..., ::2]] * 2, -1) for one in own(self, x, position_ids))

        derived(model.model.rotary_emb, halves)
        refused = NativeDecoder(model).support.reason
        assert refused == "layer 0: it takes cos and sin in another order than the model gives them"

    def test_norms_without_weights(self) -> None:
        norm = tiny("llama4_text").model.layers[0].self_attn.qk_norm
        assert norm_probe.probe_without_weight(norm, 16) == 1e-5
        derived(norm, lambda self, x: x / x.norm(dim=-1, keepdim=True))
        found = norm_probe.probe_without_weight(norm, 16)
        assert isinstance(found, Support) and "is not x / sqrt" in found.reason

    def test_arguments(self) -> None:
        weight = torch.ones(40).bfloat16()
        with pytest.raises(ValueError, match="a layer norm rounds what comes out"):
            _native.Norm(weight, 1e-5, centred=True)
        for odd in (torch.ones(39).bfloat16(), torch.ones(40)):
            with pytest.raises(ValueError, match="a bias is a layer norm's"):
                _native.Norm(weight, 1e-5, rounds_first=False, centred=True, bias=odd)
        norm, unit = _native.Norm(weight, 1e-5), _native.GatedUnit(packed(24), packed(24), packed(40, 24))
        with pytest.raises(ValueError, match="activation"):
            _native.GatedUnit(packed(24), packed(24), packed(40, 24), activation="relu")
        with pytest.raises(ValueError, match="silu, or gelu_tanh without alpha"):
            _native.GatedUnit(packed(24), packed(24), packed(40, 24), activation="gelu_tanh", alpha=2.0)
        with pytest.raises(ValueError, match="a norm before or behind is needed"):
            _native.Normed(unit, None, None)
        with pytest.raises(ValueError, match="of different sizes"):
            _native.Normed(unit, norm, _native.Norm(torch.ones(39).bfloat16(), 1e-5))
        arguments: dict[str, Any] = {
            "q": packed(64), "k": packed(32), "v": None, "o": packed(40, 64), "q_norm": None, "k_norm": None,
            "heads": 4, "groups": 2, "size": 16, "scale": 1.0, "window": 0, "sinks": None, "gated": False,
        }  # fmt: skip
        attention = _native.GroupedAttention(**arguments)
        with pytest.raises(ValueError, match="a norm of values must be one of a head's 16"):
            _native.GroupedAttention(**arguments, v_norm=norm)
        with pytest.raises(ValueError, match="chunks of how many tokens"):
            _native.GroupedAttention(**arguments, chunked=True)
        with pytest.raises(ValueError, match="less than one position"):
            _native.GroupedAttention(**arguments, tuned_every=-1.0)
        decoder = _native.Decoder(40, "bfloat16")
        for given in (
            (norm, attention, norm, unit),
            (None, attention, None, unit),
            (norm, attention, None, None),
        ):
            with pytest.raises(ValueError, match="a parallel layer has both parts"):
                decoder.add(*given, parallel=True)
        with pytest.raises(ValueError, match="scale must be one number"):
            decoder.add(norm, attention, norm, unit, scale=torch.ones(2))

    def test_arguments_of_routers(self) -> None:
        model, _ = made("qwen3_moe", num_experts_per_tok=2)
        experts = model.model.layers[1].mlp.experts.native

        def mixture(**changes: Any) -> Any:
            given = {
                "router": None, "weight": torch.randn(6, 40), "scores": "softmax", "correction": None, "top_k": 2,
                "groups": 1, "top_groups": 1, "normed": False, "factor": 1.0, "rounds_logits": False,
                "rounds_scores": False, "rounds_weights": False, "experts": experts, "shared": None, "gate": None,
            }  # fmt: skip
            return _native.Mixture(**given | changes)

        mixture(bias=torch.ones(6), by_logits=True, expert_factors=torch.ones(6))
        mixture(nearness=0.1)
        for name in ("bias", "expert_factors"):
            with pytest.raises(ValueError, match="an expert is needed"):
                mixture(**{name: torch.ones(5)})
        with pytest.raises(ValueError, match="a choice by logits has no corrections"):
            mixture(by_logits=True, correction=torch.ones(6))
        for odd in ({"top_k": 3}, {"normed": True}, {"nearness": -1.0}):
            with pytest.raises(ValueError, match="experts near the best ones are two"):
                mixture(**{"nearness": 0.1, **odd})
        for name in ("before", "behind", "router_norm"):
            with pytest.raises(ValueError, match="must be of 40 values"):
                mixture(**{name: _native.Norm(torch.ones(39).bfloat16(), 1e-5)})


def test_routers_with_a_bias_in_fp32() -> None:
    """They compute their product themselves, as all of models in fp32 do."""
    model = ktinject.optimize(
        tiny("gpt_oss", num_experts_per_tok=2), "auto", devices=["cpu"], progress=False,
        variables=dict.fromkeys(("experts", "dense", "head"), "int8"),
    )  # fmt: skip
    arguments = {**prompt(), "eos_token_id": None}
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))
    assert_native(model)
