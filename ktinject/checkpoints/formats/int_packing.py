"""int4 as checkpoints store it: from their tensors to codes, scales and zero points, without rounding.

    name     tensors of a weight [n, k] beside `<stem>`, and where a code lies
    gptq     .qweight int32 [k / 8, n]; nibble i of row r is input 8 r + i
             .qzeros int32 [groups, n / 8]; nibble i of column c is output 8 c + i, less one unless format v2
             .scales [groups, n]; .g_idx [k]: the group of each input
    awq      .qweight int32 [k, n / 8], .qzeros int32 [groups, n / 8]; nibbles of column c are outputs
             8 c + 0, 2, 4, 6, 1, 3, 5, 7; .scales [groups, n]
    packed   compressed-tensors: .weight_packed int32 [n, k / 8]; nibble i of column c is input 8 c + i
             .weight_scale [n, groups]; .weight_shape; .weight_zero_point int32 [n / 8, groups], nibbles along n
    q4_0     GGUF: blocks of 32 inputs, fp16 scale and 16 bytes; byte i has input i and, above, input i + 16

The value of a code is scale · (code - zero point); where there are no zero points that is 8.

Source: AutoGPTQ's and AutoAWQ's packing, compressed-tensors' pack-quantized, ggml's block_q4_0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.formats.base import Codes

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble


def nibbles(packed: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 → uint8, eight times as long along `dim`; nibble i of a word becomes element order[i] of its eight."""
    # Which nibble holds element e; little-endian bytes spare shifts of 32-bit words.
    places = [order.index(e) for e in range(8)]
    words = packed.contiguous().unsqueeze(-1).view(torch.uint8)
    eight = torch.stack([words[..., p // 2] >> 4 if p % 2 else words[..., p // 2] & 15 for p in places], -1)
    return eight.movedim(-1, dim + 1).flatten(dim, dim + 1)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor | None, version: int = 1
) -> Codes:
    zeros = nibbles(qzeros, 1)
    if version == 1:
        zeros = (zeros + 1) & 15
    codes, scales, zeros = (t.T.contiguous() for t in (nibbles(qweight, 0), scales, zeros))
    order = None if group_of is None else group_of.long()
    k, groups = codes.shape[1], scales.shape[1]
    if order is not None and torch.equal(order, torch.arange(k) // (k // groups)):
        order = None
    return Codes(codes, scales, _unless_middle(zeros), order)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Codes:
    codes, zeros = (nibbles(t, 1, _AWQ_ORDER).T.contiguous() for t in (qweight, qzeros))
    return Codes(codes, scales.T.contiguous(), _unless_middle(zeros))


def from_packed(packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_of: Tensor | None) -> Codes:
    n, groups = scale.shape
    zeros = None if zero_point is None else _unless_middle(nibbles(zero_point, 0)[:n].contiguous())
    codes = nibbles(packed, 1)
    order = None if group_of is None else group_of.long()
    k = codes.shape[1]
    if order is not None and torch.equal(order, torch.arange(k) // (k // groups)):
        order = None
    return Codes(codes, scale, zeros, order)


def from_q4_0(blocks: Tensor, k: int) -> Codes:
    """blocks  [n, k / 32 · 18] uint8, as they lie in the file"""
    each = blocks.view(-1, k // 32, 18)
    scales = each[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = torch.cat([each[..., 2:] & 15, each[..., 2:] >> 4], -1)
    return Codes(codes.view(-1, k), scales)


def _unless_middle(zeros: Tensor) -> Tensor | None:
    return None if bool((zeros == 8).all()) else zeros
