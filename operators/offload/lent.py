"""GPU memory that is lent to experts: `gpu_experts: auto` puts them where there is room, until somebody needs it.

    a pass, a cache or another model finds no room ──► give_back(device) ──► it tries again

The CPU has these experts, too, so nothing is lost but speed. What was captured before stays right: the tables of places
that it reads say from then on that no expert is there.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger("ktinject")

Made = TypeVar("Made")


class Borrower(Protocol):
    """A layer with experts in lent memory."""

    def lent(self) -> Tensor | None:
        """The memory, on its device; None if it was given back."""

    def give_back(self) -> Tensor | None:
        """Use the memory for nothing that is queued from now on, in any thread. Returns it, or None as `lent`.

        What is queued already, and graphs that are replayed, may read it until the device has done all that was
        queued before, twice. Raises RuntimeError if the memory must stay.
        """


# Replaced as a whole: who only looks takes no lock, and may hold one that giving back waits for.
_borrowers: tuple[weakref.ref[Borrower], ...] = ()
_lock = threading.Lock()
# Memory of which nobody knows whether it is still read.
_stuck: list[Tensor] = []
_times = 0


def times() -> int:
    """How often memory was given back in this process. What was captured before has experts in it that are gone."""
    return _times


def lend(borrower: Borrower) -> None:
    """Memory of this layer may be asked back."""
    global _borrowers
    with _lock:
        _borrowers = (*(one for one in _borrowers if one() is not None), weakref.ref(borrower))


def lent_bytes(device: torch.device) -> int:
    """Bytes that can be given back on a device."""
    return sum(memory.nbytes for _, memory in _held({device}))


def is_capturing() -> bool:
    """Whether the current stream is recorded into a graph, when nothing can be given back."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that tensors can have without anybody giving back some."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def is_lent(devices: Collection[torch.device]) -> bool:
    """Whether there is something to be given back."""
    return next(_held(devices), None) is not None


def give_back(devices: Collection[torch.device]) -> int:
    """Free what is lent on these devices, of all models of the process; says so once.

    Returns  bytes that are free now, for torch's allocator; 0 if there was nothing, or a graph is captured
    """
    global _times
    if is_capturing():
        return 0
    with _lock:
        freed: dict[torch.device, list[Tensor]] = {}
        for borrower in [one for one, _ in _held(devices)]:  # and not their memory, which is to go
            try:
                memory = borrower.give_back()
            except RuntimeError as error:
                log.warning("experts on a GPU cannot give back their memory: %s", error)
                continue
            if memory is not None:
                freed.setdefault(memory.device, []).append(memory)
        _times += bool(freed)
        total = 0
        for device, parts in freed.items():
            try:
                # Behind the first, every table says that no expert is there; what was queued until then may have read
                # another.
                torch.cuda.synchronize(device)
                torch.cuda.synchronize(device)
            except RuntimeError as error:
                log.warning("experts on %s cannot give back their memory: %s", device, error)
                _stuck.extend(parts)
                continue
            size = sum(part.nbytes for part in parts)
            total += size
            log.warning(
                "%s is short of memory: experts that lay there gave back %.1f GiB, and the CPU computes them from now "
                "on. To keep them there, give gpu_experts a number or a share.",
                device,
                size / 2**30,
            )
        return total


def retried(make: Callable[[], Made], devices: Collection[torch.device]) -> Made:
    """What `make` returns, tried again with what experts give back if it finds no room. Raises what it raises."""
    try:
        return make()
    except torch.OutOfMemoryError:
        if not give_back(devices):
            raise
    return make()  # here, where nothing of the failed try is left


def _held(devices: Collection[torch.device]) -> Iterator[tuple[Borrower, Tensor]]:
    for held in _borrowers:
        borrower = held()
        memory = None if borrower is None else borrower.lent()
        if borrower is not None and memory is not None and memory.device in devices:
            yield borrower, memory
