"""Native decode steps of GLM-5.3-Flash (`glm5_next`): residual streams around the delta rule with bounded decays, and
around latent attention to pools of tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import assert_close
from test_generate import prompt, stock
from test_native_decoder import INT8_TOLERANCE, assert_as_exact_as_its_own, doubled, logits_of, varied
from test_native_pictured import of_text
from test_native_streams import swapped_beside_fp32
from test_native_windows import assert_lookup_changes_no_token, assert_native
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ktinject import _native
from ktinject.generation import masks, pooled_index_spec, recurrent_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.masks import Masks
from ktinject.generation.pooled_index_spec import PooledIndexSpec
from ktinject.generation.recurrent_spec import KimiDeltaSpec
from ktinject.hf import compat
from tests.models import multimodal

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    "glm5_next" not in multimodal.AVAILABLE, reason="transformers has no such glm5_next"
)
NIGHTLY = pytest.mark.nightly
# All experts are taken, so none can turn over; with as many heads of an index, hardly any pools tie.
SURE: dict[str, Any] = {"num_experts_per_tok": 6, "index_n_heads": 16, "index_topk": 6, "index_kpool": 3}
# The third layer goes by the choice of the second.
SHARED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "indexer_types": ["full", "full", "shared"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
# What from_pretrained leaves in fp32.
WIDE = (".base", ".scale", "conv1d", "dt_bias", "A_log", "gate.weight", "e_score_correction_bias")


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """With weights by which each part decides something."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if any(part in name for part in (".base", ".scale")):
            tensor.data.copy_(0.5 * noise + float(".scale" in name))
        elif any(part in name for part in ("dt_bias", "A_log", "compress_ape")):
            tensor.data.copy_(noise)
    return model


def made(
    weights: str = "bf16", dtype: torch.dtype = torch.bfloat16, wide: bool = True, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: with what from_pretrained leaves in fp32"""

    def one() -> PreTrainedModel:
        return drawn(varied(doubled(multimodal.tiny("glm5_next", **SURE | changes)))).bfloat16()

    return swapped_beside_fp32(one, WIDE if wide else (), weights, dtype)


def in_fp32(**changes: Any) -> PreTrainedModel:
    """With kv_b_proj as torch's: a packed one rounds what it takes, where native steps absorb its product."""
    model: Any = made("int8", torch.float32, **changes)[0]
    for layer in model.model.language_model.layers:
        if (expansion := getattr(layer.self_attn, "kv_b_proj", None)) is not None:
            weight = expansion.unpack("weight")
            plain = nn.Linear(*reversed(weight.shape), bias=False).requires_grad_(False)
            plain.weight.copy_(weight)
            layer.self_attn.kv_b_proj = plain
    return model.eval()  # type: ignore[no-any-return]


def long(batch: int = 3, **arguments: Any) -> dict[str, Any]:
    """A request whose texts show what the index chooses."""
    ids, mask = prompt(batch, 15)["input_ids"].clamp(max=88), prompt(batch, 15)["attention_mask"]
    return of_text(batch, **{"input_ids": ids, "attention_mask": mask, **arguments})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=NIGHTLY),
        {**SHARED, "hc_mult": 3},
        pytest.param({"wide": False}, marks=NIGHTLY),
        pytest.param({"index_topk": 12, "index_kpool": 4}, marks=NIGHTLY),  # first all are attended to
        # Attention on tiles, where there are some: nothing is turned, so there is no second part of keys.
        pytest.param(
            {"kv_lora_rank": 64, "num_attention_heads": 32, "num_key_value_heads": 32}, marks=NIGHTLY
        ),
        # Heads on the pool, vectors with a rest.
        pytest.param(
            {"kv_lora_rank": 136, "linear_head_dim": 136, "linear_num_heads": 3, "index_head_dim": 40},
            marks=NIGHTLY,
        ),
    ],
    ids=str,
)
def test_steps_are_as_exact_as_the_model_s_own(changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(**changes))


@NIGHTLY
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(weights), INT8_TOLERANCE)


@pytest.mark.parametrize("changes", [SHARED, pytest.param({"index_kpool": 1}, marks=NIGHTLY)], ids=str)
def test_tokens_in_fp32_are_the_stock_loop_s(changes: dict[str, Any]) -> None:
    """Of text and behind pictures, also of rows with padding on their left."""
    model = in_fp32(**changes)
    pictures = {
        **multimodal.image_prompt("glm5_next", rows=2, padding=4),
        "max_new_tokens": 20,
        "eos_token_id": None,
    }
    for arguments in (long(3, max_new_tokens=20), long(1, max_new_tokens=20), pictures):
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


def test_turns_beams_and_lookups() -> None:
    """On a cache of the caller's, whose texts go in and out of pools; with rows that move; and some taken back."""
    model = in_fp32()
    ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
    arguments = {**long(2), "max_new_tokens": 5}
    first = arguments["attention_mask"]
    for new in (5, 4, 7):
        arguments["max_new_tokens"] = new
        found = model.generate(**arguments, **{compat.CACHE: ours})
        assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: theirs}))
        assert_native(model)
        ids = torch.cat([found, arguments["input_ids"][:, 4:6]], dim=1).clamp(max=88)
        mask = torch.cat([first, first.new_ones(2, ids.shape[1] - first.shape[1])], dim=1)
        arguments |= {"input_ids": ids, "attention_mask": mask}
    for one, other in zip(ours.layers[1:], theirs.layers[1:]):
        assert_close(one.indexer_keys, other.indexer_keys)
    beams = {**long(2), "num_beams": 3, "max_new_tokens": 16}
    assert torch.equal(model.generate(**beams), stock(model, **beams))
    assert model.ktinject_decoding.last == "native, stock loop: beam search"
    assert_lookup_changes_no_token(model)


@NIGHTLY
def test_a_static_cache_and_a_long_text() -> None:
    """That grows beyond the first bucket."""
    model = in_fp32()
    for arguments in (long(2, cache_implementation="static"), long(1, max_new_tokens=270)):
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


class TestRefusals:
    def test_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where the keys of pools, as many as there are, would be made in a recorded step."""
        model = multimodal.tiny("glm5_next")
        monkeypatch.setattr(type(model), "device", property(lambda _: torch.device("cuda")))
        assert "its index makes keys of pools of tokens" in masks.of_model(model).reason

    def test_of_padding_between_tokens(self) -> None:
        model = in_fp32()
        arguments = long(2)
        arguments["attention_mask"][1, 5] = 0
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert model.ktinject_decoding.reason.startswith("a row has padding between its tokens")

    def test_of_texts_that_show_no_choice(self) -> None:
        model = in_fp32(index_kpool=6)
        model.generate(**of_text(1))
        assert model.ktinject_decoding.reason.startswith("5 tokens show no choice of ")
        model.generate(
            **long(1, **{name: prompt(1, 20)[name].clamp(max=88) for name in ("input_ids", "attention_mask")})
        )
        assert_native(model)

    @pytest.mark.parametrize("name", ["index_kpool_compress_ape", "index_kpool_compress_gate", "k_norm.bias"])
    def test_of_weights_that_are_not_what_was_read(self, name: str) -> None:
        model, _ = made()
        native = NativeDecoder(model)
        index: Any = model.model.language_model.layers[1].self_attn.indexer
        owner, _, own = name.rpartition(".")
        module = index.get_submodule(owner)
        setattr(module, own, nn.Parameter(2 - 30 * getattr(module, own).detach()))
        logits_of(model, native)
        assert not native.is_proven

    def test_of_an_index_without_its_last_pool(self) -> None:
        index: Any = multimodal.tiny("glm5_next").model.language_model.layers[1].self_attn.indexer
        index.index_kpool_always_select_tail = False
        assert "chooses pools in another way" in pooled_index_spec.of_index(index).reason

    @pytest.mark.parametrize("method", ["get_pooled_states", "append_visible_tail", "get_visible_tokens"])
    def test_of_an_index_that_computes_something_else(self, method: str) -> None:
        index: Any = multimodal.tiny("glm5_next").model.language_model.layers[1].self_attn.indexer
        own = getattr(type(index), method)

        def other(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = own(self, *args, **kwargs)
            if method == "get_pooled_states":
                return (found[0] * found[0], *found[1:])
            return found.roll(1, 1)

        index.__class__ = type("Other", (type(index),), {method: other})
        assert "chooses pools in another way" in pooled_index_spec.of_index(index).reason

    def test_of_another_head(self) -> None:
        model, _ = made()
        head: Any = model.model.language_model.hc_head
        head.__class__ = type("Last", (nn.Module,), {"forward": lambda self, x: x[:, :, -1]})
        reason = NativeDecoder(model).support.reason
        assert reason == "its Last does not collapse streams in a known way"

    def test_of_attention_that_holds_more(self) -> None:
        model, _ = made()
        model.model.language_model.layers[1].self_attn.sinks = nn.Parameter(torch.ones(4))
        assert "has no num_heads, " in NativeDecoder(model).support.reason

    def test_of_masks_of_more_than_a_step_s_tokens(self) -> None:
        model, _ = made()
        language: Any = model.model.language_model
        own = type(language).forward

        def other(self: Any, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **{**kwargs, "attention_mask": dict.fromkeys(
                ("linear_attention", "indexed_attention"), torch.ones(3, 5, dtype=torch.bool)
            )})  # fmt: skip

        language.__class__ = type("Other", (type(language),), {"forward": other})
        assert "its mask is not of the step's tokens alone" in masks.of_model(model).reason


def test_specs() -> None:
    model: Any = multimodal.tiny("glm5_next")
    linear, latent = (layer.self_attn for layer in model.model.language_model.layers)
    assert pooled_index_spec.of_index(latent.indexer) == PooledIndexSpec(2, 16, 2, 8, 1e-6, 0.25)
    epsilon = model.config.text_config.rms_norm_eps
    assert recurrent_spec.of_kimi_delta(linear) == KimiDeltaSpec("", 0, 2, 8, epsilon, -5.0)
    linear.forget_gate.safe_gate_lower_bound = None
    assert recurrent_spec.of_kimi_delta(linear) == KimiDeltaSpec("", 0, 2, 8, epsilon)
    found = masks.of_model(model)
    assert isinstance(found, Masks) and found.kind.is_state  # the model is given none


def given(**changes: Any) -> dict[str, Any]:
    """Of an index of 2 heads of 8 values, for pools of 4 tokens."""
    sizes = {"q": (16, 6), "k": (8, 40), "gate": (8, 40), "weights": (2, 40)}
    layers: dict[str, Any] = {
        name: _native.Projection(weight=torch.zeros(shape)) for name, shape in sizes.items()
    }
    values: dict[str, Tensor] = {"norm_weight": torch.ones(8), "norm_bias": torch.zeros(8)}
    numbers = {"epsilon": 1e-6, "heads": 2, "size": 8, "top_k": 8, "score_scale": 1.0, "weight_scale": 1.0}
    return {**layers, **values, **numbers, "bias": torch.zeros(4, 8), **changes}


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"top_k": 6}, "top_k a multiple of pool"),
        ({"heads": 3}, "do not fit its heads of 8 values"),
        ({"bias": torch.zeros(4, 7)}, r"must be \[tokens of a pool, 8\]"),
        ({"norm_bias": torch.zeros(7)}, "8 weights and biases of one dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit(changes: dict[str, Any], why: str) -> None:
    _native.PooledIndex(**given())
    with pytest.raises(ValueError, match=why):
        _native.PooledIndex(**given(**changes))
