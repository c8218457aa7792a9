"""What is under way between a GPU and the CPU's experts: tickets, their slots, and what a submit asks for."""

from __future__ import annotations

import threading
from collections.abc import MutableSet
from typing import Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address

Mode = Literal["auto", "flags", "host_func"]

# Tokens that a layer's own slots hold: decoding with room for drafts. Longer submits into a stream, which only graphs
# have, take slots that layers share.
MOST_TOKENS = 32
# Submits of one owner under way at the same time. Deferral needs two.
SLOTS = 4
# The native core's limit.
MOST_EXPERTS_PER_TOKEN = 64


class Ticket:
    """One submit. Dropping it without waiting drops the answer."""

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
    """What one submit has to know of the experts on its device.

    places   [num_experts] int32: where an expert lies, or -1
    chosen   [m, t] int32, written by the submit: what `places` said of each id, then
    traffic  [num_experts] int32, or None: counts how often each is asked for
    """

    __slots__ = ("chosen", "places", "traffic")

    def __init__(self, places: Tensor, chosen: Tensor, traffic: Tensor | None = None) -> None:
        self.places, self.chosen, self.traffic = places, chosen, traffic

    def addresses(self, ids: Tensor) -> tuple[int, int, int]:
        """For a submit of these ids. Raises ValueError."""
        like = ids.device, torch.int32
        return (
            address("places", self.places, *like),
            address("chosen", self.chosen, *like, ids.shape),
            address("traffic", self.traffic, *like),
        )

    def split(self, ids: Tensor) -> Tensor:
        """Write `chosen`, and return what is left for the CPU; ids that are no expert are its to refuse."""
        known = (ids >= 0) & (ids < self.places.shape[0])
        places = self.places[ids.clamp(0, self.places.shape[0] - 1).long()]
        self.chosen.copy_(places.masked_fill(~known, -1))
        return ids.masked_fill(self.chosen >= 0, -1)


class Routing(NamedTuple):
    """A submit that chooses the experts itself, on the device: by softmax over logits [m, num_experts].

    normed   the weights are divided by their sum
    """

    logits: Tensor
    normed: bool


class Slots:
    """Slots on one CUDA device, and which of them are free.

    size     bytes of a request's tokens, and as many of the answer, that each slot holds
    routes   pairs of an id and a weight that each slot holds
    stream   that of all submits that use them, for slots that several layers share
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
        self._free = list(reversed(range(count)))
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """A free slot, or None."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
            # The lowest first, always: streams that take several take them in the same order and cannot block
            # each other.
            self._free.sort(reverse=True)

    def drop(self, ticket: Ticket) -> None:
        """Free the slot of a ticket that nobody waited for. One captured in a graph has nothing to free."""
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
    """`flags` or `host_func`, whichever `auto` means on a CUDA device."""
    if mode != "auto":
        return mode
    assert device.index is not None
    return "host_func" if _native.why_no_flags(device.index) else "flags"


# Slots for submits of more than MOST_TOKENS tokens, which only graphs have: a prompt of 8,192 tokens of DeepSeek-V3 is
# 2 x 117 MB. Layers capture into one stream one after the other, so they can use the same slots; and so can graphs that
# were captured in one stream: where two of them are replayed at once, one waits for the other on the device. What holds
# the Slots is the layers that have used them; without them, the graphs hold what is native of them.
_shared: WeakSet[Slots] = WeakSet()
_lock = threading.Lock()


def take_shared(device: torch.device, stream: int, size: int, routes: int) -> tuple[Slots, int]:
    """`take_from` the slots that layers share which submit into a stream."""
    return take_from(_shared, device, size, routes, "flags", stream)


def take_from(
    pool: MutableSet[Slots],
    device: torch.device,
    size: int,
    routes: int,
    mode: Mode,
    stream: int | None = None,
) -> tuple[Slots, int]:
    """The smallest slot of the pool that is free and has room for such a request; a new one if there is none.

    Raises   RuntimeError, MemoryError where there is no room for pinned buffers
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
        # By powers of two, so that a series of ever longer submits does not take a block each.
        size, routes = (1 << (most - 1).bit_length() for most in (size, routes))
        made = Slots(device, 1, size, routes, mode, stream)
        pool.add(made)
        slot = made.take()
        assert slot is not None
        return made, slot
