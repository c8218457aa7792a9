"""A conversation's next turn: its new tokens are read by a captured pass, where there is one for them.

    the caller's cache ──► `GraphRunner.begin` copies it ──► turn_pass.py: the new tokens ──► decode steps go on there

Capturing a pass and comparing it with the model takes about as long as reading the tokens would some times. So that is
done between requests, or behind one: a server does it while no request waits, and `generate` at the end of the first
next turn of its kind. Until then, and where a request asks for more than a pass gives, transformers' own prefill reads
the new tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ktinject.errors import OperatorError
from ktinject.generation import batching, continued, kept_cache, step_inputs, turn_pass
from ktinject.generation.decoding import Decoding
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.steps import tokens_in
from ktinject.generation.turn_pass import TurnPass
from ktinject.hf import compat
from ktinject.hf.layers import layer_configs
from ktinject.operators.offload import lent
from ktinject.support import Support

logger = logging.getLogger("ktinject")


def read(
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: Mapping[str, Any],
    new_tokens: int,
) -> tuple[GraphRunner, Tensor] | None:
    """Read the new tokens of a request that recorded steps serve, if there is a pass for them.

    input_ids     [1, n], with those that its cache holds
    model_kwargs  what transformers has prepared for the model
    new_tokens    that may be written
    Returns       the runner, which holds the whole text, and the logits [1, v] behind it; None: nothing was done
    """
    decoding: Decoding = model.ktinject_decoding
    held, runner = compat.cache_of(model_kwargs), decoding.runners.get(1)
    before = tokens_in(held)
    passes: TurnPass | None = None if runner is None else runner.turns
    if runner is None or passes is None or not _is_whole_text(input_ids, before, config, model_kwargs):
        return None
    if not kept_cache.is_callers(held) or not passes.takes(before, input_ids.shape[1] - before):
        return None
    if not runner.cache.takes(held, input_ids.shape[1] + new_tokens) or runner.is_changed():
        return None
    runner.begin(held, before, None, None)
    return runner, passes(input_ids[:, before:])


def _is_whole_text(
    input_ids: Tensor, before: int, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> bool:
    """Whether a request is one text of tokens, none of them padding, that begins with those of its cache."""
    length = input_ids.shape[1]
    if len(input_ids) != 1 or length <= before or config.prefill_chunk_size:
        return False
    if step_inputs.beside(model_kwargs):
        return False
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None and positions is None:
        return False  # transformers drops a mask of ones, but then has made positions of it
    if mask is not None and (mask.shape != (1, length) or not bool(mask.all())):
        return False
    if positions is None:
        return True
    counted = torch.arange(length, device=positions.device)
    return positions.shape == (1, length) and torch.equal(positions[0], counted)


def prepare(model: Any, ids: Tensor) -> bool:
    """Make one more pass ready, for texts like one that was just written. To be called in one's turn, behind a request.

    ids      [1, n]: the text, on which the pass is compared with the model
    Returns  whether there was one to be made
    """
    decoding: Decoding = model.ktinject_decoding
    if decoding.group is not None or not decoding.graphs or not decoding.model_support():
        return False
    runner = decoding.runners.get(1)
    if runner is None:
        return False
    try:
        if runner.turns is None:
            runner.turns = _passes(model, decoding, runner)
        with torch.no_grad():
            found: bool = runner.turns.prepare(model, ids.to(runner.device))
        decoding.check()
        return found
    except (OperatorError, RuntimeError) as error:  # a request that has ended must not fail of it
        decoding.drain()
        decoding.release()
        logger.warning("next turns are not prepared for: %s", error)
        return False


def come_again(model: Any, ids: Tensor, before: int, tokens: int) -> None:
    """Be ready for more turns like one that transformers' prefill has read. To be called in its turn, behind it.

    ids     [1, n]: its whole text
    before  tokens that its cache held, and so many new ones
    """
    if len(ids) == 1 and before >= turn_pass.FEWEST_HELD and tokens <= turn_pass.SIZES[-1]:
        while prepare(model, ids):
            pass


def _passes(model: Any, decoding: Decoding, runner: GraphRunner) -> TurnPass:
    sizes = [size for size in turn_pass.SIZES if not batching.is_streamed(model, size)]
    passes = lent.retried(lambda: TurnPass(decoding.turn_forward(), runner, sizes), {runner.device})
    if passes.support:
        passes.support = continued.support(model)
    if passes.support:
        keys = runner.cache.layers[0][0]
        queries = {config.num_attention_heads for config in layer_configs(model.config)}
        passes.support = (
            Support.no("its layers have different numbers of heads")
            if len(queries) > 1
            else turn_pass.attention_support(
                keys.device, keys.dtype, keys.shape[3], keys.shape[1], queries.pop() // keys.shape[1]
            )
        )
    if not passes.support:
        logger.info("next turns are read one kernel at a time: %s", passes.support.reason)
    return passes


def between_requests(model: Any, ids: list[int]) -> bool:
    """As `prepare`, outside of a turn."""
    decoding: Decoding = model.ktinject_decoding
    with decoding.turn() as turn:
        return bool(turn) and prepare(model, torch.tensor([ids], dtype=torch.int64, device="cpu"))
