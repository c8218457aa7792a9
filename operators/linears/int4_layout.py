"""int4 weights for tensor cores: quantising, packing and unpacking them, in torch operations on any device.

A weight [n, k] is cut into tiles of 64 outputs × 64 inputs, and a tile into 4 × 4 operands of the instruction
mma.m16n8k16, of 16 outputs × 16 inputs each. Each of the 32 lanes of a warp holds 8 codes of an operand, in one 32-bit
word. The four words of a lane along k are stored together, as one 16-byte piece:

    words   [k / 64, tiles of a strip, 4 operands along n, 32 lanes, 4 operands along k] int32, strip after strip
    lane    4 · (output // 2) + input % 8 // 2                    output, input: within the operand
    nibble  output % 2 + 2 · (input // 8) + 4 · (input % 2)       from the lowest bits of the word up

    scales  [groups, tiles of a strip, 64] int16, the bits of a bf16 or fp16, strip after strip; or int32,
            zero point << 16 | scale

A strip is four tiles along n, 256 outputs. The last strip may have fewer tiles, and its last tile is padded. The value
of a code is scale · (code - zero point); without zero points, 8 is subtracted.

Scales that `quantise` chooses have few significant bits: 5 without zero points, since a code minus 8 has up to 3, and 4
with zero points, since a code minus a zero point has up to 4. The product has up to 8, as many as a bf16. So every
weight is exact in bf16 and in fp16, and all kernels, also those that round weights to 16 bits, compute with the same
numbers. The coarse scales cost little accuracy: the error is flat around its minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ktinject.checkpoints.formats.base import Codes

TILE = 64
STRIP = 4  # tiles
_ROWS = 2048  # rows that are quantised at a time, which limits temporary memory


def quantise(weight: Tensor, group_size: int, symmetric: bool) -> Codes:
    """Round to int4, with the scale of each group chosen for the least squared error.

    weight      [n, k] float, k a multiple of group_size
    group_size  inputs that share a scale
    symmetric   False: each group also has a zero point
    Returns     codes [n, k] uint8, 0 to 15; scales [n, k / group_size] fp32; zero points, likewise uint8, or None
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
        # Codes minus 8 reach from -8 to 7. The value of greatest magnitude gets -8, if need be by a negative scale.
        ones = torch.ones_like(low)
        sign = torch.where(high > -low, -ones, ones)
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
    """The smallest number with `bits` significant bits that is at least x > 0, and then `step` such numbers further."""
    mantissa, exponent = torch.frexp(x)  # mantissa in [0.5, 1)
    half = 1 << (bits - 1)
    place = (mantissa * (2 * half)).ceil().int() - half + step
    return torch.ldexp(((place % half) + half).float() / (2 * half), exponent + place // half)


def _to_strips(tiles: Tensor) -> Tensor:
    """[tiles along n, parts along k, …] → flat: strip after strip, within a strip part after part along k."""
    return torch.cat([strip.transpose(0, 1).reshape(-1) for strip in tiles.split(STRIP)])


def _from_strips(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_to_strips`; `shape` is that of the tiles."""
    tiles, stretches, *inner = shape
    widths = [min(STRIP, tiles - first) for first in range(0, tiles, STRIP)]
    each = flat.numel() // tiles
    strips = flat.split([width * each for width in widths])
    return torch.cat([s.view(stretches, w, *inner).transpose(0, 1) for s, w in zip(strips, widths)])


def pack_codes(codes: Tensor) -> Tensor:
    """codes [n, k] uint8 → the words of the layout above, flat int32; padding rows are zero."""
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
    """bf16 or fp16: the first of the two that holds all scales exactly; None if neither does."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return dtype
    return None


def pack_scales(scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
    """scales [n, groups] and zero points [n, groups] or None → the scales of the layout above, flat.

    dtype    of the stored scales, bf16 or fp16
    Returns  int16, or int32 with zero points
    """
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
