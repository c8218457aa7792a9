"""Native decode steps of Unlimited-OCR, whose layers keep all of the prompt, and of what is behind it a window."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import INT8_TOLERANCE, assert_as_exact_as_its_own, logits_of
from test_native_gates import packed
from test_native_pictured import made as pictured
from test_native_windows import assert_lookup_changes_no_token, assert_native
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktinject import _native
from ktinject.generation import cache_layers, masks
from ktinject.generation.cache import FixedCache
from ktinject.generation.cache_layers import LayerKind
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.several import SeveralTokens
from ktinject.hf import compat
from ktinject.planning import memory
from ktinject.support import Support
from tests.models import multimodal

torch.set_num_threads(1)
FAMILY = "unlimited_ocr"
pytestmark = pytest.mark.skipif(FAMILY not in multimodal.AVAILABLE, reason=f"transformers has no {FAMILY}")
NIGHTLY = pytest.mark.nightly
# Shorter than what is written.
WINDOW: dict[str, Any] = {"sliding_window": 4}
BOTH = {**WINDOW, "layer_types": ["full_attention", "reference_sliding_attention"]}


@functools.cache
def shared(**changes: Any) -> PreTrainedModel:
    """A swapped model in fp32, whose steps differ from its own in last places alone; tests leave it as it is."""
    if changes.pop("both", False):
        changes |= BOTH
    return pictured(FAMILY, "int8", torch.float32, **{**WINDOW, "num_experts_per_tok": 2} | changes)[0]


def of_text(batch: int = 1, length: int = 9, new: int = 24, **more: Any) -> dict[str, Any]:
    found = {**prompt(batch, length, padding=0), "max_new_tokens": new, "eos_token_id": None}
    found["input_ids"] = found["input_ids"].clamp(max=88)  # what is above stands for pictures
    return {**found, **more}


def assert_same_tokens(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))


@pytest.mark.parametrize(
    "changes",
    [
        WINDOW,
        BOTH,
        pytest.param({"sliding_window": 64}, marks=NIGHTLY),
        pytest.param({"sliding_window": 2}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_steps_are_as_exact_as_the_model_s_own(changes: dict[str, Any]) -> None:
    """Behind rows with padding, too, which keep their places before a ring."""
    assert_as_exact_as_its_own(*pictured(FAMILY, **changes))


@NIGHTLY
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*pictured(FAMILY, weights, **WINDOW), INT8_TOLERANCE)


@pytest.mark.parametrize("both", [False, True])
def test_tokens_are_the_stock_loop_s(both: bool) -> None:
    """Of text, behind pictures, and of a prompt that is read in pieces; windows of some layers or of all."""
    model = shared(both=both)
    behind_pictures = {**multimodal.image_prompt(FAMILY, rows=2), "max_new_tokens": 12, "eos_token_id": None}
    for arguments in (of_text(3), of_text(), behind_pictures, of_text(prefill_chunk_size=4)):
        assert_same_tokens(model, arguments)
        assert_native(model)


@pytest.mark.parametrize(
    "requests, places",
    [
        (((9, 6), (40, 12), (12, 12), (9, 2)), 44),
        # The text grows beyond its first bucket of 256 tokens: in a prompt, behind it, and behind a short one.
        pytest.param(((9, 6), (40, 20), (250, 20), (300, 8), (9, 6), (20, 250)), 304, marks=NIGHTLY),
    ],
)
def test_prompts_of_other_lengths(requests: Sequence[tuple[int, int]], places: int) -> None:
    """A longer prompt makes a longer cache, on which a shorter one's ring ends earlier."""
    model = shared()
    model.ktinject_decoding.release()
    for length, new in requests:
        assert_same_tokens(model, of_text(length=length, new=new))
        assert_native(model)
    cache = model.ktinject_decoding.runners[1].cache
    assert {tensor.shape[2] for held in cache.layers for tensor in held} == {places}


def test_a_text_that_grows_behind_a_short_prompt_on_a_long_one_s_cache() -> None:
    """Its ring is full before the cache has all of its places."""
    model = shared()
    kinds = cache_layers.kinds_of(model.config)
    cache = FixedCache(prefilled(model, 300), 256, 1, torch.device("cpu"), kinds)
    assert cache.layers[0][0].shape[2] == cache.rings[4].shape[-1] == 256
    cache.begin(prefilled(model, 200), 200, None, None)
    for length in range(201, 280):
        cache.reserve()
        place = 200 + (length - 201) % 4
        assert int(cache.places[4]) == place
        shown = cache.rings[4][0, 0, 0].nonzero().flatten().tolist()
        assert shown == [*range(min(length, 204))]
        cache.advance()
    assert cache.capacity == 512 and cache.rings[4].shape[-1] == 304


def prefilled(model: PreTrainedModel, tokens: int) -> DynamicCache:
    """What a prefill of so many tokens leaves."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.full((1, tokens), 5), **{compat.CACHE: cache})
    return cache


@pytest.mark.parametrize(
    "more",
    [
        {"no_repeat_ngram_size": 2, "no_repeat_ngram_window_size": 8},  # of the model's own
        pytest.param({"max_time": 1e6}, marks=NIGHTLY),
        {"num_beams": 2},
    ],
    ids=str,
)
def test_the_stock_loop_on_native_steps(more: dict[str, Any]) -> None:
    model = shared()
    config = copy.deepcopy(model.generation_config)
    for name, value in more.items():
        setattr(config, name, value)
    assert_same_tokens(model, of_text(2, generation_config=config))
    assert model.ktinject_decoding.last.startswith("native, stock loop: ")
    assert not model.ktinject_decoding.reason


def test_several_tokens_of_a_text() -> None:
    """Those that are taken back leave the ring behind the prompt as it was."""
    model = shared()
    assert_lookup_changes_no_token(model)
    native, ids = NativeDecoder(model), torch.tensor([[7, 8, 9]])
    logits_of(model, native)
    assert native.is_proven
    held, logits = [], []
    for count in (1, 2, 3):
        _, runner = logits_of(model, native, batch=1)  # six tokens behind a prompt of nine
        several = SeveralTokens(runner, native, lambda: [])
        several.step(ids[:, :count], 0, has_hidden=True)
        several.keep(1)
        held.append([tensor.clone() for layer in runner.cache.layers for tensor in layer])
        logits.append(several.step(ids[:, 1:2], 1))
    for tensors, found in zip(held[1:], logits[1:]):
        assert all(torch.equal(one[:, :, :13], other[:, :, :13]) for one, other in zip(tensors, held[0]))
        assert torch.equal(found, logits[0])


class TestOtherRequests:
    """They stay with transformers, and write the same."""

    def test_rows_with_padding(self) -> None:
        model = shared()
        arguments = of_text(2)
        arguments["attention_mask"][0, :3] = 0
        assert_same_tokens(model, arguments)
        reason = "a row has padding, and its layers keep the prompt beside a window"
        assert model.ktinject_decoding.reason == reason

    def test_that_return_a_cache(self) -> None:
        model = shared()
        arguments = of_text(return_dict_in_generate=True)
        ours, theirs = model.generate(**arguments), stock(model, **arguments)
        reason = "its layers keep the prompt beside a window, and the cache outlives the request"
        assert torch.equal(ours.sequences, theirs.sequences)
        assert model.ktinject_decoding.reason == reason

    def test_on_a_cache_of_the_caller_s(self) -> None:
        model = shared()
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        arguments = of_text(new=8)
        for _ in range(2):
            found = model.generate(**arguments, **{compat.CACHE: caches[0]})
            assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: caches[1]}))
            assert model.ktinject_decoding.reason.endswith("and the cache outlives the request")
            ids = torch.cat([found, found[:, :3]], 1)
            arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def test_static_caches(self) -> None:
        model = shared()
        assert_same_tokens(model, of_text(cache_implementation="static"))
        assert "native" not in model.ktinject_decoding.last


def test_kinds_and_what_they_take() -> None:
    model = shared(both=True)
    kinds = cache_layers.kinds_of(model.config)
    assert kinds == [LayerKind(), LayerKind(window=4, keeps_prompt=True)]
    sizes = [memory._size(8, 0, kind) for kind in kinds]
    assert sizes[0] == sizes[1] != memory._size(8, 0, LayerKind(window=4))


def test_a_model_that_shows_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.unlimited_ocr import (
        modeling_unlimited_ocr as modeling,
    )  # older versions have none

    model, _ = pictured(FAMILY, **WINDOW)
    assert not isinstance(masks.of_model(model), Support)
    own = modeling.create_reference_sliding_window_causal_mask

    def hiding(**kwargs: Any) -> Tensor:
        """All but a token of the prompt."""
        cache = kwargs[compat.CACHE]
        if cache is None:
            return own(**kwargs)
        seen = torch.ones(
            len(kwargs["inputs_embeds"]), 1, 1, cache.layers[0].get_mask_sizes(1)[0], dtype=torch.bool
        )
        seen[..., 1] = False
        return seen

    monkeypatch.setattr(modeling, "create_reference_sliding_window_causal_mask", hiding)
    found = masks.of_model(model)
    assert isinstance(found, Support)
    assert found.reason == "layer 0: its mask shows something else than the prompt and a window of 4 tokens"


def test_arguments() -> None:
    arguments: dict[str, Any] = {
        "q": packed(64), "k": packed(32), "v": packed(32), "o": packed(40, 64), "q_norm": None, "k_norm": None,
        "heads": 4, "groups": 2, "size": 16, "scale": 1.0, "sinks": None, "gated": False, "keeps_prompt": True,
    }  # fmt: skip
    for odd in ({"window": 0}, {"window": 4, "chunked": True}):
        with pytest.raises(ValueError, match="a prompt is kept beside a window, without chunks"):
            _native.GroupedAttention(**arguments, **odd)
    decoder = _native.Decoder(40, "bfloat16")
    decoder.add(None, _native.GroupedAttention(**arguments, window=4), None, None)
    x, keys = torch.zeros(1, 40).bfloat16(), torch.zeros(1, 2, 8, 16).bfloat16()

    def step(position: int, **more: Any) -> None:
        decoder.forward(
            x=x, cos=None, sin=None, mask=None, position=position, first=0, last=1, final_norm=None, out=x.clone(),
            cache=_native.DecoderCache([keys], [keys]), **more,
        )  # fmt: skip

    with pytest.raises(ValueError, match="a prompt is kept, of so many tokens as the step has to say"):
        step(5)
    for prompt_tokens in (-1, 6):
        with pytest.raises(ValueError, match=f"a prompt of {prompt_tokens} tokens"):
            step(5, prompt=prompt_tokens)
    with pytest.raises(ValueError, match="position 9 of a cache of 8"):
        step(9, prompt=5)
