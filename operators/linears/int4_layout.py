"""int4 weights for the tensor cores: how they are quantised, packed and unpacked; torch operations, on any device.

A weight [n, k] is cut into tiles of 64 outputs × 64 inputs, a tile into 4 × 4 operands of the instruction
mma.m16n8k16: 16 outputs × 16 inputs. Of an operand each of 32 lanes holds 8 codes, one word; the four words of a
lane along k are one 16-byte piece:

    words   [k / 64, tiles of a strip, 4 operands along n, 32 lanes, 4 operands along k] int32, strip after strip
    lane    4 · (output // 2) + input % 8 // 2                    output, input: within the operand
    nibble  output % 2 + 2 · (input // 8) + 4 · (input % 2)       from the lowest bits of the word up

    scales  [groups, tiles of a strip, 64] int16, the bits of a bf16 or fp16, strip after strip; or int32,
            zero point << 16 | scale

A strip is four tiles along n, 256 outputs; the last has what is left, the last tile padded. The value of a code is
scale · (code - zero point); without zero points that is 8.

Our own scales have so few significant bits that every value is a bf16 and an fp16 without rounding: 5 beside the 3
of a code minus 8, or 4 beside the 4 of a code minus a zero point. So all ways to multiply, also those that round
the weights, see the same numbers. What the coarser scales cost is little: the error is flat around its minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ktinject.checkpoints.formats.base import Codes

TILE = 64
STRIP = 4  # tiles
_ROWS = 2048  # that are quantised at a time: bounds temporary memory


def quantise(weight: Tensor, group_size: int, symmetric: bool) -> Codes:
    """Round to int4, with the scale of each group chosen for the least squared error.

    weight      [n, k] float, k a multiple of group_size
    Raises      ValueError if a value is not finite
    """
    pieces = [_quantise(rows.float(), group_size, symmetric) for rows in weight.split(_ROWS)]
    zeros = None if symmetric else torch.cat([piece.zeros for piece in pieces if piece.zeros is not None])
    return Codes(
        torch.cat([piece.codes for piece in pieces]), torch.cat([piece.scales for piece in pieces]), zeros
    )


def _quantise(weight: Tensor, group_size: int, symmetric: bool) -> Codes:
    n, k = weight.shape
    w = weight.view(n, k // group_size, group_size)
    low, high = w.amin(-1), w.amax(-1)
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise ValueError("a value is not finite")
    if symmetric:
        # The code -8 goes to the side of the greatest magnitude; the scale may be negative for that.
        sign = torch.where(high > -low, -1.0, 1.0)
        reach, bits, tries = torch.maximum(high, -low) / 8.6, 5, 10
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        sign = torch.ones_like(low)
        reach, bits, tries = (high - low) / 17, 4, 5
    reach = reach.clamp(min=1e-30)
    zero = torch.full_like(low, 8)
    best = torch.full_like(low, torch.inf)
    scales, zeros = torch.empty_like(low), torch.empty_like(low)
    codes = torch.empty_like(w)
    for step in range(tries):
        scale = _few_bits(reach, bits, step) * sign
        if not symmetric:
            zero = (-low / scale).round_().clamp_(0, 15)
        q = (w / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
        error = (q - zero[..., None]).mul_(scale[..., None]).sub_(w).square_().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        zeros = torch.where(better, zero, zeros)
        codes = torch.where(better[..., None], q, codes)
    return Codes(codes.to(torch.uint8).view(n, k), scales, None if symmetric else zeros.to(torch.uint8))


def _few_bits(x: Tensor, bits: int, step: int) -> Tensor:
    """The `step`-th number with `bits` significant bits that is not below x > 0, counted from 0."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    half = 1 << (bits - 1)
    place = (mantissa * (2 * half)).ceil().int() - half + step
    return torch.ldexp(((place % half) + half).float() / (2 * half), exponent + place // half)


def _to_strips(tiles: Tensor) -> Tensor:
    """[tiles along n, stretches of k, …] → flat, strip after strip of four tiles, stretch by stretch."""
    return torch.cat([strip.transpose(0, 1).reshape(-1) for strip in tiles.split(STRIP)])


def _from_strips(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_to_strips` for tiles of this shape."""
    tiles, stretches, *inner = shape
    widths = [min(STRIP, tiles - first) for first in range(0, tiles, STRIP)]
    each = flat.numel() // tiles
    strips = flat.split([width * each for width in widths])
    return torch.cat([s.view(stretches, w, *inner).transpose(0, 1) for s, w in zip(strips, widths)])


def pack_codes(codes: Tensor) -> Tensor:
    """codes [n, k] uint8 → words, flat int32; rows beyond n are zero."""
    n, k = codes.shape
    codes = functional.pad(codes, (0, 0, 0, -n % TILE))
    # block, operand n, output // 2, output % 2, depth, operand k, input // 8, input % 8 // 2, input % 2
    view = codes.view(-1, 4, 8, 2, k // TILE, 4, 2, 4, 2)
    lanes = view.permute(0, 4, 1, 2, 7, 5, 8, 6, 3).contiguous()
    nibbles = lanes[..., 0] | lanes[..., 1] << 4
    return _to_strips(nibbles.view(-1, k // TILE, 4, 32, 4, 4).view(torch.int32).squeeze(-1))


def unpack_codes(words: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `pack_codes`: [n, k] uint8."""
    blocks, depth = -(-n // TILE), k // TILE
    nibbles = (
        _from_strips(words, (blocks, depth, 4, 32, 4))
        .contiguous()
        .view(torch.uint8)
        .view(blocks, depth, 4, 8, 4, 4, 2, 2)
    )
    lanes = torch.stack([nibbles & 15, nibbles >> 4], dim=-1)
    return lanes.permute(0, 2, 3, 8, 1, 5, 7, 4, 6).reshape(blocks * TILE, depth * TILE)[:n]


def scale_dtype(scales: Tensor) -> torch.dtype | None:
    """bf16 or fp16, whichever holds the scales exactly, or None."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return dtype
    return None


def pack_scales(scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scales [n, groups] and zeros → flat int16, or int32 with zero points."""
    n, groups = scales.shape
    bits = scales.to(dtype).contiguous().view(torch.int16)
    if zeros is not None:
        bits = (bits.to(torch.int32) & 0xFFFF) | zeros.to(torch.int32) << 16
    return _to_strips(functional.pad(bits, (0, 0, 0, -n % TILE)).view(-1, TILE, groups).transpose(1, 2))


def unpack_scales(packed: Tensor, n: int, groups: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The inverse of `pack_scales`: scales [n, groups] fp32, and zeros [n, groups] uint8 or None."""
    flat = _from_strips(packed, (-(-n // TILE), groups, TILE)).transpose(1, 2).reshape(-1, groups)[:n]
    if flat.dtype == torch.int16:
        return flat.contiguous().view(dtype).float(), None
    return flat.to(torch.int16).view(dtype).float(), (flat >> 16).to(torch.uint8)
