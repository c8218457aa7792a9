"""`return_dict_in_generate=True` in our own loop: what unswapped transformers returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import Pair, assert_near_cache, assert_same_output, read
from byte_tokenizer import tokenizer
from test_generate import MANY_ENDS, Heard, Shift, name_of, prompt
from test_native_decoder import TOLERANCE, difference
from transformers import DynamicCache, LogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation import TemperatureLogitsWarper

torch.set_num_threads(1)
ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WAYS = ["eager", "fixed", pytest.param("graph", marks=[pytest.mark.gpu, NO_CUDA])]

OUTPUTS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, "batch": 1},
    {"do_sample": False, "output_scores": False},
    {"do_sample": False, "output_logits": False, "temperature": None},
    {"do_sample": False, "output_scores": False, "output_logits": False, "top_k": None},
    {"do_sample": False, **MANY_ENDS},
    {"do_sample": False, "eos_token_id": list(range(3, 96)), "top_p": None},
    {"do_sample": False, "repetition_penalty": 1.4, "eos_token_id": None},
    {"do_sample": False, "min_new_tokens": 9, **MANY_ENDS},
    {"do_sample": False, "max_new_tokens": 1},
    {"do_sample": False, "use_cache": False},
    {"do_sample": False, "stop_strings": ["a", "bc", "d"], "tokenizer": tokenizer(), **MANY_ENDS},
    {"do_sample": True, "temperature": 0.6, "top_k": 5, "top_p": 0.8},
    {"do_sample": True, "top_k": 0, "min_p": 0.2, **MANY_ENDS},
    {"do_sample": True, "output_logits": False, "temperature": 0.7},
    {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": True, "num_return_sequences": 2, "batch": 1},
]


def given(models: Pair, batch: int = 3, **case: Any) -> dict[str, Any]:
    return {**prompt(batch, device=models.model.device.type), "max_new_tokens": 12, **ALL, **case}


@pytest.mark.parametrize("case", OUTPUTS, ids=name_of)
def test_scores_logits_and_cache_are_those_of_transformers(models: Pair, case: dict[str, Any]) -> None:
    ours, theirs = models.generate(**given(models, **case))
    assert_same_output(ours, theirs)
    eager = case.get("max_new_tokens") == 1 or not case.get("use_cache", True)
    assert models.model.ktinject_decoding.last == ("eager loop" if eager else models.last)


def test_rows_that_ended_are_those_of_transformers(models: Pair) -> None:
    """One ends early, by an end token and by a stop string, and the others go on."""
    arguments = given(models, eos_token_id=None, max_new_tokens=12)
    written = models.plain.generate(**arguments).sequences[:, 9:]
    ends = [int(written[0, 2])]
    ours, theirs = models.generate(**{**arguments, "eos_token_id": ends})
    assert_same_output(ours, theirs)
    assert (theirs.sequences[0, 12:] == 0).all(), "row 0 has ended"
    word = tokenizer().decode([int(written[1, 2])])
    stops = {"stop_strings": [word], "tokenizer": tokenizer(), "eos_token_id": [95]}
    assert_same_output(*models.generate(**{**arguments, **stops}))


def test_steps_on_fixed_tensors_serve_such_requests(models: Pair, way: str) -> None:
    decoding = models.model.ktinject_decoding
    decoding.release()
    models.model.generate(**given(models))
    if way == "eager":
        assert not decoding.runners
    else:
        assert [*decoding.runners] == [3]
        assert decoding.reason == decoding.runners[3].graphs.reason


def test_a_plain_request_afterwards_keeps_nothing(models: Pair) -> None:
    """The same way of choosing, with and without scores, one after the other."""
    arguments = given(models, do_sample=True, temperature=0.5)
    for _ in range(2):
        ours, theirs = models.generate(**arguments)
        assert_same_output(ours, theirs)
        plain = {name: value for name, value in arguments.items() if name not in ALL}
        found, wanted = models.generate(**plain)
        assert torch.equal(found, wanted) and torch.equal(found, theirs.sequences)


def test_scores_of_one_request_stay_as_they_are_during_the_next(models: Pair) -> None:
    ours = models.model.generate(**given(models))
    kept = [tensor.clone() for tensor in (*ours.scores, *ours.logits, ours.past_key_values.layers[0].keys)]
    models.model.generate(**{**given(models), "do_sample": True, "temperature": 3.0})
    found = [*ours.scores, *ours.logits, ours.past_key_values.layers[0].keys]
    assert all(torch.equal(a, b) for a, b in zip(found, kept))


def test_the_cache_that_is_returned_serves_the_next_request(models: Pair) -> None:
    for batch in (1, 3):
        ours, theirs = models.generate(**given(models, batch, eos_token_id=None))
        mask = torch.ones_like(theirs.sequences)
        mask[:, :9] = given(models, batch)["attention_mask"]
        answers = [
            model.generate(
                out.sequences,
                attention_mask=mask,
                past_key_values=out.past_key_values,
                max_new_tokens=8,
                eos_token_id=None,
            )
            for model, out in ((models.model, ours), (models.plain, theirs))
        ]
        assert torch.equal(*answers)
        assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()


def test_a_streamer_hears_the_same(models: Pair) -> None:
    heard, wanted = Heard(), Heard()
    models.model.generate(**given(models, 1), streamer=heard)
    models.plain.generate(**given(models, 1), streamer=wanted)
    assert heard.heard == wanted.heard


@pytest.mark.parametrize("case", [{"output_attentions": True}, {"output_hidden_states": True}], ids=name_of)
def test_what_steps_compute_within_is_left_to_transformers(models: Pair, case: dict[str, Any]) -> None:
    name = next(iter(case))
    arguments = {**given(models), **case, "max_new_tokens": 4}
    implementation = models.model.config._attn_implementation
    for model in (models.model, models.plain):
        model.set_attn_implementation("eager")
    try:
        ours, theirs = models.generate(**arguments)
    finally:
        for model in (models.model, models.plain):
            model.set_attn_implementation(implementation)
    assert_same_output(ours, theirs)
    decoding = models.model.ktinject_decoding
    assert decoding.last.startswith("stock loop: attentions or hidden states are asked for")
    assert decoding.reason == f"the model gets {name}"


@pytest.mark.parametrize("processor", [Shift()], ids=["unknown"])
def test_the_stock_loop_around_recorded_steps_returns_the_same(
    models: Pair, way: str, processor: LogitsProcessor
) -> None:
    for batch in (3, 1):
        ours, theirs = models.generate(**given(models, batch, logits_processor=[processor]))
        assert_same_output(ours, theirs)
        assert (
            models.model.ktinject_decoding.last == ("" if way == "eager" else "graph, ") + "stock loop: Shift"
        )


def test_a_static_cache_that_is_returned_is_transformers_own(models: Pair) -> None:
    ours, theirs = models.generate(**given(models, cache_implementation="static", disable_compile=True))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert type(ours.past_key_values) is type(theirs.past_key_values)
    assert int(ours.past_key_values.get_seq_length()) == int(theirs.past_key_values.get_seq_length())
    decoding = models.model.ktinject_decoding
    assert "static cache without graphs" in decoding.last
    assert decoding.reason == "return_dict_in_generate=True returns the cache, a StaticCache"


@pytest.mark.parametrize(
    "case, processors",
    [
        ({"do_sample": False}, []),
        ({"do_sample": False, **MANY_ENDS}, []),
        ({"do_sample": True, "top_k": 0, "temperature": 0.5}, [TemperatureLogitsWarper(0.5)]),
        ({"do_sample": False, "repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    ],
    ids=lambda value: name_of(value) if isinstance(value, dict) else "",
)
def test_native_steps_return_what_transformers_computes_of_the_same_text(
    native: Pair, case: dict[str, Any], processors: list[LogitsProcessor]
) -> None:
    # Some versions penalise padding, too.
    padding = 0 if "repetition_penalty" in case else 4
    arguments = {**prompt(padding=padding), **ALL, "eos_token_id": None, **case}
    out = native.model.generate(**arguments)
    assert native.model.ktinject_decoding.last == "native loop"
    steps = out.sequences.shape[1] - 9
    logits, cache = read(native.plain, out.sequences[:, :-1], arguments["attention_mask"])
    assert len(out.scores) == len(out.logits) == steps
    assert all(found.dtype == torch.float32 for found in (*out.scores, *out.logits))
    assert difference(torch.stack(out.logits, dim=1), logits[:, 8:]) <= TOLERANCE
    for step in range(steps):
        wanted = out.logits[step]
        for processor in processors:
            wanted = processor(out.sequences[:, : 9 + step], wanted)
        assert torch.equal(out.scores[step], wanted)
    assert type(out.past_key_values) is DynamicCache
    assert_near_cache(out.past_key_values, cache)
