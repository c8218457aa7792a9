"""Twins: second modules of the same class and attributes, to try something on.

A trial on a twin changes nothing of its module, even if it is interrupted, and no other thread sees it. A twin
shares everything with its module but what it is given anew.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ktinject.operators.probes.defaults import Defaults, exact_products

Module = TypeVar("Module", bound=nn.Module)

# What a module changes in place where tensors, children and hooks come and go.
_OWN = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def of(
    module: Module,
    children: Mapping[str, nn.Module] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    attributes: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    hooks: bool = True,
) -> Module:
    """A twin, which may be an operator's: nothing is pickled.

    children    name → what it has in place of the child of that name
    tensors     name → what it has in place of the parameter or buffer of that name, if there is one
    attributes  name → what it has in place of the attribute of that name, if there is one
    without     attributes that it does not have
    hooks       whether it has the module's hooks; those that it is given later are its own
    """
    found = object.__new__(type(module))
    values = {name: value for name, value in vars(module).items() if name not in without}
    vars(found).update({name: value.copy() if name in _OWN else value for name, value in values.items()})
    vars(found).update({name: value for name, value in (attributes or {}).items() if hasattr(module, name)})
    if not hooks:
        vars(found).update({name: OrderedDict() for name in _HOOKS})
    found._modules.update(children or {})
    for name, tensor in (tensors or {}).items():
        if name in found._parameters:
            found._parameters[name] = nn.Parameter(tensor, False)
        elif name in found._buffers:
            found._buffers[name] = tensor
    return found


def on_meta(module: Module) -> Module:
    """A twin without values: its tensors, and those of all below it, are on meta. It keeps no memory of them."""
    found = of(module, {name: on_meta(child) for name, child in module.named_children()}, hooks=False)
    kinds: list[dict[str, Any]] = [found._parameters, found._buffers]
    for tensors in kinds:
        for name, tensor in tensors.items():
            if tensor is not None:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                tensors[name] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
    return found


def around(
    root: Module, path: str, found: nn.Module, without: tuple[str, ...] = (), hooks: bool = True
) -> Module:
    """A twin of a model in which `found` stands at a path, and twins are around it; all else is shared.

    path     of a module below the root
    without  attributes that the root's twin does not have
    hooks    whether the twins have their modules' hooks; without, so are the children beside the path
    """
    holder: Any = root
    while path:
        path, _, name = path.rpartition(".")
        holder = root.get_submodule(path)
        beside = {} if hooks else {key: of(child, hooks=False) for key, child in holder.named_children()}
        found = holder = of(holder, {**beside, name: found}, without=() if path else without, hooks=hooks)
    assert isinstance(holder, type(root))
    return holder


def filled(
    module: nn.Module, random: torch.Generator, children: Mapping[str, nn.Module] | None = None
) -> Any:
    """A twin in evaluation mode, whose parameters and buffers, also those of children, are small random numbers.

    children   name → what it has in place of the child of that name, as it is
    """
    given = children or {}
    others = {name: filled(child, random) for name, child in module.named_children() if name not in given}
    twin = of(module, {**others, **given}, hooks=False)
    # A repeated pattern, since a shared expert of a large model would take a second to draw.
    pattern = torch.rand(4099, generator=random, dtype=torch.float32, device="cpu") - 0.5
    kinds: list[dict[str, Any]] = [twin._parameters, twin._buffers]
    for tensors in kinds:
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not tensor.is_floating_point():
                tensors[name] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
                continue
            small = pattern / max(1, tensor.shape[-1] if tensor.dim() > 1 else 1) ** 0.5
            value = small.repeat(tensor.numel() // len(small) + 1)[: tensor.numel()].view(tensor.shape)
            tensors[name] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    return twin.eval()


def small(module: Any, sizes: Mapping[str, int], *args: Any) -> nn.Module:
    """A module of the same class and config at other sizes, with Gaussian weights in fp64, in evaluation mode.

    sizes   config attribute → size, for those that the config has
    args    what the class takes behind the config
    """
    config: Any = copy.deepcopy(module.config)
    if getattr(config, "is_heterogeneous", False):  # it may have other sizes for this layer
        values = vars(config.per_layer_config[args[0]])
        own = {name: values[name] for name in config.per_layer_attributes}
        config.per_layer_config = None
        vars(config).update(own)
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    config._attn_implementation = "eager"
    twin: nn.Module = type(module)(config, *args)
    # Without touching the global random state.
    random = torch.Generator().manual_seed(0)
    for parameter in twin.double().parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64, device="cpu")
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return twin.eval()


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
    made[id(module)] = found = of(module, new, without=without if module is root else ())
    for name, value in vars(module).items():
        # The same children under another class, as `deferred_moe` has its block.
        if isinstance(value, nn.Module) and value._modules is module._modules:
            vars(found)[name] = block = of(value)
            vars(block)["_modules"] = found._modules
    return found


def run(twin: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward on a twin; a forward set on the instance would be bound to the module it came from."""
    return type(twin).forward(twin, *args, **kwargs)


def run_eager(twin: Any, *args: Any) -> Any:
    """The same without what decorates it, which may dispatch on the config, perhaps to something for a GPU."""
    return inspect.unwrap(type(twin).forward)(twin, *args)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within, on this thread: tensors are made on the CPU and floats in fp32, whatever the defaults are; random numbers
    come from a generator of its own; no gradients are recorded, nothing is cast (autocast) or multiplied less exactly,
    and tensors may be used outside of inference mode."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        Defaults(),
        exact_products(),
    ):
        yield
