"""Decode steps as CUDA graphs: captured once for each batch size and bucket of cache, replayed for every request.

    eager prefill ──► its cache ──► `GraphRunner.begin` copies it into tensors that stay where they are
                                    `GraphRunner.step`: one replay is one token: forward, cache, mask, positions

A runner belongs to one batch size. Its cache holds the longest request so far, rounded up to a power of two; a graph
sees the shortest bucket of it, a power of two again, that holds what there is. So attention over an empty rest costs
at most as much as over what is there, and nothing is captured anew but when a request needs a longer cache. On the CPU,
where no graph holds its address, the cache grows with the text. Layers on several GPUs make it several graphs, see
`graph`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, CacheLayerMixin

from ktinject.generation.cuda.decode_ops import advance
from ktinject.generation.piecewise_graph import (
    EagerStages,
    NotCapturable,
    PiecewiseGraph,
    Stages,
    capture,
    capture_stream,
)
from ktinject.generation.sampling import Request, Sampler, Sampling

logger = logging.getLogger("ktinject")

MAX_BATCH = 8
_SMALLEST_BUCKET = 256  # tokens of the shortest bucket
_SAMPLERS = 16  # captured ways to choose a token that a runner keeps

# (ids [b, 1], mask [b, 1, 1, n] bool, positions [b, 1], cache) → logits [b, v]
Forward = Callable[[Tensor, Tensor, Tensor, Cache], Tensor]


class BucketLayer(CacheLayerMixin):
    """A bucket of one layer's cache. Layers share the position of the next token, where transformers' count each."""

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


class KVBucket(Cache):
    """What a step sees of a runner's cache. stages: how it goes on where layers are on another GPU."""

    def __init__(self, layers: Sequence[BucketLayer], cache_position: Tensor) -> None:
        super().__init__(layers=[*layers])
        self.stages: Stages | None = None
        self._cache_position = cache_position

    def transfer(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """As `Stages.transfer`; layers on another GPU find the position of the next token there, too."""
        assert self.stages is not None
        if device == self._cache_position.device:
            return self.stages.transfer(tensors, device)
        *crossed, cache_position = self.stages.transfer([*tensors, self._cache_position], device)
        for layer in self.layers:
            if layer.keys.device == device:
                layer.cache_position = cache_position
        return crossed


def bucket_of(tokens: int) -> int:
    """The smallest bucket of cache that holds so many tokens."""
    return max(_SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


class GraphRunner:
    """All that is captured for one batch size.

    ids         [b, 1] int64: the tokens that the next step reads
    logits      [b, v] fp32: what it leaves
    capacity    tokens that the cache holds
    captures    graphs captured so far
    replays     steps replayed
    failure     why graphs cannot be captured; the steps then run one kernel at a time, on the same tensors
    changed     why steps of this request ran as `own`; "" if none did
    """

    def __init__(
        self,
        forward: Forward,
        wake: Callable[[], None],
        cache: Cache,
        tokens: int,
        logits: Tensor,
        *,
        own: Forward | None = None,
        change: Callable[[], str] = lambda: "",
    ) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        forward  the model on one token a row; must not keep the model alive
        wake     called before each replay
        cache    as a prefill left it; the shapes of its keys and values are taken
        tokens   that the longest row of the request may have; on the CPU, that there is room for at first
        logits   [b, v] of that prefill
        own      as `forward`, by the model as it is now, whatever was recorded
        change   asked before each step: what the model has of another kind than when `forward` was made, or ""
        """
        device = logits.device
        batch, vocab_size = logits.shape
        self.device, self.capacity = device, bucket_of(tokens)
        self.captures, self.replays, self.failure = 0, 0, ""
        self.changed = ""
        self._forward, self._wake = forward, wake
        self._own, self._change = own or forward, change
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self._cache = [
                (self._empty(layer.keys, self.capacity), self._empty(layer.values, self.capacity))
                for layer in cache.layers
            ]
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.logits = torch.zeros(batch, vocab_size, dtype=torch.float32, device=device)
            self._positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self._cache_position = torch.zeros(1, dtype=torch.int64, device=device)
            self._mask = torch.zeros(batch, 1, 1, self.capacity, dtype=torch.bool, device=device)
        self._used = self._written = 0  # positions of this request, and of the longest one
        self._views: dict[int, KVBucket] = {}
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        else:
            self.failure = f"{device} has no CUDA graphs"
        self._steps: dict[int, PiecewiseGraph] = {}
        self._samplers: OrderedDict[Sampling, tuple[Sampler, PiecewiseGraph | None]] = OrderedDict()

    def _empty(self, like: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = like.shape
        try:
            return torch.zeros(batch, heads, capacity, size, dtype=like.dtype, device=like.device)
        except RuntimeError as error:  # what the CPU says, or a size beyond 64 bits
            raise torch.OutOfMemoryError(f"a cache of {capacity} tokens: {error}") from None

    def _grow(self) -> None:
        """Twice the capacity, layer by layer, so that no more than one is there twice."""
        capacity = 2 * self.capacity
        self._views.clear()
        with torch.inference_mode(False):
            for index, tensors in enumerate(self._cache):
                longer = [self._empty(tensor, capacity) for tensor in tensors]
                for tensor, new in zip(tensors, longer):
                    new[:, :, : self._written].copy_(tensor[:, :, : self._written])
                self._cache[index] = (longer[0], longer[1])
            mask = torch.zeros(*self._mask.shape[:-1], capacity, dtype=torch.bool, device=self.device)
            mask[..., : self.capacity] = self._mask
            # The position that the last step found no room for.
            mask[..., self._used - 1] = True
        self._mask, self.capacity = mask, capacity

    def begin(self, cache: Cache, length: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Take over what a prefill left behind.

        cache      its layers' keys and values, [b, h, n ≥ length, d]
        length     tokens in it
        mask       [b, ≥ length], 0 or False for padding; None: there is none
        positions  [b or 1, 1] of the next token; None: `length`
        """
        for (keys, values), layer in zip(self._cache, cache.layers):
            keys[:, :, :length].copy_(layer.keys[:, :, :length])
            values[:, :, :length].copy_(layer.values[:, :, :length])
            # What a failed request left is not finite, which a mask does not hide.
            keys[:, :, length : self._written].zero_()
            values[:, :, length : self._written].zero_()
        self._written = length
        self.changed = ""
        self._mask.zero_()
        self._mask[:, 0, 0, : length + 1] = True
        if mask is not None:
            self._mask[:, 0, 0, :length] = mask[:, :length] != 0
        self._cache_position.fill_(length)
        self._positions.copy_(self._cache_position if positions is None else positions)
        self._used = length

    def step(self) -> None:
        """One forward pass over `ids`, which leaves `logits`."""
        self._used += 1
        if self._used > self.capacity and self.device.type == "cpu":
            self._grow()
        # A step on the CPU reads no position that is empty.
        bucket = self.capacity if self.device.type == "cpu" else bucket_of(self._used)
        self._written = max(self._written, self._used)
        change = self._change()
        if change:
            self.changed = change
            with EagerStages(self.device) as stages:
                self._compute(bucket, stages, self._own)
            return
        graph = self._steps.get(bucket)
        if graph is None and not self.failure:
            state = [self._positions, self._cache_position, self._mask]
            graph = self._capture(lambda stages: self._compute(bucket, stages, self._forward), state)
            if graph is not None:
                self._steps[bucket] = graph
        if graph is None:
            with EagerStages(self.device) as stages:
                self._compute(bucket, stages, self._forward)
        else:
            self._wake()
            graph.replay()
            self.replays += 1

    def sampler(self, sampling: Sampling) -> Sampler:
        """The sampler of this runner for a way of choosing."""
        if sampling not in self._samplers:
            with torch.inference_mode(False):
                sampler = Sampler(sampling, self.ids, self.logits.shape[1])
            sampler.begin(self.ids, Request())
            graph = None if self.failure else self._capture(lambda _: sampler.choose(self.logits), [self.ids])
            self._samplers[sampling] = (sampler, graph)
            if len(self._samplers) > _SAMPLERS:
                self._samplers.popitem(last=False)
        self._samplers.move_to_end(sampling)
        return self._samplers[sampling][0]

    def choose(self, sampling: Sampling) -> None:
        """Choose the next tokens from `logits`; `sampler(sampling)` was called before."""
        sampler, graph = self._samplers[sampling]
        if graph is None or self.failure:
            sampler.choose(self.logits)
        else:
            graph.replay()

    def _compute(self, bucket: int, stages: Stages, forward: Forward) -> None:
        if bucket not in self._views:
            layers = [
                BucketLayer(k[:, :, :bucket], v[:, :, :bucket], self._cache_position) for k, v in self._cache
            ]
            self._views[bucket] = KVBucket(layers, self._cache_position)
        view = self._views[bucket]
        view.stages = stages
        logits = forward(self.ids, self._mask[..., :bucket], self._positions, view)
        self.logits.copy_(logits)
        advance(self._cache_position, self._positions, self._mask)

    def _capture(self, work: Callable[[Stages], None], state: list[Tensor]) -> PiecewiseGraph | None:
        """Run `work` once to warm up, put `state` back, and capture it; None, and `failure`, if that cannot be."""
        saved = [tensor.clone() for tensor in state]
        generator = torch.cuda.default_generators[self.device.index]
        drawn = generator.get_offset()
        with torch.cuda.device(self.device):
            try:
                with EagerStages(self.device, capture_stream) as stages:
                    work(stages)
                graph = capture(work, self.device, self._pool)
                self.captures += 1
                return graph
            except NotCapturable as error:
                self.failure = str(error)
                logger.warning("a decode step cannot be captured, it runs eagerly from now on: %s", error)
                return None
            finally:
                generator.set_offset(drawn)
                for tensor, value in zip(state, saved):
                    tensor.copy_(value)
