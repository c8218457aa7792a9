"""Decoder layers on several GPUs: what they take and give crosses a border once.

    layer 11 on cuda:0 ── hidden states ──► layer 12 on cuda:1 …  last layer ── hidden states ──► norm, head on cuda:0

With the hidden states crosses what the model hands to every layer, such as the mask and the rotation, and what
operators hand on (`HandsOn`). It is kept for the other layers of that GPU until the last of them is done. The cache of
a layer is made where its keys are; that of a captured step says itself how to cross, see `graph.Stretch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.machine import device_of
from ktinject.operators import Operator
from ktinject.operators.base import HandsOn


class Border:
    """The way to the GPU of some layers: what was moved there, and its copies.

    hands_on   what operators hand from layer to layer
    """

    def __init__(self, device: str, hands_on: Sequence[HandsOn] = ()) -> None:
        self.device = torch.device(device)
        self._hands_on = hands_on
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def around(self, layers: Sequence[nn.Module]) -> None:
        """Let all that these layers take come to this GPU; they follow each other."""
        layers[0].register_forward_pre_hook(self.enter, with_kwargs=True)
        for layer in layers[1:]:
            layer.register_forward_pre_hook(self.stay, with_kwargs=True)
        layers[-1].register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pre-hook of the first layer: all that it is given crosses, together."""
        handed = [(who, tensor) for who in self._hands_on if (tensor := who.lift()) is not None]
        tensors = {id(tensor): tensor for tensor in _tensors((args, kwargs))}
        crossed = _crosser(kwargs)([*tensors.values(), *(tensor for _, tensor in handed)], self.device)
        self._moved = {key: (tensor, there) for (key, tensor), there in zip(tensors.items(), crossed)}
        for (who, _), there in zip(handed, crossed[len(tensors) :]):
            who.put_down(there)
        return self.move(args), self.move(kwargs)

    def stay(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pre-hook of the others, whose hidden states are here."""
        return args, self.move(kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook of the last layer: another pass hands out other tensors."""
        self._moved.clear()

    def move(self, value: Any) -> Any:
        """A value with its tensors on this GPU; one that was moved before is not moved again."""
        if isinstance(value, Tensor):
            found = self._moved.get(id(value))
            if found is not None and found[0] is value:
                return found[1]
            if value.device == self.device:
                return value
            there = value.to(self.device, non_blocking=True)
            self._moved[id(value)] = (value, there)
            return there
        if type(value) is tuple:
            return tuple(self.move(item) for item in value)
        if type(value) is list:
            return [self.move(item) for item in value]
        if type(value) is dict:
            return {key: self.move(item) for key, item in value.items()}
        return value

    # They put work on GPUs and decide nothing.
    for _hook in (enter, stay, leave):
        _hook.capturable = True  # type: ignore[union-attr]
    del _hook


def _tensors(value: Any) -> list[Tensor]:
    """Those that `Border.move` finds."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list, dict):
        items = value.values() if isinstance(value, dict) else value
        return [tensor for item in items for tensor in _tensors(item)]
    return []


def _crosser(kwargs: Mapping[str, Any]) -> Callable[[Sequence[Tensor], torch.device], list[Tensor]]:
    """How tensors cross in this pass."""
    return getattr(kwargs.get("past_key_values"), "cross", _cross)


def _cross(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def back(home: torch.device) -> Callable[[nn.Module, Any, dict[str, Any], Any], Any]:
    """The hook of the last layer of all, if what comes after stands elsewhere."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        tensors = _tensors(output)
        there = iter(_crosser(kwargs)(tensors, home))
        if isinstance(output, Tensor):
            return next(there)
        if type(output) is tuple:
            return tuple(next(there) if isinstance(item, Tensor) else item for item in output)
        return output

    hook.capturable = True  # type: ignore[attr-defined]
    return hook


def handed_on(model: nn.Module) -> list[HandsOn]:
    """What operators of a model hand from layer to layer."""
    operators = [module for module in model.modules() if isinstance(module, Operator)]
    return list(dict.fromkeys(o.hands_on for o in operators if o.hands_on is not None))


def install(model: nn.Module, layers: Sequence[str], device_map: Mapping[str, str]) -> None:
    """Let hidden states cross where the device map changes from one layer to the next.

    layers      paths of the decoder layers, in order
    device_map  module path → device; "" is where everything else stands
    """
    home = before = device_map[""]
    for device, paths in groupby(layers, lambda path: device_of(device_map, path)):
        run = [model.get_submodule(path) for path in paths]
        if device != before:
            Border(device, handed_on(model)).around(run)
        before = device
    if before != home:
        model.get_submodule(layers[-1]).register_forward_hook(back(torch.device(home)), with_kwargs=True)
