"""Beam search in transformers' own loop, whose decode steps are recorded ones.

    _beam_search ──► _prefill ──────► the model; its cache has a row for each beam
                 ──► self(**inputs) ► `Caller`, a replay on the runner's `FixedCache`
                 ──► cache.reorder_cache(rows) ► `BeamCache`, which moves rows of that cache where they lie

The loop calls what is here in place of the model; everything else that it asks the model for is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ktinject.generation import cache as caches
from ktinject.generation import kept_cache
from ktinject.generation.decoding import Decoding
from ktinject.generation.steps import StockReplay
from ktinject.hf import compat
from ktinject.model_class import own_class
from ktinject.support import SUPPORTED, Support

NAME = "beam search"


def support(config: GenerationConfig, synced_gpus: bool) -> Support:
    """Whether recorded steps can stand for the forward passes of a beam search."""
    if synced_gpus:
        return Support.no("synced_gpus")
    if config.output_attentions or config.output_hidden_states:
        return Support.no(
            "attentions or hidden states are asked for (output_attentions, output_hidden_states)"
        )
    return SUPPORTED


class BeamCache:
    """What the loop holds of a runner's cache: how many tokens there are, and who goes on from whom."""

    def __init__(self, replay: BeamReplay) -> None:
        self._replay = replay

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._replay.tokens

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._replay.reorder(beam_idx)


class BeamReplay(StockReplay):
    """The forward pass of one request."""

    def __init__(self, model: Any, max_length: int, prompt: int) -> None:
        super().__init__(model, max_length, prompt)
        self._view = BeamCache(self)
        self._open = ExitStack()

    def prefill(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own; its logits have the shape that steps have."""
        outputs = self._model._prefill(*args, **kwargs)
        self._shape = outputs.logits[:, -1]
        return outputs

    def __call__(self, **inputs: Any) -> Any:
        is_first = self._shape is not None
        if is_first:
            self._open.enter_context(self._model._optimize_model_for_decode())
        outputs = super().__call__(**inputs)
        if self._runner is None:
            return outputs
        if is_first and not kept_cache.is_callers(self._cache):
            caches.give_back(self._cache)
        setattr(outputs, compat.CACHE, self._view)
        return outputs

    def reorder(self, beam_idx: Tensor) -> None:
        assert self._runner is not None
        self._runner.reorder(beam_idx)

    def finish(self, found: Any, config: GenerationConfig) -> None:
        """Give the loop's result the cache that transformers gives it."""
        if self._runner is None:
            return
        if config.return_dict_in_generate:
            setattr(found, compat.CACHE, self._cache)
        if config.return_dict_in_generate or kept_cache.is_callers(self._cache):
            self.hand_back()

    def close(self) -> None:
        self._open.close()


class Caller:
    """A model with another forward pass, for transformers' loops."""

    def __init__(self, model: Any, forward: BeamReplay) -> None:
        self._model, self._forward = model, forward
        self._prefill: Callable[..., Any] = forward.prefill

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._forward(**inputs)


def run(model: Any, input_ids: Tensor, arguments: dict[str, Any]) -> tuple[Any, Support]:
    """A beam search whose steps are recorded ones.

    arguments  of transformers' `_beam_search`, beside the ids [b * beams, n]
    Returns    what that returns, and whether all steps were recorded ones
    """
    decoding: Decoding = model.ktinject_decoding
    config = arguments["generation_config"]
    replay = BeamReplay(model, config.max_length, input_ids.shape[1])
    try:
        found = own_class(model)._beam_search(Caller(model, replay), input_ids, **arguments)
    finally:
        replay.close()
    if decoding.group is None:
        decoding.check()
    replay.finish(found, config)
    return found, replay.support
