"""Everything ktinject knows about the inside of transformers; no other file touches its private functions.

    config.json ──► `meta_model` ──► `key_map` ──────────► what fills each parameter, by checkpoint key
                                     `load_rest` ────────► transformers' own loader for all that is not swapped

The mapping from checkpoint names to fused parameters is transformers' own (`WeightRenaming`, `WeightConverter`), run on
the names alone. Followed versions: 5.17 to 5.23.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from ktinject import kimi
from ktinject.errors import CheckpointError, PlanError

kimi.complete()

# An expert's number in a checkpoint key. Keys that differ in nothing else are renamed once, all together.
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")

_STACK = ("MergeModulelist", 0)  # [experts] × [n, k] → [experts, n, k]
_CONCATENATE = ("Concatenate", 1)  # parts × [experts, n, k] → [experts, parts · n, k]


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint, and which part of a parameter it is.

    expert   None: it has all of dimension 0; e: it is `parameter[e]`
    part     None: all outputs; p: the p-th of the parts concatenated along the output dimension
    """

    key: str
    expert: int | None = None
    part: int | None = None


@dataclass(frozen=True)
class Conversion:
    """Tensors that only transformers' own converter can turn into parameters, whole and all at once.

    name      the parameter by which transformers knows the result; first of `targets`
    sources   source pattern of the converter → checkpoint keys
    """

    name: str
    targets: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    converter: Any

    @property
    def keys(self) -> list[str]:
        return [key for keys in self.sources.values() for key in keys]

    def run(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Read all keys and convert. Returns parameter name → tensor; needs about twice their memory."""
        converter = deepcopy(self.converter)
        for pattern, keys in self.sources.items():
            for key in keys:
                converter.add_tensor(self.name, key, pattern, read(key))
        made = converter.convert(self.name, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass
class KeyMap:
    """What a checkpoint's names mean to a model.

    targets      parameter → the pieces that fill it
    parts        parameter → number of parts its pieces come in, where there is more than one
    conversions  parameter → the conversion that gives it; those are not in `targets`
    unexpected   keys that belong nowhere
    missing      what the model needs and the checkpoint has not, by checkpoint name where that is known
    transforms   transformers' mapping, which knows by now what it was used for
    """

    targets: dict[str, list[Piece]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    transforms: list[Any] = field(default_factory=list)

    def keys(self, name: str) -> list[str]:
        """The checkpoint keys that fill the parameter `name`."""
        if name in self.conversions:
            return self.conversions[name].keys
        return [piece.key for piece in self.targets.get(name, ())]


def key_map(model: PreTrainedModel, names: Iterable[str], companions: Callable[[str], Iterable[str]]) -> KeyMap:
    """Map every checkpoint key to the model's parameters, reading nothing.

    model       on any device, not swapped
    names       all tensor names of the checkpoint
    companions  weight key → names that may come with it (scales); they follow their weight
    """
    names = set(names)
    names -= {companion for key in names for companion in companions(key) if companion in names}
    mapping = KeyMap(transforms=get_model_conversion_mapping(model))
    renamer = _Renamer(model, mapping.transforms)

    # Sorted as transformers' loader does it: some renamings switch others on, and unnumbered experts count by rank.
    together: dict[str, list[tuple[int | None, str]]] = {}
    for key in names:
        number = _EXPERT.search(key)
        canonical = key[: number.start()] + "0" + key[number.end() :] if number else key
        together.setdefault(canonical, []).append((int(number[0]) if number else None, key))
    collected: dict[str, dict[str, list[tuple[int | None, str]]]] = {}
    unexpected: dict[str, list[str]] = {}
    for canonical in sorted(together, key=dot_natural_key):
        members = together[canonical]
        target, pattern = renamer.rename(canonical)
        if pattern is None or _EXPERT.search(target):  # the number stays in the name
            for number_, key in members:
                target, pattern = renamer.rename(key)
                if target not in renamer.state:
                    unexpected.setdefault(target, []).append(key)
                elif pattern is not None:
                    collected.setdefault(target, {}).setdefault(pattern, []).append((number_, key))
                elif target in mapping.targets:
                    unexpected.setdefault(target, []).append(key)
                else:
                    mapping.targets[target] = [Piece(key)]
        elif target not in renamer.state:
            unexpected.setdefault(target, []).extend(key for _, key in members)
        else:
            collected.setdefault(target, {}).setdefault(pattern, []).extend(members)

    for target, by_pattern in collected.items():
        if target in mapping.targets:  # the checkpoint has the parameter itself, too
            unexpected.setdefault(target, []).extend(key for keys in by_pattern.values() for _, key in keys)
        else:
            _assemble(mapping, renamer, target, by_pattern)
    _share_tied(mapping, model)
    _report(mapping, model, renamer.state, unexpected)
    return mapping


class _Renamer:
    """transformers' renaming of one key, as its loader does it."""

    def __init__(self, model: PreTrainedModel, transforms: list[Any]) -> None:
        self.state = model.state_dict()
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        self.converter_of = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}

    def rename(self, key: str) -> tuple[str, str | None]:
        """The parameter's name, and the source pattern of the converter that makes it, if there is one."""
        renamed = rename_source_key(key, self._renamings, self._converters, self._prefix, self.state)
        if renamed[0] not in self.state and key in self.state:
            renamed = rename_source_key(key, [], [], self._prefix, self.state)
        return renamed


def _assemble(
    mapping: KeyMap, renamer: _Renamer, target: str, by_pattern: dict[str, list[tuple[int | None, str]]]
) -> None:
    """Say how the tensors of one converter make the parameter `target`."""
    converter = renamer.converter_of[next(iter(by_pattern))]
    steps = tuple((type(step).__name__, getattr(step, "dim", None)) for step in converter.operations)
    patterns = converter.source_patterns
    shape = renamer.state[target].shape
    if steps == (_STACK,) or steps == (_STACK, _CONCATENATE):
        count = len(patterns)
        pieces = []
        for part, pattern in enumerate(patterns):
            members = by_pattern.get(pattern, [])
            for rank, (number, key) in enumerate(sorted(members, key=lambda m: dot_natural_key(m[1]))):
                pieces.append(Piece(key, rank if number is None else number, part if count > 1 else None))
        mapping.missing += _absent(pieces, converter, shape[0], target)
    elif steps == (_CONCATENATE,) and len(shape) == 3 and all(len(keys) == 1 for keys in by_pattern.values()):
        count = len(patterns)
        pieces = [Piece(by_pattern[p][0][1], None, part) for part, p in enumerate(patterns) if p in by_pattern]
        mapping.missing += [f"{target} (from {p})" for p in patterns if p not in by_pattern]
    else:
        sources = {
            pattern: tuple(key for _, key in sorted(members, key=lambda m: dot_natural_key(m[1])))
            for pattern, members in by_pattern.items()
        }
        first = converter.target_patterns[0]
        targets = tuple(dict.fromkeys(target.replace(first, other) for other in converter.target_patterns))
        conversion = Conversion(target, targets, sources, converter)
        mapping.conversions.update(dict.fromkeys(targets, conversion))
        mapping.missing += [f"{target} (from {p})" for p in patterns if p not in by_pattern]
        return
    mapping.targets[target] = pieces
    if count > 1:
        mapping.parts[target] = count


def _absent(pieces: list[Piece], converter: Any, experts: int, target: str) -> list[str]:
    """Names of the expert tensors that should be there and are not."""
    patterns = converter.source_patterns
    there = {(piece.expert, piece.part or 0) for piece in pieces}
    if len(there) == experts * len(patterns) or not pieces:
        return []
    # Any piece shows how this checkpoint spells the names; only the number and the pattern's tail differ.
    sample = pieces[0]
    tail = patterns[sample.part or 0].rpartition("*")[2]
    absent = []
    for part, pattern in enumerate(patterns):
        spelled = sample.key.removesuffix(tail) + pattern.rpartition("*")[2]
        for expert in range(experts):
            if (expert, part) not in there:
                name = _EXPERT.sub(str(expert), spelled, count=1)
                absent.append(name if _EXPERT.search(spelled) else f"{target}[{expert}]")
    return absent


def _share_tied(mapping: KeyMap, model: PreTrainedModel) -> None:
    """A parameter tied to one that is there needs no key of its own; transformers ties both ways."""
    for name, other in model.all_tied_weights_keys.items():
        for absent, there in ((name, other), (other, name)):
            if absent not in mapping.targets and there in mapping.targets:
                mapping.targets[absent] = mapping.targets[there]


def _report(
    mapping: KeyMap, model: PreTrainedModel, state: Mapping[str, Tensor], unexpected: dict[str, list[str]]
) -> None:
    """Complete the lists of unexpected and missing names, less what the model class says to ignore."""
    buffers = [name for name, _ in model.named_buffers()]
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        ignored.add(r"rotary_emb\.inv_freq")  # once stored per layer
    if any(name.endswith("position_ids") for name in buffers):
        ignored.add(r"(^|\.)position_ids$")
    for target, keys in unexpected.items():
        if not _matches(ignored, target):
            mapping.unexpected += keys
    for target, pieces in mapping.targets.items():
        experts = state[target].shape[0] if state[target].dim() else 0
        mapping.unexpected += [p.key for p in pieces if p.expert is not None and p.expert >= experts]
    optional = set(model._keys_to_ignore_on_load_missing or ())
    mapping.missing += [
        name
        for name in state
        if name not in mapping.targets and name not in mapping.conversions and not _matches(optional, name)
    ]
    mapping.unexpected.sort(key=dot_natural_key)
    mapping.missing.sort(key=dot_natural_key)


def _matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


class _Lazy:
    """Stands for a tensor in the state dict that transformers' loader gets: read when it is indexed."""

    def __init__(self, read: Callable[[str], Tensor], key: str) -> None:
        self._read, self._key = read, key

    def __getitem__(self, _: object) -> Tensor:
        return self._read(self._key)


def load_rest(
    model: PreTrainedModel,
    mapping: KeyMap,
    read: Callable[[str], Tensor],
    device_map: Mapping[str, str],
    where: str,
) -> None:
    """Let transformers load everything the swapped model still has, and put it into evaluation mode.

    model       swapped; what is left of it may be on meta
    mapping     of the model as it was before the swap
    read        key → the tensor as floats, on the CPU; called from several threads
    device_map  module path or "" → device
    where       the checkpoint's name, for refusals
    Raises      CheckpointError for every parameter that was not filled, with all in one report
    """
    state = {
        key: _Lazy(read, key) for name in model.state_dict() for key in mapping.keys(name)
    }
    # As in `from_pretrained`, no module counts as initialised: buffers that no checkpoint has are computed anew.
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=where,
        device_map=dict(device_map),
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
        weight_mapping=mapping.transforms,
    )
    with _quiet():
        info, _ = type(model)._load_pretrained_model(model, state, None, config)
        optional = set(model._keys_to_ignore_on_load_missing or ())
        faults = [
            f"{name}: not filled"
            for name in info.missing_keys
            if name not in model.all_tied_weights_keys and not _matches(optional, name)
        ]
        faults += [f"{key}: belongs nowhere" for key in info.unexpected_keys]
        faults += [f"{name}: found {list(a)}, expected {list(b)}" for name, a, b in info.mismatched_keys]
        faults += [f"{name}: {text.splitlines()[-1]}" for name, text in info.conversion_errors.items()]
        if faults:
            raise CheckpointError(f"{where}: transformers could not load it:\n  " + "\n  ".join(sorted(faults)))
        type(model)._finalize_model_loading(model, config, info)
    model.eval()
    # Only what this checkpoint used is undone by `save_pretrained`; the keys of swapped modules count, too.
    model._weight_conversions = [entry for entry in mapping.transforms if entry.was_used()]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' own progress bars away: a library that was not asked to does not print."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def untie(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Forget that swapped parameters are tied; `tie_weights` would put a Parameter on the operator."""
    for name in set(names) & model.all_tied_weights_keys.keys():
        del model.all_tied_weights_keys[name]
        model._tied_weights_keys = {k: v for k, v in (model._tied_weights_keys or {}).items() if k != name}


def final_dtype(model: PreTrainedModel) -> Callable[[str, Tensor], torch.dtype]:
    """The dtype a parameter or buffer has once loaded: some stay fp32 in a bf16 model."""
    plan = model._get_dtype_plan(model.dtype)
    patterns = [(re.compile(glob.replace("*", ".*")), dtype) for glob, dtype in plan.items()]

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        return next((dtype for pattern, dtype in patterns if pattern.search(name)), tensor.dtype)

    return dtype_of


def load_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Take the checkpoint's generation config, as `from_pretrained` does, unless the user has set one."""
    if not (model.can_generate() and (folder / "generation_config.json").is_file()):
        return
    if model.generation_config == GenerationConfig.from_model_config(model.config):
        model.generation_config = GenerationConfig.from_pretrained(folder)


def quantization(config: PreTrainedConfig) -> dict[str, Any] | None:
    """What `config.json` says about quantised weights, as a dict."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, Mapping) else found.to_dict()
    return None


def drop_quantization(config: PreTrainedConfig) -> None:
    """The weights are floats now: what is saved or reloaded must not claim otherwise."""
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)


def read_config(path: str | os.PathLike[str]) -> PreTrainedConfig:
    """Read a model folder's config.json; never runs code from it. Raises CheckpointError."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: its config.json cannot be used: {error}") from error


def meta_model(config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    """Build the causal language model of a config on the meta device, in no memory. Raises PlanError.

    dtype   None: what the config says
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise PlanError(
            f"model type {config.model_type!r}: transformers has no causal language model for it. "
            "Build the model yourself inside torch.device('meta') and call ktinject.optimize on it."
        )
    arguments = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **arguments)


class Layers:
    """Which decoder layer a module belongs to."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @cached_property
    def _prefix_and_count(self) -> tuple[str, int]:
        count = getattr(self._model.config.get_text_config(), "num_hidden_layers", 0)
        lists = [
            (path, len(module))
            for path, module in self._model.named_modules()
            if isinstance(module, nn.ModuleList)
        ]
        # A vision tower may be as deep as the language model, whose layers are called `layers` nearly everywhere.
        lists.sort(key=lambda found: (found[1] != count, not found[0].endswith("layers")))
        return lists[0] if lists and lists[0][1] == count else ("", 0)

    @property
    def count(self) -> int:
        """Number of decoder layers; 0 if the model has none that can be told."""
        return self._prefix_and_count[1]

    def of(self, path: str) -> int | None:
        """The decoder layer of a module path, None outside of them."""
        prefix, count = self._prefix_and_count
        inside = path.removeprefix(f"{prefix}.")
        number = inside.partition(".")[0]
        return int(number) if count and inside != path and number.isdigit() else None


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's class and its bases, most derived first."""
    return tuple(base.__name__ for base in type(module).__mro__[:-1])
