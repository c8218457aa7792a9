"""Twins: second modules of the same class and attributes that can be run without touching the first, on the CPU.

A twin shares everything with its module but what it is given anew.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def of(module: nn.Module, **children: nn.Module) -> Any:
    """A twin without hooks that shares parameters, buffers and children with its module, but for the children given."""
    twin = copy.copy(module)
    vars(twin)["_modules"] = {**module._modules, **children}
    for name in ("_parameters", "_buffers"):
        vars(twin)[name] = dict(vars(module)[name])
    for name in _HOOKS:
        vars(twin)[name] = OrderedDict()
    return twin


def with_parameters(module: nn.Module, parameters: Mapping[str, Tensor], **attributes: Any) -> Any:
    """A twin with other parameters and, where the module has them, other attributes; the module's hooks run on it."""
    twin: Any = object.__new__(type(module))  # copy.copy would pickle, which operators refuse
    vars(twin).update(vars(module))
    given = {name: nn.Parameter(tensor, False) for name, tensor in parameters.items()}
    vars(twin)["_parameters"] = {**module._parameters, **given}
    vars(twin).update({name: value for name, value in attributes.items() if hasattr(module, name)})
    return twin


def filled(
    module: nn.Module, random: torch.Generator, children: Mapping[str, nn.Module] | None = None
) -> Any:
    """A twin in evaluation mode, whose parameters and buffers, also those of children, are small random numbers.

    children   name → what it has in place of the child of that name, as it is
    """
    given = children or {}
    others = {name: filled(child, random) for name, child in module.named_children() if name not in given}
    twin = of(module, **others, **given)
    # A repeated pattern, since a shared expert of a large model would take a second to draw.
    pattern = torch.rand(4099, generator=random) - 0.5
    kinds: list[dict[str, Any]] = [twin._parameters, twin._buffers]
    for tensors in kinds:
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if not tensor.is_floating_point():
                tensors[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
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
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    config._attn_implementation = "eager"
    twin: nn.Module = type(module)(config, *args)
    # Without touching the global random state.
    random = torch.Generator().manual_seed(0)
    for parameter in twin.double().parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    return twin.eval()


def run(twin: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own forward on a twin; a forward set on the instance would be bound to the module it came from."""
    return type(twin).forward(twin, *args, **kwargs)


def run_eager(twin: Any, *args: Any) -> Any:
    """The same without what decorates it, which may dispatch on the config, perhaps to something for a GPU."""
    return inspect.unwrap(type(twin).forward)(twin, *args)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within, tensors are made on the CPU, also inside `with torch.device("meta")`, and no gradients are recorded."""
    with torch.no_grad(), torch.device("cpu"):
        yield
