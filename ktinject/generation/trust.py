"""Whose code a recorded decode step may stand for.

transformers', torch's and our own forwards compute what they return and do nothing besides. Of other code nobody knows,
unless it says so by `capturable = True`: a replay would miss a counter, a log or a file that it writes.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ktinject.hf import compat
from ktinject.operators import Operator
from ktinject.operators.stand_in import StandIn
from ktinject.support import SUPPORTED, Support

# What all models and operators have in common, beside nn.Module: no forward is made of it.
BASES = frozenset({*PreTrainedModel.__mro__, *GenerationMixin.__mro__, Operator, StandIn})
_TRUSTED = ("torch", "transformers", "ktinject")


def is_trusted(name: str) -> bool:
    """Whether a Python module belongs to a package that is known."""
    return name.partition(".")[0] in _TRUSTED or name in ("builtins", "abc", "typing")


def replay_support(module: nn.Module) -> Support:
    """Whether a replay misses nothing that the module's forward does."""
    if "capturable" in vars(module):
        return SUPPORTED
    if not (own := instance_support(module)):
        return own
    for base in type(module).__mro__:
        unknown = _unknown_code(base)
        if unknown and ("capturable" not in vars(base) or is_trusted(base.__module__)):
            return Support.no(
                f"is a {type(module).__qualname__}, {unknown}; capturable = True says that a replay misses nothing"
            )
        if "capturable" in vars(base):
            return SUPPORTED
    return SUPPORTED


def instance_support(module: nn.Module) -> Support:
    """Whether a module's forward is its class's."""
    for name in ("forward", "__call__"):
        if name in vars(module):
            return Support.no(f"has a {name} of its own")
    return SUPPORTED


def unknown_file(function: Any) -> str | None:
    """The unknown file that a function is from, or what it wraps: decorators copy names, but not `__globals__`."""
    while function is not None:
        file = getattr(function, "__globals__", {}).get("__name__", "torch")
        if not is_trusted(file):
            return str(file)
        function = getattr(function, "__wrapped__", None)
    return None


def active_mode() -> str | None:
    """The class of the torch mode that is on and sees every operation: of a recorded step it would see none."""
    mode = compat.get_current_dispatch_mode()
    return None if mode is None else type(mode).__name__


def _unknown_code(base: type) -> str | None:
    """What of a class is neither torch's nor transformers' nor ours."""
    functions = {name: value for name, value in vars(base).items() if callable(value)}
    if not is_trusted(base.__module__):
        return f"whose {next(iter(functions))} is from {base.__module__}" if functions else None
    names = ("forward", "__call__") if base in BASES else functions
    found = ((name, unknown_file(functions.get(name))) for name in names)
    return next((f"whose {name} is from {file}" for name, file in found if file is not None), None)
