"""A plain request in our own decode loop.

transformers' prefill ──► its cache ──► recorded steps, or the model's own ──► loop.run
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from ktinject.generation import cache as caches
from ktinject.generation import kept_cache, loop, next_turns, own_caches, replaced
from ktinject.generation.cpu import openmp
from ktinject.generation.decoding import Decoding
from ktinject.generation.eligibility import PlainRequest
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.reading_again import RereadingStep
from ktinject.generation.steps import (
    EagerStep,
    GraphStep,
    begin,
    first_positions,
    last_logits,
    runner_for,
    tokens_in,
)
from ktinject.hf import compat
from ktinject.support import Support


class _Read(NamedTuple):
    """A prompt that was read.

    logits        [b, v] behind it
    cache         that the request was given, or that the prefill made
    model_kwargs  of transformers, for the first step
    runner        of the steps; None: they are the model's own
    positions     as `first_positions` has them
    """

    logits: Tensor
    cache: Any
    model_kwargs: dict[str, Any]
    runner: GraphRunner | None
    positions: Tensor | None


def run(
    model: Any,
    recorded: Support,
    plain: PlainRequest,
    input_ids: Tensor,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Any:
    """The request in our own loop, with recorded steps if they serve it.

    Returns  [b, n + new] int64; or transformers' GenerateDecoderOnlyOutput
    """
    decoding: Decoding = model.ktinject_decoding
    new_tokens = max(1, plain.max_length - input_ids.shape[1])
    held = compat.cache_of(model_kwargs)
    before = tokens_in(held)
    turn = None
    if recorded and not replaced.rereads(model, before, input_ids.shape[1]):
        turn = next_turns.read(model, input_ids, config, model_kwargs, new_tokens)
    if turn is not None:
        read = _Read(turn[1], held, model_kwargs, turn[0], None)
    else:
        read, recorded = _prefilled(model, recorded, input_ids, config, model_kwargs, before, new_tokens)
    logits, cache, model_kwargs, runner, positions = read
    length = tokens_in(cache) if turn is None else input_ids.shape[1]
    native = decoding.native if runner is not None else None
    with model._optimize_model_for_decode(), nullcontext() if native is None else openmp.one_thread():
        if runner is not None and turn is None:
            recorded = begin(decoding, runner, logits, cache, model_kwargs.get("attention_mask"), positions)
            if not recorded:
                runner = native = None
        decoding.require(recorded)
        step: GraphStep | EagerStep
        if runner is not None:
            if not kept_cache.is_callers(cache):
                caches.give_back(cache)
            if replaced.rereads(model, length, length + new_tokens - 1):
                step = RereadingStep(
                    model, runner, plain, decoding, input_ids, model_kwargs, cache, positions
                )
            else:
                step = GraphStep(runner, plain, decoding)
        else:
            step = EagerStep(model, plain, logits, input_ids, model_kwargs)
        step.sampler.begin(input_ids, plain.request)
        draws = runner is not None and plain.sampling.do_sample and logits.is_cuda
        is_kept = plain.is_dict or kept_cache.is_callers(cache)
        # A step that is queued ahead does not know of the rows that a stop string has just ended; and if it is thrown
        # away, states of fixed size have gone on.
        waits = native is not None or (plain.sampling.keeps_rows and plain.stop is not None)
        waits |= is_kept and runner is not None and runner.cache.has_states
        tokens = loop.run(
            input_ids,
            step,
            functools.partial(step.first, logits),
            new_tokens=new_tokens,
            pad=plain.sampling.pad,
            stop=None if plain.stop is None else lambda rows: plain.stop(rows, None),
            streamer=streamer,
            queue_ahead=runner is not None and not waits,
            generator=torch.cuda.default_generators[logits.device.index] if draws else None,
        )
    steps = tokens.shape[1] - input_ids.shape[1]
    read_again = isinstance(step, RereadingStep) and step.cache is not cache
    if isinstance(step, RereadingStep):
        cache = step.cache
    if runner is not None and is_kept:
        # The last token was read by no step that counts.
        kept_cache.hand_back(cache, runner.cache, length + steps - 1)
    decoding.note(*_how(runner, recorded, is_native=native is not None))
    if runner is not None and turn is None and not read_again and kept_cache.is_callers(cache):
        next_turns.come_again(model, tokens, before, length - before)
    if not plain.is_dict:
        return tokens
    return compat.GenerateDecoderOnlyOutput(
        sequences=tokens, **{compat.CACHE: cache}, **step.records.first(steps)
    )


def _prefilled(
    model: Any,
    recorded: Support,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    before: int,
    new_tokens: int,
) -> tuple[_Read, Support]:
    """The prompt as transformers reads it, behind `before` tokens, and whether recorded steps go on from there."""
    decoding: Decoding = model.ktinject_decoding
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    logits = last_logits(outputs, input_ids)
    cache = outputs.get(compat.CACHE)
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    del outputs
    runner, positions = None, None
    if recorded and new_tokens > 1:
        mask = model_kwargs.get("attention_mask")
        found = first_positions(model, input_ids, logits, model_kwargs)
        positions, recorded = (None, found) if isinstance(found, Support) else (found, recorded)
        recorded = recorded and replaced.cache_support(cache)  # which the model may have made
        if recorded:
            own = own_caches.as_dynamic(model, cache)
            runner, recorded = runner_for(decoding, own, logits, input_ids, before, mask, new_tokens)
            cache = cache if runner is None else own
    return _Read(logits, cache, model_kwargs, runner, positions), recorded


def _how(runner: GraphRunner | None, recorded: Support, is_native: bool) -> tuple[str, str]:
    """How a request ran in our own loop, and why not in graphs, as `Decoding.note` takes it."""
    if runner is None:
        return "eager loop", recorded.reason
    if is_native:
        return "native loop", runner.changed
    return ("graph loop" if runner.graphs else "eager loop"), runner.graphs.reason or runner.changed
