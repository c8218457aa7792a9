"""The cache of recorded decode steps: tensors that stay where they are.

    eager prefill ──► its cache ──► `FixedCache.begin` copies it
                                    `FixedCache.bucket` is what a step sees: the first 256, 512, 1024 … positions

A captured graph holds addresses and sizes. So one `FixedCache` holds the longest request so far, rounded up to a power
of two, and a step sees the smallest bucket, a power of two again, that holds what there is. Attention over the empty
rest costs at most as much as over what is there, and nothing is captured again until a request needs a longer cache. On
the CPU, where no graph holds an address, the cache grows with the text. What else a layer may keep than all tokens,
cache_layers.py says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from ktinject import _native
from ktinject.generation import compressed
from ktinject.generation.cache_layers import (
    BucketLayer,
    IndexedBucketLayer,
    LayerKind,
    PooledBucketLayer,
    States,
    empty,
    fill_rows,
    is_compressed,
    keeps_prompt,
    kind_of,
    prompt_of,
    tensors_of,
)
from ktinject.generation.compressed import Compressed, CompressedLayer
from ktinject.generation.cuda.decode_ops import advance
from ktinject.generation.piecewise_graph import Stages
from ktinject.support import Support

_SMALLEST_BUCKET = 256


def bucket_of(tokens: int) -> int:
    """The size of the smallest bucket that holds so many tokens."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


class KVBucket(Cache):
    """What a step sees of a `FixedCache`.

    stages          how the step goes on where the next layers are on another GPU
    cache_position  [1] int64: of the next token
    places          window → [1] int64: the next token's place in rings for that window
    masks           window, or None → [b, 1, 1, n] bool: what the step may attend to, in the order of its places
    past            of a step of several tokens of one text, what notes the states between them; else None
    asks_hidden     a step is to leave in `hidden` what its logits are made of, [n, 1, hidden]
    logits          [b, v] fp32: where a forward may leave those that it returns; None: it makes them
    is_compared     the step's parts are compared with the model's, also in what nobody sees yet
    prompt          tokens that layers which keep the prompt have before their rings
    """

    def __init__(
        self,
        layers: Sequence[Any],
        cache_position: Tensor,
        places: Mapping[int, Tensor],
        masks: Mapping[int | None, Tensor],
        states: Sequence[tuple[States, tuple[Tensor, ...]] | None],
    ) -> None:
        """states  of each layer: which it has, and where; None: it has keys and values"""
        Cache.__init__(self, layers=[*layers])  # a class that a model takes for its own may lie between
        self.stages: Stages | None = None
        self.past: Any = None
        self.asks_hidden = self.is_compared = False
        self.prompt = 0
        self.hidden: Any = None
        self.logits: Tensor | None = None
        self.cache_position, self.places, self.masks = cache_position, places, masks
        self._states = states
        self._fixed = [(at, *found) for at, found in enumerate(states) if found is not None]

    def states_of(self, index: int) -> tuple[Tensor, ...]:
        """The states of fixed size of a layer, or what a step writes of its compressed keys: what a step that is
        repeated must find as it was.
        """
        layer, found = self.layers[index], self._states[index]
        if isinstance(layer, CompressedLayer):
            return layer.written
        return () if found is None else found[1]

    def keep_in_place(self, index: int | None = None) -> None:
        """Have the states of a layer, or of all, where they were before. Raises RuntimeError for another shape."""
        for at, states, tensors in self._fixed:
            if index in (None, at):
                states.keep_in_place(self.layers[at], tensors)

    def transfer(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """As `Stages.transfer`. The next token's position and places go along, for the layers on that GPU."""
        assert self.stages is not None
        if device == self.cache_position.device:
            return self.stages.transfer(tensors, device)
        there = self.stages.transfer([*tensors, self.cache_position, *self.places.values()], device)
        position, *places = there[len(tensors) :]
        for layer in self.layers:
            if isinstance(layer, BucketLayer) and layer.keys.device == device:
                layer.cache_position = layer.place = position
                if layer.window is not None:
                    layer.place = dict(zip(self.places, places))[layer.window]
        return there[: len(tensors)]


class FixedCache:
    """Keys, values, states, masks and positions of the requests of one batch size, one after the other.

    layers          of each layer, keys and values [b, h, capacity, d]; with a window, rings [b, h, up to window, d];
                    or its states of fixed size, as `cache_layers.tensors_of` has them
    compressed      of each layer, its compressed keys; None: it has none
    kinds           of the layers
    capacity        tokens that there is room for
    mask            [b, 1, 1, capacity] bool: what the next step may attend to
    rings           window → [b, 1, 1, up to window] bool: the same of rings for that window, or such chunks
    first           [b] int64: of the first token of a row that is not padding
    positions       [b, 1] int64: of the next tokens in their rows
    cache_position  [1] int64: of the next token in the cache
    places          window → [1] int64: its place in rings for that window
    room            places behind each ring, for the tokens of a step that may be taken back
    prompt          tokens of this request's prompt, which lie before the rings of a model whose layers keep it; else 0.
                    `rings` and `places` are of both then
    """

    def __init__(
        self,
        like: Cache,
        capacity: int,
        batch: int,
        device: torch.device,
        kinds: Sequence[LayerKind] | None = None,
        room: int = 0,
    ) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        like      a cache that a prefill left: the shapes of its keys, values and states are taken
        capacity  a bucket's size
        batch     rows, as many as `like` has or more
        device    of mask and positions; keys and values are where those of `like` are
        kinds     of the layers; None: those of `like`, where windows of static layers are cut to their length
        room      as above
        """
        self.capacity, self.device, self.room = capacity, device, room
        self._bucket_class: type[KVBucket] = getattr(like, "bucket_class", KVBucket)
        self.kinds = [*map(kind_of, like.layers)] if kinds is None else [*kinds]
        self._states = [
            States.of(layer) if kind.is_state else None for layer, kind in zip(like.layers, self.kinds)
        ]
        windows = sorted({kind.window for kind in self.kinds if kind.window is not None})
        # Tokens of the longest prompt that there is room for before rings.
        self.prompt = self._longest_prompt = prompt_of(like)
        self._chunks = {kind.window for kind in self.kinds if kind.is_chunked}
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self._whole = [
                tuple(empty(tensor, batch, self._places_of(kind)) for tensor in tensors_of(layer))
                for layer, kind in zip(like.layers, self.kinds)
            ]
            self.layers = [*map(self._without_room, self._whole, self.kinds)]
            self.compressed = [
                None if kind.rate is None else Compressed(layer, batch, capacity)
                for layer, kind in zip(like.layers, self.kinds)
            ]
            self.positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.cache_position = torch.zeros(1, dtype=torch.int64, device=device)
            self.places = {window: torch.zeros_like(self.cache_position) for window in windows}
            self.mask = torch.zeros(batch, 1, 1, capacity, dtype=torch.bool, device=device)
            self.rings = {window: self.mask[..., : self._ring_of(window)].clone() for window in windows}
            self.first = torch.zeros(batch, dtype=torch.int64, device=device)
        self._used = 0  # tokens of this request
        self._written = 0  # tokens that keys and values hold, of this request or the one before
        self._buckets: dict[int, KVBucket] = {}
        # On the CPU, where a small tensor operation behind weights that emptied the caches takes 20 to 80 µs.
        self._next: Any = None

    @property
    def used(self) -> int:
        """Tokens of this request."""
        return self._used

    @property
    def devices(self) -> set[torch.device]:
        """Of the layers."""
        return {tensor.device for held in self.layers for tensor in held}

    @property
    def has_states(self) -> bool:
        """Whether some layer has states of fixed size, which cannot be taken back."""
        return any(kind.is_state and held for kind, held in zip(self.kinds, self.layers)) or any(
            held is not None and held.states for held in self.compressed
        )

    def takes(self, cache: Cache, tokens: int) -> bool:
        """Whether there is room for so many tokens of a cache that a prefill left, and its tensors are alike."""
        return (
            self.capacity >= tokens
            and self._longest_prompt >= prompt_of(cache)
            and all(
                [_form(tensor, kind) for tensor in held]
                == [_form(tensor, kind) for tensor in tensors_of(layer)]
                and (kept is None or kept.takes(layer))
                for held, kept, layer, kind in zip(self.layers, self.compressed, cache.layers, self.kinds)
            )
        )

    @property
    def state(self) -> list[Tensor]:
        """What a step changes, beside keys and values, which it writes anew if it is repeated."""
        states = [tensor for kind, held in zip(self.kinds, self.layers) if kind.is_state for tensor in held]
        states += [tensor for held in self.compressed if held is not None for tensor in held.states]
        return [
            self.positions,
            self.cache_position,
            self.mask,
            *self.places.values(),
            *self.rings.values(),
            *states,
        ]

    def begin(self, cache: Cache, length: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Take over what a prefill left. Rows beyond those are copies of the first one.

        cache      its layers' keys and values, [b, h, n ≥ length, d]; of a layer with a window, of its last tokens
        length     tokens in it
        mask       [b, ≥ length], 0 or False for padding; None: there is none
        positions  [b or 1, 1] of the next token; None: `length`
        """
        self.prompt = prompt_of(cache)
        for bucket in self._buckets.values():
            bucket.prompt = self.prompt
        for tensors, layer, kind in zip(self.layers, cache.layers, self.kinds):
            for to, held in zip(tensors, tensors_of(layer)):
                if kind.is_state:
                    fill_rows(to, held)
                elif kind.window is not None:
                    _fill_ring(to, held, length, kind.window, self.prompt)
                else:
                    fill_rows(to[:, :, :length], held[:, :, :length])
                    # What a failed request left is not finite, which a mask does not hide.
                    to[:, :, length : self._written].zero_()
        for layer, kept in zip(cache.layers, self.compressed):
            if kept is not None:
                kept.begin(layer, length, self._written)
        for whole, kind in zip(self._whole, self.kinds):
            if kind.window is not None and self.room:
                for tensor in whole:
                    tensor[:, :, -self.room :].zero_()
        self._used = self._written = length
        self.mask.zero_()
        self.mask[:, 0, 0, : length + 1] = True
        if mask is not None:
            fill_rows(self.mask[:, 0, 0, :length], mask[:, :length] != 0)
        self.cache_position.fill_(length)
        self.first.copy_(first_tokens(self.mask[:, 0, 0]))
        for window, ring in self.rings.items():
            before = self.prompt
            self.places[window].fill_(before + (length - before) % window)
            # The next token's own place is that of the first one that its window does not show.
            shown = torch.arange(
                max(before, length + 1 - window), min(length + 1, self.capacity), device=self.device
            )
            seen = self.mask.index_select(3, shown)
            if window in self._chunks:
                seen &= shown >= begin_of_chunk(length, self.first, window)[:, None, None, None]
            ring.zero_().index_copy_(3, before + (shown - before) % window, seen)
            ring[..., :before] = self.mask[..., :before]
        self._next = self._next_place()
        if positions is None or len(positions) == 1:
            self.positions.copy_(self.cache_position if positions is None else positions)
        else:
            fill_rows(self.positions, positions)

    def reserve(self, tokens: int = 1) -> int:
        """Make room for the tokens of the next step; returns the size of the bucket that it needs."""
        self._used += tokens
        on_cpu = self.device.type == "cpu"
        while on_cpu and self._used > self.capacity:
            self._grow()
        self._written = max(self._written, self._used)
        # A step on the CPU reads no empty position, so there one bucket is enough.
        return self.capacity if on_cpu else bucket_of(self._used)

    def give_back(self, tokens: int) -> None:
        """So many of those that there was made room for are none."""
        self._used -= tokens

    def bucket(self, size: int) -> KVBucket:
        if size not in self._buckets:
            layers = []
            for kind, held, kept, states in zip(self.kinds, self.layers, self.compressed, self._states):
                if states is not None:
                    layers.append(states.layer(held))
                    continue
                place = self.cache_position if kind.window is None else self.places[kind.window]
                tensors = [tensor[:, :, :size] for tensor in held]
                if kept is not None:
                    layers.append(kept.layer(tensors[0], self.cache_position, place, kind.window, size))
                elif kind.indexed:
                    made_as = PooledBucketLayer if kind.is_pooled else IndexedBucketLayer
                    layers.append(made_as(tensors, self.cache_position, place, kind.window))
                else:
                    keys, values = tensors
                    layers.append(BucketLayer(keys, values, self.cache_position, place, kind.window))
            masks: dict[int | None, Tensor] = {None: self.mask[..., :size]}
            masks.update((window, ring[..., :size]) for window, ring in self.rings.items())
            made = self._bucket_class
            self._buckets[size] = made(layers, self.cache_position, self.places, masks, self.held_states)
            self._buckets[size].prompt = self.prompt
        return self._buckets[size]

    @property
    def held_states(self) -> list[tuple[States, tuple[Tensor, ...]] | None]:
        """As a `KVBucket` takes them."""
        return [None if states is None else (states, held) for states, held in zip(self._states, self.layers)]

    def with_room(self, index: int) -> tuple[Tensor, ...]:
        """The rings of a layer, and behind them its room: [b, h, up to window + room, d]."""
        return self._whole[index]

    def advance(self) -> None:
        """What follows from a token more."""
        if self._next is not None:
            self._next.advance()
            return
        advance(self.cache_position, self.positions, self.mask)
        for window, ring in self.rings.items():
            place, size = self.places[window], ring.shape[-1]
            if self.prompt:
                torch.remainder(self.cache_position - self.prompt, window, out=place).add_(self.prompt)
            else:
                torch.remainder(self.cache_position, window, out=place)
            if window in self._chunks:
                begins = begin_of_chunk(self.cache_position, self.first, window)
                ring.logical_and_((begins != self.cache_position)[:, None, None, None])
            # A ring that is shorter than its window is full before the place is beyond its end.
            ring.index_fill_(3, place if size == window else place.clamp(max=size - 1), True)

    def advance_by(self, tokens: Tensor, order: Tensor) -> None:
        """What follows from so many tokens more of one row, as `advance` for each of them; the host may not know them.

        Not for layers with chunks, nor for those that keep the prompt.

        tokens  [1] int64
        order   [n] int64: 0, 1 … n - 1, for any number of tokens from 1 to n
        """
        places = torch.arange(self.capacity, device=self.device) - self.cache_position
        self.mask.logical_or_((places > 0) & (places <= tokens))
        written = self.cache_position + 1 + torch.minimum(order, tokens - 1)
        self.cache_position.add_(tokens)
        self.positions.add_(tokens)
        for window, ring in self.rings.items():
            torch.remainder(self.cache_position, window, out=self.places[window])
            ring.index_fill_(3, (written % window).clamp(max=ring.shape[-1] - 1), True)

    def _places_of(self, kind: LayerKind) -> int | None:
        """With the room; None: the layer has none."""
        if kind.is_state:
            return None
        return self.capacity if kind.window is None else self._ring_of(kind.window) + self.room

    def _ring_of(self, window: int) -> int:
        """Places of a ring, and of the prompt before it."""
        return min(self.capacity, self._longest_prompt + window)

    def _without_room(self, whole: tuple[Tensor, ...], kind: LayerKind) -> tuple[Tensor, ...]:
        """As `layers` has them."""
        if kind.window is None or not self.room:
            return whole
        return tuple(tensor[:, :, : -self.room] for tensor in whole)

    def _grow(self) -> None:
        """Double the capacity, layer by layer, so that only one layer is in memory twice."""
        self.capacity *= 2
        self._buckets.clear()
        last = self._used - 1  # for which the last step found no room in the mask
        with torch.inference_mode(False):
            for index, (whole, kind) in enumerate(zip(self._whole, self.kinds)):
                whole = tuple(self._longer(tensor, self._places_of(kind)) for tensor in whole)
                self._whole[index], self.layers[index] = whole, self._without_room(whole, kind)
                if (kept := self.compressed[index]) is not None:
                    kept.grow(self.capacity)
            self.mask = self._longer(self.mask.transpose(2, 3), self.capacity).transpose(2, 3)
            self.mask[..., last] = True
            for window, ring in self.rings.items():
                if ring.shape[-1] < self._ring_of(window):
                    places = self._ring_of(window)
                    self.rings[window] = self._longer(ring.transpose(2, 3), places).transpose(2, 3)
                    self.rings[window][..., self.prompt + (last - self.prompt) % window] = True
        self._next = self._next_place()

    def _next_place(self) -> Any:
        """`advance` in one native call; None: not on this device, or not with chunks."""
        if self.device.type != "cpu" or self._chunks:
            return None
        return _native.NextPlace(
            place=self.cache_position,
            positions=self.positions,
            mask=self.mask,
            capacity=self.capacity,
            windows=[*self.rings],
            places=[self.places[window] for window in self.rings],
            rings=[*self.rings.values()],
            prompt=self.prompt,
        )

    def _longer(self, tensor: Tensor, places: int | None) -> Tensor:
        """[b, h, n, d] as [b, h, places, d]; itself if it has a state, or a ring as long as its window."""
        if places in (None, tensor.shape[2]):
            return tensor
        longer = empty(tensor, len(tensor), places)
        longer[:, :, : tensor.shape[2]].copy_(tensor)
        return longer


def first_tokens(mask: Tensor) -> Tensor:
    """[b]: how many places of padding each row of a mask [b, n] of bool begins with."""
    return (mask.cumsum(1) == 0).sum(1)


def begin_of_chunk(position: int | Tensor, first: Tensor, window: int) -> Tensor:
    """[b]: where the chunk begins that a position is in.

    first  [b] int64: of the first token of each row, from which chunks are counted
    """
    return position - (position - first) % window


def _form(tensor: Tensor, kind: LayerKind) -> tuple[Any, ...]:
    """What of a tensor does not depend on the rows and tokens."""
    shape = tensor.shape[1:] if kind.is_state else (tensor.shape[1], *tensor.shape[3:])
    return tensor.dtype, tensor.device, *shape


def rows_of(cache: Cache) -> int:
    """Rows of a cache that a prefill left."""
    return len(next(tensor for layer in cache.layers for tensor in tensors_of(layer)))


def _fill_ring(ring: Tensor, held: Tensor, length: int, window: int, prompt: int) -> None:
    """held [b, h, n, d]: the last of so many tokens, in their order; a static layer has zeros behind them.

    prompt  tokens that it begins with, and that lie before the ring
    """
    # What a failed request left is not finite, which a mask does not hide.
    ring.zero_()
    last = held[:, :, prompt:length][:, :, -window:]
    places = torch.arange(length - last.shape[2], length, device=ring.device)
    ring[: len(last)].index_copy_(2, prompt + (places - prompt) % window, last)
    ring[: len(last), :, :prompt] = held[:, :, :prompt]
    ring[len(last) :] = ring[:1]


def length_support(cache: Any, prompt: Tensor, before: int) -> Support:
    """Whether a cache holds what a prefill of the prompt, [b, n], has to leave.

    before  tokens that it held; the prompt may begin with them, or go on after them
    """
    held = int(cache.get_seq_length()) if cache is not None else 0
    if any(
        getattr(layer, "indexer_position_ids", None) is not None for layer in getattr(cache, "layers", ())
    ):
        return Support.no("a layer's index has positions of its own")
    if held in (prompt.shape[1], before + prompt.shape[1]):
        return compressed.length_support(cache.layers, held)
    return Support.no(f"the cache holds {held} tokens, the prompt {prompt.shape[1]}")


def give_back(cache: DynamicCache | StaticCache) -> None:
    """Free a cache that was copied; nobody else holds it."""
    for layer in cache.layers:
        if kind_of(layer).is_state:
            continue  # which is small
        if is_compressed(layer):
            compressed.give_back(layer)
        if keeps_prompt(layer):
            layer.prefill_keys, layer.prefill_values = (kept[:, :, :0].clone() for kept in tensors_of(layer))
            layer.keys, layer.values = layer.prefill_keys, layer.prefill_values
        layer.keys, layer.values = layer.keys[:, :, :0].clone(), layer.values[:, :, :0].clone()
