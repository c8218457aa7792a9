"""Residual streams of a decode step, by the kernels of native/cuda/decode_streams.cu. As those of decode_ops.py, they
are only enqueued, in the current stream of the tensors' CUDA device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of

STREAMS = _native.HYPER_CONNECTION_STREAMS
_COLUMNS = _native.HYPER_CONNECTION_COLUMNS


class ConnectionWeights(NamedTuple):
    """Of a hyper-connection of N streams of n values.

    fn          [(2 + N) · N, N · n] float32, as base and scale
    base        [(2 + N) · N]
    scale       [3]
    norm_eps    of the norm before `fn`
    eps         of the streams' weights
    iterations  that normalise `comb`
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm_eps: float
    eps: float
    iterations: int


def hyper_connection(
    streams: Tensor, weights: ConnectionWeights, block_counts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a part of a layer gets of the streams, and how it is added to them; decode_streams.hpp has the formula.

    streams       [b, N, n] float32, bfloat16 or float16, contiguous; N is STREAMS
    block_counts  int32 zeros, at least b of them; they are zero again afterwards
    Returns       post [b, N] and comb [b, N, N] float32; the streams collapsed [b, n], of their dtype
    Raises        ValueError for tensors that are not as said here
    """
    device, dtype = streams.device, streams.dtype
    rows, count, n = streams.shape
    if count != STREAMS or dtype not in CODES:
        raise ValueError(
            f"found {count} streams of {dtype}; served are {STREAMS} of {', '.join(map(str, CODES))}"
        )
    if block_counts.numel() < rows:
        raise ValueError(f"found {block_counts.numel()} block counts; needed are {rows}")
    outputs = (2 + count) * count
    post, comb, scratch = (
        torch.empty(rows, *shape, dtype=torch.float32, device=device)
        for shape in ((count,), (count, count), (-(-count * n // _COLUMNS), outputs + 1))
    )
    collapsed = streams.new_empty(rows, n)
    _native.hyper_connection(
        streams=address("streams", streams, device),
        fn=address("fn", weights.fn, device, torch.float32, (outputs, count * n)),
        base=address("base", weights.base, device, torch.float32, (outputs,)),
        scale=address("scale", weights.scale, device, torch.float32, (3,)),
        norm_eps=weights.norm_eps,
        eps=weights.eps,
        scratch=address("scratch", scratch, device),
        block_counts=address("block counts", block_counts, device, torch.int32),
        post=address("post", post, device),
        comb=address("comb", comb, device),
        collapsed=address("collapsed", collapsed, device),
        rows=rows,
        n=n,
        iterations=weights.iterations,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return post, comb, collapsed


def mix(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post · y + combᵀ · streams: what a part of a layer made, added to each of the mixed streams.

    streams  [b, N, n] float32, bfloat16 or float16, contiguous, as y; N is STREAMS
    y        [b, n]
    post     [b, N] float32; comb [b, N, N]
    Returns  [b, N, n]
    Raises   ValueError for tensors that are not as said here
    """
    device, dtype = streams.device, streams.dtype
    rows, count, n = streams.shape
    if count != STREAMS or dtype not in CODES:
        raise ValueError(
            f"found {count} streams of {dtype}; served are {STREAMS} of {', '.join(map(str, CODES))}"
        )
    out = torch.empty_like(streams)
    _native.mix_streams(
        streams=address("streams", streams, device),
        y=address("y", y, device, dtype, (rows, n)),
        post=address("post", post, device, torch.float32, (rows, count)),
        comb=address("comb", comb, device, torch.float32, (rows, count, count)),
        out=address("out", out, device),
        rows=rows,
        n=n,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return out
