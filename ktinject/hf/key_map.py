"""What checkpoint keys mean to a model: transformers' own renamings and converters, run on names alone.

model.layers.3.mlp.experts.7.up_proj.weight ──► model.layers.3.mlp.experts.gate_up_proj, expert 7, part 1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ktinject.hf import compat

# An expert's number in a checkpoint key. Keys that differ in nothing else are renamed once, all together.
_EXPERT = re.compile(r"(?<=\.experts\.)(?:0|[1-9][0-9]{0,5})(?=\.)")

_MOST_MISSING = 100_000  # more are not named

_STACK = ("MergeModulelist", 0)  # [experts] × [n, k] → [experts, n, k]
_CONCATENATE = ("Concatenate", 1)  # parts × [experts, n, k] → [experts, parts · n, k]

# Source pattern of the converter that takes them, None without one → expert numbers and keys.
_ByPattern = dict[str | None, list[tuple[int | None, str]]]


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
    sources   source pattern of the converter → checkpoint keys, numbers in them rising
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
    skipped      keys that belong nowhere, and may be there
    missing      what the model needs and the checkpoint has not, by checkpoint name where that is known
    transforms   transformers' mapping, which knows by now what it was used for
    shared       parameter that has no key of its own → the one that it is tied to, whose key fills both
    """

    targets: dict[str, list[Piece]] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    transforms: list[Any] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)

    def keys(self, name: str) -> list[str]:
        """The checkpoint keys that fill the parameter `name`."""
        if name in self.conversions:
            return self.conversions[name].keys
        return [piece.key for piece in self.targets.get(name, ())]


def key_map(model: PreTrainedModel, names: Iterable[str]) -> KeyMap:
    """Map every checkpoint key to the model's parameters, reading nothing.

    model    on any device, not swapped
    names    the names of all weights in the checkpoint, without those of scales and of parts of weights
    """
    names = set(names)
    mapping = KeyMap(transforms=compat.get_model_conversion_mapping(model))
    renamer = _Renamer(model, mapping.transforms)

    together: dict[str, list[tuple[int | None, str]]] = {}
    for key in names:
        number = _EXPERT.search(key)
        canonical = key[: number.start()] + "0" + key[number.end() :] if number else key
        together.setdefault(canonical, []).append((int(number[0]) if number else None, key))
    # Sorted as transformers' loader does it: some renamings switch others on, and its converters take tensors in the
    # order they come in. Within a group, keys differ in the expert's number only.
    found: dict[str, _ByPattern] = {}
    for canonical in sorted(together, key=_natural):
        target, pattern = renamer.rename(canonical)
        # Without a converter, or with the number still in the name, each expert is a parameter of its own.
        each = pattern is None or _EXPERT.search(target)
        for expert, key in sorted(together[canonical]):
            if each and key != canonical:
                target, pattern = renamer.rename(key)
            found.setdefault(target, {}).setdefault(pattern, []).append((expert, key))

    unexpected: dict[str, list[str]] = {}
    for target, by_pattern in found.items():
        if target in renamer.state:
            unexpected[target] = _assemble(mapping, renamer, target, by_pattern)
        else:
            unexpected[target] = [key for members in by_pattern.values() for _, key in members]
    _share_tied(mapping, model)
    _report(mapping, model, renamer.state, unexpected)
    return mapping


class _Renamer:
    """transformers' renaming of one key, as its loader does it."""

    def __init__(self, model: PreTrainedModel, transforms: list[Any]) -> None:
        self.state = model.state_dict()
        self._prefix = model.base_model_prefix
        self._renamings = [entry for entry in transforms if isinstance(entry, compat.WeightRenaming)]
        self._converters = [entry for entry in transforms if isinstance(entry, compat.WeightConverter)]
        self.converter_of = {p: entry for entry in self._converters for p in entry.source_patterns}

    def rename(self, key: str) -> tuple[str, str | None]:
        """The parameter's name, and the source pattern of the converter that makes it, if there is one."""
        rename = compat.rename_source_key
        renamed = rename(key, self._renamings, self._converters, self._prefix, self.state)
        if renamed[0] not in self.state and key in self.state:
            renamed = rename(key, [], [], self._prefix, self.state)
        return renamed


def _assemble(mapping: KeyMap, renamer: _Renamer, target: str, by_pattern: _ByPattern) -> list[str]:
    """Say what fills the parameter `target`. Returns the keys for which there is no place left in it."""
    if None in by_pattern:
        first, *others = [key for members in by_pattern.values() for _, key in members]
        mapping.targets[target] = [Piece(first)]
        return others
    converter = renamer.converter_of[next(iter(by_pattern))]
    steps = tuple((type(step).__name__, getattr(step, "dim", None)) for step in converter.operations)
    patterns = converter.source_patterns
    shape = renamer.state[target].shape
    if steps == (_CONCATENATE,) and len(shape) == 3:
        experts: Sequence[int | None] = (None,)  # each part has all of them
    elif steps in ((_STACK,), (_STACK, _CONCATENATE)):
        experts = range(shape[0])
    else:
        mapping.missing += [f"{target} (from {p})" for p in patterns if p not in by_pattern]
        _convert(mapping, target, converter, by_pattern)
        return []

    numbered = any(number is not None for members in by_pattern.values() for number, _ in members)
    pieces: dict[tuple[int | None, int], Piece] = {}
    left = []
    for part, pattern in enumerate(patterns):
        for rank, (number, key) in enumerate(by_pattern.get(pattern, ())):
            expert = experts[0] if experts[0] is None else number if numbered else rank
            if expert in experts and (expert, part) not in pieces:
                pieces[expert, part] = Piece(key, expert, part if len(patterns) > 1 else None)
            else:
                left.append(key)
    mapping.targets[target] = list(pieces.values())
    if len(patterns) > 1:
        mapping.parts[target] = len(patterns)
    wanted = ((expert, part) for expert in experts for part in range(len(patterns)) if pieces)
    absent = (_spell(pieces, patterns, target, *place) for place in wanted if place not in pieces)
    mapping.missing += islice(absent, max(1, _MOST_MISSING - len(mapping.missing)))
    return left


def _spell(
    pieces: Mapping[Any, Piece], patterns: list[str], target: str, expert: int | None, part: int
) -> str:
    """The name that an absent piece would have, going by one that is there."""
    sample = next(iter(pieces.values()))
    # Only the expert's number and the end of the pattern differ.
    end, other_end = (patterns[p].rpartition("*")[2] for p in (sample.part or 0, part))
    if expert is None or not sample.key.endswith(end) or not _EXPERT.search(sample.key):
        return f"{target} (from {patterns[part]})"
    return _EXPERT.sub(str(expert), sample.key.removesuffix(end) + other_end, count=1)


def _convert(mapping: KeyMap, target: str, converter: Any, by_pattern: _ByPattern) -> None:
    """Leave it to transformers to make `target`, and what else its converter makes of the same tensors."""
    first = converter.target_patterns[0]
    targets = tuple(dict.fromkeys(target.replace(first, other) for other in converter.target_patterns))
    sources = {str(p): tuple(key for _, key in members) for p, members in by_pattern.items()}
    conversion = Conversion(target, targets, sources, converter)
    mapping.conversions.update(dict.fromkeys(targets, conversion))


def _share_tied(mapping: KeyMap, model: PreTrainedModel) -> None:
    """A parameter tied to one that is there needs no key of its own; transformers ties both ways."""
    for name, other in model.all_tied_weights_keys.items():
        for absent, there in ((name, other), (other, name)):
            if absent not in mapping.targets and there in mapping.targets:
                mapping.targets[absent] = mapping.targets[there]
                mapping.shared[absent] = there


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
        if not matches(ignored, target):
            mapping.unexpected += keys
    optional = set(model._keys_to_ignore_on_load_missing or ())
    mapping.missing += [
        name
        for name in state
        if not mapping.targets.get(name) and name not in mapping.conversions and not matches(optional, name)
    ]
    mapping.unexpected.sort(key=_natural)
    mapping.missing.sort(key=_natural)


def _natural(key: str) -> list[tuple[Any, ...]]:
    """transformers' order of keys, which cannot tell what to do with ² or a number of 5,000 digits."""
    try:
        return compat.dot_natural_key(key)
    except ValueError:
        return [(2, key)]


def matches(patterns: Iterable[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
