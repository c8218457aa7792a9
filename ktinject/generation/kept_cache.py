"""A cache that outlives its request: the caller's own (`cache`, or `past_key_values`), or one that is returned.

    the caller's DynamicCache ──► prefill of the new tokens ──► copied into a `FixedCache`, on which recorded steps run
                               ▲                                └─ the request ends: `hand_back` copies all its tokens
                               └─ the request raises: `restored` leaves the tokens that it held before

So it is never seen with a part of an answer, nor with layers of different lengths. Both take attributes of its layers
anew, as transformers' own update does, and never write into a tensor that somebody may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation import compressed
from ktinject.generation.cache import FixedCache
from ktinject.generation.cache_layers import (
    ALL_TOKENS,
    index_of,
    is_compressed,
    kind_of,
    kind_support,
    set_index,
    tensors_of,
)
from ktinject.hf import compat
from ktinject.support import SUPPORTED, Support


def is_callers(cache: Any) -> bool:
    """Whether the caller of `generate` passed it."""
    return getattr(cache, "_is_user_defined", False)


def callers_support(model: PreTrainedModel, cache: Any) -> Support:
    """Whether recorded steps can take over a cache of the caller's, and hand it back."""
    if type(cache) is not DynamicCache:
        return Support.no(f"the cache is the caller's own ({compat.CACHE}), a {type(cache).__name__}")
    if not (kind := kind_support(cache)):
        return kind
    own = DynamicCache(config=model.config.get_text_config(decoder=True))
    if not kind_support(own):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in own.layers}))
        return Support.no(f"the model's caches are of {kinds}")
    if cache.layers and len(cache.layers) != len(own.layers):
        return Support.no(f"the caller's cache has {len(cache.layers)} layers, the model's {len(own.layers)}")
    wanted = [*map(kind_of, own.layers)]
    # One that was made without a config has no layers yet, and they will know nothing of windows or states.
    if ([*map(kind_of, cache.layers)] or [ALL_TOKENS] * len(wanted)) != wanted:
        return Support.no(
            "the caller's cache has other sliding windows or states than the model: make it by "
            "DynamicCache(config=model.config)"
        )
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        return Support.no("the caller's cache keeps what its windows and states have passed")
    attends = [layer for layer, kind in zip(cache.layers, wanted) if not kind.is_state]
    other = {layer.keys.dtype for layer in attends if layer.get_seq_length()} - {model.dtype}
    if other:
        return Support.no(f"the caller's cache holds {other.pop()}, the model computes in {model.dtype}")
    return SUPPORTED


class _StatesBefore:
    """A layer of a cache with states of fixed size, which are written where they lie: copies of them."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._values = {
            name: {key: _copied(part) for key, part in value.items()} if isinstance(value, dict) else value
            for name, value in vars(layer).items()
        }

    def restore(self) -> None:
        vars(self._layer).update(self._values)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class _Before:
    """A layer of a cache as it is.

    tensors  its keys and values; None where they are `length` tokens with which those of the next steps begin
    others   name → what else it has that a step replaces
    """

    layer: Any
    length: int
    tensors: tuple[Tensor | None, Tensor | None] | None
    others: dict[str, Any]

    @classmethod
    def of(cls, layer: Any) -> _Before:
        length = layer.get_seq_length()
        is_growing = length > 0 and kind_of(layer).window is None
        others = compressed.undo_of(layer) if is_compressed(layer) else {}
        return cls(layer, length, None if is_growing else (layer.keys, layer.values), others)

    def restore(self) -> None:
        layer = self.layer
        vars(layer).update(self.others)
        if self.tensors is None:
            layer.keys, layer.values = layer.keys[:, :, : self.length], layer.values[:, :, : self.length]
            if (index := index_of(layer)) is not None:
                set_index(layer, index[:, :, : self.length])
            return
        set_index(layer, None)  # it held nothing
        layer.keys, layer.values = self.tensors
        layer.is_initialized = self.tensors[0] is not None
        if kind_of(layer).window is not None:
            layer.cumulative_length = self.length


def undo_of(cache: DynamicCache) -> Callable[[], None]:
    """What leaves a cache with the tokens that it holds now, whatever a pass that fails has added."""
    before = [
        _StatesBefore(layer) if kind_of(layer).is_state else _Before.of(layer) for layer in cache.layers
    ]

    def undo() -> None:
        del cache.layers[len(before) :]
        for layer in before:
            layer.restore()

    return undo


@contextmanager
def restored(cache: Any) -> Iterator[None]:
    """Within, whatever is raised leaves a caller's cache with the tokens that it held before.

    A cache of another kind than recorded steps take is left to transformers.
    """
    if not (is_callers(cache) and type(cache) is DynamicCache and kind_support(cache)):
        yield
        return
    undo = undo_of(cache)
    try:
        yield
    except BaseException:
        undo()
        raise


def hand_back(cache: DynamicCache, fixed: FixedCache, length: int) -> None:
    """Give a prefill's cache the keys and values that recorded steps left: tensors of its own, as transformers has.

    cache   of the batch's rows, whose order is that of the first rows of `fixed`
    length  tokens; what `fixed` holds after them is of a step whose token was thrown away
    """
    for layer, tensors, kept, kind in zip(cache.layers, fixed.layers, fixed.compressed, fixed.kinds):
        window = kind.window
        if kind.is_state:  # in a request of which no step is thrown away
            for to, held in zip(tensors_of(layer), tensors):
                to.copy_(held[: len(to)])
            continue
        if window is None:
            layer.keys, layer.values, *index = (_copy(tensor, len(layer.keys), length) for tensor in tensors)
            if index:
                set_index(layer, index[0])
            continue
        # Of a window, the next token sees one less of those before it. They lie in a ring.
        seen = torch.arange(max(0, length - window + 1), length, device=tensors[0].device) % window
        if kept is not None:
            kept.hand_back(layer, len(layer.keys), length)
        of_window = [tensor[: len(layer.keys)].index_select(2, seen) for tensor in tensors]
        layer.keys, layer.values = of_window[0], of_window[-1]
        layer.cumulative_length = length


def _copy(tensor: Tensor, rows: int, length: int) -> Tensor:
    return tensor[:rows, :, :length].clone(memory_format=torch.contiguous_format)
