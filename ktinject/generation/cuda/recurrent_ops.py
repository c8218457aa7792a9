"""Decode steps of Mamba-2 and of short convolutions, by the kernels of native/cuda/decode_recurrent.cu. As those of
decode_ops.py, they are only enqueued, in the current stream of the tensors' CUDA device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.generation.cuda.decode_ops import Norm, prefetched
from ktinject.generation.cuda.delta_ops import States, convolution_support, parameters
from ktinject.support import Support


class Mamba2Weights(NamedTuple):
    """What a layer has beside its projections.

    taps     [channels, 1, t]: of the convolution; channels are those of x, of B and of C
    bias     [channels], or None
    a_log    [heads], float32 or the model's dtype, as dt_bias, d and the norm's weight
    dt_bias  [heads]
    d        [heads]: the share of x that skips the state
    norm     of a group's values: the weight is [heads · head size]
    """

    taps: Tensor
    bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    d: Tensor
    norm: Norm


def mamba2_support(head_size: int, state_size: int, taps: int, dtype: torch.dtype) -> Support:
    """Whether `mamba2` computes such heads and states, a convolution of so many inputs, and models of a dtype."""
    if head_size % 32 or state_size not in (32, 64, 128, 256):
        return Support.no(
            f"heads of {head_size} values with states of {state_size}; the kernel takes multiples of 32, with states "
            "of 32, 64, 128 or 256"
        )
    return convolution_support(taps, dtype)


def mamba2(
    projected: Tensor,
    weights: Mamba2Weights,
    states: States,
    groups: int,
    block_counts: Tensor,
    then: Tensor | None = None,
) -> Tensor:
    """A token more of Mamba-2. native/cuda/decode_recurrent.hpp has the formula and its source.

    projected     [b, heads · head size of z | channels | heads of dt] bfloat16 or float16, rows contiguous
    states        inputs [b, channels, t] of that dtype, states [b, heads, head size, state size] float32
    groups        of heads, which share B, C and the mean of the norm
    block_counts  int32 zeros, at least b · groups of them; they are zero again afterwards
    then          weights that the next call will read; this call fetches them into the GPU's L2 cache
    Returns       [b, heads · head size] contiguous, of the dtype of `projected`
    Raises        ValueError for sizes that `mamba2_support` refuses, and for tensors that are not as said here
    """
    device, dtype = projected.device, projected.dtype
    rows, (_, heads, head_size, state_size) = len(projected), states.states.shape
    channels, _, taps = weights.taps.shape
    values = heads * head_size
    if channels != values + 2 * groups * state_size or heads % groups:
        raise ValueError(f"found {channels} channels of {heads} heads in {groups} groups")
    if projected.shape != (rows, values + channels + heads):
        raise ValueError(
            f"found {list(projected.shape)} projected; needed are {values + channels + heads} a row"
        )
    if block_counts.numel() < rows * groups:
        raise ValueError(f"found {block_counts.numel()} block counts; needed are {rows * groups}")
    z, mixed, dt = projected.split([values, channels, heads], 1)
    like, norm = (device, dtype), weights.norm
    named = {
        "a_log": (weights.a_log, heads),
        "dt_bias": (weights.dt_bias, heads),
        "d": (weights.d, heads),
        "norm": (norm.weight, values),
    }
    scratch = torch.empty(rows, values, dtype=torch.float32, device=device)
    out = torch.empty(rows, values, dtype=dtype, device=device)
    _native.mamba2(
        z=address("z", z, *like, strided=1),
        mixed=address("mixed", mixed, *like, strided=1),
        dt=address("dt", dt, *like, strided=1),
        inputs=address("inputs", states.inputs, *like, (rows, channels, taps)),
        states=address("states", states.states, device, torch.float32, (rows, heads, head_size, state_size)),
        taps_weight=address("taps", weights.taps, *like, (channels, 1, taps)),
        taps_bias=address("bias", weights.bias, *like, (channels,)),
        **parameters(named, device, dtype),
        eps=norm.eps,
        scratch=address("scratch", scratch, device),
        block_counts=address("block counts", block_counts, device, torch.int32),
        out=address("out", out, device),
        **prefetched(then, device),
        row_stride=projected.stride(0),
        rows=rows,
        heads=heads,
        groups=groups,
        head_size=head_size,
        state_size=state_size,
        taps=taps,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return out


def short_convolution(projected: Tensor, taps: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """A token more of C · convolution(B · x).

    projected  [b, n of B | n of C | n of x] bfloat16 or float16, rows contiguous
    taps       [n, 1, t]
    bias       [n], or None
    inputs     [b, n, t]: the last inputs of the convolution, the newest last; changed in place
    Returns    [b, n] contiguous
    Raises     ValueError for other than 2 to 8 taps, and for tensors that are not as said here
    """
    device, dtype = projected.device, projected.dtype
    rows, (n, _, count) = len(projected), taps.shape
    like = device, dtype
    out = torch.empty(rows, n, dtype=dtype, device=device)
    _native.short_convolution(
        projected=address("projected", projected, *like, (rows, 3 * n), strided=1),
        inputs=address("inputs", inputs, *like, (rows, n, count)),
        taps_weight=address("taps", taps, *like, (n, 1, count)),
        taps_bias=address("bias", bias, *like, (n,)),
        out=address("out", out, device),
        row_stride=projected.stride(0),
        rows=rows,
        n=n,
        taps=count,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return out
