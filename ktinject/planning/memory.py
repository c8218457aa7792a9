"""Runtime memory: workspace and KV cache, which a swapped model holds beside its weights while it runs.

The size of the KV cache is not computed from the config, whose fields differ from family to family. Instead the model
runs once on the meta device, where nothing is computed, and the values in its cache are counted: those of each token,
and states of fixed size, of linear attention and convolutions. Of how many tokens a layer with a window keeps values,
decode steps know, too (generation/cache_layers.py). If a device has no room for the
request that was asked for, or a short one, the layout does not fit: the planner tries several GPUs instead of one, or
reports a problem.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ktinject.generation import own_caches
from ktinject.generation.cache import bucket_of
from ktinject.generation.cache_layers import ALL_TOKENS, LayerKind, kind_of, kinds_of, tensors_of
from ktinject.hf import compat, models
from ktinject.hf.layers import Layers
from ktinject.machine import device_of
from ktinject.operators.probes.answer import Memory, key_of_value, refusal_of
from ktinject.operators.probes.twin import on_cpu
from ktinject.planning.devices import show_bytes
from ktinject.support import Support

if TYPE_CHECKING:
    from ktinject.planning.replacements import Replacement

_TOKENS = 2  # tokens of the request that runs on the meta device
_SHORTEST, _LONGEST = bucket_of(1), 1 << 30
_ANSWERS: Memory[tuple[_Counted, ...] | Support] = Memory()


class Kept(NamedTuple):
    """What a decoder layer keeps of a text.

    values       of each token, keys and values together
    state_bytes  in states of fixed size
    """

    values: int
    state_bytes: int = 0


class _Counted(NamedTuple):
    """The same for a model in bf16: values of each token; values of its states in bf16, and bytes of others."""

    values: int
    states: int
    wide_bytes: int


@dataclass(frozen=True)
class CacheSize:
    """Bytes of what the cache of a request holds.

    parts  the last tokens that layers keep, None: all → bytes that a token adds
    fixed  of states, for each row
    """

    parts: Mapping[int | None, int]
    fixed: int = 0

    @property
    def per_token(self) -> int:
        """Bytes that a token adds to a text that is shorter than all windows."""
        return sum(self.parts.values())

    def of(self, positions: int) -> int:
        """Bytes of a cache of so many positions in one row, twice: that of a captured step, and the prompt's, copied
        into it."""
        tokens = sum(
            each * (positions if most is None else min(positions, most)) for most, each in self.parts.items()
        )
        return 2 * (tokens + self.fixed)

    @classmethod
    def sum(cls, sizes: Iterable[CacheSize]) -> CacheSize:
        parts: dict[int | None, int] = {}
        fixed = 0
        for size in sizes:
            fixed += size.fixed
            for most, each in size.parts.items():
                parts[most] = parts.get(most, 0) + each
        return cls(parts, fixed)


@dataclass(frozen=True)
class RuntimeMemory:
    """The runtime memory of one device.

    workspace           purpose → bytes of a buffer that operators share
    kv_bytes_per_token  bytes that a token adds to the KV cache on this device, while no layer's window is full; 0 if
                        there is no cache here or its size is not known
    longest_request     tokens of the longest request that fits: prompt and answer, summed over the rows of the batch;
                        None if it is not known
    """

    workspace: dict[str, int]
    kv_bytes_per_token: int
    longest_request: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, device: str) -> list[str]:
        """Sentences for the plan."""
        found = [f"{device}: {show_bytes(size)} for {what}" for what, size in self.workspace.items() if size]
        if self.kv_bytes_per_token and self.longest_request is not None:
            found.append(
                f"{device}: {show_bytes(self.kv_bytes_per_token)} of cache for a token, "
                f"room for {self.longest_request:,} tokens of a request, all rows together"
            )
        return found


def find(
    replacements: Sequence[Replacement],
    model: PreTrainedModel,
    device_map: Mapping[str, str],
    to_load: Mapping[str, int],
    limits: Mapping[str, int],
    cached: Sequence[Kept] | None,
    context: int = 1,
) -> tuple[dict[str, RuntimeMemory], list[str]]:
    """The runtime memory of all devices.

    device_map  module path → device, for the modules that are not replaced
    to_load     device → bytes of weights that are not in memory yet
    limits      device → bytes that the plan may use
    cached      as `cached_values` returns them
    context     tokens of a request for which there has to be room
    Returns     device → its runtime memory; and sentences about what does not fit
    """
    runtime_memory, problems = {}, []
    positions = bucket_of(context)
    used = (device for replacement in replacements for device, _ in replacement.workspace if device in limits)
    for device in dict.fromkeys((*to_load, *device_map.values(), *used)):
        room = limits.get(device, 0) - to_load.get(device, 0)
        size = _cache_size(replacements, model, device_map, device, cached)
        kv_bytes_per_token, cache = size.per_token, size.of(positions)
        workspace: dict[str, int] = {}
        buffers = _workspace(replacements, device)
        later = sum(least for _, least, _ in buffers)
        for what, least, wanted in buffers:
            later -= least
            if least > room >= 0:
                problems.append(
                    f"{device} has {show_bytes(room)} left beside the weights, and {what} need {show_bytes(least)}."
                )
            # What a buffer may do without is for the cache and the other buffers.
            workspace[what] = max(0, min(wanted, room, max(least, room - cache - later)))
            room -= workspace[what]
        longest = _longest(room, size) if kv_bytes_per_token else None
        if longest is not None and longest < positions and room >= 0:
            problems.append(
                f"{device} has {show_bytes(room)} left beside the weights, and the cache of a request takes "
                f"{show_bytes(cache)}: no room for {max(context, _SHORTEST):,} tokens."
            )
        if workspace or kv_bytes_per_token:
            runtime_memory[device] = RuntimeMemory(workspace, kv_bytes_per_token, longest)
    return runtime_memory, problems


def longest_of(model: PreTrainedModel, running: Mapping[str, RuntimeMemory]) -> int:
    """Tokens of the longest request that is to be expected: as long as a text of the model may be, if that fits.

    running  the runtime memory of all devices, where all that is left of them is for requests
    """
    fitting = [one.longest_request for one in running.values() if one.longest_request is not None]
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(longest, int) and longest > 0:
        fitting.append(bucket_of(longest))
    return max(1, min(fitting, default=1))


def _workspace(replacements: Sequence[Replacement], device: str) -> list[tuple[str, int, int]]:
    """(purpose, least bytes, wanted bytes) of each buffer on a device.

    Operators that name the same buffer share it, so each size is the largest that any of them asks for.
    """
    found: dict[str, tuple[int, int]] = {}
    for replacement in replacements:
        for (on, what), (least, wanted) in replacement.workspace.items():
            if on == device:
                before = found.get(what, (0, 0))
                found[what] = max(before[0], least), max(before[1], wanted)
    return [(what, *sizes) for what, sizes in found.items()]


def _cache_size(
    replacements: Sequence[Replacement],
    model: PreTrainedModel,
    device_map: Mapping[str, str],
    device: str,
    values: Sequence[Kept] | None,
) -> CacheSize:
    """The cache of the layers on one device; without parts if it is not known."""
    sizes = cache_sizes(replacements, model, values)
    return CacheSize.sum(size for path, size in sizes.items() if device_of(device_map, path) == device)


def cache_sizes(
    replacements: Sequence[Replacement], model: PreTrainedModel, values: Sequence[Kept] | None
) -> dict[str, CacheSize]:
    """Decoder layer → what it caches; empty if this is not known."""
    layers = Layers(model)
    if values is None or len(values) != layers.count:
        return {}
    own = {
        layers.of(replacement.path): replacement.kv_values_per_token
        for replacement in replacements
        if replacement.kv_values_per_token is not None
    }
    kinds = _kinds(model, layers.count)
    return {
        path: _size(own.get(number, kept.values) * model.dtype.itemsize, kept.state_bytes, kinds[number])
        for number, (path, kept) in enumerate(zip(layers.paths, values))
    }


def _size(each: int, fixed: int, kind: LayerKind) -> CacheSize:
    """Of a layer to which a token adds so many bytes, beside those of its states."""
    # Of a prompt that is kept beside a window, the length is not known.
    own = CacheSize({None if kind.keeps_prompt else kind.window: each}, fixed)
    if kind.rate is None:
        return own
    # A compressed key and the index's are no wider than a key and a value. And of the tokens of two windows it is kept
    # what these are made of, some of it in fp32.
    return CacheSize.sum([own, CacheSize({kind.rate: 3 * each, None: math.ceil(each / kind.rate)})])


def _kinds(model: PreTrainedModel, count: int) -> Sequence[LayerKind]:
    """What each layer keeps; all tokens, where the config does not say."""
    try:
        kinds = kinds_of(model.config)
    except Exception:  # a family's config may lack what transformers' caches ask it for
        kinds = []
    return kinds if len(kinds) == count else [ALL_TOKENS] * count


def required(
    replacements: Sequence[Replacement],
    model: PreTrainedModel,
    device_map: Mapping[str, str],
    device: str,
    cached: Sequence[Kept] | None,
    context: int,
) -> int:
    """The least bytes that a device needs beside the weights: buffers at their smallest, and the cache of a request."""
    buffers = sum(least for _, least, _ in _workspace(replacements, device))
    return buffers + _cache_size(replacements, model, device_map, device, cached).of(bucket_of(context))


def _longest(room: int, size: CacheSize) -> int:
    """Tokens of the longest request that fits `room` bytes.

    The KV cache of a captured step has a power of two of positions.
    """
    if room < size.of(_SHORTEST):
        return 0
    tokens = _SHORTEST
    while tokens < _LONGEST and size.of(2 * tokens) <= room:
        tokens *= 2
    return tokens


def cached_values(model: PreTrainedModel) -> list[Kept] | None:
    """What each layer keeps of a text.

    Each distinct model is run once in a process, since a model is often planned for several times.

    None if the model does not run on the meta device.
    """
    kinds = tuple(_kind(model, path, number) for number, path in enumerate(Layers(model).paths))
    if not kinds:
        return None
    key = type(model), key_of_value(model.config), kinds
    found = _ANSWERS.once(key, lambda: _run(model.config, kinds))
    if isinstance(found, Support):
        return None
    return [Kept(each.values, each.states * model.dtype.itemsize + each.wide_bytes) for each in found]


def _run(config: PreTrainedConfig, kinds: Sequence[tuple[Any, ...]]) -> tuple[_Counted, ...] | Support:
    """Count what a model of this config, with layers of these kinds, caches; or why it does not run."""
    # Layers of one kind cache alike. So it is enough to run the first layers until every kind has occurred: one of
    # Qwen3's 48, four of DeepSeek-V3's 61.
    needed = max(kinds.index(kind) for kind in kinds) + 1
    refusal = Support.no("it was not run")
    for count in dict.fromkeys((needed, len(kinds))):
        try:
            # Some kernels accept only bf16, even on the meta device.
            # As it writes: in training mode some routers draw random numbers, which not all run on meta.
            twin = models.meta_model(_shortened(config, count), torch.bfloat16).eval()
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
            with on_cpu():
                cache = getattr(twin(input_ids=ids, use_cache=True), compat.CACHE)
            found = [_counted(layer) for layer in own_caches.as_dynamic(twin, cache).layers]
            return tuple(found[kinds.index(kind)] for kind in kinds)
        except (
            Exception
        ) as error:  # a family's code may fail in any way on meta tensors, or with fewer layers
            refusal = refusal_of(error)
    return refusal


def _kind(model: PreTrainedModel, path: str, number: int) -> tuple[Any, ...]:
    """Equal for layers that cache alike: shapes, classes of modules, and the config's settings of this layer."""
    layer, config = model.get_submodule(path), model.config.get_text_config()
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    classes = [type(module).__name__ for module in layer.modules()]
    said = [str(value[number]) for value in _by_layer(config).values()]
    return (*shapes, *classes, *said)


def _by_layer(config: Any) -> dict[str, list[Any]]:
    """The settings of a config that are lists with a value for each decoder layer."""
    count = config.num_hidden_layers
    return {
        name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count
    }


def _shortened(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    # The cache is the same with any attention. Flex attention compiles its mask, which takes seconds; and SDPA's asks
    # (transformers 5.17) whether a CUDA stream is recorded, which starts CUDA where nobody needs it: 0.2 s.
    config._attn_implementation = "eager"
    text = config.get_text_config()
    for name, value in _by_layer(text).items():
        setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def _counted(layer: Any) -> _Counted:
    """Of a cache's layer that a model in bf16 has filled."""
    states = tensors_of(layer) if kind_of(layer).is_state else ()
    narrow, wide = (
        [one for one in states if (one.dtype == torch.bfloat16) is is_narrow] for is_narrow in (True, False)
    )
    return _Counted(
        _values(layer) // _TOKENS, sum(one.numel() for one in narrow), sum(one.nbytes for one in wide)
    )


def _values(layer: Any) -> int:
    found = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(tensor.numel() for tensor in found if isinstance(tensor, torch.Tensor))
