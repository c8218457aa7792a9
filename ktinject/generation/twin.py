"""Twins of modules: the same class, attributes, weights and children, and hooks of their own.

A trial on a twin changes nothing of the model, even if it is interrupted, and no other thread sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def tree(root: Module, wanted: Callable[[nn.Module], bool], without: tuple[str, ...] = ()) -> Module:
    """A twin of a model in which every wanted module is a twin, and so is whatever holds one; others are shared.

    without    attributes that the root's twin does not have
    """
    found = _tree(root, root, wanted, without, {})
    assert isinstance(found, type(root))
    return found


def _tree(
    module: nn.Module,
    root: nn.Module,
    wanted: Callable[[nn.Module], bool],
    without: tuple[str, ...],
    made: dict[int, nn.Module],
) -> nn.Module:
    """made: id of a module → what stands for it."""
    if id(module) in made:
        return made[id(module)]
    old = {name: child for name, child in module._modules.items() if child is not None}
    new = {name: _tree(child, root, wanted, without, made) for name, child in old.items()}
    if all(new[name] is old[name] for name in old) and module is not root and not wanted(module):
        made[id(module)] = module
        return module
    made[id(module)] = found = of(module, new, without if module is root else ())
    for name, value in vars(module).items():
        # The same children under another class, as `deferred_moe` has its block.
        if isinstance(value, nn.Module) and value._modules is module._modules:
            vars(found)[name] = block = of(value)
            vars(block)["_modules"] = found._modules
    return found
