"""Native decode steps of models of text and images: Mistral 3 with Mistral 4 in it, Mistral Large 4, ERNIE-4.5-VL,
DeepSeek-OCR-2 and dots3-note, on text and behind pictures.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import (
    INT8_TOLERANCE,
    TOLERANCE,
    assert_as_exact_as_its_own,
    doubled,
    varied,
)
from test_native_windows import assert_lookup_changes_no_token, assert_native
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import ktinject
from ktinject.generation import feed_forward_spec, indexer_spec, layer_spec
from ktinject.generation.cpu import native_ends, native_layers
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.feed_forward_spec import MoeSpec
from ktinject.generation.layer_spec import DecoderLayerSpec, LatentAttentionSpec
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.probes import attention
from ktinject.support import Support
from tests.models import multimodal

torch.set_num_threads(1)
# Steps of tuning are shorter than the texts.
TUNED = {**multimodal.TUNED_YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7}
PLAIN = {**TUNED, "llama_4_scaling_beta": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral3": {"rope_parameters": TUNED},
    "ernie4_5_vl_moe": {},
    "deepseek_ocr2": {},
    # A layer that turns nothing, and one that goes by its choice; of fewer places than a text has.
    "mistral_large4": {
        "num_hidden_layers": 3,
        "no_rope_layers": [1, 0, 1],
        "indexer_types": ["full", "full", "shared"],
        "kv_source_layers": [0, 1, 2],
        "layer_types": ["indexed_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 8,  # of few heads, many places tie
    },
    # Layers with a window have other sizes, as in the published model.
    "dots3_note": {
        "sliding_window": 6,
        "index_n_heads": 8,
        "per_layer_config": {
            1: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "q_lora_rank": 20,
                "kv_lora_rank": 24,
                "qk_nope_head_dim": 12,
                "qk_rope_head_dim": 16,
                "head_dim": 28,
            }
        },
    },
}
FAMILIES = {name: changes for name, changes in FAMILIES.items() if name in multimodal.AVAILABLE}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("mistral3", {"q_lora_rank": None}),
    ("mistral3", {"rope_parameters": PLAIN, "norm_topk_prob": False}),
    ("ernie4_5_vl_moe", {"moe_num_shared_experts": 0}),
    ("deepseek_ocr2", {"routed_scaling_factor": 1.5}),
    ("mistral_large4", {"index_topk": 64}),
    ("dots3_note", {"index_topk": 64, "sliding_window": 64}),
]
CASES = [
    *((name, {}) for name in FAMILIES),
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in VARIANTS if case[0] in FAMILIES),
]


def made(
    family: str,
    weights: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **changes: Any,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """As that of answers.py, of a model of text and images; all experts are taken, so that none can turn over."""
    config = {"num_experts_per_tok": 6, "moe_k": 6, **FAMILIES.get(family, {}), **changes}
    model, truth = (
        varied(doubled(multimodal.tiny(family, **config).bfloat16())).to(device, dtype) for _ in range(2)
    )
    for name, parameter in [*model.named_parameters(), *truth.named_parameters()]:
        if name.endswith("softmax_scaling.scale"):
            parameter.data.mul_(
                0.25
            )  # else one token has nearly all of the weight, and roundings decide which
    variables = {**dict.fromkeys(("experts", "dense", "head"), weights), "gpu_experts": 0}
    swapped = ktinject.optimize(model, "auto", devices=[device], variables=variables, progress=False)
    return swapped, truth.float()


def in_fp32(family: str, **changes: Any) -> PreTrainedModel:
    """A swapped model whose steps differ from its own in last places alone."""
    return made(family, "int8", torch.float32, **{"num_experts_per_tok": 2, "moe_k": 2, **changes})[0]


@functools.cache
def shared(family: str) -> PreTrainedModel:
    """The same; one that tests leave as it is."""
    return in_fp32(family)


def of_text(batch: int = 3, **arguments: Any) -> dict[str, Any]:
    found = {**prompt(batch), "eos_token_id": None, **arguments}
    found["input_ids"] = found["input_ids"].clamp(max=88)  # what is above stands for pictures
    return found


@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(family, **changes))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str, family: str) -> None:
    assert_as_exact_as_its_own(*made(family, weights), INT8_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_fp32_are_the_stock_loop_s(family: str) -> None:
    """Of text and behind pictures, also of rows with padding on their left, of a choice of experts."""
    model = shared(family)
    pictures = [
        {**multimodal.image_prompt(family, **more), "max_new_tokens": 10, "eos_token_id": None}
        for more in ({"rows": 2, "padding": 3}, {})
    ]
    for arguments in (of_text(3), of_text(1), *pictures):
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@pytest.mark.nightly
@pytest.mark.parametrize("case", [{"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_other_requests_are_the_stock_loop_s(family: str, case: dict[str, Any]) -> None:
    model = shared(family)
    for batch in (3, 1):
        arguments = of_text(batch, **case)
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_recorded_steps_are_those_of_the_stock_loop(family: str) -> None:
    """On text and behind pictures. As far as both write the same: roundings may decide between two tokens."""
    model = made(family, device="cuda")[0]
    pictured = {
        **multimodal.image_prompt(family, rows=2, padding=3),
        "max_new_tokens": 10,
        "eos_token_id": None,
    }
    for arguments in (of_text(3), pictured):
        asked = {
            key: value.to("cuda", model.dtype if value.is_floating_point() else None)
            if isinstance(value, Tensor)
            else value
            for key, value in arguments.items()
        } | {"return_dict_in_generate": True, "output_logits": True}
        ours, theirs = model.generate(**asked), stock(model, **asked)
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
        first, differences = asked["input_ids"].shape[1], []
        for step, (found, wanted) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
            if not torch.equal(ours.sequences[:, : first + step], theirs.sequences[:, : first + step]):
                break
            differences.append((found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1))
            # Of two or three rows: roundings alone, those of the model's own steps, have come to 0.09.
            assert differences[-1].median() <= 5 * TOLERANCE
        assert step >= 3 and torch.cat(differences).median() <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_two_turns_and_several_tokens_of_a_text(family: str) -> None:
    model = shared(family)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    arguments = of_text(2, max_new_tokens=12)
    first = arguments["attention_mask"]
    for _ in range(2):
        found = model.generate(**arguments, past_key_values=caches[0])
        assert_native(model)
        assert torch.equal(found, stock(model, **arguments, past_key_values=caches[1]))
        ids = torch.cat([found, arguments["input_ids"][:, 4:]], dim=1).clamp(max=88)
        mask = torch.cat([first, first.new_ones(2, ids.shape[1] - first.shape[1])], dim=1)
        arguments |= {"input_ids": ids, "attention_mask": mask}
    assert_lookup_changes_no_token(model)


def layers_of(family: str, **changes: Any) -> list[DecoderLayerSpec]:
    if family not in FAMILIES:
        pytest.skip(f"transformers has no {family}")
    model = in_fp32(family, **changes) if changes else shared(family)
    found = [layer_spec.of_layer(layer) for layer in model.model.language_model.layers]
    assert all(isinstance(spec, DecoderLayerSpec) for spec in found)
    return found  # type: ignore[return-value]


class TestSpecs:
    def test_queries_that_their_position_tunes(self) -> None:
        for changes, want in (({}, (5.0, 0.7)), ({"rope_parameters": PLAIN}, None)):
            for spec in layers_of("mistral3", **changes):
                assert isinstance(spec.attention, LatentAttentionSpec)
                assert spec.attention.latent.tuned == want

    def test_queries_that_grow(self) -> None:
        """Of attention and of its index, in layers that turn and in one that does not."""
        specs = [spec.attention for spec in layers_of("mistral_large4")]
        assert all(isinstance(spec, LatentAttentionSpec) for spec in specs)
        latents = [spec.latent for spec in specs]  # type: ignore[union-attr]
        assert all(latent.grows and latent.tuned is None for latent in latents)
        assert [(latent.rope, latent.qk_rope_head_dim) for latent in latents] == [
            ("neighbours", 8), ("none", 0), ("neighbours", 8),
        ]  # fmt: skip
        assert [latent.chooses for latent in latents] == ["own", "own", "given"]
        indexes = [spec.indexer for spec in specs]  # type: ignore[union-attr]
        assert [index and (index.rope, index.rotary, index.input_epsilon) for index in indexes] == [
            ("neighbours", 8, 1e-6), ("none", 0, 1e-6), None,
        ]  # fmt: skip

    @pytest.mark.parametrize("way", [lambda at: at + 1, lambda at: at.clamp(max=3000), torch.zeros_like])
    def test_an_index_that_grows_in_another_way_is_refused(self, way: Any) -> None:
        if "mistral_large4" not in FAMILIES:
            pytest.skip("transformers has no mistral_large4")
        plain = multimodal.tiny("mistral_large4")
        indexer: Any = plain.model.language_model.layers[0].self_attn.indexer
        own = type(indexer.softmax_scaling)

        class Other(own):  # type: ignore[misc,valid-type]
            def forward(self, queries: Tensor, positions: Tensor, head_dim_first: bool) -> Any:
                return super().forward(queries, way(positions), head_dim_first)

        indexer.softmax_scaling.__class__ = Other
        found = indexer_spec.of_indexer(indexer)
        assert isinstance(found, Support) and "scores places in another way" in found.reason

    def test_latents_with_gates_and_a_window(self) -> None:
        found = [spec.attention for spec in layers_of("dots3_note")]
        latents = [spec.latent for spec in found if isinstance(spec, LatentAttentionSpec)]
        assert all(one.has_gate and one.has_key_norm and not one.by_position for one in latents)
        assert [one.chooses for one in latents] == ["own", "none"]
        assert [(one.num_heads, one.kv_lora_rank, one.qk_rope_head_dim) for one in latents] == [
            (4, 16, 8), (2, 24, 16),
        ]  # fmt: skip
        assert latents[0].factors == ((40 / 24) ** 0.5, (40 / 16) ** 0.5)
        assert latents[1].factors == ((40 / 20) ** 0.5, (40 / 24) ** 0.5)

    @pytest.mark.parametrize(
        "family, want", [("dots3_note", ("indexed_attention",)), ("ernie4_5_vl_moe", ())]
    )
    def test_rotations_that_are_asked_for_in_fp32(self, family: str, want: tuple[str, ...]) -> None:
        if family not in FAMILIES:
            pytest.skip(f"transformers has no {family}")
        language = multimodal.tiny(family).bfloat16().model.language_model
        assert native_ends.widened_kinds(language, "embed_tokens", "rotary_emb") == want

    def test_experts_for_text(self) -> None:
        dense, sparse = layers_of("ernie4_5_vl_moe")
        moe = sparse.feed_forward
        assert not isinstance(dense.feed_forward, MoeSpec) and isinstance(moe, MoeSpec)
        assert (moe.experts, moe.router.path) == ("text_moe.experts", "text_moe.gate")
        assert moe.router.correction == "moe_statics.e_score_correction_bias"
        assert moe.shared is not None and moe.shared.path == "shared_experts"

    def test_a_block_that_takes_the_experts_for_images_is_refused(self) -> None:
        block: Any = multimodal.tiny("ernie4_5_vl_moe").model.language_model.layers[1].mlp
        assert isinstance(feed_forward_spec.of_moe(block), MoeSpec)
        own = type(block).forward

        class Other(type(block)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Any:
                return own(self, x, torch.ones(x.shape[:2], dtype=torch.int32))

        block.__class__ = Other
        assert isinstance(feed_forward_spec.of_moe(block), Support)


def test_what_the_native_core_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    if "dots3_note" not in FAMILIES:
        pytest.skip("transformers has no dots3_note")
    model: Any = made("dots3_note")[0]
    first, second = (layer.self_attn for layer in model.model.language_model.layers)
    for name, found, reason in (
        ("k_rope_only_layernorm", second.q_a_layernorm, "norm of the rotary key has another size"),
        ("g_proj", first.g_proj, "the projection to gates: expected 32 outputs"),
    ):
        own = getattr(second, name)
        setattr(second, name, found)
        assert reason in NativeDecoder(model).support.reason
        setattr(second, name, own)
    assert NativeDecoder(model).support
    kinds = native_layers.kinds_of(model.config)
    monkeypatch.setattr(native_layers, "kinds_of", lambda _: [replace(kinds[0], window=6), kinds[1]])
    assert "chosen places beside a window" in NativeDecoder(model).support.reason


class TestTuning:
    def test_it_decides(self) -> None:
        """Without it, and by other steps, tokens are others."""
        model = in_fp32("mistral3")
        found = model.generate(**of_text())
        for module in [one for one in model.modules() if isinstance(one, AbsorbedMla)]:
            module.spec = replace(module.spec, tuned=None)
        model.ktinject_decoding.runners.clear()
        assert NativeDecoder(model).support
        assert not torch.equal(found, stock(model, **of_text()))

    def test_less_than_one_position(self) -> None:
        model = in_fp32("mistral3")
        module = next(one for one in model.modules() if isinstance(one, AbsorbedMla))
        module.spec = replace(module.spec, tuned=(-1.0, 0.5))
        assert "queries tuned by less than one position" in NativeDecoder(model).support.reason


def test_layers_that_share_keys_stay_eager() -> None:
    if "mistral_large4" not in FAMILIES:
        pytest.skip("transformers has no mistral_large4")
    model = in_fp32("mistral_large4", kv_source_layers=[0, 1, 0])
    assert torch.equal(model.generate(**of_text()), stock(model, **of_text()))
    assert model.ktinject_decoding.last == "eager loop"
    assert model.ktinject_decoding.reason.startswith("layer 0: self_attn: MistralLarge4TextAttention holds")
    first, second, _ = (layer.self_attn for layer in model.model.language_model.layers)
    found = attention.probe(first)
    assert isinstance(found, Support) and "other layers attend to what it keeps" in found.reason
    assert isinstance(second, AbsorbedMla)
