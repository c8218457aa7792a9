"""What the decode steps of all parts share: norms by the kernels, and linear layers with what is around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.layer_spec import NormSpec
from ktinject.operators.probes.norm import LayerNormSpec

Step = Callable[..., Any]  # takes the place of a module's forward

# With more weights, cuBLAS is faster than our kernel. With more inputs, a norm is faster as a kernel of its own.
_MANY_WEIGHTS = 50_000_000
_MANY_INPUTS = 4096


def norm_of(spec: NormSpec, owner: nn.Module) -> Norm | None:
    """The norm at the spec's path below `owner`; None if the kernels cannot compute it."""
    rms = spec.rms
    if isinstance(rms, LayerNormSpec) or not spec.has_weight:
        return None
    if rms.has_unit_offset and rms.rounds_before_weight:
        return None  # the weight with its 1 is rounded, too
    weight = owner.get_submodule(spec.path).get_parameter("weight")
    return Norm(weight, rms.epsilon, float(rms.has_unit_offset), rms.rounds_before_weight)


def _is_plain(module: Any, x: Tensor) -> bool:
    """Whether `decode_ops.linear` can take the place of a linear layer of x [m, k]."""
    if type(module) is not nn.Linear or x.dtype == torch.float32 or x.shape[1] % 32:
        return False
    if len(x) > decode_ops.MOST_ROWS:
        return False
    return module.weight.dtype == x.dtype and module.weight.is_contiguous() and not module._forward_hooks


def weight_of(linear: nn.Module) -> Tensor | None:
    """The plain weight of a linear layer, which a kernel before it may fetch; None of an operator's."""
    return linear.weight if type(linear) is nn.Linear else None


def project(
    x: Tensor,
    linears: Sequence[nn.Module],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    then: Tensor | None = None,
) -> list[Tensor]:
    """norm(x) through each of up to four linear layers, plus the residual.

    The layers that have plain weights are one kernel together, with the norm and the residual.

    x         [m, k]
    norm      None: x as it is
    residual  [m, n], with one layer only
    then      weights that the next call will read; see `decode_ops.linear`
    Returns   [m, n] for each layer
    """
    if norm is not None and x.shape[1] > _MANY_INPUTS:
        x, norm = decode_ops.rms_norm(x, norm), None
    found: dict[int, Tensor] = {}
    plain: dict[int, Any] = {i: part for i, part in enumerate(linears) if _is_plain(part, x)}
    if 0 < sum(part.weight.numel() for part in plain.values()) < _MANY_WEIGHTS:
        normed = torch.empty_like(x) if norm is not None and len(plain) < len(linears) else None
        out = decode_ops.linear(
            x,
            [part.weight for part in plain.values()],
            [part.bias for part in plain.values()],
            norm=norm,
            normed=normed,
            residual=residual,
            then=then,
        )
        found = dict(zip(plain, out.split([part.out_features for part in plain.values()], dim=1)))
        x, norm = (x if normed is None else normed), None
    x = x if norm is None else decode_ops.rms_norm(x, norm)
    for i, linear in enumerate(linears):
        if i not in found:
            found[i] = linear(x) if residual is None else residual + linear(x)
    return [found[i] for i in range(len(linears))]
