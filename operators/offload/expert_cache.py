"""`dynamic: true`: the experts on the GPU are a cache, which keeps what is used now.

Submits count on the GPU how often each expert is asked for. Between two steps, `step` puts a kernel into the stream
that changes the tables of places and sends the counts to the host; native/handoff/expert_cache.hpp draws it. A thread
of the native core chooses from the counts what to copy (native/handoff/reuse_policy.hpp), and copies it from
page-locked RAM to spare places while the next step runs. Each device has one cache, which the layers share.

Steps that see the same routing since the model was loaded see the same tables, however long copies take. How many
experts are exchanged at once follows from the time of one copy, which each process measures: it is rounded so that most
processes on a machine agree.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ktinject import _native
from ktinject.addresses import address
from ktinject.operators.offload.gpu_experts import GpuExperts

log = logging.getLogger("ktinject")

# Places of a layer beside those of its experts on the GPU. So many of its experts can be exchanged between two steps.
MOST_SPARES = 2
_EXPERTS_A_SPARE = 8


def spares(resident: int) -> int:
    """How many spare places a layer gets that has so many experts on the GPU."""
    return min(MOST_SPARES, max(1, resident // _EXPERTS_A_SPARE))


@dataclass(frozen=True)
class Hits:
    """What the experts on the GPU were good for, in decode steps so far.

    uses      of experts, one for each pair of a token and an expert
    hits      of them, of experts that were on the GPU
    fetches   experts that were copied to the GPU
    bytes     of these copies
    moves     whether experts are exchanged at present: only while that saves more than it costs
    """

    uses: int = 0
    hits: int = 0
    fetches: int = 0
    bytes: int = 0
    moves: bool = False

    @property
    def rate(self) -> float:
        """The share of the uses that found their expert on the GPU; 0 without any use."""
        return self.hits / self.uses if self.uses else 0.0

    def __add__(self, other: Hits) -> Hits:
        return Hits(
            self.uses + other.uses,
            self.hits + other.hits,
            self.fetches + other.fetches,
            self.bytes + other.bytes,
            self.moves or other.moves,
        )


class ExpertCache:
    """The cache of one device."""

    def __init__(self, device: torch.device) -> None:
        assert device.index is not None
        self.device = device
        self.native = _native.ExpertCache(device.index)
        self._kept: dict[int, tuple[Any, ...]] = {}  # what the native part uses of each layer
        self._failed = False

    def join(
        self, experts: _native.Experts, here: GpuExperts, channel: _native.Channel, *kept: object
    ) -> Seat:
        """Add a layer.

        experts  the source of copies, in the GPU's format
        channel  of the layer's submits from this device
        kept     what must live as long as the layer, such as what page-locks the experts
        """
        number = self.native.join(
            experts,
            here.native,
            channel,
            address("places", here.places, self.device, torch.int32),
            address("traffic", here.traffic, self.device, torch.int32),
            address("memory", here.memory, self.device),
            here.resident,
            here.spares,
        )
        self._kept[number] = (experts, here, channel, *kept)
        return Seat(self, number)

    def leave(self, number: int) -> None:
        """Remove a layer."""
        self.native.leave(number)
        self._kept.pop(number, None)

    @property
    def first(self) -> int:
        """The number of the layer that a step begins with."""
        return min(self._kept, default=-1)

    def step(self) -> None:
        """Put a boundary between two steps into the current stream."""
        try:
            self.native.step(torch.cuda.current_stream(self.device).cuda_stream)
        except RuntimeError as error:
            if not self._failed:  # an error of CUDA, most likely; the layers themselves still work
                log.warning("the experts on %s stay where they are: %s", self.device, error)
            self._failed = True


class Seat:
    """One layer's part of a cache."""

    def __init__(self, cache: ExpertCache, number: int) -> None:
        self.cache = cache
        self.number = number
        self._leave = weakref.finalize(self, cache.leave, number)
        self._leave.atexit = False  # the process ends, and with it the device's memory

    def places(self) -> list[int]:
        """expert → its place on the GPU, or -1."""
        return self.cache.native.places(self.number)

    @contextmanager
    def held(self, stream: torch.cuda.Stream) -> Iterator[list[int]]:
        """Inside the `with` block, no expert is overwritten; nor before what the stream has queued by its end is done.
        Gives `places()`."""
        places = self.cache.native.hold(self.number, stream.cuda_stream)
        try:
            yield places
        finally:
            self.cache.native.release(stream.cuda_stream)

    def leave(self) -> None:
        """Take the layer out of the cache, which writes nothing to its experts then. Raises RuntimeError."""
        self.cache.leave(self.number)
        self._leave.detach()

    def begins(self) -> bool:
        """Whether this layer is the first one of a step."""
        return self.number == self.cache.first

    def hits(self) -> Hits:
        """What the cache has done for this layer."""
        found = self.cache.native.counts(self.number)
        return Hits(found.uses, found.hits, found.fetches, found.bytes, found.moves)


_caches: weakref.WeakValueDictionary[torch.device, ExpertCache] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def of(device: torch.device) -> ExpertCache:
    """The cache of a device. It lives as long as somebody holds it."""
    with _lock:
        cache = _caches.get(device)
        if cache is None:
            cache = _caches[device] = ExpertCache(device)
        return cache


def step() -> None:
    """Put a boundary between two steps into the current stream of each device with a cache. For who replays graphs."""
    for cache in list(_caches.values()):
        cache.step()
