"""Long prompts: the packed experts of each layer are streamed to the GPU, which computes them.

The experts stay packed in page-locked RAM. A ring of slots on the GPU receives copies of them, a chunk of experts at a
time; those that lie on the GPU for decoding, packed in the same way, are read where they are. Copies run ahead of the
computation, also into the next layers, so that the bus is busy during attention, too. The GPU unpacks each chunk to
bf16 and multiplies it with the tokens of its experts. So the time of a layer is that of the bus, for any number of
tokens that the GPU multiplies meanwhile.

If CPU and bus need about equally long, each gets a part of the experts, and both work at the same time. The CPU gets
its part first. A kernel reads its result directly from page-locked RAM, since a copy would wait behind the experts that
are queued for the bus.

Each device has one ring, which knows the order of the layers. Chunks that it fetched for another layer than the one
that comes next are dropped.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.errors import OperatorError
from ktinject.operators.offload import lent
from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.support import SUPPORTED, Support

log = logging.getLogger("ktinject")

# Bytes of a chunk after unpacking. With smaller chunks, the GPU is idle between launches; larger ones cost memory, and
# the first copy takes longer.
CHUNK_BYTES = 256 << 20
# One slot is unpacked while the others are filled.
SLOTS = 3
# With fewer tokens, `auto` never streams: rates are measured with many tokens, and decoding must not depend on them.
FEWEST_TOKENS = 128
_ALL = 1 << 30
_MOST_RANKS = 2  # tables of a layer that stay on the GPU: of all experts, and of a part
# Bytes for the answers of a layer, one for each pair of a token and an expert. They are kept until all experts have
# passed, so a longer prompt goes through the layer in parts.
ANSWER_BYTES = 1 << 30


@dataclass
class _Slot:
    memory: Tensor  # [bytes] uint8 on the GPU
    filled: torch.cuda.Event  # the copy into it has ended
    usable: torch.cuda.Event  # its chunk has been unpacked, so the next copy may begin


class Chunk(NamedTuple):
    """Experts of a layer that are unpacked together."""

    experts: tuple[int, ...]
    places: tuple[int, ...] | None = None  # where they lie on the GPU; None: they come over the bus


@dataclass
class _Copy:
    layer: weakref.ref[StreamedExperts]
    index: int
    chunks: list[Chunk]  # of the layer, over the bus; this is the one at `index`
    slot: _Slot


class Ring:
    """The slots of one device, and the order in which the layers pass through them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()  # held during a layer, since there is only one workspace
        self._layers: list[weakref.ref[StreamedExperts]] = []
        self._stream = torch.cuda.Stream(device)
        self._chunk_bytes = 0  # of unpacked weights
        self._workspace = torch.empty(0, device=device)
        self._free: deque[_Slot] = deque()
        self._ahead: deque[_Copy] = deque()  # oldest first
        self._idle = torch.cuda.Event()  # the workspace is free
        self.passing = _ALL  # how many experts of a layer pass through the GPU; see StreamedExperts.passing

    def join(self, layer: StreamedExperts) -> None:
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
                self._workspace = torch.empty(0, device=self.device)
                if wanted == least or lent.is_lent({self.device}):
                    raise
                wanted = max(wanted // 2, least)
        for part in memory:
            slot = _Slot(part, torch.cuda.Event(), torch.cuda.Event())
            # The memory may come from a tensor that queued kernels of this stream still use.
            slot.usable.record(torch.cuda.current_stream(self.device))
            self._free.append(slot)
        self._chunk_bytes = wanted

    def chunks(self, layer: StreamedExperts, places: Sequence[int]) -> list[Chunk]:
        """What passes through the GPU, in the order of the computation. `places` as in StreamedExperts.passing."""
        most = layer.most_experts(self._chunk_bytes)
        here, absent = layer.passing(self.passing, places)
        over = [Chunk(some) for some in _cut(absent, most)]
        there = [Chunk(some, tuple(places[expert] for expert in some)) for some in _cut(here, most)]
        # While another layer is computed the slots fill up, so those come first; the bus has all of the others' time.
        half = (len(over) + 1) // 2
        return [*over[:half], *there, *over[half:]]

    def unpacked(
        self, layer: StreamedExperts, chunks: Sequence[Chunk]
    ) -> Iterator[tuple[Chunk, Tensor, Tensor]]:
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

    def _take(self, layer: StreamedExperts, chunks: list[Chunk], index: int) -> _Slot:
        while self._ahead:
            copy = self._ahead.popleft()
            if copy.layer() is layer and copy.chunks[copy.index] == chunks[index]:
                return copy.slot
            self._free.append(copy.slot)  # fetched for another layer, or for other experts of this one
        self._copy(layer, chunks, index)
        return self._ahead.popleft().slot

    def _copy(self, layer: StreamedExperts, chunks: list[Chunk], index: int) -> None:
        slot = self._free.popleft()
        self._stream.wait_event(slot.usable)
        on = self._stream.device_index, self._stream.cuda_stream
        layer.source.copy(chunks[index].experts, address("slot", slot.memory, slot.memory.device), on)
        slot.filled.record(self._stream)
        self._ahead.append(_Copy(weakref.ref(layer), index, chunks, slot))

    def _run_ahead(self, layer: StreamedExperts, chunks: list[Chunk], index: int) -> None:
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

    def _following(self, layer: StreamedExperts) -> tuple[StreamedExperts, list[Chunk]] | None:
        """The next layer that needs the bus, and what it will ask for if its experts on the GPU stay there."""
        alive = [held() for held in self._layers]
        for candidate in alive[alive.index(layer) + 1 :]:
            if candidate is None:
                continue
            over = [chunk for chunk in self.chunks(candidate, candidate.places()) if chunk.places is None]
            if over:
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


@dataclass(frozen=True)
class Here:
    """Experts of a layer that lie on the GPU, packed as those in RAM.

    places   gives expert → its place in memory, or -1, at present
    """

    shapes: _native.Resident
    memory: Tensor
    places: Callable[[], Sequence[int]]


class StreamedExperts:
    """The experts of one layer, streamed through the ring of a device and computed there.

    native  the experts in RAM, with weights
    first   the experts before this one have no weights in RAM, and are skipped
    gone    others without weights in RAM; they must be `here`
    uses    [num_experts] int64 on the GPU: how often each one was computed for a token; None: nobody looks
    here    those that need not be sent
    """

    uses: Tensor | None = None
    here: Here | None = None

    def __init__(
        self,
        spec: ExpertsSpec,
        native: _native.Experts,
        device: torch.device,
        first: int = 0,
        gone: Collection[int] = (),
    ) -> None:
        ring = _rings.get(device)
        if ring is None:
            ring = _rings[device] = Ring(device)
        self.ring = ring
        self.spec = spec
        self.native = native
        self.first = first
        self.in_ram = tuple(expert for expert in range(first, spec.num_experts) if expert not in gone)
        self.source = _native.Streamed(native, first)
        self.expert_bytes = expert_bytes(spec)
        self._biases = self._take_biases(device) if spec.has_bias else None
        self._nowhere = (-1,) * spec.num_experts
        self._ranks: tuple[tuple[tuple[int, ...], Tensor], ...] = ()
        ring.join(self)

    @staticmethod
    def support(spec: ExpertsSpec) -> Support:
        """Whether experts of this shape can be streamed."""
        if spec.hidden_size % 8 or spec.intermediate_size % 8:
            widths = f"{spec.hidden_size} and {spec.intermediate_size}"
            return Support.no(
                f"experts are streamed where both widths are multiples of 8, and these are {widths}"
            )
        return SUPPORTED

    def unpack(self, slot: Tensor, count: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
        """The first `count` experts of a slot in bf16, in the workspace: gate_up [count, n, hidden] and down
        [count, hidden, intermediate]."""
        gate_up, down = self._unpacked(count, workspace)
        self.source.unpack(
            address("slot", slot, gate_up.device),
            count,
            address("gate_up", gate_up, gate_up.device, torch.bfloat16),
            address("down", down, gate_up.device, torch.bfloat16),
            stream_of(gate_up.device),
        )
        return gate_up, down

    def unpack_here(self, places: Sequence[int], workspace: Tensor) -> tuple[Tensor, Tensor]:
        """The same of experts that lie at these places of `here`."""
        assert self.here is not None
        gate_up, down = self._unpacked(len(places), workspace)
        self.source.unpack_resident(
            self.here.shapes,
            address("memory", self.here.memory, gate_up.device),
            places,
            address("gate_up", gate_up, gate_up.device, torch.bfloat16),
            address("down", down, gate_up.device, torch.bfloat16),
            stream_of(gate_up.device),
        )
        return gate_up, down

    def _unpacked(self, count: int, workspace: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        rows = spec.intermediate_size * (2 if spec.has_gate else 1)
        cut = count * rows * spec.hidden_size
        gate_up = workspace[:cut].view(count, rows, spec.hidden_size)
        down = workspace[cut : cut + count * spec.hidden_size * spec.intermediate_size]
        return gate_up, down.view(count, spec.hidden_size, spec.intermediate_size)

    def most_experts(self, chunk_bytes: int) -> int:
        return max(1, min(self.spec.num_experts - self.first, chunk_bytes // self.expert_bytes))

    def places(self) -> Sequence[int]:
        """Expert → its place on the GPU, or -1, at present."""
        return self._nowhere if self.here is None else self.here.places()

    def passing(self, count: int, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which experts pass through the GPU if `count` do, those before `first` counted in.

        places   expert → its place in the memory of `here`, or -1
        Returns  those that are there, all of them; and the first ones of the others, which come over the bus
        """
        experts = range(self.first, self.spec.num_experts)
        here = [expert for expert in experts if places[expert] >= 0]
        absent = [expert for expert in experts if places[expert] < 0]
        return here, absent[: max(0, count - self.first - len(here))]

    def passes(self, ids: Tensor, count: int, places: Sequence[int]) -> Tensor:
        """Of ids, which are those of experts that pass through the GPU: bool of their shape. Other ids are not."""
        here, absent = self.passing(count, places)
        return self._rank(ids, (*here, *absent)) < self.spec.num_experts

    def _rank(self, ids: Tensor, experts: tuple[int, ...]) -> Tensor:
        """The place of each id among `experts`; num_experts for ids that are not among them."""
        num_experts = self.spec.num_experts
        ranks = next((table for of, table in self._ranks if of == experts), None)
        if ranks is None:
            of_expert = [num_experts] * (num_experts + 1)
            for rank, expert in enumerate(experts):
                of_expert[expert] = rank
            ranks = torch.tensor(of_expert, device=ids.device)
            self._ranks = ((experts, ranks), *self._ranks[: _MOST_RANKS - 1])
        if ranks.is_cuda:  # another thread may take it off the list, and its memory comes from another stream
            ranks.record_stream(torch.cuda.current_stream(ranks.device))
        return ranks[torch.where((ids < 0) | (ids > num_experts), num_experts, ids).long()]

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first_experts: int | None = None,
        dtype: torch.dtype | None = None,
        places: Sequence[int] | None = None,
    ) -> Tensor:
        """The weighted sum of the experts' outputs. Expert weights and activations are bf16, sums are fp32.

        x              [m, hidden] on the GPU
        ids, weights   [m, t] on the GPU; ids of -1 and num_experts are skipped
        first_experts  compute only so many experts, see `passing`; None: all
        dtype          of the result; None: that of x
        places         expert → its place in the memory of `here`, or -1, which nobody writes to until the stream is
                       through; None: all experts come over the bus
        Returns        [m, hidden]
        Raises         OperatorError for an invalid id; torch.OutOfMemoryError if there is no room for one expert and
                       FEWEST_TOKENS tokens, or for more and somebody can give back some
        """
        out = torch.empty_like(x, dtype=dtype or x.dtype)
        most = max(1, ANSWER_BYTES // (2 * ids.shape[1] * self.spec.hidden_size))
        with self.ring.lock:
            self.ring.reserve()
            self.ring.passing = _ALL if first_experts is None else first_experts
            chunks = self.ring.chunks(self, self._nowhere if places is None else places)
            done = 0
            while done < x.shape[0]:
                part = slice(done, min(done + most, x.shape[0]))
                try:
                    self._part(x[part], ids[part], weights[part], chunks, out[part])
                except torch.OutOfMemoryError:
                    if most <= FEWEST_TOKENS or lent.is_lent({x.device}):
                        raise
                    most = max(most // 2, FEWEST_TOKENS)
                    continue
                done = part.stop
        return out

    def _part(self, x: Tensor, ids: Tensor, weights: Tensor, chunks: Sequence[Chunk], out: Tensor) -> None:
        spec, experts = self.spec, self.spec.num_experts
        m, t = ids.shape
        expert = ids.reshape(-1)
        strangers = (expert < -1) | (expert > experts)
        rank = self._rank(expert, tuple(expert for chunk in chunks for expert in chunk.experts))
        order = rank.argsort(stable=True)
        ends = torch.bincount(rank, minlength=experts + 1).cumsum(0)
        inputs = x.to(torch.bfloat16)
        *host_ends, found = [0, *torch.cat([ends, strangers.sum()[None]]).tolist()]
        if found:
            raise OperatorError(
                f"top_k_index: found {int(ids[strangers.view(m, t)][0])}; allowed are 0 to {experts - 1}, and "
                f"-1 and {experts} to skip."
            )
        # One row for each pair (token, expert of the token), so that the sum at the end always has the same order.
        known = host_ends[experts]
        answers = torch.empty(max(1, known), spec.hidden_size, dtype=torch.bfloat16, device=x.device)
        end = 0
        for chunk, gate_up, down in self.ring.unpacked(self, chunks):
            first, end = end, end + len(chunk.experts)
            low, high = host_ends[first], host_ends[end]
            if low == high:
                continue
            slots = order[low:high]
            offsets = (ends[first:end] - low).to(torch.int32)
            h = functional.grouped_mm(inputs[slots // t], gate_up.transpose(-2, -1), offs=offsets)
            if self._biases is not None:
                h = h + self._biases[0][expert[slots]]
            h = self.activated(h)
            y = functional.grouped_mm(h, down.transpose(-2, -1), offs=offsets)
            if self._biases is not None:
                y = y + self._biases[1][expert[slots]]
            answers[low:high] = y
        if self.uses is not None:
            passes = rank < experts
            self.uses.scatter_add_(0, torch.where(passes, expert, 0).long(), passes.long())
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(m * t, device=x.device))
        weights = weights.contiguous()
        self.source.sum(
            address("answers", answers, x.device, torch.bfloat16),
            known,
            address("rows", rows, x.device, torch.int64),
            address("weights", weights, x.device),
            CODES[weights.dtype],
            m,
            t,
            address("out", out, x.device),
            CODES[out.dtype],
            stream_of(x.device),
        )

    def activated(self, gate_up: Tensor) -> Tensor:
        """[rows, n] bfloat16 or float32 → [rows, intermediate] bfloat16; computed in fp32, rounded once."""
        out = gate_up.new_empty(gate_up.shape[0], self.spec.intermediate_size, dtype=torch.bfloat16)
        self.source.activate(
            address("gate_up", gate_up, gate_up.device),
            CODES[gate_up.dtype],
            gate_up.shape[0],
            address("out", out, gate_up.device),
            stream_of(gate_up.device),
        )
        return out

    def _take_biases(self, device: torch.device) -> tuple[Tensor, Tensor]:
        spec = self.spec

        def of(projection: str, width: int) -> Tensor:
            bias = torch.empty(spec.num_experts, width)
            for expert in range(spec.num_experts):
                self.native.unpack_bias(projection, expert, bias[expert])
            return bias.to(device)

        inner = [of(name, spec.intermediate_size) for name in (["gate"] if spec.has_gate else []) + ["up"]]
        return torch.cat(inner, dim=-1), of("down", spec.hidden_size)
