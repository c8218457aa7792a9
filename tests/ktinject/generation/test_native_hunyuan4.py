"""Native decode steps of Hunyuan 4: several residual streams that are not mixed, and latent attention to chosen places
with sinks, and with gates behind its heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_tokens,
    doubled,
    logits_of,
    varied,
)
from test_native_streams import swapped_beside_fp32
from test_native_windows import assert_lookup_changes_no_token, assert_native, assert_steps_take_turns
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation import indexer_spec, streams_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.indexer_spec import IndexerSpec
from ktinject.generation.streams_spec import HyperConnectionSpec
from ktinject.hf import compat
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif("hy_v4" not in AVAILABLE, reason="transformers has no hy_v4")
NIGHTLY = pytest.mark.nightly
# All experts are taken, so none can turn over; with as many heads of an index, hardly any places tie.
SURE: dict[str, Any] = {
    "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "index_n_heads": 16, "index_topk": 5,
}  # fmt: skip
# The second layer goes by the choice of the first.
SHARED = {"indexer_types": ["full", "shared"]}
# What from_pretrained leaves in fp32.
WIDE = ("gate.weight", "_hc", "hc_head", "weights_proj", "k_norm", "sinks", "lm_head")


def made(
    weights: str = "bf16", dtype: torch.dtype = torch.bfloat16, wide: bool = True, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: with what from_pretrained leaves in fp32"""

    def one() -> PreTrainedModel:
        model = varied(doubled(tiny("hy_v4", **SURE | changes).bfloat16()))
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("sinks", ".base", ".scale", "hc_base", "hc_scale")):
                drawn = 0.5 * torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(drawn + float("scale" in name))
        return model

    return swapped_beside_fp32(one, WIDE if wide else (), weights, dtype)


@pytest.mark.parametrize(
    "changes",
    [
        {"index_topk": 12},  # the text grows from 9 to 15 tokens: first all are attended to
        {**SHARED, "hc_mult": 3, "hc_magnitude": 1.3},
        pytest.param({"wide": False}, marks=NIGHTLY),
        pytest.param({"index_topk": 64, "first_k_dense_replace": 2}, marks=NIGHTLY),
        # Heads on the pool.
        pytest.param(
            {"kv_lora_rank": 136, "num_attention_heads": 8, "num_key_value_heads": 8}, marks=NIGHTLY
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


def with_plain_expansions(**changes: Any) -> PreTrainedModel:
    """In fp32, with kv_b_proj as torch's: a packed one rounds what it takes, where native steps absorb its product."""
    model, _ = made("int8", torch.float32, **changes)
    for layer in model.model.layers:
        plain = nn.Linear(16, 128, bias=False).requires_grad_(False)
        plain.weight.copy_(layer.self_attn.kv_b_proj.unpack("weight"))
        layer.self_attn.kv_b_proj = plain
    return model.eval()


def test_models_in_fp32_give_the_same_tokens() -> None:
    """Also of rows with padding."""
    model = with_plain_expansions(**SHARED)
    for batch, length, padding in ((3, 9, 4), (1, 31, 3)):
        arguments = {**prompt(batch, length, padding=padding), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@NIGHTLY
def test_tokens_are_the_stock_loop_s() -> None:
    model, _ = made(index_topk=64)
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None})
        assert_native(model)


def test_several_turns_on_a_caller_s_cache() -> None:
    model = with_plain_expansions()
    ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
    ids = prompt(1, 9, padding=0)["input_ids"]
    for new in (5, 7):
        arguments = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "eos_token_id": None,
        }  # fmt: skip
        found = model.generate(**arguments, **{compat.CACHE: ours})
        assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: theirs}))
        assert_native(model)
        ids = torch.cat([found, ids[:, :2]], dim=1)


def test_lookups_change_no_token() -> None:
    model, _ = made("int8", torch.float32)
    assert_lookup_changes_no_token(model)


@NIGHTLY
def test_steps_take_turns_with_the_model_s_own() -> None:
    model, _ = made(index_topk=64)
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)
    assert_steps_take_turns(model, arguments)


@pytest.mark.parametrize(
    "path, name",
    [
        ("attn_hc", "base"),
        ("ffn_hc", "scale"),
        ("self_attn", "sinks"),
        ("self_attn.indexer.k_norm", "bias"),
    ],
)
def test_parameters_that_are_not_what_was_read_are_seen(path: str, name: str) -> None:
    model, _ = made()
    native = NativeDecoder(model)
    module = model.model.layers[1].get_submodule(path)
    setattr(module, name, nn.Parameter(2 - 3 * getattr(module, name).detach()))
    logits_of(model, native)
    assert not native.is_proven


def test_specs() -> None:
    model = tiny("hy_v4", hc_magnitude=1.3, hc_eps=1e-4)
    layer = model.model.layers[0]
    epsilon = model.config.rms_norm_eps
    found = streams_spec.of_connection(layer.attn_hc)
    assert found == HyperConnectionSpec("", model.config.hc_mult, 0, 1e-4, epsilon, (1.3, 1e-4))
    assert indexer_spec.of_indexer(layer.self_attn.indexer) == IndexerSpec(
        2, 16, 8, 8, "halves", epsilon, at_end=True
    )


class TestRefusals:
    def test_of_other_attention(self) -> None:
        model, _ = made()
        model.model.layers[0].self_attn.more = nn.Parameter(torch.ones(1))
        assert NativeDecoder(model).support.reason.startswith("layer 0: HYV4Attention has no num_heads, ")

    def test_of_a_bias(self) -> None:
        model, _ = made()
        model.model.layers[0].self_attn.kv_b_proj = nn.Linear(16, 128, dtype=torch.bfloat16)
        refused = "layer 0: its kv_b_proj is a Linear that is not known"
        assert NativeDecoder(model).support.reason == refused

    def test_of_another_connection(self) -> None:
        model, _ = made()
        del model.model.layers[0].attn_hc.hc_post_magnitude
        refused = "it has no hc_mult and hc_sinkhorn_iters, or hc_post_magnitude"
        assert NativeDecoder(model).support.reason == refused
