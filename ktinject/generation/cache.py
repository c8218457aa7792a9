"""The cache of recorded decode steps: tensors that stay where they are.

    eager prefill ──► its cache ──► `FixedCache.begin` copies it
                                    `FixedCache.bucket` is what a step sees: the first 256, 512, 1024 … positions

A captured graph holds addresses and sizes. So one `FixedCache` holds the longest request so far, rounded up to a power
of two, and a step sees the smallest bucket, a power of two again, that holds what there is. Attention over the empty
rest costs at most as much as over what is there, and nothing is captured again until a request needs a longer cache. On
the CPU, where no graph holds an address, the cache grows with the text. There, too, a layer with a sliding window keeps
no more tokens than its window shows, and one with linear attention its state in transformers' own cache layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from ktinject.generation.cuda.decode_ops import advance
from ktinject.generation.piecewise_graph import Stages
from ktinject.hf import compat
from ktinject.support import SUPPORTED, Support

_SMALLEST_BUCKET = 256


def bucket_of(tokens: int) -> int:
    """The size of the smallest bucket that holds so many tokens."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


@dataclass(frozen=True)
class LayerKind:
    """What a layer keeps of the tokens before.

    window    of how many at most a step sees keys and values, its own included; None: of all
    is_state  a state of fixed size, and no keys and values
    """

    window: int | None = None
    is_state: bool = False


ALL_TOKENS = LayerKind()


class BucketLayer(CacheLayerMixin):
    """A bucket of one layer's cache. Layers share the next token's position, where transformers' count each."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, cache_position: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.cache_position = keys, values, cache_position
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass  # it always is

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.cache_position, key_states)
        self.values.index_copy_(2, self.cache_position, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.cache_position  # a tensor, as transformers' static layers give

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class WindowLayer(BucketLayer):
    """The last tokens of a layer with a sliding window, on the CPU: a ring, where position p has place p % window.

    As long as it has fewer places than the window shows, it holds all tokens.
    """

    is_sliding = True

    def __init__(self, keys: Tensor, values: Tensor, cache_position: Tensor, window: int) -> None:
        super().__init__(keys, values, cache_position)
        self.sliding_window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        position = int(self.cache_position)
        place = position % self.sliding_window
        found = []
        for held, new in ((self.keys, key_states), (self.values, value_states)):
            held[:, :, place : place + 1] = new
            if position < self.sliding_window:
                found.append(held[:, :, : position + 1])
            else:
                found.append(torch.cat([held[:, :, place + 1 :], held[:, :, : place + 1]], dim=2))
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = int(self.cache_position) + 1
        length = min(seen, self.sliding_window)
        return length, seen - length

    def get_max_length(self) -> int:
        return self.sliding_window


class KVBucket(Cache):
    """What a step sees of a `FixedCache`.

    stages          how the step goes on where the next layers are on another GPU
    cache_position  [1] int64: of the next token
    """

    def __init__(self, layers: Sequence[CacheLayerMixin], cache_position: Tensor) -> None:
        super().__init__(layers=[*layers])
        self.stages: Stages | None = None
        self.cache_position = cache_position

    def transfer(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """As `Stages.transfer`. The next token's position goes along, for the layers on that GPU."""
        assert self.stages is not None
        if device == self.cache_position.device:
            return self.stages.transfer(tensors, device)
        *there, cache_position = self.stages.transfer([*tensors, self.cache_position], device)
        for layer in self.layers:
            if layer.keys.device == device:
                layer.cache_position = cache_position
        return there


class FixedCache:
    """Keys, values, mask and positions of the requests of one batch size, one after the other.

    layers          keys and values of each layer, [b, h, capacity, d]; of one with a window [b, h, up to window, d]; of
                    linear attention the last inputs of its convolution and its state
    kinds           of the layers
    capacity        tokens that there is room for
    mask            [b, 1, 1, capacity] bool: what the next step may attend to
    positions       [b, 1] int64: of the next tokens in their rows
    cache_position  [1] int64: of the next token in the cache
    """

    def __init__(
        self,
        like: Cache,
        capacity: int,
        batch: int,
        device: torch.device,
        kinds: Sequence[LayerKind] | None = None,
    ) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        like      a cache that a prefill left: the shapes of its keys and values are taken
        capacity  a bucket's size
        batch     rows, as many as `like` has or more
        device    of mask and positions; keys and values are where those of `like` are
        kinds     of the layers; None: those of `like`, where windows of static layers are cut to their length
        """
        self.capacity, self.device = capacity, device
        self.kinds = [*map(kind_of, like.layers)] if kinds is None else [*kinds]
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self.layers = [
                (_empty(first, batch, places), _empty(second, batch, places))
                for (first, second), places in zip(map(tensors_of, like.layers), self._places(capacity))
            ]
            self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.cache_position = torch.zeros(1, dtype=torch.int64, device=device)
            self.mask = torch.zeros(batch, 1, 1, capacity, dtype=torch.bool, device=device)
        self._used = 0  # tokens of this request
        self._written = 0  # tokens that keys and values hold, of this request or the one before
        self._buckets: dict[int, KVBucket] = {}

    @property
    def used(self) -> int:
        """Tokens of this request."""
        return self._used

    @property
    def devices(self) -> set[torch.device]:
        """Of the layers."""
        return {first.device for first, _ in self.layers}

    @property
    def state(self) -> list[Tensor]:
        """What a step changes, beside keys and values."""
        return [self.positions, self.cache_position, self.mask]

    def begin(self, cache: Cache, length: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Take over what a prefill left. Rows beyond those are copies of the first one.

        cache      its layers' keys and values, [b, h, n ≥ length, d]; of a layer with a window, of its last tokens
        length     tokens in it
        mask       [b, ≥ length], 0 or False for padding; None: there is none
        positions  [b or 1, 1] of the next token; None: `length`
        """
        for (keys, values), layer, kind in zip(self.layers, cache.layers, self.kinds):
            if kind != ALL_TOKENS:
                for to, held in zip((keys, values), tensors_of(layer)):
                    fill_rows(to, held) if kind.window is None else _fill_ring(to, held, length, kind.window)
                continue
            fill_rows(keys[:, :, :length], layer.keys[:, :, :length])
            fill_rows(values[:, :, :length], layer.values[:, :, :length])
            # What a failed request left is not finite, which a mask does not hide.
            keys[:, :, length : self._written].zero_()
            values[:, :, length : self._written].zero_()
        self._used = self._written = length
        self.mask.zero_()
        self.mask[:, 0, 0, : length + 1] = True
        if mask is not None:
            fill_rows(self.mask[:, 0, 0, :length], mask[:, :length] != 0)
        self.cache_position.fill_(length)
        if positions is None or len(positions) == 1:
            self.positions.copy_(self.cache_position if positions is None else positions)
        else:
            fill_rows(self.positions, positions)

    def reserve(self) -> int:
        """Make room for one more token; returns the size of the bucket that the next step needs."""
        self._used += 1
        on_cpu = self.device.type == "cpu"
        if on_cpu and self._used > self.capacity:
            self._grow()
        self._written = max(self._written, self._used)
        # A step on the CPU reads no empty position, so there one bucket is enough.
        return self.capacity if on_cpu else bucket_of(self._used)

    def bucket(self, size: int) -> KVBucket:
        if size not in self._buckets:
            layers = [
                cache_layer(kind, _first(held, size) if kind == ALL_TOKENS else held, self.cache_position)
                for kind, held in zip(self.kinds, self.layers)
            ]
            self._buckets[size] = KVBucket(layers, self.cache_position)
        return self._buckets[size]

    def _places(self, capacity: int) -> list[int | None]:
        """Of each layer, for so many tokens; None: it has none."""
        return [None if kind.is_state else min(capacity, kind.window or capacity) for kind in self.kinds]

    def advance(self) -> None:
        """What follows from a token more."""
        advance(self.cache_position, self.positions, self.mask)

    def _grow(self) -> None:
        """Double the capacity, layer by layer, so that only one layer is in memory twice."""
        capacity = 2 * self.capacity
        self._buckets.clear()
        with torch.inference_mode(False):
            for index, (tensors, places) in enumerate(zip(self.layers, self._places(capacity))):
                held = tensors[0].shape[2]
                if places in (None, held):
                    continue  # a state, or a ring that is as long as its window
                longer = [_empty(tensor, len(tensor), places) for tensor in tensors]
                for tensor, new in zip(tensors, longer):
                    new[:, :, :held].copy_(tensor)
                self.layers[index] = (longer[0], longer[1])
            mask = torch.zeros(*self.mask.shape[:-1], capacity, dtype=torch.bool, device=self.device)
            mask[..., : self.capacity] = self.mask
            # The last step found no room in the mask to allow this position.
            mask[..., self._used - 1] = True
        self.mask, self.capacity = mask, capacity


def _first(tensors: tuple[Tensor, Tensor], places: int) -> tuple[Tensor, Tensor]:
    keys, values = tensors
    return keys[:, :, :places], values[:, :, :places]


def fill_rows(to: Tensor, rows: Tensor) -> None:
    """Copy rows to the first ones of `to`, and the first of them to the others."""
    to[: len(rows)].copy_(rows)
    if len(rows) < len(to):
        to[len(rows) :].copy_(rows[:1].expand_as(to[len(rows) :]))


def _empty(like: Tensor, batch: int, capacity: int | None) -> Tensor:
    shape = [batch, *like.shape[1:]]
    if capacity is not None:
        shape[2] = capacity
    try:
        return torch.zeros(*shape, dtype=like.dtype, device=like.device)
    except RuntimeError as error:  # what the CPU says, or a size beyond 64 bits
        raise torch.OutOfMemoryError(f"a cache of {capacity} tokens: {error}") from None


def kind_of(layer: Any) -> LayerKind:
    """Of a layer of transformers' caches; a static one's window is cut to its length."""
    if isinstance(layer, StaticSlidingWindowLayer):
        return LayerKind(int(layer.get_max_length()))
    return LayerKind(getattr(layer, "sliding_window", None), isinstance(layer, compat.LinearAttentionLayer))


def kinds_of(config: PreTrainedConfig) -> list[LayerKind]:
    """Of a model's layers, as transformers makes caches for them."""
    return [*map(kind_of, DynamicCache(config=config).layers)]


def tensors_of(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache's layer, or the last inputs of its convolution and its state."""
    if isinstance(layer, compat.LinearAttentionLayer):
        return layer.conv_states[0], layer.recurrent_states[0]
    return layer.keys, layer.values


def rows_of(cache: Cache) -> int:
    return len(tensors_of(cache.layers[0])[0])


def cache_layer(kind: LayerKind, tensors: tuple[Tensor, Tensor], cache_position: Tensor) -> Any:
    """A layer of a `KVBucket`."""
    if kind.is_state:
        return _state_layer(*tensors)
    if kind.window is None:
        return BucketLayer(*tensors, cache_position)
    return WindowLayer(*tensors, cache_position, kind.window)


def _state_layer(conv_states: Tensor, recurrent_states: Tensor) -> Any:
    """transformers' own layer, which writes to its tensors where they lie."""
    layer = compat.LinearAttentionLayer()
    layer.dtype, layer.device = conv_states.dtype, conv_states.device
    layer.conv_states[0], layer.recurrent_states[0] = conv_states, recurrent_states
    layer.conv_kernel_size[0] = conv_states.shape[-1]
    layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
    layer.has_previous_state[0] = True
    return layer


def _fill_ring(ring: Tensor, held: Tensor, length: int, window: int) -> None:
    """held [b, h, n, d]: the last of so many tokens, in their order; a static layer has zeros behind them."""
    last = held[:, :, :length][:, :, -window:]
    places = torch.arange(length - last.shape[2], length, device=ring.device) % window
    ring[: len(last)].index_copy_(2, places, last)
    ring[len(last) :] = ring[:1]


def _kinds(cache: Any, device: torch.device) -> tuple[type, ...]:
    """What a cache may consist of: for graphs, and what the native decoder takes beside that."""
    kinds: dict[type, tuple[type, ...]] = {DynamicCache: (DynamicLayer,), StaticCache: (StaticLayer,)}
    if device.type == "cpu":
        kinds[DynamicCache] += (compat.DynamicSlidingWindowLayer, compat.LinearAttentionLayer)
        kinds[StaticCache] += (StaticSlidingWindowLayer, compat.LinearAttentionLayer)
    return kinds.get(type(cache), ())


def kind_support(cache: Any, device: torch.device) -> Support:
    """Whether a request's cache is of a kind that a `FixedCache` can take over, for a model on that device."""
    wanted = _kinds(cache, device)
    odd = {type(layer).__name__ for layer in cache.layers if type(layer) not in wanted}
    if not wanted or odd or cache.offloading:
        kinds = ", ".join(sorted(odd)) or "offloaded layers"
        return Support.no(f"the cache is a {type(cache).__name__} of {kinds}")
    if cache.layers and all(kind_of(layer).is_state for layer in cache.layers):
        return Support.no("no layer of the cache counts tokens")
    if any(getattr(layer, "number_of_states", 1) != 1 for layer in cache.layers):
        return Support.no("a layer of the cache has several states")
    return SUPPORTED


def length_support(cache: Any, prompt: Tensor, before: int) -> Support:
    """Whether a cache holds what a prefill of the prompt, [b, n], has to leave.

    before  tokens that it held; the prompt may begin with them, or go on after them
    """
    held = int(cache.get_seq_length()) if cache is not None else 0
    if held in (prompt.shape[1], before + prompt.shape[1]):
        return SUPPORTED
    return Support.no(f"the cache holds {held} tokens, the prompt {prompt.shape[1]}")


def give_back(cache: DynamicCache | StaticCache) -> None:
    """Free a cache that was copied; nobody else holds it."""
    for layer in cache.layers:
        if kind_of(layer).is_state:
            continue  # which is small
        layer.keys, layer.values = layer.keys[:, :, :0].clone(), layer.values[:, :, :0].clone()
