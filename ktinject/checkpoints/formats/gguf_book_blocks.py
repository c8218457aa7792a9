"""GGUF's blocks whose codes are looked up: the IQ types, MXFP4, and the ternary TQ types.

    type     inputs  bytes of a block, in their order                       a value, of d and what it looks up
    IQ4_NL   32      d 2, codes 16                                          d · v
    IQ4_XS   256     d 2, upper bits of s 2, lower 4, codes 128             d · (s - 32) · v, s of 32 inputs
    IQ3_XXS  256     d 2, numbers 64, 8 words: signs 28 bits, s 4           d · (s + 1/2) / 2 · v, s of 32
    IQ3_S    256     d 2, numbers 64, ninth bits 8, signs 32, s 4           d · (2 s + 1) · v, s of 32
    IQ2_XXS  256     d 2, 8 of: numbers 4, a word: signs 28 bits, s 4       d · (s + 1/2) / 4 · v, s of 32
    IQ2_XS   256     d 2, 32 of: number 9 bits, signs 7; s 8                d · (s + 1/2) / 4 · v, s of 16
    IQ2_S    256     d 2, numbers 32, signs 32, bits 9 and 10 8, s 8        d · (s + 1/2) / 4 · v, s of 16
    IQ1_S    256     d 2, numbers 32, 8 of: upper bits 12, s 3, e 1         d · (2 s + 1) · (v ± 1/8), s and e of 32
    IQ1_M    256     numbers 32, 32 of: upper bits 3, e 1; s and d in 8     d · (2 s + 1) · (v ± 1/8), s of 16, e of 8
    MXFP4    32      e 1, codes 16                                          2^(e - 128) · v, v twice e2m1's
    TQ2_0    256     codes of two bits 64, d 2                              d · (q - 1)
    TQ1_0    256     fives of ternary digits 48, fours 4, d 2               d · (q - 1)

The IQ types find v, 4 or 8 values at a time, by a number in a code book (gguf_books.py); MXFP4's are the 16 values of
the OCP's e2m1. A digit of TQ1_0's byte b is the integer part of 3 · f, f the fraction of b · 3^i / 256.

Source: ggml's block_* structures. Products are taken in the order of ggml's own dequantisation, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.formats import gguf_books

# Twice the values of e2m1 (OCP Microscaling Formats 1.0), and so half the power of two.
_E2M1 = torch.tensor(
    [0.0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.float32, device="cpu"
)
_FOUR = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu")
_EIGHT = torch.arange(8, dtype=torch.uint8, device="cpu")


def _words(each: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as little-endian integers; copied, since those of a single block may lie at any address."""
    return each.clone(memory_format=torch.contiguous_format).view(dtype)


def _halves(each: Tensor) -> Tensor:
    """[n, m] bytes → [n, 2 m] of 4 bits: of every byte the lower, then the upper ones."""
    return torch.stack((each & 15, each >> 4), -1).flatten(-2)


def _nibbles(each: Tensor) -> Tensor:
    """[n, 16 m] bytes → [n, 32 m] codes: of every 16 bytes first the lower halves, then the upper ones."""
    runs = each.unflatten(-1, (-1, 16))
    return torch.cat((runs & 15, runs >> 4), -1).flatten(-2)


def _look_up(kind: str, numbers: Tensor) -> Tensor:
    """[n, m] integers → [n, m, 4 or 8]."""
    return gguf_books.book(kind)[numbers.int()]


def _signed(scale: Tensor, values: Tensor, signs: Tensor) -> Tensor:
    """[n, groups] · [n, m, v] · [n, 256 / 8, 8]."""
    groups = scale.shape[-1]
    return (scale[..., None] * values.reshape(len(values), groups, -1)).flatten(1) * signs.flatten(1)


def iq4_nl(each: Tensor, d: Tensor) -> Tensor:
    return d * gguf_books.iq4()[_nibbles(each[:, 2:]).int()]


def iq4_xs(each: Tensor, d: Tensor) -> Tensor:
    upper = each[:, 2:4, None] >> _FOUR & 3
    s = (_halves(each[:, 4:8]) | upper.flatten(1) << 4).float() - 32
    values = gguf_books.iq4()[_nibbles(each[:, 8:]).int()].unflatten(1, (8, 32))
    return ((d * s)[..., None] * values).flatten(1)


def _seven_by_four(words: Tensor) -> Tensor:
    """[n, m] words → [n, 4 m, 8] signs, of seven bits each."""
    places = words[..., None] >> torch.arange(0, 28, 7, dtype=torch.int32, device="cpu") & 127
    return gguf_books.even_signs()[places.flatten(1)]


def _upper_four(words: Tensor) -> Tensor:
    return (words >> 28 & 15).float()


def iq3_xxs(each: Tensor, d: Tensor) -> Tensor:
    words = _words(each[:, 66:], torch.int32)
    scale = d * (_upper_four(words) + 0.5) * 0.5
    return _signed(scale, _look_up("IQ3_XXS", each[:, 2:66]), _seven_by_four(words))


def iq3_s(each: Tensor, d: Tensor) -> Tensor:
    ninth = (each[:, 66:74, None] >> _EIGHT & 1).flatten(1)
    numbers = each[:, 2:66].int() | ninth.int() << 8
    scale = d * (2 * _halves(each[:, 106:]).float() + 1)
    return _signed(scale, _look_up("IQ3_S", numbers), gguf_books.signs()[each[:, 74:106].int()])


def iq2_xxs(each: Tensor, d: Tensor) -> Tensor:
    runs = each[:, 2:].unflatten(1, (8, 8))
    words = _words(runs[..., 4:], torch.int32).flatten(1)
    scale = d * (_upper_four(words) + 0.5) * 0.25
    return _signed(scale, _look_up("IQ2_XXS", runs[..., :4].flatten(1)), _seven_by_four(words))


def iq2_xs(each: Tensor, d: Tensor) -> Tensor:
    both = _words(each[:, 2:66], torch.int16).int()
    scale = d * (_halves(each[:, 66:]).float() + 0.5) * 0.25
    return _signed(scale, _look_up("IQ2_XS", both & 511), gguf_books.even_signs()[both >> 9 & 127])


def iq2_s(each: Tensor, d: Tensor) -> Tensor:
    upper = (each[:, 66:74, None] >> _FOUR & 3).flatten(1)
    numbers = each[:, 2:34].int() | upper.int() << 8
    scale = d * (_halves(each[:, 74:]).float() + 0.5) * 0.25
    return _signed(scale, _look_up("IQ2_S", numbers), gguf_books.signs()[each[:, 34:66].int()])


def iq1_s(each: Tensor, d: Tensor) -> Tensor:
    words = _words(each[:, 34:], torch.int16).int()
    upper = words[..., None] >> torch.arange(0, 12, 3, dtype=torch.int32, device="cpu") & 7
    values = _look_up("IQ1_S", each[:, 2:34].int() | upper.flatten(1) << 8).unflatten(1, (8, 4))
    shift = 0.125 - 0.25 * (words >> 15 & 1).float()
    scale = d * (2 * (words >> 12 & 7).float() + 1)
    return (scale[..., None, None] * (values + shift[..., None, None])).flatten(1)


def iq1_m_scale(each: Tensor) -> Tensor:
    """[n, 56] → [n, 1] fp16: d is in the upper four bits of four words, the lowest first."""
    words = _words(each[:, 48:], torch.int16).int() >> 12 & 15
    number = (words << torch.arange(0, 16, 4, dtype=torch.int32, device="cpu")).sum(-1, keepdim=True)
    return number.to(torch.int16).view(torch.float16)


def iq1_m(each: Tensor, d: Tensor) -> Tensor:
    four = _halves(each[:, 32:48])
    values = _look_up("IQ1_S", each[:, :32].int() | (four & 7).int() << 8).unflatten(1, (16, 2))
    shift = 0.125 - 0.25 * (four >> 3).float().unflatten(1, (16, 2))
    words = _words(each[:, 48:], torch.int16).int()
    s = (words[..., None] >> torch.arange(0, 12, 3, dtype=torch.int32, device="cpu") & 7).flatten(1).float()
    return ((d * (2 * s + 1))[..., None, None] * (values + shift[..., None])).flatten(1)


def mxfp4(each: Tensor) -> Tensor:
    e = each[:, :1].int()
    # Exponents 0 and 1 are subnormal in fp32 once halved.
    steps = torch.where(e < 2, 0x00200000 << e, (e - 1) << 23).view(torch.float32)
    return steps * _E2M1[_nibbles(each[:, 1:]).int()]


def tq2_0(each: Tensor, d: Tensor) -> Tensor:
    codes = each[:, :64].unflatten(1, (2, 1, 32)) >> _FOUR[:, None] & 3
    return d * (codes.flatten(1).float() - 1)


def _digits(each: Tensor, run: int, count: int) -> Tensor:
    """Of every `run` bytes first the first digits, then the second ones, and so on."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device="cpu")[:, None]
    fractions = each.unflatten(1, (-1, 1, run)) * powers  # of 256: what is above wraps around
    return (fractions.short() * 3 >> 8).flatten(1)


def tq1_0(each: Tensor, d: Tensor) -> Tensor:
    digits = (_digits(each[:, :32], 32, 5), _digits(each[:, 32:48], 16, 5), _digits(each[:, 48:52], 4, 4))
    return d * (torch.cat(digits, 1).float() - 1)
