"""Decoder layers on several GPUs: what they take and give crosses a border once.

    layer 11 on cuda:0 ── hidden states ──► layer 12 on cuda:1 …  last layer ── hidden states ──► norm, head on cuda:0

Hidden states cross with the first layer on another GPU. What the model hands to every layer, such as the mask and the
rotation, crosses with it and is kept for the other layers of that GPU until the model hands out something else. The
cache of a layer is made where its keys are, so it needs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.placement import device_of


class Border:
    """What was moved to one GPU: the tensors handed to its layers, and their copies there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def move(self, value: Any) -> Any:
        """A value with its tensors on this GPU; one that was moved before is not moved again."""
        if isinstance(value, Tensor):
            if value.device == self.device:
                return value
            found = self._moved.get(id(value))
            if found is None or found[0] is not value:
                found = self._moved[id(value)] = (value, value.to(self.device, non_blocking=True))
            return found[1]
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self.move(item) for item in value)
        if type(value) in (list, dict):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            moved = {key: self.move(item) for key, item in items}
            return moved if isinstance(value, dict) else list(moved.values())
        return value

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pre-hook of a layer on this GPU."""
        crossed = tuple(a.to(self.device, non_blocking=True) if isinstance(a, Tensor) else a for a in args)
        return crossed, {name: self.move(value) for name, value in kwargs.items()}

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook of the last layer on this GPU: another pass hands out other tensors."""
        self._moved.clear()


def _back(home: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    """The hook of the last layer of all, if what comes after stands elsewhere."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return output.to(home, non_blocking=True)
        if type(output) is tuple:
            return tuple(a.to(home, non_blocking=True) if isinstance(a, Tensor) else a for a in output)
        return output

    return hook


def install(model: nn.Module, layers: Sequence[str], device_map: Mapping[str, str]) -> None:
    """Let hidden states cross where the device map changes from one layer to the next.

    layers      paths of the decoder layers, in order
    device_map  module path → device; "" is where everything else stands
    """
    home = device_map[""]
    devices = [device_of(device_map, path) for path in layers]
    borders = {device: Border(device) for device in devices if device != home}
    for number, (path, device) in enumerate(zip(layers, devices)):
        if device == home:
            continue
        layer, border = model.get_submodule(path), borders[device]
        layer.register_forward_pre_hook(border.enter, with_kwargs=True)
        if devices[number + 1 : number + 2] != [device]:
            layer.register_forward_hook(border.leave)
    if devices and devices[-1] != home:
        model.get_submodule(layers[-1]).register_forward_hook(_back(torch.device(home)))
