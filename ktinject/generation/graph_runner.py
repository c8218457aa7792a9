"""Decode steps as CUDA graphs: captured once for each of some batch sizes and KV bucket, replayed for every request.

    eager prefill ──► its cache ──► `GraphRunner.begin` copies it into a `FixedCache`
                                    `GraphRunner.step`: one replay is one token: forward, cache, mask, positions

A batch between two sizes is padded with copies of its first row. For these rows, and for rows whose text has ended, no
expert is computed.

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

from ktinject.generation import cache_rows
from ktinject.generation.cache import FixedCache, KVBucket, bucket_of, rows_of
from ktinject.generation.cache_layers import LayerKind, fill_rows
from ktinject.generation.frequencies import Frequencies
from ktinject.generation.governor import Costs
from ktinject.generation.piecewise_graph import (
    EagerStages,
    NotCapturable,
    PiecewiseGraph,
    Stages,
    capture,
    capture_stream,
)
from ktinject.generation.sampling import Request, Sampler, Sampling
from ktinject.operators.offload import lent, submits
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

# Batch sizes that are captured. A wider step costs more with every row, a graph of its own costs memory.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
MAX_BATCH = SIZES[-1]
_SAMPLERS = 16  # captured ways to choose a token that a runner keeps

# (ids [b, 1], mask [b, 1, 1, n] bool, positions [b, 1], cache) → logits [b, v]
Forward = Callable[[Tensor, Tensor, Tensor, KVBucket], Tensor]


def size_of(batch: int, device: torch.device) -> int:
    """Rows of the step that serves a batch of up to MAX_BATCH rows: on a GPU, of the next size that is captured."""
    return next(size for size in SIZES if size >= batch) if device.type == "cuda" else batch


class GraphRunner:
    """All that is captured for one batch size.

    rows      of this request; the others of the step are padding
    ids       [b, 1] int64: the tokens that the next step reads
    logits    [b, v] fp32: what a step leaves
    live      [b] bool: the rows for which experts are computed; None: all
    cache     keys, values, mask and positions
    captures  graphs captured so far
    replays   steps replayed
    graphs    whether steps can be captured; if not, they run one kernel at a time, on the same tensors
    changed   why steps of this request ran as `own`; "" if none did
    several   steps of several tokens on the same cache, see several.py; None before the first request for them
    turns     passes over the new tokens of next turns, see turn_pass.py; None before they are prepared for
    costs     what steps cost, by their tokens, for each kind of request that chooses how many
    hidden    [1, hidden]: what the last step's logits were made of, if that was asked for and the model showed it
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
        kinds: Sequence[LayerKind] | None = None,
        room: int = 0,
        frequencies: Frequencies | None = None,
    ) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        forward  the model on one token a row; must not keep the model alive
        wake     called before each replay
        cache    as a prefill left it; the shapes of its keys and values are taken
        tokens   that the longest row of the request may have; on the CPU, that there is room for at first
        logits   [rows, v] of that prefill
        own      as `forward`, by the model as it is now, whatever was recorded
        change   asked before each step: what the model has of another kind than when `forward` was made, or ""
        kinds    as `FixedCache` takes them
        room     tokens of a step of one text, behind those of a window; a runner of several rows has none
        frequencies
                 that `forward` turns by, chosen before each step; None: it chooses itself
        """
        self._frequencies, self._ahead = frequencies, 0
        self.device = device = logits.device
        self.rows, vocab_size = logits.shape
        batch = size_of(self.rows, device)
        self.captures, self.replays, self.changed = 0, 0, ""
        self._forward, self._wake = forward, wake
        self._own, self._change = own or forward, change
        self._looked: str | None = None
        room = room if batch == 1 else 0
        self.cache = FixedCache(cache, bucket_of(tokens), batch, device, kinds, room)
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.logits = torch.zeros(batch, vocab_size, dtype=torch.float32, device=device)
            self._order = torch.arange(batch, device=device)
            self._from = self._order.clone()
            self.live = None
            if batch > 1:
                self.live = torch.ones(batch, dtype=torch.bool, device=device)
        self.graphs = SUPPORTED
        self._pool: Any = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
        else:
            self.graphs = Support.no(f"{device} has no CUDA graphs")
        # By the size of the bucket, and whether it leaves what logits were made of.
        self._steps: dict[tuple[int, bool], PiecewiseGraph] = {}
        self.hidden: Tensor | None = None
        self._hidden: Tensor | None = None  # where steps leave it, from the first one on that is asked for it
        self._reorders: dict[int, PiecewiseGraph | None] = {}
        self.several: Any = None
        self.turns: Any = None
        self.costs: dict[str, Costs] = {}
        self._samplers: OrderedDict[tuple[Sampling, int], tuple[Sampler, PiecewiseGraph | None]] = (
            OrderedDict()
        )

    def begin(self, cache: Cache, length: int, mask: Tensor | None, positions: Tensor | None) -> None:
        """Begin a request; the arguments are those of `FixedCache.begin`."""
        self.changed, self._looked = "", None
        self.rows = rows_of(cache)
        if self._frequencies is not None:
            self._frequencies.begin()
            # Positions of texts with images in them may be others than those in the cache.
            self._ahead = 0 if positions is None else int(positions.max()) - length
        self.cache.begin(cache, length, mask, positions)
        if self.live is not None:
            self.live.fill_(True)[self.rows :] = False

    def put(self, ids: Tensor) -> None:
        """Set the tokens [rows, 1] that the next step reads."""
        fill_rows(self.ids, ids)

    @property
    def found(self) -> Tensor:
        """The logits [rows, v] of this request's rows."""
        return self.logits if self.rows == self.logits.shape[0] else self.logits[: self.rows]

    def step(self, *, has_hidden: bool = False) -> None:
        """One forward pass over `ids`, which leaves `logits`.

        has_hidden  of one row: `hidden` is asked for
        """
        bucket = self.cache.reserve()
        change = self._change_now()
        self.hidden = None
        if change:
            self.changed = change
            self._run_eagerly(bucket, self._own, has_hidden=False)
            return
        self._choose_frequencies()
        key = bucket, has_hidden
        graph = self._steps.get(key)
        if graph is None and self.graphs:
            graph = self._capture(
                lambda stages: self._compute(bucket, stages, self._forward, has_hidden=has_hidden),
                self.cache.state,
            )
            if graph is not None:
                self._steps[key] = graph
        if graph is None:
            self._run_eagerly(bucket, self._forward, has_hidden=has_hidden)
        else:
            self._wake()
            graph.replay()
            self.replays += 1
        self.hidden = self._hidden if has_hidden else None

    def sampler(self, sampling: Sampling) -> Sampler:
        """The sampler of this runner for a way of choosing."""
        key = sampling, self.rows
        if key not in self._samplers:
            with torch.inference_mode(False):
                sampler = Sampler(sampling, self.ids[: self.rows], self.logits.shape[1])
            sampler.begin(sampler.ids, Request())
            state = [self.ids] if self.live is None else [self.ids, self.live]
            graph = self._capture(lambda _: self._choose(sampler), state) if self.graphs else None
            self._samplers[key] = (sampler, graph)
            if len(self._samplers) > _SAMPLERS:
                self._samplers.popitem(last=False)
        self._samplers.move_to_end(key)
        return self._samplers[key][0]

    def choose(self, sampling: Sampling) -> None:
        """Choose the next tokens from `logits`; `sampler(sampling)` was called before."""
        sampler, graph = self._samplers[sampling, self.rows]
        if graph is None or not self.graphs:
            self._choose(sampler)
        else:
            graph.replay()

    def reorder(self, order: Tensor) -> None:
        """Let each row of this request go on from the text of another one: order [rows] int64."""
        length, here = self.cache.used, range(self.rows)
        if self.device.type == "cpu" or len(self.cache.devices) > 1:
            if (rows := order.tolist()) != [*here]:
                cache_rows.move(self.cache, rows, length)
            return
        if torch.equal(order, self._order[: self.rows]):
            return
        bucket = bucket_of(length)
        # Captured with rows that stay where they are, so that the step before a capture moves none.
        graph = self.graph_of(
            self._reorders, bucket, lambda _: cache_rows.reorder(self.cache, self._from, bucket)
        )
        if graph is None:
            cache_rows.reorder(self.cache, order, length)
            return
        self._from[: self.rows].copy_(order)
        graph.replay()
        self._from.copy_(self._order)

    @property
    def _devices(self) -> set[torch.device]:
        return {self.device, *self.cache.devices}

    def graph_of(
        self,
        graphs: dict[Any, PiecewiseGraph | None],
        key: Any,
        work: Callable[[Stages], None],
        state: Sequence[Tensor] = (),
    ) -> PiecewiseGraph | None:
        """One of the graphs. Captured at its first time, when the work is done once; None: it cannot be.

        state  what work that is done twice must find as it was
        """
        self._choose_frequencies()
        if key not in graphs and self.graphs:
            graphs[key] = lent.retried(lambda: self._capture(work, [*state]), self._devices)
            self.graphs = SUPPORTED  # steps of one token are captured without it
        return graphs.get(key)

    def replay(
        self, graph: PiecewiseGraph | None, work: Callable[[Stages], None], *, is_step: bool = True
    ) -> None:
        """Do work by its graph, or one kernel at a time.

        is_step  it is a step of the model, before which the CPU is woken
        """
        if graph is None:
            with EagerStages(self.device) as stages:
                work(stages)
        else:
            if is_step:
                self._wake()
            graph.replay()

    def _choose_frequencies(self) -> None:
        if self._frequencies is not None:
            self._frequencies.choose(self.cache.used - 1 + self._ahead)

    def is_changed(self) -> bool:
        """Whether the model is another one than was recorded; `changed` says it then."""
        self.changed = self.changed or self._change_now()
        return bool(self.changed)

    def look(self) -> None:
        """Compare the model while the device computes; the next step goes by that, as one that is queued ahead does."""
        self._looked = self._change()

    def _change_now(self) -> str:
        looked, self._looked = self._looked, None
        return self._change() if looked is None else looked

    def _choose(self, sampler: Sampler) -> None:
        sampler.choose(self.found)
        if self.rows < len(self.ids):
            fill_rows(self.ids, sampler.ids)
        # Without a token to pad with, a row that has ended goes on with what it produces.
        ends = sampler.sampling.pad is not None and not sampler.sampling.keeps_rows
        if self.live is not None and ends:
            self.live[: self.rows].copy_(sampler.result[1])

    def _run_eagerly(self, bucket: int, forward: Forward, *, has_hidden: bool) -> None:
        with EagerStages(self.device) as stages:
            self._compute(bucket, stages, forward, has_hidden=has_hidden)

    def _compute(self, bucket: int, stages: Stages, forward: Forward, *, has_hidden: bool) -> None:
        view = self.cache.bucket(bucket)
        view.stages, view.asks_hidden, view.hidden = stages, has_hidden, None
        view.logits = self.logits
        with submits.only(self.live):
            logits = forward(self.ids, view.masks[None], self.cache.positions, view)
        view.keep_in_place()
        if logits is not self.logits:
            self.logits.copy_(logits)
        self.cache.advance()
        if isinstance(view.hidden, Tensor) and view.hidden.shape[:-1] == (1, 1):
            if self._hidden is None:  # in a step before the one that is captured
                with torch.inference_mode(False):
                    self._hidden = view.hidden.new_zeros(1, view.hidden.shape[-1])
            self._hidden.copy_(view.hidden[:, 0])

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
                if isinstance(error.first, torch.OutOfMemoryError) and lent.is_lent(self._devices):
                    raise error.first from None
                self.graphs = Support.no(str(error))
                logger.warning("a decode step cannot be captured, it runs eagerly from now on: %s", error)
                return None
            finally:
                generator.set_offset(drawn)
                for tensor, value in zip(state, saved):
                    tensor.copy_(value)
