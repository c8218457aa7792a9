"""Beam search in recorded steps: what unswapped transformers finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import Pair, assert_close, assert_same_cache, read
from test_generate import MANY_ENDS, name_of, prompt, stock
from test_native_decoder import INT8_TOLERANCE, TOLERANCE, doubled
from torch import Tensor
from transformers import DynamicCache

import ktinject
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
ALL = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
HOW = {
    "eager": "stock loop: beam search",
    "fixed": "graph, stock loop: beam search",
    "graph": "graph, stock loop: beam search",
}
CASES: list[dict[str, Any]] = [
    {"eos_token_id": None},
    {"num_return_sequences": 3, "early_stopping": True, **MANY_ENDS},
    {"do_sample": True, "temperature": 3.0, "length_penalty": 2.0, **MANY_ENDS},
    {"early_stopping": "never", "length_penalty": -1.0, "repetition_penalty": 1.3, **MANY_ENDS},
]
# What layers keep, each moved in its own way. All experts are taken, so that none can turn over; with many heads of an
# index, hardly any places tie.
SURE: dict[str, Any] = {"num_experts_per_tok": 6}
SURE_LATENT = {**SURE, "n_group": 1, "topk_group": 1, "index_n_heads": 16}
KEPT: dict[str, dict[str, Any]] = {
    "deepseek_v32": SURE_LATENT,  # latents, and keys of an index that chooses 8 of up to 35 places
    "gpt_oss": {"sliding_window": 12},  # sinks, and rings that the prompt has filled
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "deepseek_v3": SURE_LATENT,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "minimax_m3_vl_text": {},
}
OFTEN = ("gpt_oss", "qwen3_next", "lfm2_moe")


def given(models: Pair, **case: Any) -> dict[str, Any]:
    return {**prompt(2, device=models.model.device.type), "num_beams": 3, "max_new_tokens": 12, **ALL, **case}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_texts_scores_and_cache_are_those_of_transformers(
    models: Pair, way: str, case: dict[str, Any]
) -> None:
    ours, theirs = models.generate(**given(models, **case))
    assert models.model.ktinject_decoding.last == HOW[way]
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    assert_close(ours.sequences_scores[None], theirs.sequences_scores[None])
    for mine, other in zip((*ours.scores, *ours.logits), (*theirs.scores, *theirs.logits), strict=True):
        assert_close(mine, other)
    assert_same_cache(ours.past_key_values, theirs.past_key_values)
    plain = {**given(models, **case), **dict.fromkeys(ALL, False)}
    assert torch.equal(*models.generate(**plain))


def test_a_cache_of_the_caller_s_is_reordered_too(models: Pair) -> None:
    for new in (1, 12):
        caches = [DynamicCache(config=models.plain.config) for _ in range(2)]
        arguments = {**given(models, max_new_tokens=new), **dict.fromkeys(ALL, False)}
        ours = models.model.generate(**arguments, past_key_values=caches[0])
        assert torch.equal(ours, models.plain.generate(**arguments, past_key_values=caches[1]))
        assert_same_cache(*caches)


def test_a_cache_that_a_failed_search_leaves_is_what_it_was(models: Pair) -> None:
    cache = DynamicCache(config=models.model.config)
    count = 0

    def stop(ids: Tensor, _: Any, **__: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with pytest.raises(KeyboardInterrupt):
        models.model.generate(**given(models), past_key_values=cache, stopping_criteria=[stop])
    assert cache.get_seq_length() == 0
    ours, theirs = models.generate(**given(models))
    assert torch.equal(ours.sequences, theirs.sequences)


def test_native_steps_score_texts_as_the_model_does(native: Pair) -> None:
    """Which of two texts that are nearly as likely is found, roundings may decide; not what they are scored."""
    arguments = given(native, eos_token_id=None, length_penalty=0.0, num_return_sequences=3)
    ours = native.model.generate(**arguments)
    assert native.model.ktinject_decoding.last == "native, stock loop: beam search"
    mask = arguments["attention_mask"].repeat_interleave(3, 0)
    logits, cache = read(native.plain, ours.sequences, mask)
    likely = logits[:, 8:-1].float().log_softmax(-1).gather(2, ours.sequences[:, 9:, None]).sum((1, 2))
    assert (ours.sequences_scores - likely).norm() <= 2 * TOLERANCE * likely.norm()
    assert ours.past_key_values.get_seq_length() == cache.get_seq_length() - 1


def test_only_rows_that_move_are_written(native: Pair) -> None:
    native.model.generate(**given(native))
    runner = native.model.ktinject_decoding.runners[6]
    length, order = runner.cache.used, [2, 0, 0, 3, 5, 3]
    before = [[tensor.clone() for tensor in pair] for pair in runner.cache.layers]
    runner.reorder(torch.tensor(order))
    for held, tensors in zip(before, runner.cache.layers):
        for old, new in zip(held, tensors):
            assert torch.equal(new[:, :, :length], old[order][:, :, :length])
            assert torch.equal(new[:, :, length:], old[:, :, length:])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly)
        for name in KEPT
        if name in AVAILABLE
    ],
)
def test_all_that_layers_keep_moves_with_the_beams(family: str) -> None:
    """Native steps in fp32, whose roundings decide nothing: the loop's own tokens and scores, also behind padding."""
    model = doubled(tiny(family, **KEPT[family]))
    weights = dict.fromkeys(("experts", "dense", "head"), "int8")
    model = ktinject.optimize(model, "auto", devices=["cpu"], variables=weights, progress=False)
    arguments = {
        **prompt(2, 20, padding=3),
        "eos_token_id": None,
        "num_beams": 3,
        "max_new_tokens": 16,
        **ALL,
    }
    ours = model.generate(**arguments)
    assert model.ktinject_decoding.last == "native, stock loop: beam search"
    assert model.ktinject_decoding.reason == ""
    theirs = stock(model, **arguments)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.beam_indices, theirs.beam_indices)
    assert len({*ours.beam_indices.flatten().tolist()} - {-1}) > 2  # rows have moved
    # Activations are int8: in few rows, a rounding in the last place makes one another level.
    errors = torch.stack(
        [(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(ours.logits, theirs.logits, strict=True)]
    )
    assert errors.median() <= 1e-5 and errors.max() <= INT8_TOLERANCE
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-3, atol=0)
