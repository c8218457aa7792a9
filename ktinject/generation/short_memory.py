"""A pass that finds no room on a GPU is made once more, with what experts give back (operators/offload/lent.py).

    model(...) ──► out of memory ──► the cache as it was before ──► experts give back ──► model(...)

So memory that `gpu_experts: auto` took because it was free is not missed by whoever needs it later: a prompt, a batch
or a text that is longer than the plan left room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ktinject.generation import kept_cache
from ktinject.generation.cache_layers import kind_of, kind_support
from ktinject.model_class import Methods, put_before
from ktinject.operators.offload import lent

# Tokens of a pass from which on copies of states of fixed size cost nothing beside it.
_LONG = 64


def install(model: PreTrainedModel) -> None:
    """Let passes of a swapped model that stands on GPUs be made again."""
    if any(device != "cpu" for device in model.ktinject.bytes):
        put_before(model, _Again)


class _Again(Methods):
    """The method that differs from the model's own class."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        run: Any = super()
        if torch.compiler.is_compiling():
            return run.__call__(*args, **kwargs)
        devices = {torch.device(device) for device in self.ktinject.to_load}
        if not lent.is_lent(devices) or lent.is_capturing():
            return run.__call__(*args, **kwargs)
        undo = _undo(args, kwargs)
        try:
            return run.__call__(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not lent.give_back(devices):
                raise
            if undo is None:
                error.add_note("ktinject: experts have given back their memory; another try has more room.")
                raise
        undo()  # here, where nothing of the failed pass is left
        return run.__call__(*args, **kwargs)


def _undo(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], None] | None:
    """What makes the cache of a pass what it is now; None if nobody can."""
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    if not caches:
        return lambda: None
    cache = caches[0]
    if len(caches) > 1 or type(cache) is not DynamicCache or not kind_support(cache):
        return None
    if any(kind_of(layer).is_state for layer in cache.layers):
        given = next(
            (kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None
        )
        if given is None or given.shape[1] < _LONG:
            return None
    return kept_cache.undo_of(cache)
