"""Experts of one layer, as one device streams and computes them: all of them, or its part where others help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.operators.offload import ring
from ktinject.operators.offload.ring import Asked, Chunk
from ktinject.operators.probes.experts import ExpertsSpec


@dataclass(frozen=True)
class Here:
    """Experts of a layer that lie on the GPU, packed as those in RAM.

    places   gives expert → its place in memory, or -1, at present
    """

    shapes: _native.Resident
    memory: Tensor
    places: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class Routes:
    """What one device computes: pairs of a token and an expert, sorted by expert in the order of its chunks.

    x        [m, hidden] bf16
    weights  [m, t]
    pairs    [known] int64: token * t + the expert's rank among the token's
    experts  [known] of the pairs; None where nobody needs them
    ends     [experts of the device] int32: where the pairs of each end
    bounds   where those of each begin, and where the last ones end, on the host
    """

    x: Tensor
    weights: Tensor
    pairs: Tensor
    experts: Tensor | None
    ends: Tensor
    bounds: list[int]

    def to(self, device: torch.device) -> Routes:
        """The same on another device, in the order of both current streams."""

        def sent(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        experts = None if self.experts is None else sent(self.experts)
        x, weights, pairs = sent(self.x), sent(self.weights), sent(self.pairs)
        return Routes(x, weights, pairs, experts, sent(self.ends), self.bounds)


class OneLink:
    """Experts of one layer, streamed through the ring of a device and computed there.

    native  the experts in RAM
    source  the same, page-locked
    first   the experts before this one have no weights in RAM
    here    those that need not be sent
    """

    here: Here | None = None

    def __init__(
        self,
        spec: ExpertsSpec,
        native: _native.Experts,
        source: _native.Streamed,
        device: torch.device,
        first: int,
    ) -> None:
        self.ring = ring.of(device)
        self.spec = spec
        self.native = native
        self.source = source
        self.first = first
        self.expert_bytes = ring.expert_bytes(spec)
        self._biases = self._take_biases(device) if spec.has_bias else None
        self.ring.join(self)

    def foreseen(self, asked: Asked) -> Sequence[int]:
        """As `ring.Layer` has it."""
        raise NotImplementedError

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

    def sum_of_answers(self, routes: Routes, chunks: Sequence[Chunk], out: Tensor) -> Iterator[Chunk]:
        """Compute the pairs of `routes`, and write each token's weighted sum to out [m, hidden].

        Queues a chunk whenever it is asked for the next value, and at the end the sum. Call with the ring's lock held.
        """
        m, t = routes.weights.shape
        known, device = routes.bounds[-1], out.device
        # One row for each pair (token, expert of the token), so that the sum at the end always has the same order.
        answers = torch.empty(max(1, known), self.spec.hidden_size, dtype=torch.bfloat16, device=device)
        end = 0
        for chunk, gate_up, down in self.ring.unpacked(self, chunks):
            first, end = end, end + len(chunk.experts)
            low, high = routes.bounds[first], routes.bounds[end]
            if low < high:
                answers[low:high] = self._answers(routes, slice(low, high), slice(first, end), gate_up, down)
            yield chunk
        rows = torch.full((m * t,), known, device=device, dtype=torch.int64)
        rows.scatter_(0, routes.pairs, torch.arange(known, device=device))
        self.source.sum(
            address("answers", answers, device, torch.bfloat16),
            known,
            address("rows", rows, device, torch.int64),
            address("weights", routes.weights, device),
            CODES[routes.weights.dtype],
            m,
            t,
            address("out", out, device),
            CODES[out.dtype],
            stream_of(device),
        )

    def _answers(self, routes: Routes, pairs: slice, ranks: slice, gate_up: Tensor, down: Tensor) -> Tensor:
        """[pairs, hidden] bf16 of the experts of a chunk, which are these of the device's."""
        tokens = routes.pairs[pairs] // routes.weights.shape[1]
        offsets = routes.ends[ranks] - pairs.start
        h = functional.grouped_mm(routes.x[tokens], gate_up.transpose(-2, -1), offs=offsets)
        if self._biases is None:
            return functional.grouped_mm(self.activated(h), down.transpose(-2, -1), offs=offsets)
        assert routes.experts is not None
        experts = routes.experts[pairs]
        h = self.activated(h + self._biases[0][experts])
        return functional.grouped_mm(h, down.transpose(-2, -1), offs=offsets) + self._biases[1][experts]

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
            bias = torch.empty(spec.num_experts, width, dtype=torch.float32, device="cpu")
            for expert in range(spec.num_experts):
                self.native.unpack_bias(projection, expert, bias[expert])
            return bias.to(device)

        inner = [of(name, spec.intermediate_size) for name in (["gate"] if spec.has_gate else []) + ["up"]]
        return torch.cat(inner, dim=-1), of("down", spec.hidden_size)
