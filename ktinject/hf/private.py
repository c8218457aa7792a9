"""A name of transformers or torch that neither promises to keep, and how it is looked at; the list is in compat.py."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

THERE = "there"  # a signature: the owner has such an attribute, whatever it is
SET = "set"  # the owner is a function whose code names it: an attribute that it sets or reads


@dataclass(frozen=True)
class Private:
    """A name that may be gone, or mean something else, in another version.

    owner      "module", "module:Class" or "module:Class.method"
    name       of the owner
    signature  calls that must be allowed, such as "(self, ids, streamer=None, *, mask)"; what else it takes must have
               a default. Or THERE or SET
    used_for   what depends on it
    """

    owner: str
    name: str
    signature: str
    used_for: str

    def __str__(self) -> str:
        return f"{self.owner.rpartition(':')[2]}.{self.name}"

    def fault(self) -> str:
        """What is wrong with it in this version; "" if nothing is."""
        try:
            owner = resolve(self.owner)
            if self.signature == SET:
                code = inspect.unwrap(owner).__code__
                file = importlib.import_module(self.owner.partition(":")[0]).__file__
                if code.co_filename not in (file, "<string>"):  # the latter: of a dataclass
                    return ""  # another library has put a function of its own in this one's place, which says nothing
                return "" if self.name in (*code.co_names, *code.co_consts) else f"{self} is gone"
            value = getattr(owner, self.name)
        except (ImportError, AttributeError):
            return f"{self} is gone"
        if self.signature == THERE:
            return ""
        found = inspect.signature(value)
        if _allows(found, inspect.signature(eval(f"lambda {self.signature[1:-1]}: None"))):
            return ""
        bare = [parameter.replace(annotation=Parameter.empty) for parameter in found.parameters.values()]
        found = inspect.Signature(bare)
        return f"{self} takes {found}, not {self.signature}"


def owner_of(cls: type) -> str:
    """A class, as `owner` of `Private` names it."""
    return f"{cls.__module__}:{cls.__name__}"


def resolve(owner: str) -> Any:
    """What an `owner` of `Private` names. Raises ImportError or AttributeError."""
    module, _, path = owner.partition(":")
    return functools.reduce(getattr, path.split(".") if path else (), importlib.import_module(module))


def _allows(found: inspect.Signature, asked: inspect.Signature) -> bool:
    """Whether each call that `asked` allows is one of `found`, and means the same."""
    there, positions = found.parameters, [*found.parameters]
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    for position, (name, parameter) in enumerate(asked.parameters.items()):
        if parameter.kind in variadic:
            if all(other.kind is not parameter.kind for other in there.values()):
                return False
            continue
        other = there.get(name)
        if other is None or (parameter.default is not Parameter.empty and other.default != parameter.default):
            return False
        by_position = parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        if by_position and (other.kind is not parameter.kind or positions[position] != name):
            return False
    return all(
        name in asked.parameters or other.default is not Parameter.empty or other.kind in variadic
        for name, other in there.items()
    )
