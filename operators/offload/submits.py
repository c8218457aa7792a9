"""The data of a submit: its ticket, the slot with its buffers, and its options (resident experts, routing)."""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Iterator, MutableSet
from contextlib import contextmanager
from typing import Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address

Mode = Literal["auto", "flags", "host_func"]

# Tokens in each slot that a layer owns: enough for decode steps, also of small batches or with speculated tokens. A
# longer submit goes into a stream only within a graph, and takes a slot that layers share.
MOST_TOKENS = 32
# Submits of one layer that may be under way at the same time. Deferral needs two.
SLOTS = 4
# The native core's limit.
MOST_EXPERTS_PER_TOKEN = 64


class Ticket:
    """One submit. If a ticket is deleted without a wait, the answer is discarded and the slot is freed."""

    __slots__ = (
        "captured",
        "channel",
        "device",
        "dtype",
        "shape",
        "slot",
        "slots",
        "stream",
        "task",
        "tensors",
    )

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.slot = -1
        self.slots: Slots | None = None
        self.channel: _native.Channel | None = None
        self.task: _native.Task | None = None
        self.tensors: tuple[Tensor, ...] = ()
        self.stream = 0
        self.captured = False

    def __del__(self) -> None:
        if self.slots is not None:
            self.slots.drop(self)


class OnGpu:
    """The resident experts, as one submit needs to know them. All tensors are on the GPU.

    places   [num_experts] int32: expert → place in the GPU's memory, or -1 if it is not there
    chosen   [m, t] int32, written by the submit: the place of each id at that moment, or -1. `places` may change later.
             None if nobody needs to know
    traffic  [num_experts] int32, or None: counts how often each expert is asked for
    """

    __slots__ = ("chosen", "places", "traffic")

    def __init__(self, places: Tensor, chosen: Tensor | None, traffic: Tensor | None = None) -> None:
        self.places, self.chosen, self.traffic = places, chosen, traffic

    def addresses(self, ids: Tensor) -> tuple[int, int, int]:
        """The addresses of places, chosen and traffic, for a submit of these ids. Raises ValueError for a misfit."""
        like = ids.device, torch.int32
        return (
            address("places", self.places, *like),
            address("chosen", self.chosen, *like, ids.shape),
            address("traffic", self.traffic, *like),
        )

    def split(self, ids: Tensor) -> Tensor:
        """Write `chosen`, as the submit kernel does, for a submit that goes through the host.

        ids      [m, t]
        Returns  [m, t]: the ids for the CPU, and -1 for resident experts. An invalid id stays: the CPU refuses it
        """
        known = (ids >= 0) & (ids < self.places.shape[0])
        places = self.places[ids.clamp(0, self.places.shape[0] - 1).long()]
        places = places.masked_fill(~known, -1)
        if self.chosen is not None:
            self.chosen.copy_(places)
        return ids.masked_fill(places >= 0, -1)


class Routing(NamedTuple):
    """For a submit that chooses the experts itself on the GPU, by softmax.

    logits   [m, num_experts] contiguous, on the GPU
    normed   divide the weights of the chosen experts by their sum
    """

    logits: Tensor
    normed: bool


def of_ranks(ids: Tensor, weights: Tensor, first: int, end: int) -> Tensor:
    """ids [m, t], with -1 for the experts of a token whose rank is not in first … end - 1.

    Rank 0 has the greatest |weight| of weights [m, t]; of equal ones, the first in its row.
    """
    order = weights.abs().argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    return ids.masked_fill((ranks < first) | (ranks >= end), -1)


class _Rows(threading.local):
    live: Tensor | None = None


_rows = _Rows()


@contextmanager
def only(live: Tensor | None) -> Iterator[None]:
    """Inside the `with` block, this thread's submits compute only some rows; other rows get zeros. For ended requests.

    live     [m] bool: the rows to compute; None: all rows. On a CUDA device it is read when a submit's kernel runs,
             also in a replayed graph; on the CPU by the native decoder alone. Submits on another device, or of another
             number of tokens, compute all rows
    """
    before, _rows.live = _rows.live, live
    try:
        yield
    finally:
        _rows.live = before


def live_rows(x: Tensor) -> Tensor | None:
    """The rows of x that `only` selects, as [m] bool; None for all rows."""
    live = _rows.live
    return live if live is not None and live.device == x.device and len(live) == len(x) else None


class Slots:
    """Slots of one CUDA device, and which of them are free. A slot holds the buffers of one submit.

    count    number of slots
    size     bytes for the tokens in each slot, and the same again for the answer
    routes   pairs of an id and a weight in each slot
    mode     `flags` or `host_func`
    stream   for slots that several layers share: the handle of the one stream of all their submits; else None
    """

    def __init__(
        self, device: torch.device, count: int, size: int, routes: int, mode: Mode, stream: int | None = None
    ) -> None:
        assert device.index is not None and mode != "auto"
        self.mode: Mode = mode
        self.device = device
        self.size, self.routes = size, routes
        self.stream = stream
        self.native = _native.Slots(
            device=device.index,
            count=count,
            bytes=size,
            routes=routes,
            host_func=mode == "host_func",
            shared=stream is not None,
        )
        self._free = list(range(count))
        self._lock = threading.Lock()

    def take(self, captured: bool = False) -> int | None:
        """A free slot, or None.

        Always the lowest first, so streams that take several slots take them in the same order, and cannot wait for
        each other in a circle. Graphs take from the other end: their submits spin for a slot on the device, and should
        not spin for one whose wait the host has yet to queue.
        """
        with self._lock:
            return self._free.pop(-1 if captured else 0) if self._free else None

    def give(self, slot: int) -> None:
        with self._lock:
            insort(self._free, slot)

    def drop(self, ticket: Ticket) -> None:
        """Free the slot of a ticket that gets no wait. Outside of graphs, a wait is queued that discards the answer."""
        if not ticket.captured and ticket.channel is not None:
            ticket.channel.wait(
                self.native,
                ticket.slot,
                ticket.shape[0],
                CODES[ticket.dtype],
                0,
                0,
                0,
                ticket.stream,
                ticket.stream,
            )
        self.give(ticket.slot)


def mode_of(device: torch.device, mode: Mode) -> Mode:
    """The mode, with `auto` resolved to `flags` where they work on the CUDA device, else `host_func`."""
    if mode != "auto":
        return mode
    assert device.index is not None
    return "host_func" if _native.why_no_flags(device.index) else "flags"


# Slots for captured submits of more than MOST_TOKENS tokens. They are large (2 x 117 MB for 8,192 tokens of
# DeepSeek-V3), so layers share them: layers that submit into one stream do so one after the other. Graphs captured in
# one stream share them, too; if two such graphs are replayed at once, one waits for the other on the device.
# The layers that have used a Slots object keep it alive. When they are gone, the graphs keep its native part alive.
_shared: WeakSet[Slots] = WeakSet()
_lock = threading.Lock()


def take_shared(device: torch.device, stream: int, size: int, routes: int) -> tuple[Slots, int]:
    """A free slot of those that layers share for submits into one stream; see `take_from`."""
    return take_from(_shared, device, size, routes, "flags", stream)


def take_from(
    pool: MutableSet[Slots],
    device: torch.device,
    size: int,
    routes: int,
    mode: Mode,
    stream: int | None = None,
) -> tuple[Slots, int]:
    """Take the smallest free slot of a pool that is large enough; add a new one to the pool if there is none.

    size     bytes of the tokens
    routes   pairs of an id and a weight
    stream   as in `Slots`
    Returns  the Slots object and the index of the slot
    Raises   RuntimeError or MemoryError if there is no room for pinned buffers
    """
    with _lock:
        fitting = [
            slots
            for slots in pool
            if (slots.device, slots.mode, slots.stream) == (device, mode, stream)
            and slots.size >= size
            and slots.routes >= routes
        ]
        for slots in sorted(fitting, key=lambda slots: slots.size):
            slot = slots.take()
            if slot is not None:
                return slots, slot
        # Sizes are rounded up to powers of two, so that a series of ever longer submits does not allocate for each.
        size, routes = (1 << (most - 1).bit_length() for most in (size, routes))
        made = Slots(device, 1, size, routes, mode, stream)
        pool.add(made)
        slot = made.take()
        assert slot is not None
        return made, slot
