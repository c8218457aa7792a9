"""What the decode steps of all parts share: norms by the kernels, and linear layers with what is around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.layer_spec import NormSpec

Step = Callable[..., Any]  # takes the place of a module's forward

# With more weights, cuBLAS is faster than our kernel. With more inputs, a norm is faster as a kernel of its own.
_MANY_WEIGHTS = 50_000_000
_MANY_INPUTS = 4096


def norm_of(spec: NormSpec, owner: nn.Module) -> Norm | None:
    """The norm at the spec's path below `owner`; None if the kernels cannot compute it."""
    rms = spec.rms
    if rms.has_unit_offset and rms.rounds_before_weight:
        return None  # the weight with its 1 is rounded, too
    weight = owner.get_submodule(spec.path).get_parameter("weight")
    return Norm(weight, rms.epsilon, float(rms.has_unit_offset), rms.rounds_before_weight)


def _is_plain(module: Any, k: int, dtype: torch.dtype) -> bool:
    """Whether `decode_ops.linear` can take the place of a linear layer."""
    if type(module) is not nn.Linear or dtype == torch.float32 or k % 32:
        return False
    return module.weight.dtype == dtype and module.weight.is_contiguous() and not module._forward_hooks


def project(
    x: Tensor,
    linears: Sequence[nn.Module],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    then: Tensor | None = None,
) -> list[Tensor]:
    """norm(x) through each of up to four linear layers, plus the residual.

    x         [m, k]
    norm      None: x as it is
    residual  [m, n], with one layer only
    then      weights that the next call will read; see `decode_ops.linear`
    Returns   [m, n] for each layer
    """
    parts: list[Any] = list(linears)
    if norm is not None and x.shape[1] > _MANY_INPUTS:
        x, norm = decode_ops.rms_norm(x, norm), None
    is_plain = all(_is_plain(part, x.shape[1], x.dtype) for part in parts)
    if is_plain and sum(part.weight.numel() for part in parts) < _MANY_WEIGHTS:
        out = decode_ops.linear(
            x, [p.weight for p in parts], [p.bias for p in parts], norm=norm, residual=residual, then=then
        )
        return list(out.split([p.out_features for p in parts], dim=1))
    x = x if norm is None else decode_ops.rms_norm(x, norm)
    found = [linear(x) for linear in linears]
    return found if residual is None else [residual + y for y in found]
