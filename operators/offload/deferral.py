"""How many experts a layer defers: as its rule says, or so many that the CPU never waits for the GPU.

While a GPU computes what lies between one layer's experts and the next's, G µs, the CPU has nothing to do but what was
deferred. With an expert taking E µs, n of them fill the gap if n · E ≥ G; more only cost accuracy. So `auto` takes the
smallest such n, and none at all where the gap is not worth two more kernels a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import nn

from ktinject import _native
from ktinject.machine import has_gpu
from ktinject.operators.probes.moe_block import BlockSpec

# Of a token's experts: deferring more moved the next-token distribution of a trained model of ours by more than
# BOUND_NATS of KL divergence on average (docs/explanation/deferral.md); int4 weights cost it about as much.
BOUND_SHARE, BOUND_NATS = 0.25, 0.02

# Measured on the reference box in CUDA graphs (docs/explanation/deferral.md): what splitting a layer's experts costs,
# what a module with weights takes on the GPU beside reading them, and what experts at decode reach of the bandwidth
# that plain reading has.
OVERHEAD_US = 6.0
MODULE_US = 6.0
REACHED = 0.6
# Bytes a second, of a GPU that does not say, or is not here.
_USUAL_BANDWIDTH = 1e12


def depth(
    decoder: nn.Module,
    modules: Mapping[str, tuple[nn.Module, Any]],
    path: str,
    spec: BlockSpec,
    expert_bytes: float,
) -> tuple[int, str] | str:
    """How many experts the block at `path` defers, and a remark; or the reason why it is refused.

    modules       all blocks of the operator with their configs, in the order of the model
    expert_bytes  that the CPU reads for one expert, on average
    """
    module, config = modules[path]
    kinds = {type(block) for block, _ in modules.values()}
    in_order = [block for block in decoder.modules() if type(block) in kinds]
    following = dict(zip(map(id, in_order), in_order[1:])).get(id(module))
    cannot = ""
    if following is None:
        cannot = "it is the last"
    elif not any(following is block for block, _ in modules.values()):
        cannot = "the next is not deferred_moe"
    wanted = config.deferred
    if isinstance(config.schedule, list):
        paths = [other for other, (_, theirs) in modules.items() if theirs == config]
        if len(config.schedule) != len(paths):
            return f"its schedule has {len(config.schedule)} numbers for {len(paths)} layers"
        wanted = config.schedule[paths.index(path)]
        if wanted and cannot:
            return f"its schedule defers {wanted} experts in a layer that cannot: {cannot}"
    if wanted > spec.top_k:
        return f"{wanted} experts are to be deferred, and a token has {spec.top_k}"
    if cannot:
        return 0, cannot
    assert following is not None
    if config.schedule == "auto":
        most = wanted or int(BOUND_SHARE * spec.top_k)
        return _auto(decoder, module, following, spec, config.device, expert_bytes, most)
    return wanted, ""


def warning(deferred: int, top_k: int) -> str:
    """What the plan says of a depth beyond the bound, or ""."""
    if deferred <= BOUND_SHARE * top_k:
        return ""
    return (
        f"{deferred} of {top_k} experts deferred: beyond a quarter, the mean KL divergence of a trained model of ours "
        f"exceeds {BOUND_NATS} nats. Measure this one with `ktinject eval`"
    )


def _auto(
    decoder: nn.Module,
    block: nn.Module,
    following: nn.Module,
    spec: BlockSpec,
    device: str,
    expert_bytes: float,
    most: int,
) -> tuple[int, str]:
    if device == "cpu":
        return 0, "auto: no GPU computes meanwhile"
    gap = gap_us(decoder, block, following, spec.experts, gpu_bandwidth(device))
    expert = expert_bytes / (REACHED * cpu_bandwidth()) * 1e6
    count = min(most, ceil(gap / max(expert, 1e-3)))
    gain = min(gap, count * expert)
    about = f"auto: the GPU takes about {gap:.0f} us between, the CPU {expert:.0f} us an expert"
    if gain < 2 * OVERHEAD_US:
        return 0, f"{about}; not worth it"
    return count, about


def gap_us(
    decoder: nn.Module, block: nn.Module, following: nn.Module, experts: str, bytes_per_second: float
) -> float:
    """What a GPU takes from the end of one block's experts to the router of the next, estimated, batch 1."""
    modules = list(decoder.modules())
    first, last = (next(i for i, m in enumerate(modules) if m is b) for b in (block, following))
    inside = {id(module) for module in block.modules()}
    between = [module for module in modules[first:last] if id(module) not in inside]
    # The next block's router is needed, too; its shared experts and ours run beside experts that are not deferred.
    between += [
        module
        for name, child in following.named_children()
        if name != experts and "shared" not in name
        for module in child.modules()
    ]
    own = [[*module.parameters(recurse=False)] for module in between]
    size = sum(tensor.nbytes for tensors in own for tensor in tensors)
    return size / bytes_per_second * 1e6 + MODULE_US * sum(1 for tensors in own if tensors)


@functools.cache
def cpu_bandwidth() -> float:
    """Bytes a second that the CPU's threads read, measured once a process on a gibibyte, more than caches hold."""
    return _native.read_bandwidth((1 << 30) // _native.threads())


@functools.cache
def gpu_bandwidth(device: str) -> float:
    """Bytes a second that a GPU reads, from its clock and bus; four fifths of them are reached."""
    if not has_gpu(device):
        return _USUAL_BANDWIDTH
    properties: Any = torch.cuda.get_device_properties(device)
    rate = getattr(properties, "memory_clock_rate", 0)  # kHz
    bits = getattr(properties, "memory_bus_width", 0)
    return 0.8 * 2 * rate * 1e3 * bits / 8 or _USUAL_BANDWIDTH
