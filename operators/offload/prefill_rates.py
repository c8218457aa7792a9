"""Where a long prompt is fastest: what a layer takes on the CPU, over the bus, and on both.

It is measured at the first long prompt, and kept for the next process (`ktinject/measured.py`): the bus, the CPU with
few and many tokens, the GPU with few and many, and how much CPU and bus slow each other down.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ktinject import _native, measured
from ktinject.addresses import address, stream_of
from ktinject.operators.offload import lent, ring, streaming
from ktinject.operators.offload.links import Links
from ktinject.operators.offload.streaming import StreamedExperts

log = logging.getLogger("ktinject")

SUBJECT = "prompts"  # of the kept measurements
# What a layer costs beside what is measured, seen on the reference box. Streamed: sorting, launches, one look at the
# counts; computed: attention, and what the host does between layers; both: the same, launched by a thread that shares
# its CPU.
_STREAMED_S, _COMPUTED_S, _BOTH_S = 0.6e-3, 1.5e-3, 2.7e-3
# Both sides are not worth it for less than a tenth, or a fifth where the bus alone would do: its time is known, and the
# CPU's has been seen to be half as long again.
_WORTH, _WORTH_BESIDE_BUS = 0.9, 0.8
_MOST_SAMPLE_TOKENS = 8192
# The CPU's samples end after so many seconds. A layer that takes _SLOW_S with few tokens is sampled by an eighth of its
# experts, and of the tokens; calls as long as _LONG_S are measured once.
_BUDGET_S, _SLOW_S, _LONG_S = 0.8, 0.1, 0.05
_SLOWED = 1.1  # by which CPU and bus slow each other down where that was not measured
_MOST_SLOWED = 2.0

Samples = tuple[tuple[int, float], ...]  # (tokens, seconds), ascending


def _at(samples: Samples, tokens: int) -> float:
    """Seconds for so many tokens: between two samples, before the first, or behind the last."""
    below, above = (0, 0.0), samples[0]
    for sample in samples[1:]:
        if above[0] >= tokens:
            break
        below, above = above, sample
    slope = (above[1] - below[1]) / (above[0] - below[0])
    return above[1] + (tokens - above[0]) * slope


@dataclass(frozen=True)
class Rates:
    """What one layer takes, measured."""

    bus_s: float  # all its experts over the bus
    cpu_s: Samples  # on the CPU
    token_s: float = 0.0  # a token's hidden state over the bus, there and back
    host_s: float = _COMPUTED_S  # what the host makes the GPU wait for where the CPU computes
    gpu_s: Samples = ()  # unpacking all experts and multiplying on the GPU; (): hidden behind the bus
    # How many times as long the CPU, and the bus, take beside each other.
    slowed: tuple[float, float] = (_SLOWED, _SLOWED)
    links: Links | None = (
        None  # over which the experts come; None: over the own one, which is what is measured
    )

    def over(self, links: Links) -> Rates:
        """The same where other GPUs help: `bus_s` is what all links take together."""
        times = links.alone_s / links.layer_s  # as much is read from RAM beside the CPU
        on_cpu = min(1 + (self.slowed[0] - 1) * times, _MOST_SLOWED)
        return replace(self, bus_s=self.bus_s / times, slowed=(on_cpu, self.slowed[1]), links=links)

    def streamed_s(self, tokens: int, absent: float = 1.0) -> float:
        """All experts on the GPU: its own work hides behind the bus, or the bus behind that.

        absent   the share of the experts that has to be sent
        """
        return self._passing_s(tokens, absent) + self._crossing_s(tokens) + _STREAMED_S

    def _passing_s(self, tokens: int, absent: float) -> float:
        """What bus and GPU take, whichever is longer."""
        gpu_s = _at(self.gpu_s, tokens) if self.gpu_s else 0.0
        if self.links is not None:  # each GPU computes what it gets, and the own one those that are there
            own, *others = (absent * share for share in self.links.shares)
            gpu_s *= max(1 - absent + own, *others)
        return max(absent * self.bus_s, gpu_s)

    def _crossing_s(self, tokens: int) -> float:
        return 0.0 if self.links is None else self.links.crossing_s(tokens)

    def computed_s(self, tokens: int) -> float:
        """All experts on the CPU."""
        return _at(self.cpu_s, tokens) + tokens * self.token_s + self.host_s

    def passing(self, tokens: int, experts: int, absent: float = 1.0) -> int:
        """How many of so many experts should be sent to the GPU: none, all, or as many as keep both sides busy.

        absent   their share of the layer's experts; the others are on the GPU, and are computed there in any case. For
                 the CPU alone nothing is taken off for them: the GPU's kernels beside it are made for few tokens
        """
        computed_s, streamed_s = self.computed_s(tokens), self.streamed_s(tokens, absent)
        cpu_s = absent * self.slowed[0] * (computed_s - self.host_s - tokens * self.token_s)
        bus_s, crossing_s = self.slowed[1] * self._passing_s(tokens, absent), self._crossing_s(tokens)
        share = max(0.0, cpu_s - crossing_s) / (cpu_s + bus_s)
        both_s = share * bus_s + crossing_s + tokens * self.token_s + _BOTH_S
        if both_s < min(_WORTH * computed_s, _WORTH_BESIDE_BUS * streamed_s):
            return min(max(1, round(share * experts)), experts - 1)
        return experts if streamed_s < computed_s else 0

    def values(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "bus_s": self.bus_s,
            "token_s": self.token_s,
            "cpu_s": self.cpu_s,
            "gpu_s": self.gpu_s,
            "slowed": self.slowed,
        }

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Rates | None:
        """The inverse of `values`; None for what no measurement gives."""
        try:
            cpu_s, gpu_s = ((*((int(m), float(s)) for m, s in values[name]),) for name in ("cpu_s", "gpu_s"))
            bus_s, token_s = float(values["bus_s"]), float(values["token_s"])
            on_cpu, on_bus = (float(factor) for factor in values["slowed"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        times = [bus_s, token_s, *(seconds for _, seconds in (*cpu_s, *gpu_s))]
        ascending = all(a[0] < b[0] for some in (cpu_s, gpu_s) for a, b in zip(((0, 0.0), *some), some))
        if not (cpu_s and ascending and all(0 < one < math.inf for one in times)):
            return None
        if not all(1 <= factor <= _MOST_SLOWED for factor in (on_cpu, on_bus)):
            return None
        return cls(bus_s, cpu_s, token_s, gpu_s=gpu_s, slowed=(on_cpu, on_bus))

    def __str__(self) -> str:
        def said(samples: Samples) -> str:
            return ", ".join(f"{1e3 * seconds:.1f} ms for {tokens}" for tokens, seconds in samples)

        gpu = f", on the GPU {said(self.gpu_s)}" if self.gpu_s else ""
        both = f"beside each other {self.slowed[0]:.2f} and {self.slowed[1]:.2f} times as long"
        return f"{self.bus_s * 1e3:.1f} ms a layer over the bus, on the CPU {said(self.cpu_s)} tokens{gpu}; {both}"


_rates: dict[tuple[object, ...], Rates] = {}


def key_of(streamed: StreamedExperts, kind: str, top_k: int) -> dict[str, Any]:
    """All that the rates depend on."""
    return {
        "machine": measured.this_machine(str(streamed.ring.device)),
        "experts": str(streamed.spec),
        "first": streamed.first,
        "in_ram": len(streamed.in_ram),
        "weights": kind,
        "top_k": top_k,
    }


def measure(streamed: StreamedExperts, kind: str, top_k: int) -> Rates:
    """The rates of layers of this shape and kind of weights: kept ones, or measured in about a second.

    Raises   torch.OutOfMemoryError if there is no room on the GPU for a chunk of experts
    """
    at = (
        streamed.ring.device,
        streamed.spec,
        streamed.first,
        len(streamed.in_ram),
        kind,
        top_k,
        _native.threads(),
    )
    if at not in _rates:
        key = key_of(streamed, kind, top_k)
        values = measured.load(SUBJECT, key)
        found = None if values is None else Rates.of_values(values)
        if values is not None and found is None:
            log.warning("what was kept of %s in %s makes no sense; measured again", kind, measured.folder())
        if found is None:
            found = _measure(streamed, top_k)
            measured.save(SUBJECT, key, found.values())
        log.info("experts of %s on %s: %s", kind, streamed.ring.device, found)
        _rates[at] = found
    return _rates[at]


def _measure(streamed: StreamedExperts, top_k: int) -> Rates:
    spec, device, source = streamed.spec, streamed.ring.device, streamed.source
    experts = spec.num_experts - streamed.first
    chunk = streamed.in_ram[: streamed.most_experts(ring.CHUNK_BYTES)]
    count = len(chunk)
    memory = torch.empty(source.packed_bytes(count), dtype=torch.uint8, device=device)

    def copy() -> None:
        source.copy(chunk, address("memory", memory, memory.device), stream_of(device))

    chunk_s = min(_seconds_on(device, copy) for _ in range(3))
    bus_s = chunk_s / count * experts
    token_s = 2 * 2 * spec.hidden_size * bus_s / source.packed_bytes(experts)
    cpu = _Cpu(streamed, top_k)
    cpu_s = _sample_cpu(cpu, bus_s + _STREAMED_S)
    try:
        gpu_s = _sample_gpu(streamed, memory, count, top_k)
    except torch.OutOfMemoryError:
        if lent.is_lent({device}):
            raise
        gpu_s = ()
    return Rates(bus_s, cpu_s, token_s, gpu_s=gpu_s, slowed=_slowed(cpu, copy, chunk_s, device))


def _seconds_on(device: torch.device, call: Callable[[], object]) -> float:
    """What the GPU takes for a call."""
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class _Cpu:
    """A layer on the CPU, with random tokens."""

    def __init__(self, streamed: StreamedExperts, top_k: int) -> None:
        self.streamed, self.top_k = streamed, top_k
        self.experts = streamed.spec.num_experts - streamed.first
        self._generator = torch.Generator().manual_seed(0)
        # Experts that are asked, and as large a part of the tokens: an expert gets as many rows as from all of them.
        self.used = max(min(top_k, self.experts), self.experts // 8)
        self.used = min(self.used, len(streamed.in_ram))
        if self.seconds(streaming.FEWEST_TOKENS) <= _SLOW_S:
            self.used = len(streamed.in_ram)

    def call(self, tokens: int) -> Callable[[], float]:
        """A call that takes its own time; `used` of the experts."""
        spec, m = self.streamed.spec, max(1, tokens * self.used // self.experts)
        x = torch.randn(m, spec.hidden_size, generator=self._generator, dtype=torch.float32, device="cpu").to(
            torch.bfloat16
        )
        chosen = (
            torch.rand(m, self.used, generator=self._generator, dtype=torch.float32, device="cpu")
            .topk(min(self.top_k, self.used))
            .indices
        )
        ids, weights = (
            torch.tensor(self.streamed.in_ram, dtype=torch.int64, device="cpu")[chosen],
            torch.full(chosen.shape, 1 / self.top_k, dtype=torch.float32, device="cpu"),
        )
        out = torch.empty_like(x)

        def once() -> float:
            begin = time.perf_counter()
            self.streamed.native.forward(x, ids, weights, out)
            return time.perf_counter() - begin

        return once

    def seconds(self, tokens: int) -> float:
        """What all experts take for so many tokens."""
        once = self.call(tokens)
        times = [once()]
        while len(times) < 3 and times[-1] < _LONG_S:
            times.append(once())
        return min(times) * self.experts / self.used


def _sample_cpu(cpu: _Cpu, until_s: float) -> Samples:
    """A layer on the CPU with more and more tokens, until it takes so long: reading the weights is most of the time of
    few tokens, and none of that of many, so one sample does not tell of another."""
    began = time.perf_counter()
    samples = [(streaming.FEWEST_TOKENS, cpu.seconds(streaming.FEWEST_TOKENS))]
    while samples[-1][1] < until_s and samples[-1][0] < _MOST_SAMPLE_TOKENS:
        tokens, took = samples[-1]
        further = tokens * min(4, max(2, math.ceil(until_s / took)))
        next_s = took * cpu.used / cpu.experts * further / tokens
        if len(samples) > 1 and time.perf_counter() - began + next_s > _BUDGET_S:
            break
        samples.append((further, cpu.seconds(further)))
    return tuple(samples)


def _sample_gpu(streamed: StreamedExperts, memory: Tensor, count: int, top_k: int) -> Samples:
    """What the GPU takes to unpack all experts of a layer and to multiply them with few, and with many tokens.

    memory   `count` packed experts
    """
    spec, device = streamed.spec, memory.device
    experts = spec.num_experts - streamed.first
    workspace = torch.empty(streamed.expert_bytes * count // 2, dtype=torch.bfloat16, device=device)
    samples = []
    # Its own, so that no call shifts what others sample: processes of one model must sample the same.
    generator = torch.Generator(device).manual_seed(0)
    for tokens in (streaming.FEWEST_TOKENS, _MOST_SAMPLE_TOKENS // 2):
        rows = max(1, tokens * top_k // experts)
        x = torch.randn(
            count * rows, spec.hidden_size, generator=generator, dtype=torch.bfloat16, device=device
        )
        ends = torch.arange(1, count + 1, device=device, dtype=torch.int32) * rows

        def call(x: Tensor = x, ends: Tensor = ends) -> None:
            gate_up, down = streamed.unpack(memory, count, workspace)
            h = streamed.activated(functional.grouped_mm(x, gate_up.transpose(-2, -1), offs=ends))
            functional.grouped_mm(h, down.transpose(-2, -1), offs=ends)

        seconds = min(_seconds_on(device, call) for _ in range(3))
        samples.append((tokens, seconds / count * experts))
    return tuple(samples)


def _slowed(cpu: _Cpu, copy: Callable[[], None], chunk_s: float, device: torch.device) -> tuple[float, float]:
    """How many times as long the CPU, and the bus, take while the other one reads the same memory."""
    once = cpu.call(4 * streaming.FEWEST_TOKENS)
    alone = min(once() for _ in range(2))
    copies = min(200, math.ceil(1.2 * alone / chunk_s) + 1)
    found = []
    for _ in range(2):
        took = [0.0]

        def both(took: list[float] = took) -> None:
            for _ in range(copies):
                copy()
            took[0] = once()

        stream_s = _seconds_on(device, both)
        # The CPU may end before the copies do, which are slowed down only until then.
        late_s = max(0.0, stream_s - copies * chunk_s)
        busy_s = min(took[0], stream_s)
        found.append((took[0] / alone, busy_s / max(busy_s - late_s, busy_s / _MOST_SLOWED)))
    on_cpu, on_bus = (min(max(min(factors), 1.0), _MOST_SLOWED) for factors in zip(*found))
    return on_cpu, on_bus
