"""What the decode steps of all parts share: norms by the kernels, and linear layers with what is around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.layer_spec import NormSpec
from ktinject.operators.int4_linear import Int4Linear
from ktinject.operators.linears.int4_layout import Packed

Step = Callable[..., Any]  # takes the place of a module's forward

# With more weights, cuBLAS, or an operator's own kernel, is faster than ours. With more inputs, a norm is faster as a
# kernel of its own.
_MANY_WEIGHTS = 50_000_000
_MANY_INPUTS = 4096
# Outputs of plain weights that go along with int4 ones, in blocks of their own: gates of linear attention.
_FEW_BESIDE = 128


def norm_of(spec: NormSpec, owner: nn.Module) -> Norm | None:
    """The norm at the spec's path below `owner`; None if the kernels cannot compute it."""
    rms = spec.rms
    if rms.has_unit_offset and rms.rounds_before_weight:
        return None  # the weight with its 1 is rounded, too
    weight = owner.get_submodule(spec.path).get_parameter("weight")
    return Norm(weight, rms.epsilon, float(rms.has_unit_offset), rms.rounds_before_weight)


class _Part(NamedTuple):
    """A linear layer whose weight `decode_ops.linear` takes, and its bias."""

    weight: Tensor | Packed
    bias: Tensor | None
    n: int
    k: int


def _part_of(module: Any, x: Tensor) -> _Part | None:
    """What `decode_ops.linear` takes of a linear layer of x [m, k]; None if it cannot take its place."""
    if x.dtype == torch.float32 or len(x) > decode_ops.MOST_ROWS:
        return None
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is Int4Linear:
        found = module.packed()
        if found is None or module.out_features % 16 or module.in_features != x.shape[1]:
            return None
        packed, bias = found
        return _Part(packed, bias, packed.n, packed.k) if packed.words.device == x.device else None
    if type(module) is not nn.Linear or x.shape[1] % 32:
        return None
    weight = module.weight
    fits = weight.dtype == x.dtype and weight.is_contiguous()
    return _Part(weight, module.bias, *weight.shape) if fits else None


def weight_of(linear: nn.Module) -> Tensor | None:
    """What a kernel before a linear layer may fetch of its weight; None of an operator that has kernels of its own."""
    if type(linear) is Int4Linear:
        found = linear.packed()
        return None if found is None else found[0].words
    return linear.weight if type(linear) is nn.Linear else None


def _kernels(parts: dict[int, _Part]) -> list[list[int]]:
    """Which of the parts are one kernel together: those of one kind, and few plain outputs beside int4 ones."""
    kinds: dict[Any, list[int]] = {}
    for i, part in parts.items():
        kinds.setdefault(part.weight.kind if isinstance(part.weight, Packed) else "plain", []).append(i)
    plain = kinds.pop("plain", [])
    if kinds and plain and sum(parts[i].n for i in plain) <= _FEW_BESIDE:
        first = next(iter(kinds))
        kinds[first], plain = kinds[first] + plain, []
    calls = [*kinds.values(), plain]
    return [call for call in calls if 0 < sum(parts[i].n * parts[i].k for i in call) < _MANY_WEIGHTS]


def project(
    x: Tensor,
    linears: Sequence[nn.Module],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    then: Tensor | None = None,
) -> list[Tensor]:
    """norm(x) through each of up to four linear layers, plus the residual.

    The layers that have plain weights are one kernel together, with the norm and the residual; so are int4 ones.

    x         [m, k]
    norm      None: x as it is
    residual  [m, n], with one layer only
    then      weights that the next call will read; see `decode_ops.linear`
    Returns   [m, n] for each layer
    """
    if norm is not None and x.shape[1] > _MANY_INPUTS:
        x, norm = decode_ops.rms_norm(x, norm), None
    found: dict[int, Tensor] = {}
    fitting = [(i, part) for i, linear in enumerate(linears) if (part := _part_of(linear, x)) is not None]
    parts = dict(fitting)
    calls = _kernels(parts)
    left = len(linears) - sum(map(len, calls))
    for call in calls:
        normed = torch.empty_like(x) if norm is not None and left else None
        out = decode_ops.linear(
            x,
            [parts[i].weight for i in call],
            [parts[i].bias for i in call],
            norm=norm,
            normed=normed,
            residual=residual,
            then=then if call is calls[-1] else None,
        )
        found |= dict(zip(call, out.split([parts[i].n for i in call], dim=1)))
        if normed is not None:
            x, norm = normed, None
    x = x if norm is None or not left else decode_ops.rms_norm(x, norm)
    for i, linear in enumerate(linears):
        if i not in found:
            found[i] = linear(x) if residual is None else residual + linear(x)
    return [found[i] for i in range(len(linears))]
