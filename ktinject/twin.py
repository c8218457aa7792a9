"""Twins of modules: the same class, attributes, weights and children, and hooks of their own.

What is tried out on a twin changes nothing of the model, whatever interrupts it, and no other thread sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)

# What a module changes in place where hooks and children come and go.
_OWN = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


def of(
    module: Module, children: Mapping[str, nn.Module] | None = None, without: tuple[str, ...] = ()
) -> Module:
    """A twin.

    children   name → what it has in place of the child of that name
    without    attributes that it does not have
    """
    found = object.__new__(type(module))
    values = {name: value for name, value in vars(module).items() if name not in without}
    vars(found).update({name: value.copy() if name in _OWN else value for name, value in values.items()})
    found._modules.update(children or {})
    return found
