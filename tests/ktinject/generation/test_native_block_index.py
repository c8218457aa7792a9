"""Native decode steps of MiniMax-M3's sparse layers: an index chooses blocks of places that heads attend to."""

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
from test_native_windows import assert_lookup_changes_no_token, assert_native, assert_steps_take_turns
from torch import Tensor, nn
from transformers import DynamicCache

import ktinject
from ktinject import _native
from ktinject.generation import block_index_spec, layer_spec
from ktinject.generation.block_index_spec import BlockIndexSpec
from ktinject.generation.layer_spec import DecoderLayerSpec, GroupedAttentionSpec
from ktinject.hf import compat
from ktinject.support import Support
from tests.models import AVAILABLE, multimodal, tiny

torch.set_num_threads(1)
FAMILY = "minimax_m3_vl_text"
pytestmark = pytest.mark.skipif(FAMILY not in AVAILABLE, reason="transformers has no MiniMax-M3")
# All experts are taken, so none can turn over. Texts are longer than all blocks that are chosen.
SURE: dict[str, Any] = {
    "num_experts_per_tok": 6,
    "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_block_size": 5,
    "index_topk_blocks": 2,
}
CASES: list[dict[str, Any]] = [
    {},
    {"index_n_heads": 1, "index_head_dim": 24},
    {
        "index_block_size": 7,
        "index_local_blocks": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    {"index_topk_blocks": 3, "index_local_blocks": 2, "layer_types": ["minimax_m3_sparse"] * 2},
    # Heads on the pool.
    {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 136, "index_head_dim": 136},
]


def changes_of(case: dict[str, Any]) -> dict[str, Any]:
    return SURE | case


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(case: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(FAMILY, **changes_of(case)))


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.nightly)])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(FAMILY, weights, **SURE), INT8_TOLERANCE)


@pytest.mark.parametrize("case", CASES[:-1], ids=str)
def test_models_in_fp32_give_the_same_tokens(case: dict[str, Any]) -> None:
    """Also of rows with padding, by which blocks and positions come apart."""
    model, _ = made(FAMILY, "int8", torch.float32, **changes_of(case))
    for batch, length, padding in ((3, 9, 4), (1, 40, 3), (2, 31, 2)):
        arguments = {**prompt(batch, length, padding=padding), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"cache_implementation": "static"},
        *(
            pytest.param(case, marks=pytest.mark.nightly)
            for case in ({"max_time": 1e6}, {"prefill_chunk_size": 4})
        ),
    ],
    ids=str,
)
def test_tokens_are_the_stock_loop_s(case: dict[str, Any]) -> None:
    """In fp32: in bf16, a near tie of the index moves a block, and with it the text."""
    model, _ = made(FAMILY, "int8", torch.float32, **SURE)
    for batch, length in ((3, 9), (1, 40)):
        assert_same_tokens(model, {**prompt(batch, length, padding=2), "eos_token_id": None, **case})
        assert_native(model)


def test_a_text_longer_than_the_cache_is_at_first() -> None:
    model, _ = made(FAMILY, "int8", torch.float32, **SURE | {"index_block_size": 128})
    arguments = {**prompt(2, 250, padding=100), "max_new_tokens": 140, "eos_token_id": None}
    assert_same_tokens(model, arguments)
    assert_native(model)


def test_two_turns() -> None:
    model, _ = made(FAMILY, **SURE)
    cache = DynamicCache(config=model.config)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    for _ in range(2):
        found = model.generate(**arguments, past_key_values=cache)
        assert_native(model)
        assert_same_but_for_roundings(model, arguments, found, stock(model, **arguments))
        assert cache.layers[1].idx_keys.shape[2] == cache.get_seq_length() == found.shape[1] - 1
        ids = torch.cat([found, arguments["input_ids"]], dim=1)
        arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_request_that_raises_leaves_the_index_as_it_was() -> None:
    model, _ = made(FAMILY, **SURE)
    cache = DynamicCache(config=model.config)
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    found = model.generate(**arguments, past_key_values=cache)
    before = [tensor.clone() for tensor in (cache.layers[1].keys, cache.layers[1].idx_keys)]

    class Broken:
        def put(self, _: Tensor) -> None:
            raise KeyboardInterrupt

        def end(self) -> None: ...

    ids = torch.cat([found, arguments["input_ids"]], dim=1)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=Broken())
    assert all(map(torch.equal, before, (cache.layers[1].keys, cache.layers[1].idx_keys)))


def test_several_tokens_of_a_text() -> None:
    model, _ = made(FAMILY, **SURE)
    assert_lookup_changes_no_token(model)


def test_steps_take_turns_with_the_model_s_own() -> None:
    model, _ = made(FAMILY, **SURE)
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_steps_take_turns(model, arguments)


def test_padding_for_a_whole_block_stays_with_the_model() -> None:
    model, _ = made(FAMILY, **SURE)
    arguments = {**prompt(2, 20, padding=5), "eos_token_id": None}
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))
    assert model.ktinject_decoding.last == "eager loop"
    assert model.ktinject_decoding.reason == (
        "a row has padding for 5 tokens or more, and its layers choose blocks of as many"
    )


@pytest.mark.skipif("minimax_m3_vl" not in multimodal.AVAILABLE, reason="transformers has no MiniMax-M3")
def test_with_pictures() -> None:
    model = multimodal.tiny(
        "minimax_m3_vl", num_experts_per_tok=6, layer_types=SURE["layer_types"]
    ).bfloat16()
    ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    arguments = {**prompt(2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)


def test_the_index_decides() -> None:
    """Without it, tokens are others."""
    model, _ = made(FAMILY, "int8", torch.float32, **SURE)
    arguments = {**prompt(1, 40, padding=0), "eos_token_id": None}
    found = model.generate(**arguments)
    with torch.no_grad():
        model.model.layers[1].self_attn.indexer.q_norm.weight.mul_(-3)
    assert not torch.equal(found, model.generate(**arguments))
    assert_same_tokens(model, arguments)
    assert_native(model)


class TestSpecs:
    def test_of_minimax_m3(self) -> None:
        full, sparse = (layer_spec.of_layer(layer) for layer in tiny(FAMILY, **SURE).model.layers)
        for spec in (full, sparse):
            assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.attention, GroupedAttentionSpec)
        assert full.attention.index is None  # type: ignore[union-attr]
        index = sparse.attention.index  # type: ignore[union-attr]
        assert isinstance(index, BlockIndexSpec)
        assert (index.heads, index.size, index.block, index.top_k, index.local) == (2, 16, 5, 2, 1)

    @pytest.mark.parametrize(
        "choose",
        [
            lambda own, x, rotation, cache, position_ids: own(x, rotation, cache, position_ids - 1),
            lambda own, x, rotation, cache, position_ids: own(x, rotation, cache, position_ids)[..., 1:],
            lambda own, x, rotation, cache, position_ids: own(-x, rotation, cache, position_ids),
            lambda own, x, rotation, cache, position_ids: own(x, rotation[::-1], cache, position_ids),
        ],
        ids=["earlier", "fewer", "of another input", "turned otherwise"],
    )
    def test_of_other_choices(self, choose: Any) -> None:
        index = tiny(FAMILY, **SURE).model.layers[1].self_attn.indexer
        own = type(index).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            cache = kwargs.pop(compat.CACHE)

            def plain(*args: Any) -> Tensor:
                found: Tensor = own(self, *args[:2], **{compat.CACHE: args[2]}, position_ids=args[3])
                return found

            found: Tensor = choose(plain, *args, cache, **kwargs)
            return found

        derived(index, forward)
        found = block_index_spec.of_index(index)
        assert isinstance(found, Support) and found.reason == "its Odd chooses blocks in another way"

    def test_of_other_masks(self) -> None:
        index = tiny(FAMILY, **SURE).model.layers[1].self_attn.indexer
        own = type(index).build_block_mask

        def build(self: Any, blocks: Tensor, mask: Any, *args: Any) -> Tensor:
            found: Tensor = own(self, blocks.flip(1), mask, *args)  # heads of each other
            return found

        index.__class__ = type("Odd", (type(index),), {"build_block_mask": build})
        found = block_index_spec.of_index(index)
        assert isinstance(found, Support) and found.reason == "its Odd chooses blocks in another way"

    def test_of_other_parts(self) -> None:
        index = tiny(FAMILY, **SURE).model.layers[1].self_attn.indexer
        index.local_blocks = 3
        found = block_index_spec.of_index(index)
        assert isinstance(found, Support) and "they do not fit" in found.reason
        index.bias = nn.Parameter(torch.ones(1))
        found = block_index_spec.of_index(index)
        assert isinstance(found, Support) and found.reason.startswith("its MiniMaxM3VLIndexer holds k_norm")


def given(**changes: Any) -> dict[str, Any]:
    """Two heads of 16 values, from 40."""
    arguments: dict[str, Any] = {
        "q": _native.Projection(linear=linear(32, 40)[0]),
        "k": _native.Projection(linear=linear(16, 40)[0]),
        **{name: _native.Norm(torch.ones(16).bfloat16(), 1e-6) for name in ("q_norm", "k_norm")},
        "heads": 2, "size": 16, "block": 4, "top_k": 2, "local": 1,
    }  # fmt: skip
    return arguments | changes


class TestNative:
    @pytest.mark.parametrize(
        "changes, why",
        [
            ({"local": 3}, "local 0 to top_k"),
            ({"block": 0}, "must be positive"),
            ({"heads": 3}, "do not fit its heads of 16 values"),
            ({"k": _native.Projection(linear=linear(16, 39)[0])}, "do not fit"),
            ({"k_norm": _native.Norm(torch.ones(15).bfloat16(), 1e-6)}, "do not fit"),
            ({"k_norm": _native.Norm(torch.ones(16), 1e-6)}, "norms of two dtypes"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_does_not_fit(self, changes: dict[str, Any], why: str) -> None:
        _native.BlockIndex(**given())
        with pytest.raises(ValueError, match=why):
            _native.BlockIndex(**given(**changes))

    def test_attention_that_does_not_fit(self) -> None:
        def attention(**changes: Any) -> Any:
            arguments: dict[str, Any] = {
                "q": linear(64, 40)[0], "k": linear(32, 40)[0], "v": linear(32, 40)[0], "o": linear(40, 64)[0],
                "q_norm": None, "k_norm": None, "heads": 4, "groups": 2, "size": 16, "scale": 1.0, "window": 0,
                "sinks": None, "gated": False, "index": _native.BlockIndex(**given()),
            }  # fmt: skip
            return _native.GroupedAttention(**arguments | changes)

        odd = _native.BlockIndex(**given(q=_native.Projection(linear=linear(48, 40)[0]), heads=3))
        for changes in ({"window": 4}, {"index": odd}):
            with pytest.raises(ValueError, match="an index of blocks beside a window, or of heads"):
                attention(**changes)
        decoder, x = _native.Decoder(40, "bfloat16"), torch.zeros(1, 40).bfloat16()
        decoder.add(None, attention(), None, None)
        keys = torch.zeros(1, 2, 8, 16).bfloat16()
        for index, positions, why in (
            (torch.zeros(1, 1, 7, 16).bfloat16(), None, r"the keys of an index must be \[1, 1, 8, 16\]"),
            (torch.zeros(1, 1, 8, 16), None, "of the model's dtype"),
            (
                torch.zeros(1, 1, 8, 16).bfloat16(),
                torch.zeros(2, dtype=torch.int64),
                r"positions must be \[batch\]",
            ),
        ):
            with pytest.raises(ValueError, match=why):
                decoder.forward(
                    x=x, cos=None, sin=None, mask=None, position=0, first=0, last=1, final_norm=None, out=x.clone(),
                    cache=_native.DecoderCache([keys], [keys.clone()], [index]), positions=positions,
                )  # fmt: skip
