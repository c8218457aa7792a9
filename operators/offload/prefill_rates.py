"""Where a long prompt is fastest: what a layer takes on the CPU, over the bus, and on both, measured once."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch

from ktinject import _native
from ktinject.addresses import address, stream_of
from ktinject.operators.offload import streaming
from ktinject.operators.offload.streaming import StreamedExperts

log = logging.getLogger("ktinject")

# What a layer costs beside bus and CPU, seen on the reference box. Streamed: sorting, launches, one look at the counts;
# computed: attention, and what the host does between layers; both: the same, launched by a thread that shares its CPU.
_STREAMED_S, _COMPUTED_S, _BOTH_S = 0.6e-3, 1.5e-3, 2.7e-3
# Bus and CPU read the same memory: each takes so much longer beside the other. Not worth it for less than a tenth, or a
# fifth where the bus alone would do: its time is known, and the CPU's has been seen to be half as long again.
_SLOWED, _WORTH, _WORTH_BESIDE_BUS = 1.1, 0.9, 0.8
_MOST_SAMPLE_TOKENS = 8192


@dataclass(frozen=True)
class Rates:
    """What one layer takes, measured."""

    bus_s: float  # all its experts over the bus
    cpu_s: tuple[tuple[int, float], ...]  # (tokens, seconds) on the CPU, ascending
    token_s: float = 0.0  # a token's hidden state over the bus, there and back
    host_s: float = _COMPUTED_S  # what the host makes the GPU wait for where the CPU computes

    @property
    def streamed_s(self) -> float:
        """All experts through the GPU, the same for any prompt: the GPU's own work hides behind the bus."""
        return self.bus_s + _STREAMED_S

    def computed_s(self, tokens: int) -> float:
        """All experts on the CPU."""
        below, above = (0, 0.0), self.cpu_s[0]
        for sample in self.cpu_s[1:]:
            if above[0] >= tokens:
                break
            below, above = above, sample
        slope = (above[1] - below[1]) / (above[0] - below[0])
        return above[1] + (tokens - above[0]) * slope + tokens * self.token_s + self.host_s

    def passing(self, tokens: int, experts: int) -> int:
        """How many of a layer's experts should pass through the GPU: none, all, or as many as keep both sides busy."""
        computed_s, streamed_s = self.computed_s(tokens), self.streamed_s
        cpu_s, bus_s = _SLOWED * (computed_s - self.host_s - tokens * self.token_s), _SLOWED * self.bus_s
        share = cpu_s / (cpu_s + bus_s)
        both_s = share * bus_s + tokens * self.token_s + _BOTH_S
        if both_s < min(_WORTH * computed_s, _WORTH_BESIDE_BUS * streamed_s):
            return min(max(1, round(share * experts)), experts - 1)
        return experts if streamed_s < computed_s else 0


_rates: dict[tuple[object, ...], Rates] = {}


def measure(streamed: StreamedExperts, kind: str, top_k: int) -> Rates:
    """The rates of layers of this shape and kind of weights, measured once a process: tenths of a second."""
    key = (
        streamed.ring.device,
        streamed.spec,
        streamed.first,
        streamed.end,
        kind,
        top_k,
        _native.threads(),
    )
    if key not in _rates:
        spec, device, source = streamed.spec, streamed.ring.device, streamed.source
        experts = streamed.end - streamed.first
        count = streamed.most_experts(streaming.CHUNK_BYTES)
        memory = torch.empty(source.packed_bytes(count), dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device)
        times = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            source.copy(streamed.first, count, address("memory", memory, memory.device), stream_of(device))
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        bus_s = min(times) / count * experts
        token_s = 2 * 2 * spec.hidden_size * bus_s / source.packed_bytes(experts)
        _rates[key] = Rates(bus_s, _sample_cpu(streamed, top_k, bus_s + _STREAMED_S), token_s)
        log.info(
            "%s experts of %s on %s: %.1f ms a layer over the bus, on the CPU %s",
            experts,
            kind,
            device,
            bus_s * 1e3,
            ", ".join(f"{1e3 * seconds:.1f} ms for {tokens}" for tokens, seconds in _rates[key].cpu_s),
        )
    return _rates[key]


def _sample_cpu(streamed: StreamedExperts, top_k: int, until_s: float) -> tuple[tuple[int, float], ...]:
    """A layer on the CPU with more and more tokens, until it takes so long: reading the weights is most of the time of
    few tokens, and none of that of many, so one sample does not tell of another."""
    generator = torch.Generator().manual_seed(0)
    experts = streamed.end - streamed.first

    def seconds(tokens: int) -> float:
        x = torch.randn(tokens, streamed.spec.hidden_size, generator=generator).to(torch.bfloat16)
        ids = (
            torch.rand(tokens, experts, generator=generator).topk(min(top_k, experts)).indices
            + streamed.first
        )
        weights = torch.full(ids.shape, 1 / top_k)
        out = torch.empty_like(x)
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            streamed.native.forward(x, ids, weights, out)
            times.append(time.perf_counter() - begin)
        return min(times)

    samples = [(streaming.FEWEST_TOKENS, seconds(streaming.FEWEST_TOKENS))]
    while samples[-1][1] < until_s and samples[-1][0] < _MOST_SAMPLE_TOKENS:
        tokens, took = samples[-1]
        further = tokens * min(4, max(2, math.ceil(until_s / took)))
        samples.append((further, seconds(further)))
    return tuple(samples)
