"""Rotary embeddings that choose frequencies by a text's length: in native and in captured steps, at the step where they
change, and where the text is read again there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import made, pair
from test_native_decoder import SURE
from test_replaced import error
from torch import Tensor
from transformers import DynamicCache

from ktinject.generation import frequencies
from ktinject.hf import compat

torch.set_num_threads(1)
LIMIT = 16  # tokens
FACTORS = {"short_factor": [1 + 0.05 * i for i in range(8)], "long_factor": [3 + 2.0 * i for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, **FACTORS}
LONGROPE["original_max_position_embeddings"] = LIMIT
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
DYNAMIC["original_max_position_embeddings"] = LIMIT
KINDS = {
    "longrope": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
}
PHIMOE: dict[str, Any] = {
    "rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4},
    "original_max_position_embeddings": LIMIT,
    "num_local_experts": 2,
}
# Prompt and new tokens, one request after the other: past the limit, beyond it, up to it, and short again.
REQUESTS = ((10, 12), (24, 5), (LIMIT, 4), (5, 5))


def ids_of(length: int, rows: int = 1) -> Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(length))


def write(model: Any, ids: Tensor, new: int, text: Tensor | None = None, **more: Any) -> Any:
    if text is not None:
        more["prefix_allowed_tokens_fn"] = lambda row, so_far: [int(text[row, len(so_far)])]
    device = next(model.parameters()).device
    return model.generate(
        ids.to(device), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **more,
    )  # fmt: skip


def assert_as_stock(model: Any, plain: Any, ids: Tensor, new: int, how: str, most: float, **more: Any) -> Any:
    """Most steps' logits are those of the unswapped model's own `generate` of the same text: of a few, roundings decide
    on an expert. Other frequencies show in all steps from there on.
    """
    ours = write(model, ids, new, **more)
    assert (model.ktinject_decoding.last, model.ktinject_decoding.reason) == (how, "")
    theirs = write(plain, ids, new, ours.sequences, **more)
    assert error(ours, theirs).median() < most
    return ours


@pytest.mark.parametrize("kind", KINDS)
def test_native_steps_choose_as_transformers_does(kind: str) -> None:
    model, plain = made("qwen3_moe", **SURE, **KINDS[kind])
    for length, new in REQUESTS:
        assert_as_stock(model, plain, ids_of(length), new, "native loop", 0.03)


def test_to_look_at_a_model_chooses_nothing() -> None:
    model, _ = made("qwen3_moe", **SURE, **KINDS["dynamic"])
    write(model, ids_of(24), 4)
    rotary = model.model.rotary_emb
    chosen = rotary.inv_freq.clone()
    model.model.norm.new = 1  # so that it is looked at anew
    assert model.ktinject_decoding.model_support()
    with frequencies.kept(model), torch.no_grad():
        model(input_ids=ids_of(5))
        assert not torch.equal(rotary.inv_freq, chosen)
    assert torch.equal(rotary.inv_freq, chosen)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_a_graph_s_tensors_turn_by_what_was_chosen_before(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair("qwen3_moe", "fixed", **KINDS[kind])
    chosen: list[int] = []
    choose = frequencies._Fixed.choose

    def noted(self: Any, last: int) -> None:
        assert "forward" not in vars(self.module), "it chooses within a step"
        chosen.append(last)
        choose(self, last)

    monkeypatch.setattr(frequencies._Fixed, "choose", noted)
    for length, new in REQUESTS:
        ours = write(both.model, ids_of(length), new)
        theirs = write(both.plain, ids_of(length), new, ours.sequences)
        assert error(ours, theirs).max() < 1e-3
    assert chosen == [length + i for length, new in REQUESTS for i in range(new - 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_captured_steps_turn_by_what_was_chosen_before(family: str, kind: str) -> None:
    both = pair(family, "graph", **KINDS[kind])
    for length, new in REQUESTS * 2:
        assert_as_stock(both.model, both.plain, ids_of(length), new, "graph loop", 2e-3)
    assert_as_stock(both.model, both.plain, ids_of(10, rows=3), 12, "graph loop", 2e-3)


class TestReadAgain:
    """Phi-3.5-MoE drops its cache at the limit, and reads all of the text by other frequencies."""

    @pytest.fixture(scope="class")
    def both(self) -> tuple[Any, Any]:
        return made("phimoe", **PHIMOE)

    @pytest.mark.parametrize("length", [12, LIMIT, LIMIT + 1])
    def test_in_our_loop(self, both: tuple[Any, Any], length: int) -> None:
        assert_as_stock(*both, ids_of(length), 10, "native loop", 0.03)

    def test_rows_with_padding(self, both: tuple[Any, Any]) -> None:
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[0, :5] = 0
        assert_as_stock(*both, ids_of(12, rows=2), 10, "native loop", 0.03, attention_mask=mask)

    def test_the_cache_is_that_of_the_last_time(self, both: tuple[Any, Any]) -> None:
        model, plain = both
        held, theirs = (DynamicCache(config=one.config) for one in both)
        ours = write(model, ids_of(12), 8, **{compat.CACHE: held})
        wanted = write(plain, ids_of(12), 8, ours.sequences, **{compat.CACHE: theirs})
        assert held.get_seq_length() == theirs.get_seq_length() == LIMIT
        assert ours[compat.CACHE].get_seq_length() == wanted[compat.CACHE].get_seq_length() == 19
        keys = [out[compat.CACHE].layers[0].keys.float() for out in (ours, wanted)]
        assert (keys[0] - keys[1]).norm() < 0.02 * keys[1].norm()

    @pytest.mark.parametrize(
        "more", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"num_return_sequences": 1}]
    )
    def test_other_loops_leave_it_to_transformers(self, both: tuple[Any, Any], more: dict[str, Any]) -> None:
        model, _ = both
        model.generate(
            ids_of(12), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0, **more
        )
        decoding = model.ktinject_decoding
        if "num_return_sequences" in more:
            assert decoding.last == "native loop"
        else:
            assert decoding.reason == "the text is read again behind 16 tokens, which may come within it"
            model.generate(
                ids_of(4), max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0, **more
            )
            assert decoding.reason == ""  # it stays before them

    @pytest.mark.gpu
    def test_on_a_gpu_steps_are_eager(self) -> None:
        both = pair("phimoe", "graph", **PHIMOE)
        for length in (12, LIMIT, 12):
            ours = write(both.model, ids_of(length), 10)
            assert both.model.ktinject_decoding.last == "eager loop"
            assert "PhimoeRotaryEmbedding looks at positions" in both.model.ktinject_decoding.reason
            theirs = write(both.plain, ids_of(length), 10, ours.sequences)
            assert error(ours, theirs).median() < 2e-3

    def test_it_cannot_be_recorded(self, both: tuple[Any, Any]) -> None:
        found = frequencies.recording_support(both[0])
        assert "PhimoeRotaryEmbedding looks at positions to choose" in found.reason
        for kind in KINDS.values():
            assert frequencies.recording_support(made("qwen3_moe", **kind)[0])
