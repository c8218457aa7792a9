"""What this machine has: /proc, /sys, the native core and torch, read once into a `Machine`.

Nothing is assumed about its shape: node ids may have gaps, nodes may hold memory and no CPU, /sys may be
absent.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import resource
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

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
    """A row of the native kernel table.

    weights    the format it multiplies by
    isa        the instruction sets it needs, separated by spaces
    available  it can run here; `reason` says why not
    automatic  it is chosen where no kernel is named
    """

    name: str
    weights: str
    isa: str
    available: bool
    automatic: bool
    reason: str


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as torch numbers it.

    block_shared_bytes  shared memory that a thread block may ask for; 0: not known
    ends_long_kernels   the driver ends kernels that run for seconds, mostly since a display is attached
    """

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    block_shared_bytes: int = 0
    ends_long_kernels: bool = False


@dataclass(frozen=True)
class Machine:
    """One reading of the machine.

    cpus                    logical CPUs that the affinity mask leaves us
    cpu_count               logical CPUs that are online
    cpu_quota               CPUs' worth of time that the cgroups allow, None without a quota
    threads                 workers the CPU pool gets: the least of `cpus`, and KTINJECT_THREADS or the quota
    nodes                   every NUMA node, by id; one made-up node 0 where /sys does not say
    virtual_nodes           KTINJECT_NUMA
    memory_bytes            RAM, or the cgroup limit if that is smaller
    memory_available_bytes  what can still be allocated within both, and within `address_room_bytes`
    memory_limit_bytes      the cgroup limit, None without one
    address_room_bytes      what RLIMIT_AS (`ulimit -v`) leaves this process, None without one
    affinity_refused        why the system does not say which CPUs we may use; then `cpus` are all that are online
    huge_pages              state of transparent huge pages: always, madvise, never or absent
    cpu_features            instruction sets that CPU, operating system and KTINJECT_KERNEL let us use
    amx_permission          granted, absent, or "refused: …"
    kernels                 the native kernel table, best first
    gpus, no_gpu            the CUDA devices, and why there is none
    cuda_built              the native core holds its CUDA parts
    versions                of python, torch, transformers, and of the CUDA that torch was built with
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
    address_room_bytes: int | None = None
    affinity_refused: str = ""

    @property
    def usable_nodes(self) -> tuple[Node, ...]:
        """The nodes with memory and at least one CPU that we may run on."""
        return tuple(node for node in self.nodes if set(node.cpus) & set(self.cpus) and node.memory_bytes)


def detect(
    root: Path | str = "/", *, affinity: Collection[int] | None = None, with_gpus: bool = True
) -> Machine:
    """Read the machine.

    root       where proc/ and sys/ are looked for; what is absent there is asked for in other ways
    affinity   CPUs this process may run on; by default the kernel is asked
    with_gpus  look for GPUs, which starts CUDA: it takes time, and memory of each of them
    Raises    PlanError or OperatorError for a bad environment variable
    """
    import torch

    from ktinject import _native

    root = Path(root)
    settings = env.settings()
    cpus = allowed_cpus() if affinity is None else tuple(sorted(affinity))
    quota = _cpu_quota(root)
    total, available = _memory(root)
    limit, left = _memory_limit(root)
    addresses = _address_room()
    online = _cpu_list(_read(root / "sys/devices/system/cpu/online"))
    gpus, no_gpu = _gpus() if with_gpus else ((), "not looked for, as only the CPU was named")
    return Machine(
        cpu=_cpu_name(root),
        cpus=cpus,
        cpu_count=max(len(online), len(cpus)),
        cpu_quota=quota,
        threads=max(1, min(len(cpus), settings.threads or math.ceil(quota or len(cpus)))),
        nodes=_nodes(root) or (Node(0, cpus, total, available),),
        virtual_nodes=settings.numa,
        memory_bytes=min(total, limit or total),
        memory_available_bytes=min(
            available,
            available if limit is None else left,
            available if addresses is None else addresses,
        ),
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
            "transformers": version("transformers"),  # importing it takes a second
            **({"CUDA": torch.version.cuda} if torch.version.cuda else {}),
        },
        address_room_bytes=addresses,
        affinity_refused=_native.affinity_refused() if affinity is None else "",
    )


def allowed_cpus() -> tuple[int, ...]:
    """The CPUs that this process may run on, in order; all that are online where the system does not say."""
    from ktinject import _native

    if reason := _native.affinity_refused():
        _warn_affinity(reason)
    return tuple(_native.allowed_cpus())


@functools.cache  # once a process
def _warn_affinity(reason: str) -> None:
    logging.getLogger("ktinject").warning(
        "The system does not say which CPUs this process may use (sched_getaffinity: %s). All CPUs that are online "
        "are used; set KTINJECT_THREADS if it has fewer. A container's seccomp profile may allow the call.",
        reason,
    )


def no_memory(error: MemoryError) -> str:
    """What a MemoryError means, in words: what was asked for if that is known, and what is left."""
    from ktinject import _native

    available, limit = _native.memory_headroom()
    left = [f"{available / 2**20:,.0f} MiB of memory ({limit})"]
    addresses = _address_room()
    if addresses is not None:
        left.append(f"{addresses / 2**20:,.0f} MiB of addresses (RLIMIT_AS, `ulimit -v`)")
    what = str(error) or "an allocation failed"
    return (
        f"out of memory: {what}. Left to this process: {' and '.join(left)}. Raise the limit, or free memory."
    )


def has_gpu(device: str) -> bool:
    """Whether a CUDA device is here to be asked; a plan may be for a machine that has more of them."""
    import torch

    kind, _, index = device.partition(":")
    return kind == "cuda" and torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count()


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


def _address_room() -> int | None:
    """Bytes of addresses that RLIMIT_AS leaves this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _number(_read(Path("/proc/self/statm")).partition(" ")[0]) or 0
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


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
        limits = limits_of(index)
        shared, ends = limits.get("block_shared_bytes", 0), bool(limits.get("ends_long_kernels", False))
        gpus.append(Gpu(index, name, total, free, capability, shared, ends))
    return tuple(gpus), ""


def limits_of(index: int) -> dict[str, int]:
    """What launches depend on of a CUDA device (native/cuda/limits.hpp); empty where our kernels do not run there."""
    from ktinject import _native

    try:
        return _native.device_limits(index)
    except RuntimeError:  # no CUDA parts, or a driver too old for their CUDA
        return {}


def canonical(device: str) -> str:
    """The name of a device that plans use, of one that people do: "cuda:0" for "cuda" and "0"."""
    return f"cuda:{device}" if device.isdecimal() else "cuda:0" if device == "cuda" else device


def device_of(device_map: Mapping[str, str], path: str) -> str:
    """The device of a module or tensor: that of the longest path in the map that it is in; "" is the whole model."""
    inside = (p for p in device_map if not p or path == p or path.startswith(f"{p}."))
    return device_map[max(inside, key=len)]
