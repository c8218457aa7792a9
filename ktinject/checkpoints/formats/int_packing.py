"""Integers of 4 and 8 bits as checkpoints store them: from their tensors to codes, scales, zero points; no rounding.

    name     tensors of a weight [n, k] beside `<stem>`, and where a code of b bits lies; w = 32 / b of them make a word
    gptq     .qweight int32 [k / w, n]; code i of row r is input w r + i
             .qzeros int32 [groups, n / w]; code i of column c is output w c + i, less one unless format v2
             .scales [groups, n]; .g_idx [k]: the group of each input
    awq      .qweight int32 [k, n / 8], .qzeros int32 [groups, n / 8]; nibbles of column c are outputs
             8 c + 0, 2, 4, 6, 1, 3, 5, 7; .scales [groups, n]
    packed   compressed-tensors: .weight_packed int32 [n, k / w]; code i of column c is input w c + i
             .weight_scale [n, groups]; .weight_shape; .weight_zero_point int32 [n / w, groups], codes along n
    q4_0     GGUF: blocks of 32 inputs, fp16 scale and 16 bytes; byte i has input i and, above, input i + 16

The value of a code is scale · (code - zero point); where there are no zero points that is 8 or 128.

Source: AutoGPTQ's and AutoAWQ's packing, compressed-tensors' pack-quantized, ggml's block_q4_0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.formats.base import Codes

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each nibble


def codes_in(packed: Tensor, dim: int, bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 → uint8, 32 / bits times as long along `dim`; of 4 bits, nibble i of a word becomes element order[i]."""
    # Little-endian bytes spare shifts of 32-bit words.
    words = packed.contiguous().unsqueeze(-1).view(torch.uint8)
    if bits == 4:
        places = [order.index(e) for e in range(8)]  # which nibble holds element e
        nibbles = [words[..., p // 2] >> 4 if p % 2 else words[..., p // 2] & 15 for p in places]
        words = torch.stack(nibbles, -1)
    return words.movedim(-1, dim + 1).flatten(dim, dim + 1)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor | None, bits: int = 4, version: int = 1
) -> Codes:
    """group_of   the group of each input, where they are not equal and in order"""
    zeros = codes_in(qzeros, 1, bits)[:, : scales.shape[1]]
    if version == 1:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    codes, scales, zeros = (t.T.contiguous() for t in (codes_in(qweight, 0, bits), scales, zeros))
    return Codes(codes, scales, unless_middle(zeros, bits), group_of, bits)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_of: Tensor | None = None) -> Codes:
    codes, zeros = (codes_in(t, 1, 4, _AWQ_ORDER).T.contiguous() for t in (qweight, qzeros))
    return Codes(codes, scales.T.contiguous(), unless_middle(zeros), group_of)


def from_packed(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, group_of: Tensor | None, k: int, bits: int = 4
) -> Codes:
    zeros = None
    if zero_point is not None:
        zeros = unless_middle(codes_in(zero_point, 0, bits)[: len(scale)].contiguous(), bits)
    return Codes(codes_in(packed, 1, bits)[:, :k].contiguous(), scale, zeros, group_of, bits)


def from_q4_0(blocks: Tensor, k: int) -> Codes:
    """blocks  [..., n, k / 32 · 18] uint8, as they lie in the file"""
    each = blocks.unflatten(-1, (k // 32, 18))
    scales = each[..., :2].contiguous().view(torch.float16).squeeze(-1)
    codes = torch.cat([each[..., 2:] & 15, each[..., 2:] >> 4], -1)
    return Codes(codes.flatten(-2), scales)


def unless_middle(zeros: Tensor, bits: int = 4) -> Tensor | None:
    return None if bool((zeros == 1 << (bits - 1)).all()) else zeros
