"""`dynamic: true`: keeps the experts on the GPU that are used most at present, without delaying any step.

Submits count on the GPU how often each expert is asked for. While there is traffic, a thread reads the counts and
replaces an expert on the GPU by one that is used more. It removes the old expert from the table of places, waits on
the GPU for steps that may have seen it there, copies the new expert from RAM and enters it in the table. Steps that run
meanwhile find neither in the table, so the CPU computes both.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

import torch
from torch import Tensor

from ktinject import _native
from ktinject.operators.offload.gpu_experts import GpuExperts
from ktinject.operators.offload.handoff import Handoff

logger = logging.getLogger("ktinject")

PERIOD_S = 0.1  # seconds between two looks at the counts
DECAY = 0.9  # factor of older counts at each look, so about the last second of traffic decides
# An expert must be clearly hotter than the one it replaces: else two equal ones would be exchanged again and again.
CLEARLY, AT_LEAST = 1.25, 4.0
# Exchanges of a layer at one look: copies compete with the CPU's experts for memory bandwidth.
MOST_AT_ONCE = 2


def exchanges(heat: Tensor, resident: list[int]) -> list[tuple[int, int]]:
    """The exchanges to make.

    heat      [num_experts] float32: how often each expert was asked for lately
    resident  ids of the experts on the GPU
    Returns   at most MOST_AT_ONCE pairs (id to remove from the GPU, id to copy to it)
    """
    here = torch.zeros(len(heat), dtype=torch.bool)
    here[resident] = True
    coldest = heat.masked_fill(~here, torch.inf).sort()
    hottest = heat.masked_fill(here, -1.0).sort(descending=True)
    pairs = []
    for place in range(min(MOST_AT_ONCE, len(resident), len(heat) - len(resident))):
        cold, hot = coldest.values[place].item(), hottest.values[place].item()
        if hot < AT_LEAST or hot < cold * CLEARLY:
            break
        pairs.append((int(coldest.indices[place]), int(hottest.indices[place])))
    return pairs


class Layer(Protocol):
    """What a Follower needs of a layer with experts on the GPU."""

    num_experts: int
    on_gpu: GpuExperts | None
    handoff: Handoff


class Follower:
    """Follows the traffic of one layer and exchanges its experts. Does not keep the layer alive."""

    def __init__(self, operator: Layer) -> None:
        assert operator.on_gpu is not None
        self._operator = weakref.ref(operator)
        self._heat = torch.zeros(operator.num_experts)
        self._seen = torch.zeros(operator.num_experts, dtype=torch.int32)
        self._stream = torch.cuda.Stream(operator.on_gpu.places.device)
        with _lock:
            _followers.append(self)
            if len(_followers) == 1:
                threading.Thread(target=_follow, name="ktinject-hot-experts", daemon=True).start()

    def is_gone(self) -> bool:
        """Whether the layer has been deleted."""
        return self._operator() is None

    def look(self) -> bool:
        """Read the counts once and make the exchanges. Returns False if the layer has been deleted."""
        operator = self._operator()
        if operator is None or operator.on_gpu is None:
            return False
        here = operator.on_gpu
        with torch.cuda.stream(self._stream):
            counts = operator.handoff.read(here.traffic)
            self._heat = self._heat * DECAY + (counts - self._seen).float()
            self._seen = counts
            for leaving, coming in exchanges(self._heat, here.resident):
                place = here.resident.index(leaving)
                operator.handoff.exchange(here.native, leaving, coming, place, here.places, here.memory)
                here.resident[place] = coming
        return True


_followers: list[Follower] = []
_lock = threading.Lock()


def _follow() -> None:
    before = -1
    while True:
        time.sleep(PERIOD_S)
        entries = _native.handoff_entries()
        moved, before = entries != before, entries
        gone = [follower for follower in _followers if follower.is_gone()]
        for follower in list(_followers) if moved else []:
            try:
                if not follower.look():
                    gone.append(follower)
            except Exception as error:  # an error of CUDA, most likely; the layer itself still works
                logger.warning("the experts on the GPU stay where they are: %s", error)
                gone.append(follower)
        with _lock:
            for follower in set(gone):
                _followers.remove(follower)
            if not _followers:
                return
