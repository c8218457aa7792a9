"""The slots of one GPU through which packed experts of long prompts pass, layer after layer.

    page-locked RAM ── copies, in a stream of their own ──► slot, slot, slot ── unpacking ──► workspace

Copies run ahead of the computation, also into the next layers, so that the bus is busy during attention, too. Each
device has one ring, which knows the order of the layers. Chunks that it fetched for another layer than the one that
comes next are dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import address
from ktinject.operators.offload import lent
from ktinject.operators.probes.experts import ExpertsSpec

# Bytes of a chunk after unpacking. With smaller chunks, the GPU is idle between launches; larger ones cost memory, and
# the first copy takes longer.
CHUNK_BYTES = 256 << 20
# One slot is unpacked while the others are filled.
SLOTS = 3
ALL = 1 << 30  # more experts than a layer has


class Chunk(NamedTuple):
    """Experts of a layer that are unpacked together."""

    experts: tuple[int, ...]
    places: tuple[int, ...] | None = None  # where they lie on the GPU; None: they come over the bus


class Asked(NamedTuple):
    """What a layer was asked for, as the next one will most likely be, too."""

    passing: int = ALL  # how many experts pass through GPUs; see `StreamedExperts.passing`
    linked: bool = False  # whether other GPUs help


class Layer(Protocol):
    """The experts of one layer, as one device streams them."""

    source: _native.Streamed
    expert_bytes: int

    def most_experts(self, chunk_bytes: int) -> int:
        """How many experts a chunk may have."""

    def foreseen(self, asked: Asked) -> Sequence[int]:
        """Which experts would come over the device's link, if those on GPUs stay where they are."""

    def unpack(self, slot: Tensor, count: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """As `StreamedExperts.unpack`."""

    def unpack_here(self, places: Sequence[int], workspace: Tensor) -> tuple[Tensor, Tensor]:
        """As `StreamedExperts.unpack_here`."""


@dataclass
class _Slot:
    memory: Tensor  # [bytes] uint8 on the GPU
    filled: torch.cuda.Event  # the copy into it has ended
    usable: torch.cuda.Event  # its chunk has been unpacked, so the next copy may begin


@dataclass
class _Copy:
    layer: weakref.ref[Layer]
    index: int
    chunks: list[Chunk]  # of the layer, over the bus; this is the one at `index`
    slot: _Slot


class Ring:
    """The slots of one device, and the order in which the layers pass through them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()  # held during a layer, since there is only one workspace
        self.asked = Asked()  # by the last layer that passed
        self.arrivals = torch.cuda.Stream(device)  # what other GPUs send to this one
        self._layers: list[weakref.ref[Layer]] = []
        self._stream = torch.cuda.Stream(device)
        self._chunk_bytes = 0  # of unpacked weights
        self._workspace = torch.empty(0, device=device, dtype=torch.float32)
        self._free: deque[_Slot] = deque()
        self._ahead: deque[_Copy] = deque()  # oldest first
        self._idle = torch.cuda.Event()  # the workspace is free

    def join(self, layer: Layer) -> None:
        """Add a layer. Layers are streamed in the order in which they join."""
        self._layers = [held for held in self._layers if held() is not None] + [weakref.ref(layer)]

    def bytes(self) -> int:
        """Bytes that the ring holds on the device."""
        slots = [*self._free, *(copy.slot for copy in self._ahead)]
        return sum(t.numel() * t.element_size() for t in [self._workspace, *(slot.memory for slot in slots)])

    def reserve(self) -> None:
        """Allocate slots and workspace that suit all layers. If memory is short, use smaller chunks.

        Raises   torch.OutOfMemoryError if there is no room for chunks of one expert, or somebody can give back some
        """
        layers = [layer for held in self._layers if (layer := held()) is not None]
        least = max(layer.expert_bytes for layer in layers)
        wanted = max(self._chunk_bytes or CHUNK_BYTES, least)
        while True:
            packed = max(layer.source.packed_bytes(layer.most_experts(wanted)) for layer in layers)
            unpacked = max(layer.expert_bytes * layer.most_experts(wanted) for layer in layers)
            slots = [*self._free, *(copy.slot for copy in self._ahead)]
            if 2 * self._workspace.numel() >= unpacked and slots and slots[0].memory.numel() >= packed:
                return
            self._stream.synchronize()  # copies into the old slots may be under way
            self._ahead.clear()
            self._free.clear()
            try:
                self._workspace = torch.empty(unpacked // 2, dtype=torch.bfloat16, device=self.device)
                memory = [torch.empty(packed, dtype=torch.uint8, device=self.device) for _ in range(SLOTS)]
                break
            except torch.OutOfMemoryError:
                self._workspace = torch.empty(0, device=self.device, dtype=torch.float32)
                if wanted == least or lent.is_lent({self.device}):
                    raise
                wanted = max(wanted // 2, least)
        for part in memory:
            slot = _Slot(part, torch.cuda.Event(), torch.cuda.Event())
            # The memory may come from a tensor that queued kernels of this stream still use.
            slot.usable.record(torch.cuda.current_stream(self.device))
            self._free.append(slot)
        self._chunk_bytes = wanted

    def chunks(
        self, layer: Layer, absent: Sequence[int], here: Sequence[int] = (), places: Sequence[int] = ()
    ) -> list[Chunk]:
        """What passes through the GPU, in the order of the computation.

        absent   experts that come over the bus
        here     those that lie on the GPU
        places   expert → its place there
        """
        most = layer.most_experts(self._chunk_bytes)
        over = [Chunk(some) for some in _cut(absent, most)]
        there = [Chunk(some, tuple(places[expert] for expert in some)) for some in _cut(here, most)]
        # While another layer is computed the slots fill up, so those come first; the bus has all of the others' time.
        half = (len(over) + 1) // 2
        return [*over[:half], *there, *over[half:]]

    def unpacked(self, layer: Layer, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, Tensor, Tensor]]:
        """(chunk, gate_up [count, n, hidden], down [count, hidden, intermediate]) for every chunk of a layer.

        The tensors are overwritten when the next chunk is asked for. Call with the lock held.
        """
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._idle)
        over, index = [chunk for chunk in chunks if chunk.places is None], 0
        for chunk in chunks:
            if chunk.places is not None:
                yield chunk, *layer.unpack_here(chunk.places, self._workspace)
                continue
            slot = self._take(layer, over, index)
            stream.wait_event(slot.filled)
            self._free.append(slot)
            gate_up, down = layer.unpack(slot.memory, len(chunk.experts), self._workspace)
            slot.usable.record(stream)
            self._run_ahead(layer, over, index)
            index += 1
            yield chunk, gate_up, down
        self._idle.record(stream)

    def _take(self, layer: Layer, chunks: list[Chunk], index: int) -> _Slot:
        while self._ahead:
            copy = self._ahead.popleft()
            if copy.layer() is layer and copy.chunks[copy.index] == chunks[index]:
                return copy.slot
            self._free.append(copy.slot)  # fetched for another layer, or for other experts of this one
        self._copy(layer, chunks, index)
        return self._ahead.popleft().slot

    def _copy(self, layer: Layer, chunks: list[Chunk], index: int) -> None:
        slot = self._free.popleft()
        self._stream.wait_event(slot.usable)
        on = self._stream.device_index, self._stream.cuda_stream
        layer.source.copy(chunks[index].experts, address("slot", slot.memory, slot.memory.device), on)
        slot.filled.record(self._stream)
        self._ahead.append(_Copy(weakref.ref(layer), index, chunks, slot))

    def _run_ahead(self, layer: Layer, chunks: list[Chunk], index: int) -> None:
        while self._free:
            if self._ahead:
                last = self._ahead[-1]
                if (held := last.layer()) is None:
                    return
                layer, chunks, index = held, last.chunks, last.index
            if index + 1 < len(chunks):
                self._copy(layer, chunks, index + 1)
                continue
            following = self._following(layer)
            if following is None:
                return
            self._copy(*following, 0)

    def _following(self, layer: Layer) -> tuple[Layer, list[Chunk]] | None:
        """The next layer that needs this link, and what it will ask for if its experts on the GPU stay there."""
        alive = [held() for held in self._layers]
        for candidate in alive[alive.index(layer) + 1 :]:
            if candidate is None:
                continue
            if over := self.chunks(candidate, candidate.foreseen(self.asked)):
                return candidate, over
        return None


def _cut(experts: Sequence[int], most: int) -> list[tuple[int, ...]]:
    return [tuple(experts[at : at + most]) for at in range(0, len(experts), most)]


def expert_bytes(spec: ExpertsSpec) -> int:
    """Bytes of one expert, unpacked to bf16."""
    return 2 * (3 if spec.has_gate else 2) * spec.intermediate_size * spec.hidden_size


def ring_bytes(spec: ExpertsSpec, packed_bytes: int) -> tuple[int, int]:
    """Bytes of a ring on the device: with chunks of one expert, and with chunks of CHUNK_BYTES.

    packed_bytes   of one expert
    """
    unpacked = expert_bytes(spec)
    each = unpacked + SLOTS * packed_bytes
    return each, each * max(1, min(spec.num_experts, CHUNK_BYTES // unpacked))


_rings: weakref.WeakValueDictionary[torch.device, Ring] = weakref.WeakValueDictionary()


def of(device: torch.device) -> Ring:
    """The ring of a device. It lives as long as somebody holds it."""
    ring = _rings.get(device)
    if ring is None:
        ring = _rings[device] = Ring(device)
    return ring
