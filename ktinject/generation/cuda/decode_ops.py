"""The kernels of native/cuda for a decode step, as functions of tensors. A row is one token.

All tensors are on one CUDA device. The functions only enqueue kernels in the current stream and do not wait, so all of
them can be captured in a CUDA graph. They raise ValueError for shapes, dtypes or devices that the kernels do not take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of

_SPLIT = 256  # positions of the KV cache for one thread block of attention
_MOST_SPLITS = 32
MOST_ROWS = 8  # rows that `linear` takes


class Norm(NamedTuple):
    """An RMS norm. operators/probes/norm.py has the formula.

    weight        [n]
    eps           added to the mean square
    offset        added to the weight: 1 where it is stored less 1
    rounds_first  x is rounded to its dtype before the weight is multiplied, and not only after it
    """

    weight: Tensor
    eps: float
    offset: float = 0.0
    rounds_first: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is Llama's, which all kernels compute that norm."""
        return self.offset == 0.0 and self.rounds_first

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether `rms_norm` computes it of values of a dtype; of 16 bits, it may have a float32 weight."""
        return self.weight.dtype == dtype or (self.weight.dtype == torch.float32 and not self.rounds_first)


class Cache(NamedTuple):
    """The KV cache of one layer, and the position of the next token in it.

    keys, values    [b, kv heads, n, d], rows of d contiguous
    cache_position  [1] int64: where the next token is written; positions after it are not read
    mask            [b, 1, 1, n] bool: the positions to attend to
    window          0, or the layer is a ring: position p lies at place p % window, and has that place in the mask, too
    is_consecutive  rows are tokens of one text, in this order: the first is written at cache_position, each sees those
                    before it, and the rows of keys and values are one in memory
    """

    keys: Tensor
    values: Tensor
    cache_position: Tensor
    mask: Tensor
    window: int = 0
    is_consecutive: bool = False


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x / rms(x) times the weight.

    x     [..., n] float32, bfloat16 or float16, as the result, and as the weight where the norm does not take another
    Raises    ValueError for a weight of another size, dtype or device
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    _native.rms_norm(
        address("x", x, x.device),
        address("norm", norm.weight, x.device, norm.weight.dtype if norm.takes(x.dtype) else x.dtype, (n,)),
        address("out", out, x.device, x.dtype),
        CODES[x.dtype],
        x.numel() // n,
        n,
        norm.eps,
        stream_of(x.device),
        norm.offset,
        norm.rounds_first,
        is_wide_weight=norm.weight.dtype == torch.float32,
    )
    return out


def prefetched(then: Tensor | None, device: torch.device) -> dict[str, Any]:
    """Address and bytes of weights that the next call will read, as kernels take them that fetch these into L2."""
    if then is None or then.device != device or not then.is_contiguous():
        return {"then": 0, "then_bytes": 0}
    return {"then": address("then", then, device), "then_bytes": then.nbytes}


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
    """Up to four linear layers of the same input in one kernel, with the norm before and the residual after them.

    x         [m, k] bfloat16 or float16, m up to MOST_ROWS, k a multiple of 32; all tensors contiguous, of x's dtype
    weights   [n, k] each; their biases are [n], or None
    norm      an RMS norm of x before the layers
    normed    [m, k], receives the normed x
    residual  [m, sum of n], added to the rounded result
    wide      the result is float32 and not rounded; only without a residual
    then      weights that the next call will read; this call fetches them into the GPU's L2 cache
    Returns   [m, sum of n]: the outputs of the layers, concatenated
    """
    rows, k = x.shape
    sizes = [weight.shape[0] for weight in weights]
    out = x.new_empty(rows, sum(sizes), dtype=torch.float32 if wide else x.dtype)
    if wide and residual is not None:
        raise ValueError("a wide result takes no residual")
    like = x.device, x.dtype
    _native.decode_linear(
        x=address("x", x, *like),
        norm=address("norm", None if norm is None else norm.weight, *like, (k,)),
        eps=0.0 if norm is None else norm.eps,
        norm_offset=0.0 if norm is None else norm.offset,
        rounds_first=norm is None or norm.rounds_first,
        normed=address("normed", normed, *like, (rows, k)),
        weights=[address("weight", weight, *like, (n, k)) for weight, n in zip(weights, sizes)],
        biases=[address("bias", bias, *like, (n,)) for bias, n in zip(biases or [None] * len(sizes), sizes)],
        n=sizes,
        residual=address("residual", residual, *like, (rows, sum(sizes))),
        out=address("out", out, x.device),
        is_wide=wide,
        **prefetched(then, x.device),
        rows=rows,
        k=k,
        dtype=CODES[x.dtype],
        stream=stream_of(x.device),
    )
    return out


def routes(experts: int, top_k: int) -> bool:
    """Whether `route` can choose top_k of so many experts."""
    return top_k <= min(experts, 32) and experts <= 1024


def route(logits: Tensor, top_k: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Choose the top_k experts of each token by softmax.

    logits    [m, experts] float32, bfloat16 or float16
    normed    divide the weights by their sum
    Returns   weights [m, top_k] of the logits' dtype, ids [m, top_k] int64; the greatest first
    """
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    _native.route(
        address("logits", logits, logits.device),
        address("weights", weights, logits.device, logits.dtype),
        address("ids", ids, logits.device, torch.int64),
        rows,
        experts,
        top_k,
        normed,
        CODES[logits.dtype],
        stream_of(logits.device),
    )
    return weights, ids


def routes_grouped(experts: int) -> bool:
    """Whether `route_grouped` takes so many experts."""
    return experts % 32 == 0 and 0 < experts <= 512


def route_grouped(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, kept: int, normed: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the top_k experts of each token as DeepSeek-V3's router does.

    The score of an expert is the sigmoid of its logit, and experts are ranked by score + bias. A group of experts is
    ranked by the sum of its two best. The top_k best experts of the `kept` best groups are chosen.

    logits   [m, experts] float32; the experts of a group are neighbours
    bias     [experts] float32, bfloat16 or float16
    normed   divide the scores of the chosen experts by their sum
    Returns  weights [m, top_k] float32: the scores times `scale`; ids [m, top_k] int64, in the order of
             torch.topk(sorted=False)
    """
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    device = logits.device
    _native.route_grouped(
        logits=address("logits", logits, device, torch.float32),
        bias=address("bias", bias, device, None, (experts,)),
        weights=address("weights", weights, device, torch.float32),
        ids=address("ids", ids, device, torch.int64),
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
    block_counts: Tensor,
    *,
    sinks: Tensor | None = None,
    has_gates: bool = False,
    halves_alike: bool = False,
) -> Tensor:
    """Norm and rotate the queries and the new key, write the new key and value to the cache, and attend to it.

    q, k, v       [b, heads or kv heads, d] bfloat16 or float16; a row contiguous, k and v with equal strides
    norms         RMS norms of a query's and a key's head [d], or None; both of one kind
    rotation      cos and sin, each [b or 1, 1, r]: the first r values of a head are rotated by halves
    cache         of q's dtype; keys and values with equal strides
    scale         factor of q · kᵀ
    block_counts  int32 zeros, at least b · heads of them; they are zero again afterwards
    sinks         [heads], of q's dtype: scores that take part in the softmax, without a value
    has_gates     q is [b, heads, 2 d]: a head's query, and a gate whose sigmoid its output is multiplied with
    halves_alike  cos and sin are of one half of the rotated values, [b or 1, 1, r / 2]
    Returns       [b, heads, d] contiguous
    """
    (batch, heads, _), size = q.shape, k.shape[-1]
    cos, sin = rotation
    given = [norm for norm in norms if norm is not None]
    if len({norm[1:] for norm in given}) > 1:
        raise ValueError("the norms of queries and keys are of two kinds")
    norm = given[0][1:] if given else (0.0, 0.0, True)
    if (k.stride(), cos.stride()) != (v.stride(), sin.stride()) or cos.shape[1] != 1:
        raise ValueError("keys and values, or cos and sin, are laid out in two ways")
    if q.shape[-1] != size * (2 if has_gates else 1):
        raise ValueError("queries and keys are of two sizes")
    if cos.shape[0] not in (1, batch) or len(cache.mask) != batch or block_counts.numel() < batch * heads:
        raise ValueError("cos, the mask, or the block counts, are not of as many rows")
    if cache.keys.stride() != cache.values.stride() or cache.mask.shape[-1] < cache.keys.shape[2]:
        raise ValueError("keys and values are laid out in two ways, or the mask is shorter than they are")
    _require_rows(cache)
    groups, capacity = k.shape[1], cache.keys.shape[2]
    splits = max(1, min(_MOST_SPLITS, cache.keys.shape[2] // _SPLIT))
    scratch = torch.empty(
        batch * splits * _native.attention_scratch(heads, size) if splits > 1 else 0,
        dtype=torch.float32,
        device=q.device,
    )
    out = torch.empty(batch, heads, size, dtype=q.dtype, device=q.device)
    q_weight, k_weight = (None if one is None else one.weight for one in norms)
    device, like = q.device, (q.device, q.dtype)
    _native.attention(
        q=address("q", q, *like, strided=1),
        sinks=address("sinks", sinks, *like, (heads,)),
        k=address("k", k, *like, (batch, groups, size), strided=1),
        v=address("v", v, *like, (batch, groups, size), strided=1),
        q_weight=address("q's norm", q_weight, *like, (size,)),
        k_weight=address("k's norm", k_weight, *like, (size,)),
        cos=address("cos", cos, *like, strided=1),
        sin=address("sin", sin, *like, cos.shape, strided=1),
        cache_position=address("cache position", cache.cache_position, device, torch.int64, (1,)),
        mask=address("mask", cache.mask, device, torch.bool, (batch, 1, 1, cache.mask.shape[-1]), strided=1),
        keys=address("keys", cache.keys, *like, (batch, groups, capacity, size), strided=2),
        values=address("values", cache.values, *like, (batch, groups, capacity, size), strided=2),
        out=address("out", out, *like),
        scratch=address("scratch", scratch, device, torch.float32),
        block_counts=address("block counts", block_counts, device, torch.int32),
        batch=batch,
        q_heads=heads,
        kv_heads=k.shape[1],
        size=size,
        rotary=cos.shape[-1] * (2 if halves_alike else 1),
        angles=cos.shape[-1],
        window=cache.window,
        has_gates=has_gates,
        splits=splits,
        q_stride=q.stride(0),
        q_head_stride=q.shape[-1],
        kv_stride=k.stride(0),
        rotation_stride=cos.stride(0) if cos.shape[0] == batch else 0,
        batch_stride=0 if cache.is_consecutive else cache.keys.stride(0),
        head_stride=cache.keys.stride(1),
        mask_stride=cache.mask.stride(0),
        eps=norm[0],
        norm_offset=norm[1],
        rounds_first=norm[2],
        scale=scale,
        is_consecutive=cache.is_consecutive,
        dtype=CODES[q.dtype],
        stream=stream_of(q.device),
    )
    return out


def _require_rows(cache: Cache) -> None:
    """Raises ValueError if consecutive rows do not share one cache, or others do."""
    strides = cache.keys.stride(0), cache.values.stride(0)
    if len(cache.keys) > 1 and any((stride == 0) != cache.is_consecutive for stride in strides):
        raise ValueError("consecutive rows share the one row of a cache, and other rows do not")


def latent(
    q: Tensor,
    kv: Tensor,
    norm: Norm,
    rotation: tuple[Tensor, Tensor],
    cache: Cache,
    turns_neighbours: bool,
) -> None:
    """Prepare latent attention (MLA): rotate the queries in place, and write the new token to the cache.

    q                 [b, heads, n + d], the heads of a row contiguous; the last d values of each head are rotated
    kv                [b, r + d], rows contiguous; the first r values are normed, the last d are rotated
    norm              of the latent, weight [r]
    rotation          cos and sin, each [b or 1, 1, d]
    cache             keys [b, 1, m, r] receive the latent, values [b, 1, m, d] the rotated key
    turns_neighbours  True: rotates values 2i and 2i + 1, and writes them to i and i + d/2; False: rotates i and i + d/2
    """
    (batch, heads, size), (cos, sin) = q.shape, rotation
    rank, rope = cache.keys.shape[-1], cache.values.shape[-1]
    if not norm.is_plain:
        raise ValueError("the latent's norm has an offset, or rounds last")
    if kv.shape != (batch, rank + rope) or cos.shape[1:] != (1, rope) or norm.weight.shape != (rank,):
        raise ValueError("queries, latents, cos and sin, or the norm do not belong together")
    if cos.stride() != sin.stride() or cos.shape[0] not in (1, batch) or size < rope:
        raise ValueError("cos and sin are laid out in two ways, or of other rows or sizes than the heads")
    _require_rows(cache)
    device, like, capacity = q.device, (q.device, q.dtype), cache.keys.shape[2]
    _native.latent(
        q=address("q", q, *like, strided=1),
        kv=address("kv", kv, *like, strided=1),
        norm=address("norm", norm.weight, *like, (rank,)),
        cos=address("cos", cos, *like, strided=1),
        sin=address("sin", sin, *like, cos.shape, strided=1),
        cache_position=address("cache position", cache.cache_position, device, torch.int64, (1,)),
        keys=address("keys", cache.keys, *like, (batch, 1, capacity, rank), strided=1),
        values=address("values", cache.values, *like, (batch, 1, capacity, rope), strided=1),
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
        is_consecutive=cache.is_consecutive,
        dtype=CODES[q.dtype],
        stream=stream_of(q.device),
    )


def rotation(
    positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The rotary embedding of each token: cos and sin of position · frequency, times `scale`.

    positions    [b, 1] int64
    frequencies  [f] float32
    Returns      cos and sin, each [b, 1, 2 f] of `dtype`; both halves are equal
    """
    rows, half = positions.shape[0], frequencies.shape[0]
    cos, sin = (torch.empty(rows, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    device = positions.device
    _native.rotation(
        address("positions", positions, device, torch.int64, (rows, 1)),
        address("frequencies", frequencies, device, torch.float32, (half,)),
        address("cos", cos, device, dtype),
        address("sin", sin, device, dtype),
        rows,
        half,
        scale,
        CODES[dtype],
        stream_of(positions.device),
    )
    return cos, sin


def advance(cache_position: Tensor, positions: Tensor, mask: Tensor) -> None:
    """Advance by one token, in place. Also runs on the CPU.

    cache_position  [1] int64, grows by one
    positions       [b, 1] int64, grow by one
    mask            [b, 1, 1, n] bool; becomes True at the new cache_position
    """
    if not (cache_position.is_cuda and _native.cuda_built()):
        cache_position.add_(1)
        positions.add_(1)
        if not cache_position.is_cpu:
            mask[..., cache_position[cache_position < mask.shape[-1]]] = True
        elif (place := int(cache_position)) < mask.shape[-1]:  # a number costs less than an index of one
            mask[..., place] = True
        return
    _native.advance(
        address("cache position", cache_position, cache_position.device, torch.int64, (1,)),
        address("positions", positions, cache_position.device, torch.int64, (len(mask), 1)),
        address("mask", mask, cache_position.device, torch.bool, (len(mask), 1, 1, mask.shape[-1])),
        len(mask),
        mask.stride(0),
        stream_of(cache_position.device),
    )
