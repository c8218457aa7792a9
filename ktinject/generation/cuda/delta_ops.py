"""A decode step of the gated delta rule, by the kernel of native/cuda/decode_delta.cu. As those of decode_ops.py, it is
only enqueued, in the current stream of the tensors' CUDA device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.generation.cuda.decode_ops import Norm, prefetched
from ktinject.support import SUPPORTED, Support

_MOST_PARTS = _native.GATED_DELTA_MOST_PARTS  # of a head's columns


class Projected(NamedTuple):
    """What the input projections give one token a row, for each head of keys and the n heads of values that share it.

    q, k  [b, key heads, key size]
    v, z  [b, key heads, n · value size]
    b, a  [b, key heads, n]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    b: Tensor
    a: Tensor

    def of_rows(self, rows: slice) -> Projected:
        return Projected(*(part[rows] for part in self))

    @classmethod
    def of_parts(cls, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, keys: int, key_heads: int) -> Projected:
        """Of four projections, as Qwen3.5 has them: all q, all k and all v side by side.

        keys  values of q of all heads
        """
        q, k, v = qkv.split([keys, keys, qkv.shape[1] - 2 * keys], 1)
        return cls(*(part.view(len(part), key_heads, -1) for part in (q, k, v, z, b, a)))

    @classmethod
    def of_groups(cls, qkvz: Tensor, ba: Tensor, key_size: int, key_heads: int) -> Projected:
        """Of two projections, as Qwen3-Next has them: one head of keys after the other, each with its q, k, v and z."""
        groups, gates = (part.view(len(part), key_heads, -1) for part in (qkvz, ba))
        values, shared = (groups.shape[2] - 2 * key_size) // 2, gates.shape[2] // 2
        return cls(*groups.split([key_size, key_size, values, values], 2), *gates.split([shared, shared], 2))


class Weights(NamedTuple):
    """What a layer has beside its projections.

    taps     [channels, 1, t]: of the convolution; channels are those of all q, all k and all v
    a_log    [value heads], float32 or the model's dtype, as dt_bias and the norm's weight
    dt_bias  [value heads]
    norm     of a head's values: its weight is [value size]
    """

    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Norm


class States(NamedTuple):
    """What a layer remembers; a step changes it in place.

    inputs  [b, channels, t] of the model's dtype: the last inputs of the convolution, the newest last
    states  [b, value heads, key size, value size] float32
    """

    inputs: Tensor
    states: Tensor


def convolution_support(taps: int, dtype: torch.dtype) -> Support:
    """Whether the kernels of layers with states compute a convolution of so many inputs, and models of a dtype."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Support.no(f"the kernel computes bfloat16 and float16, not {dtype}")
    if not 2 <= taps <= 8:
        return Support.no(f"a convolution of {taps} inputs; the kernel takes 2 to 8")
    return SUPPORTED


def support(key_size: int, value_size: int, taps: int, dtype: torch.dtype) -> Support:
    """Whether `gated_delta` computes heads of such sizes, a convolution of so many inputs, and models of a dtype."""
    if any(size % 32 or not 32 <= size <= 256 for size in (key_size, value_size)):
        return Support.no(f"heads of {key_size} and {value_size}; the kernel takes multiples of 32 up to 256")
    return convolution_support(taps, dtype)


def parameters(
    named: dict[str, tuple[Tensor, int]], device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Vectors of the model's dtype or float32, as the kernels take them: their addresses, and which of them are wide.

    named  name → the vector, and its size
    """
    given: dict[str, Any] = {}
    for name, (tensor, size) in named.items():
        is_wide = tensor.dtype == torch.float32
        given[name] = address(name, tensor, device, torch.float32 if is_wide else dtype, (size,))
        given[f"is_wide_{name}"] = is_wide
    return given


def gated_delta(
    projected: Projected, weights: Weights, states: States, block_counts: Tensor, then: Tensor | None = None
) -> Tensor:
    """A token more: convolution, gates, the gated delta rule, and the norm of each head's values times silu(z).

    native/cuda/decode_delta.hpp has the formula and its source.

    projected     bfloat16 or float16; rows and heads of keys may lie apart
    block_counts  int32 zeros, at least b · key heads of them; they are zero again afterwards
    then          weights that the next call will read; this call fetches them into the GPU's L2 cache
    Returns       [b, value heads · value size] contiguous, of the dtype of q
    Raises        ValueError for heads of other sizes than 32, 64 … 256, for other than 2 to 8 taps, and for tensors
                  that are not as said here
    """
    q = projected.q
    device, dtype = q.device, q.dtype
    rows, key_heads, key_size = q.shape
    _, heads, _, value_size = states.states.shape
    channels, _, taps = weights.taps.shape
    shared = heads // key_heads
    if shared * key_heads != heads or channels != 2 * key_heads * key_size + heads * value_size:
        raise ValueError(
            f"found {channels} channels of {key_heads} heads of {key_size} and {heads} heads of {value_size}"
        )
    if block_counts.numel() < rows * key_heads:
        raise ValueError(f"found {block_counts.numel()} block counts; needed are {rows * key_heads}")
    sizes = (key_size, key_size, shared * value_size, shared * value_size, shared, shared)
    parts: dict[str, Any] = {
        name: (
            address(name, part, device, dtype, (rows, key_heads, size), strided=2),
            part.stride(0),
            part.stride(1),
        )
        for (name, part), size in zip(projected._asdict().items(), sizes)
    }
    norm = weights.norm
    named = {
        "a_log": (weights.a_log, heads),
        "dt_bias": (weights.dt_bias, heads),
        "norm": (norm.weight, value_size),
    }
    scratch = torch.empty(rows, heads, value_size + _MOST_PARTS, dtype=torch.float32, device=device)
    out = torch.empty(rows, heads * value_size, dtype=dtype, device=device)
    _native.gated_delta(
        **parts,
        inputs=address("inputs", states.inputs, device, dtype, (rows, channels, taps)),
        states=address("states", states.states, device, torch.float32, (rows, heads, key_size, value_size)),
        taps_weight=address("taps", weights.taps, device, dtype, (channels, 1, taps)),
        **parameters(named, device, dtype),
        eps=norm.eps,
        scratch=address("scratch", scratch, device),
        block_counts=address("block counts", block_counts, device, torch.int32),
        out=address("out", out, device),
        **prefetched(then, device),
        rows=rows,
        key_heads=key_heads,
        value_heads=heads,
        key_size=key_size,
        value_size=value_size,
        taps=taps,
        dtype=CODES[dtype],
        stream=stream_of(device),
    )
    return out
