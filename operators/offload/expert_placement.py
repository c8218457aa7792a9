"""Chooses the routed experts that are copied to the GPU. The CPU holds all experts in any case.

A rule gives a number, a share, or a profile of the traffic. Or it gives `auto`: as many as fit in the memory that
everything else leaves, the longest request included, and none if these would be too few to pay. With a profile, the
most used experts of all layers come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Placement
from ktinject.operators.cpu_experts import native_experts, weights_in_words
from ktinject.operators.offload import expert_cache, gpu_experts, ring
from ktinject.operators.offload.gpu_experts import GpuExperts
from ktinject.operators.offload.streaming import StreamedExperts
from ktinject.operators.probes import experts as routed_experts
from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.support import Support

# Of each layer's experts, what `auto` puts on a GPU at least. With fewer, captured steps gain less from them than from
# guesses at the next layer's experts, which are for layers without experts on the GPU.
LEAST_SHARE = 0.25


@dataclass(frozen=True)
class ExpertPlacement(Placement):
    """What is settled for one layer.

    resident   ids of the experts that are copied to the GPU
    remark     why there are none, if that was not asked for
    helpers    other GPUs that stream a part of the experts of long prompts
    """

    resident: tuple[int, ...] = ()
    remark: str = ""
    helpers: tuple[str, ...] = ()


def plan(
    modules: Mapping[str, nn.Module], config: Any, spare: Mapping[str, int]
) -> dict[str, ExpertPlacement | str]:
    """Choose the resident experts of modules that share one config.

    modules  path → experts module
    spare    device → bytes that may be used
    Returns  path → placement, or the reason why the module is refused. On the CPU there are only refusals

    Arguments that do not fit the model are refused without a GPU, too, so that a rule file can be checked anywhere.
    """
    specs: dict[str, ExpertsSpec] = {}
    placements: dict[str, ExpertPlacement | str] = {}
    for path, module in modules.items():
        spec = routed_experts.probe(module)
        if isinstance(spec, Support):
            placements[path] = spec.reason
        else:
            specs[path] = spec
    counts = _traffic(config, specs)
    if isinstance(counts, str):
        return dict.fromkeys(modules, counts)
    for path, spec in specs.items():
        if isinstance(config.gpu_experts, int) and config.gpu_experts > spec.num_experts:
            placements[path] = (
                f"{config.gpu_experts} of its experts are to be on the GPU, and it has {spec.num_experts}"
            )
    if config.device == "cpu":
        return placements
    specs = {path: spec for path, spec in specs.items() if path not in placements}
    if config.gpu_experts == "auto" and config.profile is None and config.ram_copy:
        wanted, remark = _all_alike(config, specs, spare.get(config.device))
    else:
        wanted, remark = _counts_on_gpu(config, specs, counts, spare.get(config.device, 0)), ""
    for path, count in wanted.items():
        placements[path] = ExpertPlacement(gpu_experts.hottest(counts[path], count), remark)
    return placements


def _traffic(config: Any, specs: Mapping[str, ExpertsSpec]) -> dict[str, list[int]] | str:
    """Path → how often each expert was chosen in the rule's profile, 0 without one; or what is wrong with the file."""
    profile = config.gpu_experts if str(config.gpu_experts).endswith(".json") else config.profile
    if profile is None:
        return {path: [0] * spec.num_experts for path, spec in specs.items()}
    try:
        found = gpu_experts.read_profile(profile)
    except OperatorError as error:
        return str(error).removesuffix(".")
    for path, spec in specs.items():
        if len(found.get(path, ())) != spec.num_experts:
            has = f"{len(found[path])} experts" if path in found else "nothing"
            return f"the profile {profile} has {has} for it, and it has {spec.num_experts} experts"
    return {path: found[path] for path in specs}


def _counts_on_gpu(
    config: Any, specs: Mapping[str, ExpertsSpec], traffic: Mapping[str, list[int]], spare: int
) -> dict[str, int]:
    """Path → how many of its experts are copied to the GPU.

    spare   bytes that may be used on the GPU
    """
    share = config.gpu_experts
    if isinstance(share, float):
        return {path: round(share * spec.num_experts) for path, spec in specs.items()}
    if isinstance(share, int):
        return dict.fromkeys(specs, share)

    sizes, room = _sizes(config, specs, spare)
    if config.profile is not None or share != "auto":
        return gpu_experts.fill(traffic, sizes, max(0, room))
    # Without a profile, each layer gets the same number.
    each = max(0, room) // max(1, sum(sizes.values()))
    return {path: min(each, spec.num_experts) for path, spec in specs.items()}


def _all_alike(
    config: Any, specs: Mapping[str, ExpertsSpec], spare: int | None
) -> tuple[dict[str, int], str]:
    """What `auto` puts on the GPU where the CPU keeps all experts, too: of each layer the same number, or none and why.

    spare   bytes that may be used on the GPU; None: nobody knows
    """
    none = dict.fromkeys(specs, 0)
    if spare is None:
        return none, "nothing is left to them here, as with tp; a number or a share does not ask"
    if config.gpu_weights == "same" and not config.copies_as_is:
        as_is = f"the GPU has no kernel for {weights_in_words(config)}"
        return none, f"{as_is}; with a number or a share they lie there as {config.gpu_format}"
    sizes, room = _sizes(config, specs, spare)
    each = max(0, room) // max(1, sum(sizes.values()))
    most = max((spec.num_experts for spec in specs.values()), default=0)
    if each < LEAST_SHARE * most:
        least = math.ceil(LEAST_SHARE * most)
        return (
            none,
            f"there would be room for {each} of {most} of each layer, and fewer than {least} do not pay",
        )
    return {path: min(each, spec.num_experts) for path, spec in specs.items()}, ""


def _sizes(config: Any, specs: Mapping[str, ExpertsSpec], spare: int) -> tuple[dict[str, int], int]:
    """Path → bytes of one expert on the GPU; and of `spare` bytes there, how many are for all experts together."""

    def packed(spec: ExpertsSpec, weights: str, symmetric: bool = True, down: str = "same") -> int:
        return native_experts(spec, weights, config.group_size, "auto", symmetric, down_weights=down).bytes

    shapes = {*specs.values()}
    symmetric = config.symmetric if config.copies_as_is else True
    expert_bytes = {spec: packed(spec, config.gpu_format, symmetric) // spec.num_experts for spec in shapes}
    rings = (
        ring_bytes(config, spec, packed(spec, config.weights, config.symmetric, config.down_weights))[1]
        for spec in shapes
    )
    room = spare - int(spare * gpu_experts.RESERVE_SHARE) - gpu_experts.RESERVE_BYTES
    room -= sum(GpuExperts.table_bytes(spec.num_experts) for spec in specs.values()) + max(rings, default=0)
    sizes = {path: expert_bytes[spec] for path, spec in specs.items()}
    if config.moves and any(room < sum(sizes.values()) * spec.num_experts for spec in shapes):
        room -= expert_cache.MOST_SPARES * sum(sizes.values())
    return sizes, room


def ring_bytes(config: Any, spec: ExpertsSpec, packed: int) -> tuple[int, int]:
    """Bytes (least, wanted) on the GPU for streaming the experts of long prompts; zeros if prompts stay on the CPU.

    packed   bytes of all experts of the layer, packed
    """
    if not config.streams or not StreamedExperts.support(spec):
        return 0, 0
    return ring.ring_bytes(spec, packed // spec.num_experts)
