"""The layers of a step's cache: what they keep of the tokens before, in tensors that stay where they are.

A layer that shows all tokens has a place for each of them. One with a sliding window is a ring, where position p has
place p % window: attention does not depend on the order of rotated keys. One that keeps the prompt has it before such a
ring. Chunked attention has such a ring, too, of
which a step sees what belongs to its chunk. A layer with linear attention has states of fixed size, in transformers'
own cache layer, which writes to its tensors where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    PreTrainedConfig,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ktinject.hf import compat
from ktinject.hf.private import owner_of
from ktinject.support import SUPPORTED, Support


@dataclass(frozen=True)
class LayerKind:
    """What a layer keeps of the tokens before.

    window      of how many at most a step sees keys and values, its own included; None: of all
    is_state    states of fixed size, or nothing at all; and no keys and values
    indexed     beside keys and values, keys of an index by which attention chooses tokens; or room for them
    is_chunked  a row's tokens, less the padding before them, are cut into pieces of `window`, and a step sees its own
                piece up to itself
    is_pooled   tokens that follow each other share a key of the index, made anew in each step of what it keeps of them
    keeps_prompt
                beside its window, which is of the tokens behind the prompt, a step sees all of the prompt
    rate        beside its window, a step sees one compressed key for each so many tokens, see compressed.py; None: it
                sees none
    """

    window: int | None = None
    is_state: bool = False
    indexed: bool = False
    is_chunked: bool = False
    rate: int | None = None
    is_pooled: bool = False
    keeps_prompt: bool = False


ALL_TOKENS = LayerKind()


@dataclass(frozen=True)
class States:
    """Which states of fixed size a layer of transformers' caches has.

    made       its class
    number     of states that it may have; of each, the last inputs of a convolution and a recurrent state
    conv       indices of those whose inputs of a convolution there are
    recurrent  of those whose recurrent state there is
    previous   of those that a step goes on from
    """

    made: type
    number: int = 0
    conv: tuple[int, ...] = ()
    recurrent: tuple[int, ...] = ()
    previous: tuple[int, ...] = ()

    @classmethod
    def of(cls, layer: Any) -> States:
        if not isinstance(layer, compat.LinearAttentionLayer):
            return cls(type(layer))
        conv, recurrent = (
            tuple(index for index, tensor in states.items() if tensor is not None)
            for states in (layer.conv_states, layer.recurrent_states)
        )
        previous = tuple(index for index, has in layer.has_previous_state.items() if has)
        return cls(type(layer), layer.number_of_states, conv, recurrent, previous)

    def layer(self, tensors: tuple[Tensor, ...]) -> Any:
        """transformers' own layer, which writes to its tensors where they lie."""
        if not self.number:
            return self.made()
        layer = self.made(number_of_states=self.number)
        if tensors:
            layer.dtype, layer.device = tensors[0].dtype, tensors[0].device
        for index, tensor in zip(self.conv, tensors):
            layer.conv_states[index], layer.is_conv_states_initialized[index] = tensor, True
            layer.conv_kernel_size[index] = tensor.shape[-1]
        for index, tensor in zip(self.recurrent, tensors[len(self.conv) :]):
            layer.recurrent_states[index], layer.is_recurrent_states_initialized[index] = tensor, True
        layer.has_previous_state.update(dict.fromkeys(self.previous, True))
        return layer

    def keep_in_place(self, layer: Any, tensors: tuple[Tensor, ...]) -> None:
        """Copy states that a step has replaced, where it should have written to them, to where they were.

        Raises  RuntimeError if one has another shape now
        """
        named = [(layer.conv_states, index) for index in self.conv]
        named += [(layer.recurrent_states, index) for index in self.recurrent]
        for (held, index), tensor in zip(named, tensors):
            if held[index] is not tensor:
                tensor.copy_(held[index])
                held[index] = tensor


class BucketLayer(CacheLayerMixin):
    """A bucket of one layer's cache. Layers share the next token's place, where transformers' count each.

    place   [1] int64: where the next token's keys and values are written
    window  as `LayerKind` has it
    """

    is_compileable = True

    def __init__(
        self, keys: Tensor, values: Tensor, cache_position: Tensor, place: Tensor, window: int | None = None
    ) -> None:
        super().__init__()
        self.keys, self.values, self.window = keys, values, window
        self.cache_position, self.place = cache_position, place
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # it always is

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.cache_position  # a tensor, as transformers' static layers give

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class ConsecutiveLayer(BucketLayer):
    """The same for a step whose rows are tokens of one text: all rows share the one row of keys and values.

    keys, values  [rows, h, n, d], of which all rows are one in memory
    place         [rows] int64, one after the other: where their keys and values are written
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        cache_position: Tensor,
        place: Tensor,
        rows: int,
        window: int | None = None,
    ) -> None:
        keys, values = (tensor.expand(rows, -1, -1, -1) for tensor in (keys, values))
        super().__init__(keys, values, cache_position, place, window)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[:1].index_copy_(2, self.place, new.transpose(0, 2))
        return self.keys, self.values


class IndexedBucketLayer(BucketLayer):
    """The same of a layer with an index: indexer_keys [b, n, d], or of one that chooses blocks idx_keys [b, 1, n, d];
    None: the layer goes by another one's choice.
    """

    def __init__(
        self, tensors: Sequence[Tensor], cache_position: Tensor, place: Tensor, window: int | None = None
    ) -> None:
        super().__init__(tensors[0], tensors[1], cache_position, place, window)
        self.idx_keys = tensors[2] if len(tensors) > 2 else None
        self.indexer_keys = None if self.idx_keys is None else self.idx_keys[:, 0]
        self.is_indexer_initialized = self.indexer_keys is not None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        assert self.indexer_keys is not None
        self.indexer_keys.index_copy_(1, self.place, indexer_key_states)
        return self.indexer_keys

    def update_index(self, idx_k: Tensor) -> Tensor:
        assert self.idx_keys is not None
        self.idx_keys.index_copy_(2, self.place, idx_k)
        return self.idx_keys


class PooledBucketLayer(IndexedBucketLayer):
    """The same of an index whose tokens share keys. It asks how many tokens there are when it has kept the new one."""

    def get_seq_length(self) -> Any:
        return self.cache_position + 1


def kind_of(layer: Any) -> LayerKind:
    """Of a layer of transformers' caches; a static one's window is cut to its length.

    Such a layer does not know whether its attention is chunked; `kinds_of` does.
    """
    if isinstance(layer, StaticSlidingWindowLayer):
        return LayerKind(int(layer.get_max_length()))
    is_state = not isinstance(layer, CacheLayerMixin)
    indexed = hasattr(layer, "update_indexer") or hasattr(layer, "update_index")
    rate = layer.compress_rate if is_compressed(layer) else None
    window = getattr(layer, "sliding_window", None)
    return LayerKind(window, is_state, indexed, rate=rate, keeps_prompt=keeps_prompt(layer))


def is_compressed(layer: Any) -> bool:
    """Whether a cache's layer is of a class of transformers' with compressed keys."""
    return owner_of(type(layer)) in compat.COMPRESSED_CACHES


def keeps_prompt(layer: Any) -> bool:
    """Whether a cache's layer is of a class of transformers' that keeps the prompt beside a window."""
    return owner_of(type(layer)) in compat.PROMPT_CACHES


def prompt_of(cache: Any) -> int:
    """Tokens of the prompt that layers of a cache keep beside their windows; 0: none does."""
    return max((layer.prefill_cumulative_length for layer in cache.layers if keeps_prompt(layer)), default=0)


def kinds_of(config: PreTrainedConfig) -> list[LayerKind]:
    """Of a model's layers, as transformers makes caches for them."""
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None)
    if types is None and getattr(text, "sliding_window", None) is None:
        types = ["chunked_attention"] * text.num_hidden_layers  # those of its layers that have a window
    kinds = [*map(kind_of, DynamicCache(config=config).layers)]
    for index, name in enumerate((types or ())[: len(kinds)]):
        if name == "chunked_attention" and kinds[index].window is not None:
            kinds[index] = replace(kinds[index], is_chunked=True)
    if getattr(text, "index_kpool", None) is not None:
        kinds = [replace(kind, is_pooled=kind.indexed) for kind in kinds]
    return kinds


def has_latents(text: PreTrainedConfig) -> bool:
    """Whether layers of a language part with this config cache latents in place of keys and values."""
    # A config whose layers have other ranks gives none of its own as an attribute.
    return vars(text).get("kv_lora_rank") is not None


def tensors_of(layer: Any) -> tuple[Tensor, ...]:
    """Keys and values of a cache's layer, and its index [b, 1, n, d] if it has one; or the last inputs of its
    convolutions, and its recurrent states. Of one with compressed keys, the keys of its window, which are its values.
    Of one that keeps the prompt, that and the latest tokens behind it, in their order.
    """
    if keeps_prompt(layer):
        kept = layer.prefill_keys, layer.prefill_values
        if layer.cumulative_length == 0:
            return kept
        latest = layer.keys, layer.values
        return tuple(torch.cat(both, dim=2) for both in zip(kept, latest))
    if kind_of(layer).is_state:
        states = States.of(layer)
        conv = (layer.conv_states[index] for index in states.conv)
        return (*conv, *(layer.recurrent_states[index] for index in states.recurrent))
    if is_compressed(layer):
        return (layer.keys,)
    index = index_of(layer)
    return (layer.keys, layer.values) if index is None else (layer.keys, layer.values, index)


def index_of(layer: Any) -> Tensor | None:
    """The keys of a layer's index, [b, 1, n, d], if it has one."""
    index = getattr(layer, "indexer_keys", None)
    return getattr(layer, "idx_keys", None) if index is None else index[:, None]


def set_index(layer: Any, index: Tensor | None) -> None:
    """Give such keys to a layer of transformers' caches that may have some; None: it holds none."""
    if hasattr(layer, "idx_keys"):
        layer.idx_keys = index
    elif hasattr(layer, "indexer_keys"):
        layer.indexer_keys, layer.is_indexer_initialized = (
            None if index is None else index[:, 0],
            index is not None,
        )


def _is_known(cache: Any, layer: Any) -> bool:
    """Whether a cache may have such a layer."""
    kinds: dict[type, tuple[type, ...]] = {
        DynamicCache: (DynamicLayer, compat.DynamicSlidingWindowLayer, compat.LinearAttentionLayer),
        StaticCache: (StaticLayer, StaticSlidingWindowLayer, compat.LinearAttentionLayer),
    }
    kind = type(layer)
    keeps_nothing = (
        kind.__module__ == Cache.__module__ and kind_of(layer).is_state and States.of(layer).number == 0
    )
    chooses_blocks = owner_of(type(layer)) in compat.BLOCK_CACHES and bool(compat.support("blocks"))
    is_indexed = kind_of(layer) == LayerKind(indexed=True) and (
        kind.__module__ == Cache.__module__ or chooses_blocks
    )
    is_ours = is_compressed(layer) and type(cache) is DynamicCache and compat.support("compressed")
    return kind in kinds.get(type(cache), ()) or keeps_nothing or is_indexed or bool(is_ours)


def _keeps_both(layer: Any) -> bool:
    """Whether a cache's layer has states of fixed size beside keys and values, as ZAYA1's have."""
    return isinstance(layer, compat.LinearAttentionLayer) and isinstance(layer, CacheLayerMixin)


def kind_support(cache: Any) -> Support:
    """Whether a request's cache is of a kind that a `FixedCache` can take over."""
    both = {type(layer).__name__ for layer in cache.layers if _keeps_both(layer)}
    if both:
        return Support.no(
            f"its layers keep keys and states at once ({', '.join(sorted(both))}), "
            "for which no cache of fixed size is made here"
        )
    odd = {type(layer).__name__ for layer in cache.layers if not _is_known(cache, layer)}
    if type(cache) not in (DynamicCache, StaticCache) or odd or cache.offloading:
        kinds = ", ".join(sorted(odd)) or "offloaded layers"
        return Support.no(f"the cache is a {type(cache).__name__} of {kinds}")
    if cache.layers and all(kind_of(layer).is_state for layer in cache.layers):
        return Support.no("no layer of the cache counts tokens")
    return SUPPORTED


def fill_rows(to: Tensor, rows: Tensor) -> None:
    """Copy rows to the first ones of `to`, and the first of them to the others."""
    to[: len(rows)].copy_(rows)
    if len(rows) < len(to):
        to[len(rows) :].copy_(rows[:1].expand_as(to[len(rows) :]))


def empty(like: Tensor, batch: int, places: int | None, dim: int = 2) -> Tensor:
    """Zeros for so many rows, of the shape of a tensor but for its places along a dimension; None: it keeps these.

    Raises  torch.OutOfMemoryError
    """
    shape = [batch, *like.shape[1:]]
    if places is not None:
        shape[dim] = places
    try:
        return torch.zeros(*shape, dtype=like.dtype, device=like.device)
    except RuntimeError as error:  # what the CPU says, or a size beyond 64 bits
        raise torch.OutOfMemoryError(f"a cache of {places} tokens: {error}") from None
