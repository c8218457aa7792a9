"""Runtime memory: what a swapped model holds beside its weights while it runs, which is workspace and KV cache.

The size of the KV cache is not computed from the config, whose fields differ from family to family. Instead the model
runs once on the meta device, where nothing is computed, and the values in its cache are counted. A plan without room
for a short request is refused, and one GPU is left for several because of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ktinject.generation.cache import bucket_of
from ktinject.hf import models
from ktinject.hf.layers import Layers
from ktinject.machine import device_of
from ktinject.planning.devices import show_bytes

if TYPE_CHECKING:
    from ktinject.planning.replacements import Replacement

_TOKENS = 2  # of the request that runs on meta
_SHORTEST = bucket_of(1)


@dataclass(frozen=True)
class RuntimeMemory:
    """What one device holds.

    workspace           what for → bytes of buffers that operators share
    kv_bytes_per_token  that a token adds to the KV cache; 0 where the model caches nothing here, or nobody can tell
    longest_request     tokens of the longest request that there is room for, prompt and answer, all rows together; None
                        where nobody can tell
    """

    workspace: dict[str, int]
    kv_bytes_per_token: int
    longest_request: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self, device: str) -> list[str]:
        """For people."""
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
    cached: Sequence[int] | None,
) -> tuple[dict[str, RuntimeMemory], list[str]]:
    """Device → its runtime memory, and the problems where that does not fit.

    to_load   device → bytes of weights that are not in memory yet
    cached    as `cached_values` says
    """
    runtime_memory, problems = {}, []
    for device in {**to_load, **dict.fromkeys(device_map.values())}:
        room = limits.get(device, 0) - to_load.get(device, 0)
        workspace: dict[str, int] = {}
        for what, least, wanted in _workspace(replacements, device):
            if least > room >= 0:
                problems.append(
                    f"{device} has {show_bytes(room)} left beside the weights, and {what} need {show_bytes(least)}. "
                    "Use smaller weights, a larger budget, or prefill: cpu."
                )
            workspace[what] = max(0, min(wanted, room))
            room -= workspace[what]
        kv_bytes_per_token = _kv_bytes_per_token(replacements, model, device_map, device, cached)
        longest = _longest(room, kv_bytes_per_token) if kv_bytes_per_token else None
        if longest is not None and longest < _SHORTEST and room >= 0:
            problems.append(
                f"{device} has {show_bytes(room)} left beside the weights, and each token of a request takes "
                f"{show_bytes(kv_bytes_per_token)} of cache: no room for {_SHORTEST} tokens. "
                "Use smaller weights, or a larger budget."
            )
        if workspace or kv_bytes_per_token:
            runtime_memory[device] = RuntimeMemory(workspace, kv_bytes_per_token, longest)
    return runtime_memory, problems


def _workspace(replacements: Sequence[Replacement], device: str) -> list[tuple[str, int, int]]:
    """(what for, least, wanted) bytes of each buffer: the largest that any operator asks for, since they share it."""
    found: dict[str, tuple[int, int]] = {}
    for replacement in replacements:
        for (on, what), (least, wanted) in replacement.workspace.items():
            if on == device:
                before = found.get(what, (0, 0))
                found[what] = max(before[0], least), max(before[1], wanted)
    return [(what, *sizes) for what, sizes in found.items()]


def _kv_bytes_per_token(
    replacements: Sequence[Replacement],
    model: PreTrainedModel,
    device_map: Mapping[str, str],
    device: str,
    values: Sequence[int] | None,
) -> int:
    """Bytes that a token adds to the cache on one device."""
    layers = Layers(model)
    if values is None or len(values) != layers.count:
        return 0
    own = {
        layers.of(replacement.path): replacement.kv_values_per_token
        for replacement in replacements
        if replacement.kv_values_per_token is not None
    }
    return sum(
        own.get(number, count) * model.dtype.itemsize
        for number, (path, count) in enumerate(zip(layers.paths, values))
        if device_of(device_map, path) == device
    )


def _longest(room: int, kv_bytes_per_token: int) -> int:
    """Tokens of the longest request. A captured step has a cache of a power of two; the prompt's is copied into it."""
    if room < 2 * kv_bytes_per_token * _SHORTEST:
        return 0
    tokens: int = 1 << (room // (2 * kv_bytes_per_token)).bit_length() - 1
    return tokens


def cached_values(model: PreTrainedModel) -> list[int] | None:
    """Keys and values that each layer caches for a token; None where the model does not run on meta."""
    layers = Layers(model)
    kinds = [_kind(model, path, number) for number, path in enumerate(layers.paths)]
    if not kinds:
        return None
    # Layers of one kind cache alike, so as many run as show every kind: one of Qwen3's 48, four of DeepSeek-V3's 61.
    needed = max(kinds.index(kind) for kind in kinds) + 1
    for count in dict.fromkeys((needed, len(kinds))):
        try:
            # Some kernels take nothing but bf16, on meta, too.
            twin = models.meta_model(_shortened(model.config, count), torch.bfloat16)
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
            with torch.no_grad():
                cache = twin(input_ids=ids, use_cache=True).past_key_values
            found = [_values(layer) // _TOKENS for layer in cache.layers]
            return [found[kinds.index(kind)] for kind in kinds]
        except Exception:  # whatever a family's code says to tensors without values, or to fewer layers
            continue
    return None


def _kind(model: PreTrainedModel, path: str, number: int) -> tuple[Any, ...]:
    """What layers that cache alike have in common: modules, shapes, and what the config says of each layer."""
    layer, config = model.get_submodule(path), model.config.get_text_config()
    shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    classes = [type(module).__name__ for module in layer.modules()]
    said = [str(value[number]) for value in _by_layer(config).values()]
    return (*shapes, *classes, *said)


def _by_layer(config: Any) -> dict[str, list[Any]]:
    """The settings that have a value for each decoder layer."""
    count = config.num_hidden_layers
    return {
        name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == count
    }


def _shortened(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    # Flex attention compiles its mask, which takes seconds. What is cached is the same with any attention.
    if config._attn_implementation == "flex_attention":
        config._attn_implementation = "sdpa"
    text = config.get_text_config()
    for name, value in _by_layer(text).items():
        setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def _values(layer: Any) -> int:
    found = (getattr(layer, name, None) for name in ("keys", "values"))
    return sum(tensor.numel() for tensor in found if isinstance(tensor, torch.Tensor))
