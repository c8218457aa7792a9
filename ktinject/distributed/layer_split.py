"""Decoder layers split over several GPUs: each tensor is copied once per stage boundary.

    layer 11 on cuda:0 ── hidden states ──► layer 12 on cuda:1 …  last layer ── hidden states ──► norm, head on cuda:0

A stage is a run of layers on one GPU. Before its first layer, three kinds of tensors are copied to that GPU: the hidden
states, the other arguments of the layers (mask, rotary embeddings), and the pending outputs of operators
(`PendingOutput`). The later layers of the stage use the same copies, and the last one drops them. The KV cache of a
layer is allocated on the device of its keys. In a captured step, the cache decides how tensors are copied
(`cache.KVBucket.transfer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.hf import compat
from ktinject.machine import device_of
from ktinject.operators import Operator
from ktinject.operators.base import PendingOutput


class StageBoundary:
    """The boundary before a stage. Copies tensors to the stage's GPU, and keeps the copies for all its layers.

    device    the GPU of the stage
    pending   outputs that operators of one layer leave for the next layer
    """

    def __init__(self, device: str, pending: Sequence[PendingOutput] = ()) -> None:
        self.device = torch.device(device)
        self._pending = pending
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def install_on(self, layers: Sequence[nn.Module]) -> None:
        """Register the hooks that copy the layers' arguments to this GPU. The layers are one run, in order."""
        layers[0].register_forward_pre_hook(self.enter_stage, with_kwargs=True)
        for layer in layers[1:]:
            layer.register_forward_pre_hook(self.stay_in_stage, with_kwargs=True)
        layers[-1].register_forward_hook(self.leave_stage)

    def enter_stage(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pre-hook of the first layer: copies all its arguments and the pending outputs in one transfer."""
        handed = [(who, tensor) for who in self._pending if (tensor := who.detach()) is not None]
        tensors = {id(tensor): tensor for tensor in _tensors((args, kwargs))}
        crossed = _transfer_of(kwargs)([*tensors.values(), *(tensor for _, tensor in handed)], self.device)
        self._moved = {key: (tensor, there) for (key, tensor), there in zip(tensors.items(), crossed)}
        for (who, _), there in zip(handed, crossed[len(tensors) :]):
            who.attach(there)
        return self.to_stage(args), self.to_stage(kwargs)

    def stay_in_stage(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The pre-hook of the later layers. Hidden states are on this GPU already; other arguments may not be."""
        return args, self.to_stage(kwargs)

    def leave_stage(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook of the last layer: drops the copies, since the next forward pass has other tensors."""
        self._moved.clear()

    def to_stage(self, value: Any) -> Any:
        """The value with all tensors in it (tuples, lists, dicts, too) on this GPU. No tensor is copied twice."""
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
            return tuple(self.to_stage(item) for item in value)
        if type(value) is list:
            return [self.to_stage(item) for item in value]
        if type(value) is dict:
            return {key: self.to_stage(item) for key, item in value.items()}
        return value

    # The hooks enqueue copies and do not depend on values, so a CUDA graph may capture them.
    for _hook in (enter_stage, stay_in_stage, leave_stage):
        _hook.capturable = True  # type: ignore[union-attr]
    del _hook


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in the order in which `StageBoundary.to_stage` reaches them."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, list, dict):
        items = value.values() if isinstance(value, dict) else value
        return [tensor for item in items for tensor in _tensors(item)]
    return []


def _transfer_of(kwargs: Mapping[str, Any]) -> Callable[[Sequence[Tensor], torch.device], list[Tensor]]:
    """The function that copies tensors to a device in this forward pass."""
    return getattr(compat.cache_of(kwargs), "transfer", _transfer)


def _transfer(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def return_hook(home: torch.device) -> Callable[[nn.Module, Any, dict[str, Any], Any], Any]:
    """The hook of the model's last layer, for a model whose final norm and head are on another device, `home`."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        tensors = _tensors(output)
        there = iter(_transfer_of(kwargs)(tensors, home))
        if isinstance(output, Tensor):
            return next(there)
        if type(output) is tuple:
            return tuple(next(there) if isinstance(item, Tensor) else item for item in output)
        return output

    hook.capturable = True  # type: ignore[attr-defined]
    return hook


def pending_outputs(model: nn.Module) -> list[PendingOutput]:
    """The pending outputs of all operators of a model, each once."""
    operators = [module for module in model.modules() if isinstance(module, Operator)]
    return list(dict.fromkeys(o.pending_output for o in operators if o.pending_output is not None))


def install(model: nn.Module, layers: Sequence[str], device_map: Mapping[str, str]) -> None:
    """Put a stage boundary wherever two neighbouring layers are on different devices.

    layers      paths of the decoder layers, in order
    device_map  module path → device; "" is the device of everything that has no entry of its own
    """
    home = before = device_map[""]
    for device, paths in groupby(layers, lambda path: device_of(device_map, path)):
        run = [model.get_submodule(path) for path in paths]
        if device != before:
            StageBoundary(device, pending_outputs(model)).install_on(run)
        before = device
    if before != home:
        model.get_submodule(layers[-1]).register_forward_hook(
            return_hook(torch.device(home)), with_kwargs=True
        )
