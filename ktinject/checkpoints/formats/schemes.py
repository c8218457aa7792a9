"""What config.json says of a weight where it says it by groups of modules, as compressed-tensors and ModelOpt do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktinject.checkpoints.formats.base import refused
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown
from ktinject.rules.pattern import fullmatch

_REGEX = "re:"


def schemes(reader: Reader) -> list[Mapping[str, Any]]:
    """The `config_groups`, as far as they are objects."""
    groups = reader.quantization.get("config_groups")
    return [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []


def check_transforms(reader: Reader, key: str) -> None:
    """Raise CheckpointError for weights that stand for others with activations that are transformed, too."""
    if reader.quantization.get("transform_config"):
        text = "its weights are rotated (transform_config), and activations would have to be, too"
        raise refused(reader, key, f"{text}. Use a checkpoint without.")


def scheme_of(reader: Reader, key: str) -> Mapping[str, Any] | None:
    """The `weights` of the group that a weight is in; None if config.json has no groups.

    Raises   CheckpointError if groups differ and their targets do not tell them apart
    """
    check_transforms(reader, key)
    groups = [group for group in schemes(reader) if isinstance(group.get("weights"), Mapping)]
    if not groups:
        return None
    if all(group["weights"] == groups[0]["weights"] for group in groups):
        return groups[0]["weights"]
    # A target is a pattern or a name of modules, or the name of a class, which says less.
    found = [group for group in groups if any(_is_named(reader, key, t) for t in _targets(group))]
    found = found or [group for group in groups if any("." not in t for t in _targets(group))]
    if not found or any(group["weights"] != found[0]["weights"] for group in found):
        text = f"{len(groups)} config_groups, and their targets do not say which of them it is in"
        raise refused(
            reader, key, f"{text}: {shown([_targets(group) for group in groups])}. Correct config.json."
        )
    return found[0]["weights"]


def says(reader: Reader, key: str, kind: str, bits: int) -> bool:
    """Whether config.json has groups, and a weight's group has numbers of this kind ("int", "float") and size.

    For what is known by an index alone; the tensors themselves say it where they are there. Raises CheckpointError
    """
    scheme = scheme_of(reader, key) or {}
    return scheme.get("type", "int") == kind and scheme.get("num_bits") == bits


def _targets(group: Mapping[str, Any]) -> list[str]:
    targets = group.get("targets")
    return [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []


def _is_named(reader: Reader, key: str, target: str) -> bool:
    stem = key.removesuffix(".weight")
    if not target.startswith(_REGEX):
        return stem == target
    pattern = target.removeprefix(_REGEX)
    try:
        return fullmatch(f"(?:{pattern}).*", stem)
    except (ValueError, TimeoutError) as error:
        text = f"quantization_config has a target that cannot be matched: {shown(target)}: {error}"
        raise refused(reader, key, f"{text}. Correct config.json.") from None
