"""What this machine has, and what ktinject will use of it.

`detect` reads /proc, /sys, the native core and torch; `doctor` explains the outcome. Nothing is assumed about
the shape of the machine: node ids may have gaps, nodes may hold memory and no CPU, /sys may be absent.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktinject import env


@dataclass(frozen=True)
class Node:
    """A NUMA node; `cpus` is empty for one that holds memory only."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Kernel:
    """A row of the native kernel table; `reason` says why it is not available, else it is empty."""

    name: str
    weights: str
    isa: str
    available: bool
    reason: str


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as torch numbers it."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """One reading of the machine.

    cpus                    logical CPUs that the affinity mask leaves us
    cpu_count               logical CPUs that are online
    cpu_quota               CPUs' worth of time that the cgroups allow, None without a quota
    threads                 workers the CPU pool gets: KTINJECT_THREADS, or the smaller of the two above
    nodes                   every NUMA node, by id; one made-up node 0 where /sys does not say
    virtual_nodes           KTINJECT_NUMA
    memory_bytes            RAM, or the cgroup limit if that is smaller
    memory_available_bytes  what can still be allocated within both
    memory_limit_bytes      the cgroup limit, None without one
    huge_pages              state of transparent huge pages: always, madvise, never or absent
    cpu_features            instruction sets that CPU and operating system let us use
    amx_permission          granted, absent, or "refused: …"
    kernels                 the native kernel table, best first
    gpus, no_gpu            the CUDA devices, and why there is none
    cuda_built              the native core holds CUDA kernels
    versions                of python, torch, transformers
    """

    cpu: str
    cpus: tuple[int, ...]
    cpu_count: int
    cpu_quota: float | None
    threads: int
    nodes: tuple[Node, ...]
    virtual_nodes: int | None
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    huge_pages: str
    cpu_features: dict[str, bool]
    amx_permission: str
    kernels: tuple[Kernel, ...]
    gpus: tuple[Gpu, ...]
    no_gpu: str
    cuda_built: bool
    versions: dict[str, str]

    @property
    def usable_nodes(self) -> tuple[Node, ...]:
        """The nodes with at least one CPU that we may run on."""
        return tuple(node for node in self.nodes if set(node.cpus) & set(self.cpus))


def detect(root: Path | str = "/", *, affinity: Collection[int] | None = None) -> Machine:
    """Read the machine.

    root      where proc/ and sys/ are looked for; what is absent there is asked for in other ways
    affinity  CPUs this process may run on; by default the kernel is asked
    Raises    PlanError or OperatorError for a bad environment variable
    """
    import torch
    import transformers

    from ktinject import _native

    root = Path(root)
    settings = env.settings()
    cpus = tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity))
    quota = _cpu_quota(root)
    total, available = _memory(root)
    limit, left = _memory_limit(root)
    online = _cpu_list(_read(root / "sys/devices/system/cpu/online"))
    gpus, no_gpu = _gpus()
    return Machine(
        cpu=_cpu_name(root),
        cpus=cpus,
        cpu_count=max(len(online), len(cpus)),
        cpu_quota=quota,
        threads=settings.threads or max(1, min(len(cpus), math.ceil(quota or len(cpus)))),
        nodes=_nodes(root) or (Node(0, cpus, total, available),),
        virtual_nodes=settings.numa,
        memory_bytes=min(total, limit or total),
        memory_available_bytes=available if limit is None else min(available, left),
        memory_limit_bytes=limit,
        huge_pages=_huge_pages(root),
        cpu_features=dict(_native.cpu_features()),
        amx_permission=_native.amx_permission(),
        kernels=tuple(Kernel(**row) for row in _native.kernels()),
        gpus=gpus,
        no_gpu=no_gpu,
        cuda_built=_native.cuda_built(),
        versions={
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """A count of a kernel file, None for `max`, -1 or nothing."""
    return int(text) if text.strip().isdigit() else None


def _cpu_list(text: str) -> tuple[int, ...]:
    """`0-3,8` as (0, 1, 2, 3, 8)."""
    cpus: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus += range(int(first), int(last or first) + 1)
    return tuple(cpus)


def _kibibytes(text: str, key: str) -> int:
    """The entry `key` of a meminfo file, in bytes; 0 if it is not there."""
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def _cpu_name(root: Path) -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read(root / "proc/cpuinfo"))
    return found[1].strip() if found else "unknown CPU"


def _huge_pages(root: Path) -> str:
    found = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return found[1] if found else "absent"


def _nodes(root: Path) -> tuple[Node, ...]:
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node*"):
        number = _number(folder.name.removeprefix("node"))
        if number is not None:
            memory = _read(folder / "meminfo")
            cpus = _cpu_list(_read(folder / "cpulist"))
            nodes.append(Node(number, cpus, _kibibytes(memory, "MemTotal"), _kibibytes(memory, "MemFree")))
    return tuple(sorted(nodes, key=lambda node: node.id))


def _memory(root: Path) -> tuple[int, int]:
    """Bytes of RAM, and of those the kernel can still hand out."""
    text = _read(root / "proc/meminfo")
    if text:
        return _kibibytes(text, "MemTotal"), _kibibytes(text, "MemAvailable")
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """The folders whose limits bind this process: its own cgroup and all above it, version 1 and 2.

    Inside a container the path in /proc/self/cgroup may be the host's; then only the mount's root is there.
    """
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = [base]
        elif controller in controllers.split(","):
            mounts = [base / controller, base / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []
        for mount in mounts:
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth])


def _cpu_quota(root: Path) -> float | None:
    """The smallest quota over all cgroups, in CPUs."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        fields = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us").strip(),
            _read(folder / "cpu.cfs_period_us").strip(),
        ]
        quota, period = (_number(field) for field in fields[:2])
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _memory_limit(root: Path) -> tuple[int | None, int]:
    """The smallest memory limit over all cgroups, and the least that is left under any of them, in bytes."""
    limits, left = [], []
    for folder in _cgroups(root, "memory"):
        limit = _number(_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes"))
        # Version 1 writes "no limit" as the largest multiple of the page size that fits 63 bits.
        if limit is None or limit >= 1 << 60:
            continue
        used = _number(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")) or 0
        # The page cache counts as used, but gives way: a checkpoint just read must not look like full memory.
        cache = sum(
            int(size)
            for size in re.findall(r"^(?:in)?active_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
        )
        limits.append(limit)
        left.append(max(0, limit - max(0, used - cache)))
    return min(limits, default=None), min(left, default=0)


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    import torch

    if torch.version.cuda is None:
        return (), f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return (), "no CUDA device is visible" + (
            "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        )
    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        gpus.append(Gpu(index, name, total, free, capability))
    return tuple(gpus), ""


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
        return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())

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
    if env.settings().threads:
        reasons.append(f"KTINJECT_THREADS={machine.threads}")
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
        + ("no CPU that the affinity mask leaves us" if node.cpus else "memory and no CPU")
        for node in machine.nodes
        if node not in usable
    ]
    if machine.virtual_nodes:
        return Finding(
            "NUMA", has, f"{machine.virtual_nodes} virtual nodes", f"KTINJECT_NUMA={machine.virtual_nodes}"
        )
    return Finding(
        "NUMA", has, ", ".join(f"node {node.id}" for node in usable) or "no node", "; ".join(reasons)
    )


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


def _explain_features(machine: Machine) -> Finding:
    has = [name for name, there in machine.cpu_features.items() if there]
    lacks = [name for name, there in machine.cpu_features.items() if not there]
    reason = f"not usable: {', '.join(lacks)}" if lacks else ""
    if machine.amx_permission.startswith("refused"):
        reason += f"; the kernel {machine.amx_permission} AMX, so AVX-512 does its work"
    return Finding("instructions", ", ".join(has) or "none of those we have kernels for", "all", reason)


def _explain_kernels(machine: Machine) -> Iterator[Finding]:
    """For each weight format the row that will run, and why the better ones do not."""
    forced = env.settings().kernel
    for weights in dict.fromkeys(row.weights for row in machine.kernels):
        rows = [row for row in machine.kernels if row.weights == weights]
        chosen = next((row for row in rows if row.name == forced), None)
        reasons = [f"KTINJECT_KERNEL={forced}"] if chosen else []
        if chosen is None:
            chosen = next((row for row in rows if row.available), None)
            better = rows[: rows.index(chosen)] if chosen else rows
            reasons = [f"{row.name}: {row.reason}" for row in better]
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
    if machine.cuda_built:
        return Finding("GPU", has, "torch's and our own kernels")
    return Finding(
        "GPU", has, "torch's kernels", "the native core was built without nvcc: no CUDA kernels of our own"
    )
