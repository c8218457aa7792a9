"""K-quants and Q8_0 made from values, plainly: what GGUF files hold and, but for Q8_0, no Python package makes.

`quantised` rounds to the nearest code with scales from each run's extremes. The gguf package reads what it makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "q8_0")
_WITH_MINIMA = {"q2_k": (3, 15, 16), "q4_k": (15, 63, 32), "q5_k": (31, 63, 32)}  # largest q, largest s, run
_SIGNED = {"q3_k": (4, 31, 16), "q6_k": (32, 127, 16)}  # -q is the lowest, largest s, run
INPUTS = {"q8_0": 32}  # of a block, where it is not 256
_BOOK = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_TWO_BITS = torch.arange(0, 8, 2)[:, None]


def quantised(values: Tensor, kind: str) -> Tensor:
    """values [..., k] → the rows of a GGUF file, uint8 [..., bytes]; k is a multiple of 256, for q8_0 of 32."""
    blocks = values.float().reshape(-1, INPUTS.get(kind, 256))
    rows = _quantised(blocks, kind)
    return rows.reshape(*values.shape[:-1], -1).contiguous()


def _quantised(x: Tensor, kind: str) -> Tensor:
    if kind == "q8_0":
        d = (x.abs().amax(-1, keepdim=True) / 127).half()
        return _bytes(d, _nearest(x, d.float()).clamp(-128, 127).to(torch.int8).view(torch.uint8))
    if kind in _WITH_MINIMA:
        most, largest, run = _WITH_MINIMA[kind]
        runs = x.view(len(x), -1, run)
        low, high = runs.amin(-1).clamp(max=0), runs.amax(-1).clamp(min=0)
        d, s = _scales((high - low) / most, largest)
        m, t = _scales(-low, largest)
        codes = _nearest(runs + (m * t)[..., None], (d * s)[..., None]).clamp(0, most)
        return _PACK[kind](codes.flatten(1).int(), s.int(), t.int(), d.half(), m.half())
    if kind in _SIGNED:
        lowest, largest, run = _SIGNED[kind]
        runs = x.view(len(x), -1, run)
        d, s = _scales(runs.abs().amax(-1) / (lowest - 0.5), largest)
        codes = _nearest(runs, (d * s)[..., None]).clamp(-lowest, lowest - 1) + lowest
    else:
        runs = x.view(len(x), -1, 32)
        d, s = _scales(runs.abs().amax(-1) / 120, 31)
        scaled = runs / (d * s).clamp(min=1e-30)[..., None]
        codes = (scaled[..., None] - _BOOK).abs().argmin(-1)
    return _PACK[kind](codes.flatten(1).int(), s.int(), d.half())


def _scales(wanted: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """One fp16 number a block, and a whole one a run, whose products are what is wanted."""
    d = (wanted.amax(-1, keepdim=True) / largest).half().float()
    return d, _nearest(wanted, d).clamp(0, largest)


def _nearest(x: Tensor, step: Tensor) -> Tensor:
    return torch.where(step > 0, x / step.clamp(min=1e-30), 0).round()


def _bytes(*parts: Tensor) -> Tensor:
    """Side by side: bytes, and fp16 numbers."""
    return torch.cat(
        [p.contiguous().view(torch.uint8) if p.dtype == torch.half else p.byte() for p in parts], -1
    )


def _nibbles(codes: Tensor, run: int) -> Tensor:
    first, second = (codes & 15).view(len(codes), -1, 2, run).unbind(2)
    return (first | second << 4).flatten(1)


def _twos(codes: Tensor) -> Tensor:
    return ((codes & 3).view(len(codes), -1, 4, 32) << _TWO_BITS).sum(2).flatten(1)


def _ones(bits: Tensor) -> Tensor:
    """Bit r of byte i is that of input i of run r of 32."""
    return (bits.view(len(bits), 8, 32) << torch.arange(8)[:, None]).sum(1)


def _six_bits(s: Tensor, t: Tensor) -> Tensor:
    """Eight s and t in twelve bytes."""
    a, b = s[:, :4] | s[:, 4:] >> 4 << 6, t[:, :4] | t[:, 4:] >> 4 << 6
    return torch.cat((a, b, s[:, 4:] & 15 | (t[:, 4:] & 15) << 4), -1)


def _q3_scales(s: Tensor) -> Tensor:
    s = s + 32
    low = s & 15
    high = ((s >> 4).view(len(s), 4, 4) << _TWO_BITS).sum(1)
    return torch.cat((low[:, :8] | low[:, 8:] << 4, high), -1)


def _iq4(q: Tensor, s: Tensor, d: Tensor) -> Tensor:
    s = s + 32
    high = ((s >> 4) << torch.arange(0, 16, 2)).sum(-1, keepdim=True)
    low = s[:, ::2] & 15 | (s[:, 1::2] & 15) << 4
    return _bytes(d, high & 255, high >> 8, low, _nibbles(q, 16))


_PACK = {
    "q2_k": lambda q, s, t, d, m: _bytes(s | t << 4, _twos(q), d, m),
    "q3_k": lambda q, s, d: _bytes(_ones(q >> 2), _twos(q), _q3_scales(s), d),
    "q4_k": lambda q, s, t, d, m: _bytes(d, m, _six_bits(s, t), _nibbles(q, 32)),
    "q5_k": lambda q, s, t, d, m: _bytes(d, m, _six_bits(s, t), _ones(q >> 4), _nibbles(q, 32)),
    "q6_k": lambda q, s, d: _bytes(_nibbles(q, 64), _twos(q >> 4), s, d),
    "iq4_xs": _iq4,
}
