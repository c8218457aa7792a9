"""`dynamic: true`: the experts on the GPU follow the traffic, between steps and without holding one up.

The submits count on the GPU which experts are asked for. A thread looks at the counts while there is traffic, and
exchanges an expert on the GPU for one that has become hotter. An exchange takes the leaving expert off the table, waits
on the GPU for steps that may have seen it there, copies the other from RAM, and puts it on the table; steps that run
meanwhile find both on the CPU.
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

PERIOD_S = 0.1  # between two looks
DECAY = 0.9  # what is left of a count at the next look: traffic of the last second or so decides
# An expert comes in only if it is clearly hotter, or two equal ones would be exchanged for ever.
CLEARLY, AT_LEAST = 1.25, 4.0
MOST_AT_ONCE = 2  # exchanges of a layer at one look: copies compete with the CPU's experts for memory


def exchanges(heat: Tensor, resident: list[int]) -> list[tuple[int, int]]:
    """Which experts should change places: (leaving, coming), at most MOST_AT_ONCE.

    heat      [num_experts] how much each was asked for lately
    resident  those on the GPU
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
    """A layer with experts on the GPU."""

    num_experts: int
    on_gpu: GpuExperts | None
    handoff: Handoff


class Follower:
    """Follows the traffic of one layer; the layer itself is not kept alive."""

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
        """Whether the layer is."""
        return self._operator() is None

    def look(self) -> bool:
        """Exchange what should be; False when the layer is gone."""
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
            except Exception as error:  # whatever the driver says; the layer works on as it is
                logger.warning("the experts on the GPU stay where they are: %s", error)
                gone.append(follower)
        with _lock:
            for follower in set(gone):
                _followers.remove(follower)
            if not _followers:
                return
