"""A cache that outlives its request: the caller's own (`past_key_values`), or one that is returned.

    the caller's DynamicCache ──► prefill of the new tokens ──► copied into a `FixedCache`, on which recorded steps run
                               ▲                                └─ the request ends: `hand_back` copies all its tokens
                               └─ the request raises: `restored` leaves the tokens that it held before

So it is never seen with a part of an answer, nor with layers of different lengths. Both take attributes of its layers
anew, as transformers' own update does, and never write into a tensor that somebody may hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation.cache import FixedCache, kind_support
from ktinject.support import SUPPORTED, Support


def is_callers(cache: Any) -> bool:
    """Whether the caller of `generate` passed it."""
    return getattr(cache, "_is_user_defined", False)


def callers_support(model: PreTrainedModel, cache: Any) -> Support:
    """Whether recorded steps can take over a cache of the caller's, and hand it back."""
    if type(cache) is not DynamicCache:
        return Support.no(f"the cache is the caller's own (past_key_values), a {type(cache).__name__}")
    if not (kind := kind_support(cache)):
        return kind
    # One that was made without a config has no layers yet, or ones that know nothing of windows.
    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not kind_support(own):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in own.layers}))
        return Support.no(f"the model's caches are of {kinds}")
    if cache.layers and len(cache.layers) != len(own.layers):
        return Support.no(f"the caller's cache has {len(cache.layers)} layers, the model's {len(own.layers)}")
    other = {layer.keys.dtype for layer in cache.layers if layer.get_seq_length()} - {model.dtype}
    if other:
        return Support.no(f"the caller's cache holds {other.pop()}, the model computes in {model.dtype}")
    return SUPPORTED


@contextmanager
def restored(cache: Any) -> Iterator[None]:
    """Within, whatever is raised leaves a caller's cache with the tokens that it held before.

    A cache of another kind is left to transformers.
    """
    if not is_callers(cache) or type(cache) is not DynamicCache or not kind_support(cache):
        yield
        return
    before = []
    for layer in cache.layers:
        length = layer.get_seq_length()
        # The tensors themselves only where they are empty: a prefill's begin with the same tokens.
        before.append((layer, length, *((None, None) if length else (layer.keys, layer.values))))
    try:
        yield
    except BaseException:
        del cache.layers[len(before) :]
        for layer, length, keys, values in before:
            if length:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            else:
                layer.keys, layer.values, layer.is_initialized = keys, values, keys is not None
        raise


def hand_back(cache: DynamicCache, fixed: FixedCache, length: int) -> None:
    """Give a prefill's cache the keys and values that recorded steps left: tensors of its own, as transformers has.

    cache   of the batch's rows, whose order is that of the first rows of `fixed`
    length  tokens; what `fixed` holds after them is of a step whose token was thrown away
    """
    for layer, tensors in zip(cache.layers, fixed.layers):
        layer.keys, layer.values = (_beginning(tensor, len(layer.keys), length) for tensor in tensors)


def _beginning(tensor: Tensor, rows: int, length: int) -> Tensor:
    return tensor[:rows, :, :length].clone(memory_format=torch.contiguous_format)
