"""What ktinject uses of the machine, and the reason for everything it leaves unused."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ktinject import _native, env, measured
from ktinject.grid import Grid
from ktinject.hf import compat
from ktinject.machine import Gpu, Kernel, Machine, detect


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

    def __rich__(self) -> Grid:
        titles = ("", "this machine has", "ktinject uses", "because")
        return Grid(titles, [(f.subject, f.has, f.uses, f.reason) for f in self.findings])

    def __str__(self) -> str:
        return "\n".join(self.__rich__().lines(120))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, ready for JSON."""
        return {"machine": asdict(self.machine), "findings": [asdict(finding) for finding in self.findings]}


def doctor(machine: Machine | None = None) -> Report:
    """Say what the machine has, what ktinject uses of it, and why it does not use the rest.

    machine  a `Machine` to explain; by default this machine as it is now
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
            *_explain_gpus(machine),
            *_explain_prompts(machine),
            _explain_transformers(machine),
            Finding(
                "versions",
                ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
                "all",
            ),
        ),
    )


def _explain_transformers(machine: Machine) -> Finding:
    """What can be had with this version's inside."""
    supports = {feature.replace("_", " "): compat.expected_support(feature) for feature in compat.PRIVATE}
    reasons = [f"{feature}: {found.reason}" for feature, found in supports.items() if not found]
    uses = "all" if not reasons else ", ".join(feature for feature, found in supports.items() if found)
    has = f"{machine.versions.get('transformers', 'none')}, tested are {' and '.join(compat.TESTED)}"
    return Finding("transformers", has, uses, "; ".join(reasons))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _explain_cpu(machine: Machine) -> Finding:
    reasons = []
    if machine.affinity_refused:
        reasons.append(f"the system does not say which CPUs are allowed ({machine.affinity_refused})")
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
    reasons = []
    if machine.memory_limit_bytes is not None:
        reasons.append(f"the cgroup limit is {_gib(machine.memory_limit_bytes)}")
    if machine.address_room_bytes is not None:
        reasons.append(f"RLIMIT_AS (ulimit -v) leaves {_gib(machine.address_room_bytes)} of addresses")
    uses = f"{_gib(machine.memory_available_bytes)} available"
    return Finding("memory", _gib(machine.memory_bytes), uses, "; ".join(reasons))


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
    if level := env.settings().level:
        reasons.append(f"KTINJECT_KERNEL={level} allows no others")
    elif lacks:
        reasons.append(f"CPU or system lack {', '.join(lacks)}")
    if machine.amx_permission.startswith("refused"):
        reasons.append(f"AMX {machine.amx_permission}, so AVX-512 does its work")
    return Finding(
        "instructions", ", ".join(has) or "none of ours", ", ".join(uses) or "none", "; ".join(reasons)
    )


def _explain_kernels(machine: Machine) -> Iterator[Finding]:
    """For each weight format the row that will run, and why the better ones do not."""
    settings = env.settings()
    for weights, rows in _by_weights(machine).items():
        chosen = _choose(rows)
        rows = [row for row in rows if row.automatic or row is chosen]
        if settings.level or (chosen and chosen.name == settings.kernel):
            reasons = [f"KTINJECT_KERNEL={settings.level or settings.kernel}"]
        else:
            reasons = [f"{row.name}: {row.reason}" for row in rows[: rows.index(chosen) if chosen else None]]
        names = ", ".join(row.name for row in rows if row.available)
        yield Finding(f"{weights} weights", names, chosen.name if chosen else "none", "; ".join(reasons))


@dataclass(frozen=True)
class _GpuKernels:
    """Kernels of ours, or torch's that an operator calls, and what they need.

    capability  the least compute capability
    only        they run on no newer one: made of instructions that it alone has
    cuda        the least CUDA version that torch was built with
    """

    names: str
    capability: tuple[int, int] = (8, 0)
    only: bool = False
    cuda: tuple[int, int] = (0, 0)

    def lacking(self, gpu: Gpu, cuda: str) -> str:
        """Why they do not run on this GPU, or ""."""
        version = tuple(int(part) for part in cuda.split(".")[:2])
        if gpu.capability < self.capability or (self.only and gpu.capability != self.capability):
            needed = ".".join(map(str, self.capability)) + (" alone" if self.only else " or newer")
            return f"cuda:{gpu.index} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, not {needed}"
        if version < self.cuda:
            return f"torch was built with CUDA {cuda}, not {self.cuda[0]}.{self.cuda[1]} or newer"
        return ""


# What the kernels of decode steps ask for where they have the most weights on their way.
_MUCH_SHARED_BYTES = 227 << 10
# By subject, best first: where the first alternative runs, the others are not needed.
_GPU_KERNELS = {
    "GPU experts": [_GpuKernels("handoff, resident, streamed")],
    "GPU decode": [_GpuKernels("rms_norm, attention, router")],
    "GPU int4": [_GpuKernels("int4_few_sm90, int4_many_sm90", (9, 0), True), _GpuKernels("int4_linear_sm80")],
    "GPU fp8": [
        _GpuKernels("scaled product of cuBLAS", (9, 0), True, (12, 9)),
        _GpuKernels("unpacked when loaded, cuBLAS"),
    ],
}


def _reservations(gpus: Iterable[Gpu]) -> Iterator[str]:
    """What of a GPU makes our kernels slower, or lets them fail, than on another one."""
    for gpu in gpus:
        if 0 < gpu.block_shared_bytes < _MUCH_SHARED_BYTES:
            yield (
                f"cuda:{gpu.index} has {gpu.block_shared_bytes >> 10} KiB of shared memory a thread block, not "
                f"{_MUCH_SHARED_BYTES >> 10}: kernels of decode steps have fewer weights on their way"
            )
        if gpu.ends_long_kernels:
            yield (
                f"the driver of cuda:{gpu.index} ends kernels that run for seconds, mostly since a display is "
                f"attached: a captured step waits {_native.LONGEST_KERNEL_SECONDS:g} s at most for the CPU's experts, "
                "and other waits are functions of the host"
            )


def _explain_gpus(machine: Machine) -> Iterator[Finding]:
    """The GPUs, and for each subject the kernels that will run, and why the better ones do not."""
    if not machine.gpus:
        yield Finding("GPU", "none", "the CPU for everything", machine.no_gpu)
        return
    has = "; ".join(
        f"cuda:{gpu.index} {gpu.name}, {_gib(gpu.memory_bytes)}, {_gib(gpu.free_bytes)} free, "
        f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        for gpu in machine.gpus
    )
    if not machine.cuda_built:
        reason = "the native core was built without nvcc; install the CUDA toolkit and build again"
        yield Finding("GPU", has, "nothing; torch's kernels alone where you name it as a device", reason)
        return
    yield Finding("GPU", has, "our kernels and torch's", "; ".join(_reservations(machine.gpus)))
    for subject, alternatives in _GPU_KERNELS.items():
        able, uses, reasons = dict[str, None](), dict[str, list[str]](), dict[str, None]()
        for gpu in machine.gpus:
            lacking = [kernels.lacking(gpu, machine.versions.get("CUDA", "0.0")) for kernels in alternatives]
            names = [kernels.names for kernels, reason in zip(alternatives, lacking) if not reason]
            able.update(dict.fromkeys(names))
            uses.setdefault(names[0] if names else "none", []).append(f"cuda:{gpu.index}")
            better = zip(alternatives, itertools.takewhile(bool, lacking))
            reasons.update((f"{kernels.names}: {reason}", None) for kernels, reason in better)
        used = "; ".join(f"{', '.join(gpus)}: {names}" for names, gpus in uses.items())
        yield Finding(
            subject, "; ".join(able), used if len(uses) > 1 else next(iter(uses)), "; ".join(reasons)
        )


def _explain_prompts(machine: Machine) -> Iterator[Finding]:
    """What was measured for the choice between CPU and GPU for long prompts."""
    if not (machine.gpus and machine.cuda_built):
        return
    from ktinject.operators.offload import links, prefill_rates  # import transformers

    here = {f"cuda:{gpu.index}": machine for gpu in machine.gpus}
    files = list(measured.kept(prefill_rates.SUBJECT, here))
    current = []
    for file in files:
        rates = prefill_rates.Rates.of_values(file.values) if file.is_current else None
        if rates is not None:
            key = file.key
            current.append(f"{key.get('weights')}, {key.get('top_k')} experts a token: {rates}")
    for file in measured.kept(links.SUBJECT, here):
        files.append(file)
        carried = links.LinkRates.of_values(file.values) if file.is_current else None
        if carried is not None:
            current.append(f"chunks of {int(file.key.get('bytes', 0)) >> 20} MiB: {carried}")
    stale = len(files) - len(current)
    reasons = [
        f"{stale} of {len(files)} files are damaged, or of another machine, driver, build or setting"
    ] * (stale > 0)
    if not current:
        reasons.append("measured at the first prompt of 128 tokens or more, for each kind of layer")
    reasons.append(f"kept in {measured.folder()}")
    uses = "the fastest of CPU, GPU and both by that" if current else "not measured yet"
    yield Finding("long prompts", "; ".join(current), uses, "; ".join(reasons))
