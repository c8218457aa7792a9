"""What the native twin of a layer is made of: linear layers, norms and vectors, of a model's modules or refused."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation.layer_spec import NormSpec
from ktinject.hf import adapters
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.probes.norm import LayerNormSpec
from ktinject.support import Support


class UnknownLayer(Exception):
    """Something is not as it has to be; says why."""


Spec = TypeVar("Spec")


def known(found: Spec | Support) -> Spec:
    if isinstance(found, Support):
        raise UnknownLayer(found.reason)
    return found


def child_of(module: Any, name: str, kind: type, owner: str = "") -> Any:
    """A child of some type, which must be there; within adapters that add nothing, as they may be switched off."""
    found = adapters.unadapted(getattr(module, name, None))
    if isinstance(found, kind):
        return found
    shown = "nothing" if found is None else f"a {type(found).__name__}"
    raise UnknownLayer(f"{owner or type(module).__name__} has {shown} as {name}, not a {kind.__name__}")


def linear(module: Any, name: str) -> Any:
    return child_of(module, name, CpuLinear).native


def projection(module: Any, name: str) -> Any:
    """A linear layer that is packed, or one of torch's."""
    layer = adapters.unadapted(getattr(module, name))
    if isinstance(layer, CpuLinear):
        return _native.Projection(linear=layer.native)
    if type(layer) is not nn.Linear or not layer.weight.is_contiguous():
        raise UnknownLayer(f"its {name} is a {type(layer).__name__} that is not known")
    weight, bias = layer.weight.detach(), layer.bias
    if bias is not None and not weight.dtype == bias.dtype == torch.float32:
        raise UnknownLayer(f"its {name} has a bias and is not in fp32")
    return _native.Projection(weight=weight, bias=None if bias is None else bias.detach())


def norm(spec: NormSpec | None, owner: nn.Module, dtype: torch.dtype) -> Any:
    """The norm at the spec's path below its owner, if there is one."""
    if spec is None:
        return None
    module = owner.get_submodule(spec.path)
    rms = spec.rms
    if not spec.has_weight:
        return _native.Norm(torch.ones(rms.size, dtype=dtype, device="cpu"), rms.epsilon)
    weight = module.get_parameter("weight").detach()
    if isinstance(rms, LayerNormSpec):
        bias = module.get_parameter("bias").detach() if rms.has_bias else None
        if weight.dtype != dtype or not weight.is_contiguous() or (bias is not None and bias.dtype != dtype):
            raise UnknownLayer(f"a {type(module).__name__} is no layer norm of the model's dtype")
        return _native.Norm(weight, rms.epsilon, rounds_first=False, centred=True, bias=bias)
    if weight.dtype == torch.float32 != dtype and not rms.rounds_before_weight and not rms.has_unit_offset:
        return _native.Norm(weight, rms.epsilon, rounds_first=False, is_wide=True)
    if weight.dtype != dtype or not weight.is_contiguous():
        raise UnknownLayer(f"a {type(module).__name__} is no RMS norm of the model's dtype")
    if rms.has_unit_offset and rms.rounds_before_weight and dtype != torch.float32:
        raise UnknownLayer(f"a {type(module).__name__} rounds the sum of its weight and 1")
    rounds_first = rms.rounds_before_weight and not rms.has_unit_offset
    return _native.Norm(weight, rms.epsilon, unit_offset=rms.has_unit_offset, rounds_first=rounds_first)


def wide(tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """In fp32: itself, or a copy."""
    found = tensor.detach().float()
    if tensor.dtype != torch.float32:
        copies.append((found, tensor.detach()))
    return found
