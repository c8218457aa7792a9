"""Attention of a prompt in bf16 on CPUs with AVX-512 but without AMX.

On these CPUs, torch's fused attention takes two to three times as long as the same matrix products one by one. So
`attend` takes some queries at a time and computes their scores with the keys that they see. Scores are fp32, as in the
fused attention.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ktinject import _native

# Queries at a time: few, so that the scores stay in the cache; many, so that the products are worth starting.
_ROWS = 128
# Of scores, and of keys in fp32, at a time.
MOST_BYTES = 256 << 20


def is_faster(q: Tensor, k: Tensor) -> bool:
    """Whether `attend` takes less time than torch's fused attention of q and k [b, h, tokens, d]; without gradients."""
    if not q.is_cpu or q.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return q.shape[2] > 1 and 4 * k.numel() <= MOST_BYTES and _has_products_only()


@functools.cache
def _has_products_only() -> bool:
    features = _native.cpu_features()
    return features["avx512bw"] and not features["amx_bf16"]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """q [b, h, m, d], k [b, h, s, d], v [b, h, s, dv] of one dtype → [b, h, m, dv].

    mask   [b or 1, 1, m, s]: bool, True to attend, or floats to add; None: causal, and m = s
    Returns zeros for a query that a bool mask hides all keys from
    """
    b, h, m, _ = q.shape
    s = k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.reshape(b * h, -1, x.shape[-1]) for x in (q.to(wide), k.to(wide), v))
    out = v.new_empty(b * h, m, v.shape[-1])
    rows = max(1, min(_ROWS, m, MOST_BYTES // (b * h * s * wide.itemsize)))
    later = torch.full((rows, rows), -torch.inf, dtype=wide, device="cpu").triu(1)
    unused = q.new_empty(()).expand(b * h, rows, s)
    for first in range(0, m, rows):
        last = min(first + rows, m)
        count, seen = last - first, last if mask is None else s
        scores = torch.baddbmm(
            unused[:, :count, :seen], q[:, first:last], k[:, :seen].mT, beta=0, alpha=scaling
        )
        if mask is None:
            scores[:, :, first:].add_(later[:count, :count])
        else:
            scores = masked(scores.view(b, h, count, s), mask[:, :, first:last]).view(b * h, count, s)
        torch.bmm(scores.softmax(-1).to(v.dtype), v[:, :seen], out=out[:, first:last])
    out = out.view(b, h, m, -1)
    return out if mask is None else without_blind(out, mask)


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """scores [b, h, m, s] with the mask applied: floats are added, False becomes the lowest number."""
    if mask.dtype != torch.bool:
        return scores + mask
    # Not minus infinity: a row of padding that sees nothing must not become NaN.
    return torch.where(mask, scores, torch.finfo(scores.dtype).min)


def without_blind(out: Tensor, mask: Tensor) -> Tensor:
    """out [b, h, m, d] with zeros for queries that a bool mask hides all keys from, as torch's fused attention has.

    Padding would else be the mean of all keys, those of later tokens among them.
    """
    return out * mask.any(-1, keepdim=True) if mask.dtype == torch.bool else out
