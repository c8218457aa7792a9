"""What is under way between a GPU and the CPU's experts: tickets, their slots, and what a submit asks for."""

from __future__ import annotations

import threading
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address
from ktinject.errors import OperatorError

Mode = Literal["auto", "flags", "host_func"]

# Tokens that a submit into a stream may have: decoding with room for drafts. More are prefill, for which plain copies
# cost nothing beside the computation.
MOST_TOKENS = 32
# Submits of one owner under way at the same time. Deferral needs two.
SLOTS = 4


class Ticket:
    """One submit. Dropping it without waiting drops the answer."""

    __slots__ = ("captured", "channel", "device", "dtype", "shape", "slot", "stream", "task", "tensors")

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.slot = -1
        self.channel: Slots | None = None
        self.task: _native.Task | None = None
        self.tensors: tuple[Tensor, ...] = ()
        self.stream = 0
        self.captured = False

    def __del__(self) -> None:
        if self.channel is not None:
            self.channel.drop(self)


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
    """One owner's slots on one CUDA device, and which of them are free."""

    def __init__(self, experts: _native.Experts, device: torch.device, value_bytes: int, mode: Mode) -> None:
        assert device.index is not None
        if mode == "auto":
            mode = "host_func" if _native.why_no_flags(device.index) else "flags"
        self.mode: Mode = mode
        self.device = device
        self.value_bytes = value_bytes
        self.native = _native.Channel(
            experts=experts,
            device=device.index,
            slots=SLOTS,
            tokens=MOST_TOKENS,
            value_bytes=value_bytes,
            host_func=mode == "host_func",
        )
        self._free = list(reversed(range(SLOTS)))
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            if not self._free:
                raise OperatorError(
                    f"handoff: {SLOTS} submits of one layer are under way, which is the most. Wait for one first."
                )
            return self._free.pop()

    def give(self, slot: int) -> None:
        with self._lock:
            self._free.append(slot)
            # The lowest first, always: streams that take several take them in the same order and cannot block
            # each other.
            self._free.sort(reverse=True)

    def drop(self, ticket: Ticket) -> None:
        """Free the slot of a ticket that nobody waited for. One captured in a graph has nothing to free."""
        if not ticket.captured:
            self.native.wait(ticket.slot, ticket.shape[0], CODES[ticket.dtype], 0, 0, 0, ticket.stream)
        self.give(ticket.slot)
