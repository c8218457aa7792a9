"""Decode steps as CUDA graphs: captured once for each batch size and KV bucket, replayed for every request.

    eager prefill ──► its cache ──► `GraphRunner.begin` copies it into a `FixedCache`
                                    `GraphRunner.step`: one replay is one token: forward, cache, mask, positions

Layers on several GPUs make one step several graphs, see `piecewise_graph`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from ktinject.generation.cache import FixedCache, bucket_of
from ktinject.generation.piecewise_graph import (
    EagerStages,
    NotCapturable,
    PiecewiseGraph,
    Stages,
    capture,
    capture_stream,
)
from ktinject.generation.sampling import Request, Sampler, Sampling
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

MAX_BATCH = 8
_SAMPLERS = 16  # captured ways to choose a token that a runner keeps

# (ids [b, 1], mask [b, 1, 1, n] bool, positions [b, 1], cache) → logits [b, v]
Forward = Callable[[Tensor, Tensor, Tensor, Cache], Tensor]


class GraphRunner:
    """All that is captured for one batch size.

    ids       [b, 1] int64: the tokens that the next step reads
    logits    [b, v] fp32: what a step leaves
    cache     keys, values, mask and positions
    captures  graphs captured so far
    replays   steps replayed
    graphs    whether steps can be captured; if not, they run one kernel at a time, on the same tensors
    changed   why steps of this request ran as `own`; "" if none did
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
        windows: Sequence[int | None] | None = None,
    ) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        forward  the model on one token a row; must not keep the model alive
        wake     called before each replay
        cache    as a prefill left it; the shapes of its keys and values are taken
        tokens   that the longest row of the request may have; on the CPU, that there is room for at first
        logits   [b, v] of that prefill
        own      as `forward`, by the model as it is now, whatever was recorded
        change   asked before each step: what the model has of another kind than when `forward` was made, or ""
        windows  as `FixedCache` takes them
        """
        self.device = device = logits.device
        batch, vocab_size = logits.shape
        self.captures, self.replays, self.changed = 0, 0, ""
        self._forward, self._wake = forward, wake
        self._own, self._change = own or forward, change
        self.cache = FixedCache(cache, bucket_of(tokens), batch, device, windows)
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.logits = torch.zeros(batch, vocab_size, dtype=torch.float32, device=device)
        self.graphs = SUPPORTED
        self._pool: Any = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        else:
            self.graphs = Support.no(f"{device} has no CUDA graphs")
        self._steps: dict[int, PiecewiseGraph] = {}  # by the size of the bucket
        self._samplers: OrderedDict[Sampling, tuple[Sampler, PiecewiseGraph | None]] = OrderedDict()

    def begin(self, cache: Cache, length: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Begin a request; the arguments are those of `FixedCache.begin`."""
        self.changed = ""
        self.cache.begin(cache, length, mask, positions)

    def step(self) -> None:
        """One forward pass over `ids`, which leaves `logits`."""
        bucket = self.cache.reserve()
        change = self._change()
        if change:
            self.changed = change
            self._run_eagerly(bucket, self._own)
            return
        graph = self._steps.get(bucket)
        if graph is None and self.graphs:
            graph = self._capture(
                lambda stages: self._compute(bucket, stages, self._forward), self.cache.state
            )
            if graph is not None:
                self._steps[bucket] = graph
        if graph is None:
            self._run_eagerly(bucket, self._forward)
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
            graph = self._capture(lambda _: sampler.choose(self.logits), [self.ids]) if self.graphs else None
            self._samplers[sampling] = (sampler, graph)
            if len(self._samplers) > _SAMPLERS:
                self._samplers.popitem(last=False)
        self._samplers.move_to_end(sampling)
        return self._samplers[sampling][0]

    def choose(self, sampling: Sampling) -> None:
        """Choose the next tokens from `logits`; `sampler(sampling)` was called before."""
        sampler, graph = self._samplers[sampling]
        if graph is None or not self.graphs:
            sampler.choose(self.logits)
        else:
            graph.replay()

    def _run_eagerly(self, bucket: int, forward: Forward) -> None:
        with EagerStages(self.device) as stages:
            self._compute(bucket, stages, forward)

    def _compute(self, bucket: int, stages: Stages, forward: Forward) -> None:
        view = self.cache.bucket(bucket)
        view.stages = stages
        logits = forward(self.ids, self.cache.mask[..., :bucket], self.cache.positions, view)
        self.logits.copy_(logits)
        self.cache.advance()

    def _capture(self, work: Callable[[Stages], None], state: list[Tensor]) -> PiecewiseGraph | None:
        """Run `work` once to warm up, restore `state`, and capture it. If that fails: None, and `graphs` says why."""
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
                self.graphs = Support.no(str(error))
                logger.warning("a decode step cannot be captured, it runs eagerly from now on: %s", error)
                return None
            finally:
                generator.set_offset(drawn)
                for tensor, value in zip(state, saved):
                    tensor.copy_(value)
