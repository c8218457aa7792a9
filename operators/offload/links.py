"""Several links: how the experts of a streamed layer are dealt over the GPUs of a model, and whether that pays.

    cuda:0 (the layer's own)  ◄── link ── some experts ──┐
       │ tokens, once   ▲ their sum                      RAM
       ▼                │                                │
    cuda:1 (helps)      └ link ─── the other experts ────┘

What each link carries while all of them are busy is measured once for a machine (`ktinject/measured.py`), in about a
tenth of a second. Experts are dealt in proportion to it. What crosses between the GPUs grows with the prompt, and what
is gained does not: a prompt takes help where that pays for its tokens.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktinject import _native, measured
from ktinject.addresses import address, stream_of

log = logging.getLogger("ktinject")

SUBJECT = "links"  # of the kept measurements
# What help costs a layer beside what crosses: more launches, GPUs that wait for each other, and work of their own that
# hides behind a busy bus. With int4 experts of Qwen3-30B-A3B's shape it was more than the 2.6 ms that two links spare
# (two H100), and with bf16 some 1 ms.
_HELP_S = 2.5e-3
# Help is not worth it for less than a tenth of the time.
_WORTH = 0.9
# Bytes of a copy that is measured: several of the pieces that copies are cut into.
CHUNK_BYTES = 64 << 20
_CROSSING_TOKENS = 2048
_TIMES = 3
_COPIES = 4


def deal(experts: Sequence[int], shares: Sequence[float]) -> list[tuple[int, ...]]:
    """Cut experts into runs, one for each link, in proportion to `shares`. Each expert is in one run."""
    total, reached, ends = sum(shares), 0.0, [0]
    for share in shares:
        reached += share
        ends.append(math.floor(len(experts) * reached / total + 0.5))
    return [tuple(experts[first:end]) for first, end in itertools.pairwise(ends)]


def of_argument(links: str | Sequence[str], own: str, used: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that help a layer, in ascending order.

    links   the rule's argument: auto, own, or names of GPUs
    own     the layer's device
    used    devices of all layers of the model
    """
    if own == "cpu" or links == "own":
        return ()
    named = used if links == "auto" else links
    return tuple(sorted({*named} - {own, "cpu"}, key=lambda name: (len(name), name)))


@dataclass(frozen=True)
class Links:
    """What the links of one layer take, the layer's own first.

    alone_s     seconds for all experts over the own link, while the others rest
    together_s  seconds for all experts over each link, while all links are busy
    token_s     seconds for a token's hidden state to the other GPUs, and for their sums back
    """

    alone_s: float
    together_s: tuple[float, ...]
    token_s: float

    @property
    def layer_s(self) -> float:
        """All experts, each link its share."""
        return 1 / sum(1 / seconds for seconds in self.together_s)

    @property
    def shares(self) -> tuple[float, ...]:
        """Which part of the experts each link carries; their sum is 1."""
        return tuple(self.layer_s / seconds for seconds in self.together_s)

    def crossing_s(self, tokens: int) -> float:
        """What help costs a layer, whatever the number of experts."""
        return _HELP_S + tokens * self.token_s

    def pay(self, tokens: int, absent: float = 1.0) -> bool:
        """Whether it is faster with help.

        absent   the share of the layer's experts that has to be sent
        """
        return absent * self.layer_s + self.crossing_s(tokens) < _WORTH * absent * self.alone_s


@dataclass(frozen=True)
class LinkRates:
    """What links carry in bytes a second, measured; as `Links` has it."""

    alone: float
    together: tuple[float, ...]
    crossing: float  # of all that goes to the other GPUs and comes back

    def of_layer(self, packed_bytes: int, hidden: int) -> Links:
        """What that is for a layer with so many bytes of experts, and so wide tokens."""
        others = len(self.together) - 1
        return Links(
            packed_bytes / self.alone,
            tuple(packed_bytes / rate for rate in self.together),
            others * (2 + 4) * hidden / self.crossing,  # bf16 there, and fp32 back
        )

    def values(self) -> dict[str, Any]:
        """What is kept."""
        return {"alone": self.alone, "together": self.together, "crossing": self.crossing}

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> LinkRates | None:
        """The inverse of `values`; None for what no measurement gives."""
        try:
            together = tuple(float(rate) for rate in values["together"])
            alone, crossing = float(values["alone"]), float(values["crossing"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        sound = len(together) > 1 and all(0 < rate < math.inf for rate in (alone, crossing, *together))
        return cls(alone, together, crossing) if sound else None

    def __str__(self) -> str:
        each = " and ".join(f"{rate / 1e9:.1f}" for rate in self.together)
        return (
            f"{self.alone / 1e9:.1f} GB/s over one link alone, {each} over {len(self.together)} at once, "
            f"{self.crossing / 1e9:.1f} between the GPUs"
        )


_rates: dict[tuple[object, ...], LinkRates] = {}


def measure(
    source: _native.Streamed, chunk: Sequence[int], hidden: int, devices: Sequence[torch.device]
) -> LinkRates:
    """The rates of links: kept ones, or measured.

    chunk    the experts of `source` that are copied
    hidden   values of a token's hidden state
    devices  that of the layer, and those that help
    Raises   torch.OutOfMemoryError if there is no room for the chunk on each of them
    """
    size = source.packed_bytes(len(chunk))
    at = (*devices, size, hidden)
    if at not in _rates:
        key = {
            "machine": measured.this_machine(str(devices[0])),
            "others": [measured.gpu(str(device)) for device in devices[1:]],
            "bytes": size,
            "hidden": hidden,
        }
        values = measured.load(SUBJECT, key)
        found = None if values is None else LinkRates.of_values(values)
        if found is None or len(found.together) != len(devices):
            found = _measure(source, chunk, hidden, devices)
            measured.save(SUBJECT, key, found.values())
        log.info("links of %s: %s", ", ".join(map(str, devices)), found)
        _rates[at] = found
    return _rates[at]


def _measure(
    source: _native.Streamed, chunk: Sequence[int], hidden: int, devices: Sequence[torch.device]
) -> LinkRates:
    size, others = source.packed_bytes(len(chunk)), devices[1:]
    memory = [torch.empty(size, dtype=torch.uint8, device=device) for device in devices]

    def copy(number: int) -> None:
        to = address("memory", memory[number], memory[number].device)
        source.copy(chunk, to, stream_of(devices[number]))

    alone = min(_seconds(devices[:1], copy)[0] for _ in range(_TIMES))
    # Of one time that all links were busy, as they are in a prompt: the fastest of each need not go together.
    together = min((_seconds(devices, copy) for _ in range(_TIMES)), key=max)
    crossing = min(_crossing_s(devices[0], others, hidden) for _ in range(_TIMES))
    moved = len(others) * (2 + 4) * hidden * _CROSSING_TOKENS
    return LinkRates(size / alone, tuple(size / seconds for seconds in together), moved / crossing)


def _seconds(devices: Sequence[torch.device], copy: Callable[[int], object]) -> list[float]:
    """What a copy takes on each of some devices, while all of them copy."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in devices]
    streams = [torch.cuda.current_stream(device) for device in devices]
    for stream, (start, _) in zip(streams, events):
        stream.synchronize()
        start.record(stream)
    for _ in range(_COPIES):
        for number in range(len(devices)):
            copy(number)
    for stream, (_, end) in zip(streams, events):
        end.record(stream)
    for _, end in events:
        end.synchronize()
    return [max(start.elapsed_time(end) / 1e3 / _COPIES, 1e-9) for start, end in events]


def _crossing_s(own: torch.device, others: Sequence[torch.device], hidden: int) -> float:
    """What tokens take to other GPUs, and sums back."""
    x = torch.empty(_CROSSING_TOKENS, hidden, dtype=torch.bfloat16, device=own)
    sums = [torch.empty(x.shape, dtype=torch.float32, device=other) for other in others]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream(own)
    stream.synchronize()
    start.record(stream)
    kept = [x.to(other, non_blocking=True) for other in others]
    kept += [part.to(own, non_blocking=True) for part in sums]
    end.record(stream)
    end.synchronize()
    return max(float(start.elapsed_time(end)) / 1e3, 1e-9)
