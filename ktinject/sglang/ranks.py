"""Which of SGLang's processes have experts on the CPU, and which of them.

With tensor parallelism several processes compute each layer, and what they find is added. The rule: a process whose
CPUs no process before it uses has a part of the experts, all parts of a size; the others have none.

- Processes that share CPUs would have pools that take turns at them, and a step with few tokens asks one part for more
  experts than the other. So the first of them has all experts and the others wait.
- SGLang binds a process to the NUMA node of its GPU, and processes may be on several machines. There one alone would
  leave the others' CPUs and memory idle.

Nothing heavy is imported: the plug-in needs this in every process.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Where(NamedTuple):
    """Where a process runs: the machine, and the numbers of its CPUs there."""

    machine: str
    cpus: frozenset[int]

    def shares_cpus(self, other: Where) -> bool:
        return self.machine == other.machine and not self.cpus.isdisjoint(other.cpus)


class Share(NamedTuple):
    """What a process has of each layer's experts on the CPU.

    part    its number among `parts`; None: it has none
    parts   into how many the experts are cut
    beside  so many other processes wait for this one on CPUs that it shares with them
    """

    part: int | None = 0
    parts: int = 1
    beside: int = 0

    def of(self, first: int, end: int) -> tuple[int, int]:
        """Its own of the experts from `first` to the one before `end`, likewise; parts differ by an expert at most."""
        part, count = self.part, end - first
        if part is None:
            return end, end
        return first + count * part // self.parts, first + count * (part + 1) // self.parts


ALL = Share()
_mine = ALL


def here() -> Where:
    """Where this process runs."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = platform.node()
    return Where(machine, frozenset(os.sched_getaffinity(0)))


def shares(places: Sequence[Where]) -> list[Share]:
    """Every rank's share, by where the ranks run."""
    having: list[int] = []
    for rank, place in enumerate(places):
        if not any(place.shares_cpus(places[before]) for before in having):
            having.append(rank)
    waiting = [rank for rank in range(len(places)) if rank not in having]

    def share(rank: int) -> Share:
        if rank in waiting:
            return Share(None, len(having))
        beside = sum(places[rank].shares_cpus(places[other]) for other in waiting)
        return Share(having.index(rank), len(having), beside)

    return [share(rank) for rank in range(len(places))]


def take(share: Share) -> None:
    """The share of the layers that this process makes from now on."""
    global _mine
    _mine = share


def mine() -> Share:
    """This process's share."""
    return _mine
