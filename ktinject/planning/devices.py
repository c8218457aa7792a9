"""The devices of a plan: which there are, how much memory they have free, and how much of it the budget allows.

Several GPUs hold the decoder layers in order, each GPU in proportion to its limit. Modules outside of the layers are on
the first GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ktinject.errors import PlanError
from ktinject.machine import Gpu, Machine, canonical
from ktinject.rules import Rule

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # fmt: skip
_SIZE = re.compile(r"\s*(\d{1,18})\s*B?\s*|\s*(\d{1,9}(?:\.\d{1,9})?)\s*(" + "|".join(_UNITS) + r")\s*")
Budget = Mapping[str, int | str] | Mapping[int, int | str] | Mapping[str | int, int | str]
"""Device → bytes, or text like "24GiB". A GPU is "cuda:0" or, as accelerate counts them, 0."""

# The compute capability assumed for a GPU that this machine does not have.
_SUPPOSED_CAPABILITY = (8, 0)


def show_bytes(count: int) -> str:
    """A number of bytes for people: `1.2 GiB`."""
    if count < 2**10:
        return f"{count} B"
    power = min(int(math.log2(count)) // 10, 4)
    return f"{count / 2 ** (10 * power):.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def parse_bytes(size: object, what: str) -> int:
    """The bytes of a size that a user gave.

    size    a number of bytes, or text of a number with or without a unit: "24GiB"
    what    where the size was given, for the message
    Raises  PlanError for anything else
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is None:
        raise PlanError(
            f"{what}: found {size!r}; a size is a number of bytes or text like '24GiB' "
            f"(units {', '.join(_UNITS)}). Write one of these."
        )
    return int(found[1]) if found[1] else int(float(found[2]) * _UNITS[found[3]])


def one_budget(budget: Budget | None, max_memory: Budget | None) -> Budget | None:
    """The budget that a call gives, under either name. Raises PlanError for both."""
    if budget is not None and max_memory is not None:
        raise PlanError("budget and max_memory are two names of one thing. Give one of them.")
    return max_memory if budget is None else budget


def suppose(machine: Machine, memory: Budget) -> Machine:
    """Describe another machine, so that a plan can be made for it here.

    machine  this machine; its CPU is kept
    memory   device → bytes, or text like "24GiB"; all of it counts as free. The other machine has the GPUs named here
             and no others; without "cpu" it has this machine's memory
    Returns  the machine to plan for
    Raises   PlanError for anything but such a mapping
    """
    if not isinstance(memory, Mapping) or not memory:
        raise PlanError(
            f"machine: found {memory!r}; it maps devices to sizes. "
            'Write {"cpu": "512GiB", "cuda:0": "24GiB"}, for example.'
        )
    sizes = dict(_sizes(memory, "machine", lambda name: name))
    cpu = sizes.pop("cpu", machine.memory_available_bytes)
    here = {f"cuda:{gpu.index}": gpu for gpu in machine.gpus}
    for number, name in enumerate(sorted(sizes)):
        if f"cuda:{number}" not in sizes:
            raise PlanError(
                f"machine: found {name!r}; devices are cpu and GPUs that are counted from cuda:0 without a gap. "
                "Name these."
            )
    gpus = [
        dataclasses.replace(
            here.get(name) or Gpu(0, "a GPU that is not here", 0, 0, _SUPPOSED_CAPABILITY),
            index=number,
            memory_bytes=size,
            free_bytes=size,
        )
        for number, (name, size) in enumerate(
            (f"cuda:{index}", sizes[f"cuda:{index}"]) for index in range(len(sizes))
        )
    ]
    return dataclasses.replace(
        machine,
        memory_bytes=cpu,
        memory_available_bytes=cpu,
        memory_limit_bytes=None,
        gpus=tuple(gpus),
        no_gpu="" if gpus else "the machine that is planned for has none",
        cuda_built=True if gpus else machine.cuda_built,
    )


@dataclass(frozen=True)
class Devices:
    """The devices of one plan.

    free        device → free bytes, for every device of the machine
    limits      device → bytes that the plan may use: the budget, but at most the free bytes
    allowed     devices that the plan may use; the CPU is always one of them
    candidates  devices for the modules that are not replaced, best first; each is one device, or several GPUs for
                decoder layers in order
    notes       remarks on this choice, for the plan
    are_named   the call says which devices; of others, nobody may have looked whether they are there
    """

    free: dict[str, int]
    limits: dict[str, int]
    allowed: tuple[str, ...]
    candidates: tuple[tuple[str, ...], ...]
    notes: list[str] = field(default_factory=list)
    are_named: bool = False

    @classmethod
    def choose(
        cls,
        machine: Machine,
        devices: str | Sequence[str] | None = None,
        budget: Budget | None = None,
    ) -> Devices:
        """Choose devices from what the machine has and what the user names.

        devices  None: the first GPU if the model fits it, else all GPUs, else the CPU. Several GPUs: layers are spread
                 over all of them
        budget   None: all that is free
        Raises   PlanError for a device that the machine does not have, or a size that cannot be read
        """
        free = {"cpu": machine.memory_available_bytes}
        free |= {f"cuda:{gpu.index}": gpu.free_bytes for gpu in machine.gpus}
        limits = dict(free)
        notes: list[str] = []
        if not isinstance(budget, Mapping | None):
            raise PlanError(
                f'budget: found {budget!r}; it maps devices to sizes. Write {{"cuda:0": "24GiB"}}, for example.'
            )
        for device, wanted in _sizes(
            budget or {}, "budget", lambda name: named(name, free, "budget", machine)
        ):
            limits[device] = min(free[device], wanted)
            if wanted > free[device]:
                notes.append(
                    f"{device}: the budget is {show_bytes(wanted)}, and {show_bytes(free[device])} are free; "
                    "`ktinject plan --machine` plans for a larger machine"
                )
        if devices is None:
            gpus = [device for device in free if device != "cpu"]
            if gpus and not machine.cuda_built:
                notes.append(
                    f"not used: {', '.join(gpus)}; this build of ktinject has no CUDA parts. Install the CUDA toolkit "
                    "and build again; torch's own kernels run there where you name them as devices"
                )
                gpus = []
            groups = [gpus[:1], gpus][: len(gpus)]
            return cls(free, limits, ("cpu", *gpus), (*map(tuple, groups), ("cpu",)), notes)
        listed = [devices] if isinstance(devices, str) or not isinstance(devices, Sequence) else devices
        chosen = list(dict.fromkeys(named(device, free, "devices", machine) for device in listed))
        gpus = [device for device in chosen if device != "cpu"]
        if not chosen:
            raise PlanError("devices: found an empty list; name at least one device, or leave it out.")
        groups = [group for group in (gpus, [device for device in chosen if device == "cpu"]) if group]
        return cls(free, limits, (*gpus, "cpu"), tuple(map(tuple, groups)), notes, are_named=True)

    def for_operator(
        self, rule: Rule, wanted: str, types: Sequence[str], standing: str, argument: str = "device"
    ) -> str:
        """The device on which an operator computes.

        wanted    the rule's `device`; "auto": the device of the surrounding modules if the operator computes there
        types     device types on which the operator computes, preferred first
        standing  the device of the surrounding modules, which are not replaced
        argument  the rule's argument that names the device
        Raises    PlanError that names the rule's line
        """
        if wanted == "auto":
            order = [standing, *(d for kind in types for d in self.allowed if d.startswith(kind))]
            fitting = [device for device in order if device.partition(":")[0] in types]
            if fitting:
                return fitting[0]
            raise _refusal(
                rule,
                f"{rule.operator} computes on {' or '.join(types)} only; the plan may use "
                f"{', '.join(self.allowed)}. Use another operator, or a machine that has it.",
            )
        device = canonical(wanted)
        if device not in self.allowed:
            is_absent = device not in self.free and not self.are_named
            reason = "is not there" if is_absent else "is not among the devices of this call"
            raise _refusal(
                rule,
                f"device {wanted!r} {reason}; usable are {', '.join(self.allowed)}. Name one of these, or auto.",
                argument,
            )
        if device.partition(":")[0] not in types:
            raise _refusal(
                rule,
                f"{rule.operator} cannot compute on {wanted!r}, only on {' or '.join(types)}. Use auto.",
                argument,
            )
        return device


def spread(
    outside_bytes: int, layers: Mapping[str, int], gpus: Sequence[str], limits: Mapping[str, int]
) -> dict[str, str]:
    """Assign decoder layers to GPUs in order. Each GPU gets a share of the bytes in proportion to its limit.

    outside_bytes  bytes of the modules outside of the layers, which are on the first GPU
    layers         path → bytes, in order
    gpus           their names, in the order in which they get layers
    limits         device → bytes that the plan may use
    Returns        a device map: module path → GPU; "" is the first GPU and covers all modules without an entry
    """
    room = sum(limits[gpu] for gpu in gpus) or 1
    total = outside_bytes + sum(layers.values())
    device_map, reached, index, end = {"": gpus[0]}, float(outside_bytes), 0, limits[gpus[0]] / room * total
    for path, size in layers.items():
        # A layer goes to the GPU in whose share its middle lies.
        while index + 1 < len(gpus) and reached + size / 2 > end:
            index += 1
            end += limits[gpus[index]] / room * total
        if index:
            device_map[path] = gpus[index]
        reached += size
    return device_map


def fill(
    outside_bytes: int, layers: Mapping[str, int], gpus: Sequence[str], limits: Mapping[str, int]
) -> dict[str, str]:
    """As `spread`, but each GPU is filled before the next one gets a layer: if the layers fit at all, then so."""
    device_map, index, room = {"": gpus[0]}, 0, limits[gpus[0]] - outside_bytes
    for path, size in layers.items():
        while index + 1 < len(gpus) and size > room:
            index += 1
            room = limits[gpus[index]]
        if index:
            device_map[path] = gpus[index]
        room -= size
    return device_map


def named(device: object, free: Mapping[str, int], what: str, machine: Machine) -> str:
    """The name that a plan uses for a device. Raises PlanError for a device that the machine does not have."""
    name = canonical(str(device))
    if name not in free:
        why = f" ({machine.no_gpu})" if machine.no_gpu and name.startswith("cuda") else ""
        raise PlanError(
            f"{what}: there is no device {str(device)!r}{why}; found are {', '.join(free)}. Name one of them."
        )
    return name


def _sizes(given: Budget, what: str, name_of: Callable[[str], str]) -> Iterator[tuple[str, int]]:
    """Device and bytes of each entry. Raises PlanError for a device that is given twice, as 0 and "cuda:0" say."""
    seen: dict[str, object] = {}
    for key, size in given.items():
        device = name_of(canonical(str(key)))
        if device in seen:
            raise PlanError(
                f"{what}: {key!r} and {seen[device]!r} are the same device, {device}. Give each device once."
            )
        seen[device] = key
        yield device, parse_bytes(size, f"{what}[{key!r}]")


def _refusal(rule: Rule, text: str, argument: str = "device") -> PlanError:
    return PlanError(str(rule.place(argument).refusal(text)))
