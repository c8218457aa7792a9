"""What is said of a request before it runs is what is said afterwards; slow ones can be refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from answers import Pair, native_pair, pair
from byte_tokenizer import tokenizer
from test_generate import Heard, Shift, name_of, prompt
from test_kept_cache import state_of
from test_outputs import ALL, WAYS
from torch import Tensor
from transformers import DynamicCache, StaticCache

import ktinject.hf.compat as compat
from ktinject import OperatorError
from ktinject.generation.decoding import Explanation
from ktinject.support import Support

torch.set_num_threads(1)
CASES: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.7},
    {**ALL},
    {"logits_processor": [Shift()]},
    {"max_time": 1e6},
    {"max_new_tokens": 1},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 2},
    {"use_cache": False},
    {"cache_implementation": "dynamic"},
    {"cache_implementation": "static"},
    {"output_hidden_states": True, "return_dict_in_generate": True},
    {"num_return_sequences": 2, "do_sample": True},
    {"stop_strings": ["a"], "tokenizer": tokenizer()},
]


@pytest.fixture(scope="module", params=[*WAYS, "native"])
def models(request: pytest.FixtureRequest) -> Pair:
    return native_pair("qwen3_moe") if request.param == "native" else pair("qwen3_moe", request.param)


def given(models: Pair, **case: Any) -> dict[str, Any]:
    arguments = prompt(1, padding=0, device=models.model.device.type)
    return {**arguments, "max_new_tokens": 6, "eos_token_id": None, **case}


def seen(models: Pair) -> Explanation:
    return Explanation(models.model.ktinject_decoding.last, models.model.ktinject_decoding.reason)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_what_is_foreseen_happens(models: Pair, case: dict[str, Any]) -> None:
    arguments = given(models, **case)
    models.model.generate(**arguments)  # whether steps can be captured is known
    found = models.model.ktinject_decoding.explain(**arguments)
    models.model.generate(**arguments)
    assert found == seen(models)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_of_the_caller_s(models: Pair, kind: Any) -> None:
    models.model.generate(**given(models))
    options = {"max_cache_len": 64} if kind is StaticCache else {}
    cache = kind(config=models.model.config, **options)
    arguments = given(models, past_key_values=cache, disable_compile=True)
    found = models.model.ktinject_decoding.explain(**arguments)
    assert int(cache.get_seq_length()) == 0
    models.model.generate(**arguments)
    assert found == seen(models)
    assert ("the cache is the caller's own" in found.reason) == (kind is StaticCache)


def test_nothing_is_computed_or_remembered(models: Pair) -> None:
    models.model.generate(**given(models))
    decoding, heard, calls = models.model.ktinject_decoding, Heard(), []
    cache = DynamicCache(config=models.model.config)
    before = seen(models), dict(decoding.requests), state_of(cache), torch.get_rng_state()

    def call(module: Any, args: Any) -> None:
        calls.append(module)

    call.capturable = True  # type: ignore[attr-defined]
    handle = models.model.register_forward_pre_hook(call)
    try:
        for case in CASES:
            caches = {} if "cache_implementation" in case else {"past_key_values": cache}
            decoding.explain(**given(models, streamer=heard, **{**caches, **case}))
    finally:
        handle.remove()
    assert not calls and not heard.heard
    after = seen(models), dict(decoding.requests), state_of(cache), torch.get_rng_state()
    assert before[:2] == after[:2] and str(before[2]) == str(after[2]) and torch.equal(before[3], after[3])
    models.model.generate(**given(models))
    assert seen(models) == before[0], "and the next request runs"


def test_wrong_arguments_are_wrong_as_in_generate(models: Pair) -> None:
    decoding = models.model.ktinject_decoding
    for ask in (models.model.generate, decoding.explain):
        with pytest.raises(ValueError, match="not used by the model"):
            ask(**given(models, no_such_argument=1))
    assert isinstance(models.model.generate(**given(models)), Tensor), "it does not go on explaining"


def test_what_decides_by_itself_is_not_asked(models: Pair) -> None:
    def generates(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it was called")

    for case in ({"custom_generate": generates}, {"cache_implementation": "paged"}):
        found = models.model.ktinject_decoding.explain(**given(models, **case))
        assert found.how == "stock loop" and next(iter(case)) in found.reason


def test_another_inside_of_transformers(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "support", lambda feature: Support.no("for this test"))
    assert models.model.ktinject_decoding.explain(**given(models)) == Explanation(
        "stock loop", "for this test"
    )


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_strict_refuses_what_would_run_slowly(models: Pair, case: dict[str, Any]) -> None:
    decoding, arguments = models.model.ktinject_decoding, given(models, **case)
    torch.manual_seed(0)
    wanted = models.model.generate(**arguments)
    is_captured = decoding.native is not None or models.model.device.type == "cuda"
    is_slow = bool(decoding.reason) or (decoding.last.startswith("graph, ") and not is_captured)
    decoding.strict = True
    try:
        if is_slow:
            with pytest.raises(OperatorError, match="would run without CUDA graphs or native") as caught:
                models.model.generate(**arguments)
            assert decoding.reason in str(caught.value) and "strict = False" in str(caught.value)
        else:
            torch.manual_seed(0)
            found = models.model.generate(**arguments)
            assert torch.equal(
                *(out if isinstance(out, Tensor) else out.sequences for out in (found, wanted))
            )
    finally:
        decoding.strict = False
    torch.manual_seed(0)
    again = models.model.generate(**arguments)
    assert torch.equal(*(out if isinstance(out, Tensor) else out.sequences for out in (again, wanted)))


def test_a_refusal_is_no_warning(models: Pair, caplog: pytest.LogCaptureFixture) -> None:
    decoding = models.model.ktinject_decoding
    decoding.requests.clear()
    decoding.strict = True
    try:
        with caplog.at_level(logging.WARNING, "ktinject"), pytest.raises(OperatorError):
            models.model.generate(**given(models, use_cache=False))
    finally:
        decoding.strict = False
    assert not caplog.records and not decoding.requests
