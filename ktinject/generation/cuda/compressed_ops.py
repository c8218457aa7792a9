"""Compressed keys of a decode step, by the kernels of native/cuda/decode_compress.cu. As those of decode_ops.py, they
are only enqueued, in the current stream of the tensors' CUDA device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.generation.compressed import Part


class CompressorWeights(NamedTuple):
    """Of a compressor of keys of d values.

    bias    [rate, d] float32, or [rate, 2 · d] where windows overlap
    norm    [d] float32
    eps     of the norm
    angles  [n] float32: by which the last 2 · n values turn a position, in pairs
    scale   of their cos and sin
    """

    bias: Tensor
    norm: Tensor
    eps: float
    angles: Tensor
    scale: float


def compress(
    kv: Tensor,
    gate: Tensor,
    part: Part,
    weights: CompressorWeights,
    cache_position: Tensor,
    positions: Tensor,
    *,
    always: bool = True,
) -> Tensor:
    """A token more of the present window, and this window's key; decode_compress.hpp has the formula.

    kv, gate        [b, width] float32, bfloat16 or float16, rows contiguous, as `part` is of
    part            changed in place
    cache_position  [1] int64: of the token in its text
    positions       [b] int64, any stride: from which windows are seen
    always          make the key of a window that is not complete, too
    Returns         [b, windows] of that dtype: 0 of a window that is complete at `positions`, -inf of another
    Raises          ValueError for tensors that are not as said here
    """
    device, dtype = kv.device, kv.dtype
    rows, rate, width = part.kv.shape
    (_, windows, d), turned = part.keys.shape, 2 * len(weights.angles)
    if dtype not in CODES or width != (d if part.overlap_kv is None else 2 * d):
        raise ValueError(f"found {dtype}, {width} values for keys of {d}")
    if part.keys.stride()[1:] != (d, 1) or positions.shape != (rows,) or positions.dtype != torch.int64:
        raise ValueError(f"found keys of strides {part.keys.stride()}, positions {list(positions.shape)}")
    like = device, dtype
    added = torch.empty(rows, windows, dtype=dtype, device=device)
    _native.compress(
        kv=address("kv", kv, *like, (rows, width), strided=1),
        gate=address("gate", gate, *like, (rows, width), strided=1),
        kv_stride=kv.stride(0),
        gate_stride=gate.stride(0),
        held_kv=address("held kv", part.kv, *like),
        held_gate=address("held gate", part.gate, *like, (rows, rate, width)),
        bias=address("bias", weights.bias, device, torch.float32, (rate, width)),
        overlap_kv=address("overlap kv", part.overlap_kv, *like, (rows, rate, d)),
        overlap_gate=address("overlap gate", part.overlap_gate, device, torch.float32, (rows, rate, d)),
        norm=address("norm", weights.norm, device, torch.float32, (d,)),
        eps=weights.eps,
        angles=address("angles", weights.angles, device, torch.float32),
        scale=weights.scale,
        cache_position=address("cache position", cache_position, device, torch.int64, (1,)),
        positions=address("positions", positions, device, strided=1),
        positions_stride=positions.stride(0),
        keys=address("keys", part.keys, *like, strided=1),
        keys_stride=part.keys.stride(0),
        added=address("added", added, device),
        always=always,
        rows=rows,
        rate=rate,
        d=d,
        windows=windows,
        turned=turned,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return added


def turn_heads(
    x: Tensor, cos: Tensor, sin: Tensor, *, eps: float | None = None, is_back: bool = False
) -> Tensor:
    """Heads whose last values are turned in pairs of neighbours.

    x         [b, heads, size] float32, bfloat16 or float16, rows contiguous
    cos, sin  [b, n], of that dtype, rows contiguous and alike: of the last 2 · n values
    eps       first divide each head by its root mean square; None: do not
    is_back   turn the other way
    Returns   [b, heads, size]
    Raises    ValueError for tensors that are not as said here
    """
    device, dtype = x.device, x.dtype
    rows, heads, size = x.shape
    if dtype not in CODES or cos.stride() != sin.stride() or 2 * cos.shape[-1] > size or size % 2:
        raise ValueError(f"found heads of {size} values of {dtype}, {cos.shape[-1]} angles")
    like = device, dtype
    out = torch.empty(rows, heads, size, dtype=dtype, device=device)
    _native.turn_heads(
        x=address("x", x, *like, strided=1),
        cos=address("cos", cos, *like, (rows, cos.shape[-1]), strided=1),
        sin=address("sin", sin, *like, cos.shape, strided=1),
        out=address("out", out, device),
        x_stride=x.stride(0),
        angle_stride=cos.stride(0),
        eps=-1.0 if eps is None else eps,
        is_back=is_back,
        rows=rows,
        heads=heads,
        size=size,
        angles=cos.shape[-1],
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return out


def sink_softmax(scores: Tensor, scale: float, first: Tensor, rest: Tensor | None, sinks: Tensor) -> Tensor:
    """The weights of attention: softmax over scores · scale + what is added to them, and a sink, which gets none.

    scores   [b, heads, n] float32, bfloat16 or float16, contiguous
    first    [b, m] of that dtype, rows contiguous: added to the first scores
    rest     [b, n - m] of that dtype, contiguous: to the others; None: there are no others
    sinks    [heads] float32
    Returns  [b, heads, n]
    Raises   ValueError for tensors that are not as said here
    """
    device, dtype = scores.device, scores.dtype
    rows, heads, n = scores.shape
    count = first.shape[-1]
    if dtype not in CODES or count > n or (rest is None) != (count == n):
        raise ValueError(f"found {n} scores of {dtype}, and {count} to which something is added first")
    like = device, dtype
    out = torch.empty_like(scores)
    _native.sink_softmax(
        scores=address("scores", scores, *like),
        first=address("first", first, *like, (rows, count), strided=1),
        rest=address("rest", rest, *like, (rows, n - count)),
        sinks=address("sinks", sinks, device, torch.float32, (heads,)),
        out=address("out", out, device),
        first_stride=first.stride(0),
        scale=scale,
        rows=rows,
        heads=heads,
        n=n,
        of_first=count,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return out
