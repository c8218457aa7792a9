"""What ktinject uses of the machine, and the reason for everything it leaves unused."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ktinject import env
from ktinject.machine import Kernel, Machine, detect


@dataclass(frozen=True)
class Finding:
    """One line of the report: what is there, what is used of it, and why not all."""

    subject: str
    has: str
    uses: str
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """What the machine has and what ktinject uses of it. `str(report)` is a table."""

    machine: Machine
    findings: tuple[Finding, ...]

    def __rich__(self) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("", no_wrap=True, style="bold")
        for title in ("this machine has", "ktinject uses", "because"):
            table.add_column(title, overflow="fold")
        for finding in self.findings:
            table.add_row(finding.subject, finding.has, finding.uses, finding.reason)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=120, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()).strip("\n")

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, ready for JSON."""
        return {"machine": asdict(self.machine), "findings": [asdict(finding) for finding in self.findings]}


def doctor(machine: Machine | None = None) -> Report:
    """Say what the machine has, what ktinject uses of it, and the reason for everything it leaves unused.

    machine  a reading to explain; by default one is taken now
    Raises   PlanError or OperatorError for a bad environment variable
    """
    machine = machine or detect()
    return Report(
        machine,
        (
            _explain_cpu(machine),
            _explain_memory(machine),
            _explain_nodes(machine),
            _explain_huge_pages(machine),
            _explain_features(machine),
            *_explain_kernels(machine),
            _explain_gpus(machine),
            Finding(
                "versions",
                ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
                "all",
            ),
        ),
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _explain_cpu(machine: Machine) -> Finding:
    reasons = []
    if len(machine.cpus) < machine.cpu_count:
        reasons.append(f"the affinity mask leaves {len(machine.cpus)} of {machine.cpu_count} CPUs")
    if machine.cpu_quota is not None:
        reasons.append(f"the cgroup quota is {machine.cpu_quota:g} CPUs")
    if threads := env.settings().threads:
        more = "; more than CPUs would take them from each other" if threads > machine.threads else ""
        reasons.append(f"KTINJECT_THREADS={threads}{more}")
    has = f"{machine.cpu}, {machine.cpu_count} logical CPUs"
    return Finding("CPU", has, f"{machine.threads} threads", "; ".join(reasons))


def _explain_memory(machine: Machine) -> Finding:
    limit = machine.memory_limit_bytes
    reason = "" if limit is None else f"the cgroup limit is {_gib(limit)}"
    return Finding(
        "memory", _gib(machine.memory_bytes), f"{_gib(machine.memory_available_bytes)} available", reason
    )


def _explain_nodes(machine: Machine) -> Finding:
    has = "; ".join(f"node {n.id}: {len(n.cpus)} CPUs, {_gib(n.memory_bytes)}" for n in machine.nodes)
    usable = machine.usable_nodes
    reasons = [
        f"node {node.id} has "
        + (
            "memory and no CPU"
            if not node.cpus
            else "no CPU that the affinity mask leaves us"
            if node.memory_bytes
            else "CPUs and no memory: they work for the nearest node"
        )
        for node in machine.nodes
        if node not in usable
    ]
    names = ", ".join(f"node {node.id}" for node in usable)
    uses = f"one pool of threads on {names}"
    if machine.virtual_nodes and machine.virtual_nodes > 1:
        reasons.append(f"KTINJECT_NUMA={machine.virtual_nodes}")
        uses = f"{machine.virtual_nodes} virtual nodes: experts cut among them, each with threads of its own"
    elif len(usable) > 1:
        uses = f"experts cut among {names}, each with its shard in its memory and threads of its own"
    return Finding("NUMA", has, uses, "; ".join(reasons))


def _explain_huge_pages(machine: Machine) -> Finding:
    if machine.huge_pages in ("always", "madvise"):
        return Finding("huge pages", f"transparent: {machine.huge_pages}", "for packed weights")
    return Finding(
        "huge pages",
        f"transparent: {machine.huge_pages}",
        "4 KiB pages",
        "the kernel has no transparent huge pages"
        if machine.huge_pages == "absent"
        else "/sys/kernel/mm/transparent_hugepage/enabled says never",
    )


def _choose(rows: Iterable[Kernel]) -> Kernel | None:
    """The row that runs, of those for one weight format: the forced one, else the best that can."""
    forced = env.settings().kernel
    able = [row for row in rows if row.name == forced or (row.available and row.automatic)]
    return next((row for row in able if row.name == forced), able[0] if able else None)


def _by_weights(machine: Machine) -> dict[str, list[Kernel]]:
    formats = dict.fromkeys(row.weights for row in machine.kernels)
    return {weights: [row for row in machine.kernels if row.weights == weights] for weights in formats}


def _explain_features(machine: Machine) -> Finding:
    chosen = [_choose(rows) for rows in _by_weights(machine).values()]
    needed = {name for row in chosen if row for name in row.isa.split()}
    has = [name for name, there in machine.cpu_features.items() if there]
    uses = [name for name in has if name in needed]
    reasons = []
    unused = [name for name in has if name not in needed]
    if unused:
        reasons.append(f"no chosen kernel needs {', '.join(unused)}")
    lacks = [name for name, there in machine.cpu_features.items() if not there]
    if lacks:
        reasons.append(f"CPU or system lack {', '.join(lacks)}")
    if machine.amx_permission.startswith("refused"):
        reasons.append(f"AMX {machine.amx_permission}, so AVX-512 does its work")
    return Finding(
        "instructions", ", ".join(has) or "none of ours", ", ".join(uses) or "none", "; ".join(reasons)
    )


def _explain_kernels(machine: Machine) -> Iterator[Finding]:
    """For each weight format the row that will run, and why the better ones do not."""
    forced = env.settings().kernel
    for weights, rows in _by_weights(machine).items():
        chosen = _choose(rows)
        rows = [row for row in rows if row.automatic or row is chosen]
        if chosen and chosen.name == forced:
            reasons = [f"KTINJECT_KERNEL={forced}"]
        else:
            reasons = [f"{row.name}: {row.reason}" for row in rows[: rows.index(chosen) if chosen else None]]
        names = ", ".join(row.name for row in rows if row.available)
        yield Finding(f"{weights} weights", names, chosen.name if chosen else "none", "; ".join(reasons))


def _explain_gpus(machine: Machine) -> Finding:
    if not machine.gpus:
        return Finding("GPU", "none", "the CPU for everything", machine.no_gpu)
    has = "; ".join(
        f"cuda:{gpu.index} {gpu.name}, {_gib(gpu.memory_bytes)}, {_gib(gpu.free_bytes)} free, "
        f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        for gpu in machine.gpus
    )
    built = "" if machine.cuda_built else "; the native core was built without nvcc"
    return Finding("GPU", has, "torch's kernels", f"there are none of our own in this version{built}")
