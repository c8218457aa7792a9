"""What native/cuda computes in a decode step, on tensors: one token a row, all of it enqueued in the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.operators.handoff import CODES, stream_of

_SPLIT = 256  # places of the cache that one block of attention takes at a time
_MOST_SPLITS = 32
MOST_ROWS = 8  # of `linear`


class Norm(NamedTuple):
    """An RMS norm: weight [n], and what is added to the mean square."""

    weight: Tensor
    eps: float


class Cache(NamedTuple):
    """One layer's cache, and where the token stands that is about to be written to it.

    keys, values  [b, g, n, d], rows contiguous
    place         [1] int64; places after it are not read
    mask          [b, 1, 1, n] bool
    """

    keys: Tensor
    values: Tensor
    place: Tensor
    mask: Tensor


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """weight [n] · x [..., n] / rms(x), rounded to x's dtype before the multiplication, as transformers does."""
    x = x.contiguous()
    out = torch.empty_like(x)
    n = norm.weight.numel()
    _native.rms_norm(
        x.data_ptr(),
        norm.weight.data_ptr(),
        out.data_ptr(),
        CODES[x.dtype],
        x.numel() // n,
        n,
        norm.eps,
        stream_of(x.device),
    )
    return out


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    *,
    norm: Norm | None = None,
    normed: Tensor | None = None,
    residual: Tensor | None = None,
    wide: bool = False,
    then: Tensor | None = None,
) -> Tensor:
    """x [m, k] through up to three matrices [n, k], beside each other in the result [m, sum of n].

    x         bfloat16 or float16, at most MOST_ROWS rows; k a multiple of 32
    biases    [n] or None for each
    norm      of x, before
    normed    [m, k], receives the normed x
    residual  [m, n], added to the rounded result
    wide      the result is float32, not rounded; without a residual
    then      weights that the next call will read; fetched into the GPU's L2 cache meanwhile
    Raises    ValueError for what is not served
    """
    rows, k = x.shape
    sizes = [weight.shape[0] for weight in weights]
    out = x.new_empty(rows, sum(sizes), dtype=torch.float32 if wide else x.dtype)
    if wide and residual is not None:
        raise ValueError("a wide result takes no residual")
    _native.decode_linear(
        x=x.data_ptr(),
        norm=0 if norm is None else norm.weight.data_ptr(),
        eps=0.0 if norm is None else norm.eps,
        normed=_address(normed),
        weights=[weight.data_ptr() for weight in weights],
        biases=[_address(bias) for bias in biases] or [0] * len(sizes),
        n=sizes,
        residual=_address(residual),
        out=out.data_ptr(),
        is_wide=wide,
        then=_address(then),
        then_bytes=0 if then is None else then.nbytes,
        rows=rows,
        k=k,
        dtype=CODES[x.dtype],
        stream=stream_of(x.device),
    )
    return out


def route(logits: Tensor, top_k: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Softmax over logits [m, e], the top_k greatest: weights [m, t] of the same dtype, ids [m, t] int64."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    _native.route(
        logits.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        rows,
        experts,
        top_k,
        normed,
        CODES[logits.dtype],
        stream_of(logits.device),
    )
    return weights, ids


def route_grouped(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, kept: int, normed: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Sigmoids of logits [m, e] float32; the top_k greatest after bias [e] is added, within the `kept` best groups.

    A group is as good as the sum of its two best. Returns the sigmoids [m, t] float32, divided by their sum if
    `normed`, times `scale`, and ids [m, t] int64, in the order of torch.topk(sorted=False).
    Raises    ValueError for what is not served
    """
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    _native.route_grouped(
        logits=logits.data_ptr(),
        bias=bias.data_ptr(),
        weights=weights.data_ptr(),
        ids=ids.data_ptr(),
        rows=rows,
        experts=experts,
        top_k=top_k,
        groups=groups,
        kept=kept,
        normed=normed,
        scale=scale,
        bias_dtype=CODES[bias.dtype],
        stream=stream_of(logits.device),
    )
    return weights, ids


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Norm | None, Norm | None],
    rotation: tuple[Tensor, Tensor],
    cache: Cache,
    scale: float,
    arrived: Tensor,
) -> Tensor:
    """Norm and rotate the queries and the new key, write the new key and value to the cache, and attend to it.

    q, k, v   [b, h, d], [b, g, d], [b, g, d], bfloat16 or float16; heads contiguous, k and v of the same strides
    norms     of the heads of queries and keys
    rotation  cos and sin, each [b or 1, 1, d]
    arrived   at least [b · h] int32 zeros, which they are again afterwards
    Returns   [b, h, d] contiguous
    Raises    ValueError for what is not served
    """
    batch, heads, size = q.shape
    cos, sin = rotation
    if (k.stride(), cos.stride()) != (v.stride(), sin.stride()) or cos.shape[1:] != (1, size):
        raise ValueError("keys and values, or cos and sin, are laid out in two ways")
    if {t.stride(-1) for t in (q, k, cos)} != {1} or q.stride(1) != size or k.stride(1) != size:
        raise ValueError("heads are not contiguous")
    splits = max(1, min(_MOST_SPLITS, cache.keys.shape[2] // _SPLIT))
    scratch = torch.empty(
        batch * splits * _native.attention_scratch(heads, size) if splits > 1 else 0,
        dtype=torch.float32,
        device=q.device,
    )
    out = torch.empty(batch, heads, size, dtype=q.dtype, device=q.device)
    _native.attention(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        q_weight=0 if norms[0] is None else norms[0].weight.data_ptr(),
        k_weight=0 if norms[1] is None else norms[1].weight.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        place=cache.place.data_ptr(),
        mask=cache.mask.data_ptr(),
        keys=cache.keys.data_ptr(),
        values=cache.values.data_ptr(),
        out=out.data_ptr(),
        scratch=scratch.data_ptr(),
        arrived=arrived.data_ptr(),
        batch=batch,
        q_heads=heads,
        kv_heads=k.shape[1],
        size=size,
        splits=splits,
        q_stride=q.stride(0),
        kv_stride=k.stride(0),
        rotation_stride=cos.stride(0) if cos.shape[0] == batch else 0,
        batch_stride=cache.keys.stride(0),
        head_stride=cache.keys.stride(1),
        mask_stride=cache.mask.stride(0),
        eps=0.0 if norms[0] is None else norms[0].eps,
        scale=scale,
        dtype=CODES[q.dtype],
        stream=stream_of(q.device),
    )
    return out


def latent(
    q: Tensor,
    kv: Tensor,
    norm: Norm,
    rotation: tuple[Tensor, Tensor],
    cache: Cache,
    turns_neighbours: bool,
) -> None:
    """What latent attention does before it attends; q is rotated where it lies, and the cache gets a token more.

    q         [b, h, n + d], heads contiguous: the last d of each are rotated
    kv        [b, r + d], rows contiguous: the first r are normed, the rest is rotated
    rotation  cos and sin, each [b or 1, 1, d]
    cache     keys [b, 1, m, r], values [b, 1, m, d]
    turns_neighbours  2i with 2i + 1, which come to i and i + d/2; else i with i + d/2
    Raises    ValueError for what is not served
    """
    (batch, heads, size), (cos, sin) = q.shape, rotation
    rank, rope = cache.keys.shape[-1], cache.values.shape[-1]
    if kv.shape != (batch, rank + rope) or cos.shape[1:] != (1, rope) or norm.weight.shape != (rank,):
        raise ValueError("queries, latents, cos and sin, or the norm do not belong together")
    if cos.stride() != sin.stride() or {t.stride(-1) for t in (q, kv, cos)} != {1} or q.stride(1) != size:
        raise ValueError("heads are not contiguous, or cos and sin are laid out in two ways")
    _native.latent(
        q=q.data_ptr(),
        kv=kv.data_ptr(),
        norm=norm.weight.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        place=cache.place.data_ptr(),
        keys=cache.keys.data_ptr(),
        values=cache.values.data_ptr(),
        rows=batch,
        heads=heads,
        nope=size - rope,
        rope=rope,
        rank=rank,
        turns_neighbours=turns_neighbours,
        q_stride=q.stride(0),
        kv_stride=kv.stride(0),
        rotation_stride=cos.stride(0) if cos.shape[0] == batch else 0,
        keys_stride=cache.keys.stride(0),
        values_stride=cache.values.stride(0),
        eps=norm.eps,
        dtype=CODES[q.dtype],
        stream=stream_of(q.device),
    )


def rotation(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [b, 1, 2 f] of positions [b, 1] int64 times frequencies [f] float32, twice side by side, scaled."""
    rows, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty(rows, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    _native.rotation(
        positions.data_ptr(),
        frequencies.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        half,
        scale,
        CODES[dtype],
        stream_of(positions.device),
    )
    return cos, sin


def advance(place: Tensor, positions: Tensor, mask: Tensor) -> None:
    """A token more: place [1] and positions [b, 1] int64 grow by one, and mask [b, 1, 1, n] allows the new place."""
    if not (place.is_cuda and _native.cuda_built()):
        place.add_(1)
        positions.add_(1)
        mask[..., place[place < mask.shape[-1]]] = True
        return
    _native.advance(
        place.data_ptr(),
        positions.data_ptr(),
        mask.data_ptr(),
        len(mask),
        mask.stride(0),
        stream_of(place.device),
    )


class Chooser:
    """The choice of a token for each row, and what follows from it, as one kernel.

    ids     [b, 1] int64: receives the tokens
    result  [2, b] int64: receives them, and says of each row whether it goes on, which is read, too
    length  [1] int64: one is added
    seen    [b, v + 1] bool, where each token is marked, or [b, 0]
    ends    [v] bool: tokens after which a row does not go on
    pad     what such a row goes on with; None: whatever is chosen
    """

    def __init__(
        self, ids: Tensor, result: Tensor, length: Tensor, seen: Tensor, ends: Tensor, pad: int | None
    ) -> None:
        self._ids, self._result, self._length, self._seen, self._ends = ids, result, length, seen, ends
        self._pad = -1 if pad is None else pad
        # Of the kernel's blocks among themselves: zero between calls.
        self._best = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=ids.device)

    def __call__(self, scores: Tensor, noise: Tensor | None) -> None:
        """The greatest of scores [b, v] float32, of equal ones the first; or, with noise [b, v] from the exponential
        distribution, of softmax(scores) / noise, which is a sample."""
        scores = scores.contiguous()
        _native.choose_on_gpu(
            scores=scores.data_ptr(),
            noise=_address(noise),
            ends=self._ends.data_ptr(),
            ids=self._ids.data_ptr(),
            result=self._result.data_ptr(),
            seen=self._seen.data_ptr() if self._seen.numel() else 0,
            length=self._length.data_ptr(),
            best=self._best.data_ptr(),
            arrived=self._arrived.data_ptr(),
            pad=self._pad,
            rows=scores.shape[0],
            vocab=scores.shape[1],
            stream=stream_of(scores.device),
        )
