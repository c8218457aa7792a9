"""Chooses the devices of a model: makes a layout for one candidate after another until one fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ktinject.generation.cache import bucket_of
from ktinject.hf import models
from ktinject.hf.layers import Layers
from ktinject.machine import device_of
from ktinject.planning import memory
from ktinject.planning.devices import Devices, fill, show_bytes, spread
from ktinject.planning.memory import Kept, RuntimeMemory
from ktinject.planning.plan import total
from ktinject.planning.replacements import Replacement, Replacer


@dataclass(frozen=True)
class Layout:
    """How a model is distributed over devices, and what it needs there.

    device_map      module path → device, for the modules that are not replaced
    replacements    the replaced modules
    rest_bytes      device → bytes of everything that is not replaced
    to_load         device → bytes of weights that are not in memory yet
    runtime_memory  device → memory that the model takes while it runs, beside its weights
    excess          device → bytes of weights beyond the plan's limit, where they exceed it
    least           device → the least bytes with which the layout fits: weights, buffers, and the cache of a request
    problems        sentences about what does not fit
    beside          tokens of the request beside which operators took what is left; None: none did
    """

    device_map: dict[str, str]
    replacements: tuple[Replacement, ...]
    rest_bytes: dict[str, int]
    to_load: dict[str, int]
    runtime_memory: dict[str, RuntimeMemory]
    excess: dict[str, int]
    least: dict[str, int]
    problems: list[str]
    beside: int | None

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def shortage(self) -> tuple[int, int]:
        """How far the layout is from fitting, for comparisons: excess bytes of weights, then other problems."""
        return sum(self.excess.values()), len(self.problems) - len(self.excess)


def choose(
    model: PreTrainedModel,
    replacer: Replacer,
    where: Devices,
    candidates: Sequence[tuple[str, ...]],
    has_weights: bool,
    kv_values: Sequence[Kept] | None,
    context: int = 1,
) -> Layout:
    """The first layout that fits, or the one with the smallest shortage.

    where        the devices of the plan, with their limits
    candidates   devices for the modules that are not replaced, best first
    has_weights  True: the modules that are not replaced are in memory already
    kv_values    as `memory.cached_values` returns them
    context      tokens of a request for which there has to be room
    Raises       what `Replacer.replacements` raises
    """
    layouts: list[Layout] = []
    for devices in candidates:
        layouts.append(_lay_out(model, replacer, where, devices, has_weights, kv_values, context))
        # Shares in proportion may not fit where layers of whole GPUs, one after the other, do.
        if len(devices) > 1 and not layouts[-1].fits:
            layouts.append(_lay_out(model, replacer, where, devices, has_weights, kv_values, context, True))
        if layouts[-1].fits:
            break
    return min(layouts, key=lambda layout: layout.shortage)


def _lay_out(
    model: PreTrainedModel,
    replacer: Replacer,
    where: Devices,
    devices: Sequence[str],
    has_weights: bool,
    kv_values: Sequence[Kept] | None,
    context: int,
    fills: bool = False,
) -> Layout:
    """The layout of a model on one device, or with its decoder layers on several.

    fills   each GPU gets as many layers as it has room for, and the next one the others
    """

    def to_load() -> dict[str, int]:
        taken = (replacement.bytes for replacement in replacements)
        return total([*taken, {} if has_weights else rest_bytes])

    def required(tokens: int) -> dict[str, int]:
        return {
            device: memory.required(replacements, model, device_map, device, kv_values, tokens)
            for device in where.allowed
        }

    device_map = {"": devices[0]}
    replacements = replacer.replacements(device_map)
    if len(devices) > 1:
        outside, layers = _sizes_of_layers(model, replacements, devices[0])
        if fills:
            caches = memory.cache_sizes(replacements, model, kv_values)
            buffers = memory.required(replacements, model, {}, devices[0], None, context)
            layers = {
                path: size + (caches[path].of(bucket_of(context)) if path in caches else 0)
                for path, size in layers.items()
            }
            room = {device: where.limits[device] - buffers for device in devices}
            device_map = fill(outside, layers, devices, room)
        else:
            device_map = spread(outside, layers, devices, where.limits)
        replacements = replacer.replacements(device_map)
    rest_bytes = _rest_bytes(model, replacements, device_map)
    beside, without = None, dict[str, RuntimeMemory]()
    # Not in a group of processes: where one of them runs short, nothing that it gives back lets the others go on.
    if any(replacement.config.auto_sized for replacement in replacements) and replacer.group is None:
        needed = to_load()
        without, _ = memory.find(replacements, model, device_map, needed, where.limits, kv_values, context)
        beside = context if context > 1 else memory.longest_of(model, without)
        cache = required(beside)
        spare = {
            device: where.limits[device] - needed.get(device, 0) - cache[device] for device in where.allowed
        }
        replacements = replacer.replacements(device_map, spare)
    needed = to_load()
    runtime_memory, problems = memory.find(
        replacements, model, device_map, needed, where.limits, kv_values, context
    )
    if beside is not None and all(one.config.gives_back for one in replacements if one.config.auto_sized):
        runtime_memory = {
            device: dataclasses.replace(running, longest_request=without[device].longest_request)
            for device, running in runtime_memory.items()
        }
    excess = {device: size - where.limits[device] for device, size in needed.items()}
    return Layout(
        device_map=device_map,
        replacements=replacements,
        rest_bytes=rest_bytes,
        to_load=needed,
        runtime_memory=runtime_memory,
        excess={device: size for device, size in excess.items() if size > 0},
        least={device: needed.get(device, 0) + size for device, size in required(context).items()},
        problems=[
            *(_too_large(device, needed[device], where) for device, size in excess.items() if size > 0),
            *problems,
        ],
        beside=beside,
    )


def _rest_sizes(model: PreTrainedModel, replacements: Sequence[Replacement]) -> Iterator[tuple[str, int]]:
    """Name and bytes, in the final dtype, of each parameter and buffer that operators do not take; tied ones once."""
    taken = {
        f"{replacement.path}.{name}" for replacement in replacements for name in replacement.parameter_shapes
    }
    dtype_of = models.final_dtype(model)
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if name not in taken:
                yield name, tensor.numel() * dtype_of(name, tensor).itemsize


def _rest_bytes(
    model: PreTrainedModel, replacements: Sequence[Replacement], device_map: Mapping[str, str]
) -> dict[str, int]:
    """Device → bytes of the parameters and buffers that operators do not take."""
    sizes = dict.fromkeys(device_map.values(), 0)
    for name, size in _rest_sizes(model, replacements):
        sizes[device_of(device_map, name)] += size
    return sizes


def _sizes_of_layers(
    model: PreTrainedModel, replacements: Sequence[Replacement], gpu: str
) -> tuple[int, dict[str, int]]:
    """Bytes outside of the decoder layers, and of each layer, on the GPU for which the replacements were planned."""
    layers = Layers(model)
    outside, inside = 0, dict.fromkeys(layers.paths, 0)
    on_first = ((replacement.path, replacement.bytes.get(gpu, 0)) for replacement in replacements)
    for path, size in (*_rest_sizes(model, replacements), *on_first):
        if (number := layers.of(path)) is None:
            outside += size
        else:
            inside[layers.paths[number]] += size
    return outside, inside


def _too_large(device: str, size: int, where: Devices) -> str:
    limit, free = where.limits[device], where.free[device]
    has = f"{show_bytes(free)} are free" if limit == free else f"the budget is {show_bytes(limit)}"
    return f"{device} needs {show_bytes(size)}, but {has}."
