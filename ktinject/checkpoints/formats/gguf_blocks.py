"""GGUF's quantised blocks, from their bytes to values.

    type   inputs  bytes of a block, in their order                     value of code q
    Q4_0   32      d 2, codes 16                                        d · (q - 8)
    Q4_1   32      d 2, m 2, codes 16                                   d · q + m
    Q5_0   32      d 2, fifth bits 4, codes 16                          d · (q - 16)
    Q5_1   32      d 2, m 2, fifth bits 4, codes 16                     d · q + m
    Q8_0   32      d 2, codes 32 (signed)                               d · q
    Q2_K   256     s and t of 16 runs of 16 in 16, codes 64, d 2, m 2   d · s · q - m · t
    Q3_K   256     third bits 32, codes 64, s of 16 runs in 12, d 2     d · (s - 32) · (q - 4)
    Q4_K   256     d 2, m 2, s and t of 8 runs of 32 in 12, codes 128   d · s · q - m · t
    Q5_K   256     d 2, m 2, s and t in 12, fifth bits 32, codes 128    d · s · q - m · t
    Q6_K   256     codes 128, upper bits 64, s of 16 runs of 16, d 2    d · s · (q - 32)

d and m are fp16; s and t have 6 bits, in Q2_K 4, in Q6_K s is a signed byte. Of a byte of codes, the upper half is of
the input 16 after the lower half's in blocks of 32, 32 after it in Q4_K and Q5_K, and 64 in Q6_K. In Q2_K and Q3_K
two bits each are of inputs 32 apart. The types whose codes are looked up are in gguf_book_blocks.py.

Blocks are decoded some at a time, so that what is made on the way stays small beside the values.

Source: ggml's block_* structures. Products are taken in the order of ggml's own dequantisation, in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats import gguf_book_blocks, int_packing
from ktinject.checkpoints.formats.base import (
    Format,
    GgufRows,
    SourceFormat,
    Stored,
    check_finite,
    place_of,
    refused,
)
from ktinject.checkpoints.reader import Reader

# Inputs and bytes of a block, and where its fp16 numbers begin. IQ1_M's lies in four parts, MXFP4 has none.
_LAYOUT: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)), "Q2_K": (256, 84, (80, 82)), "Q3_K": (256, 110, (108,)), "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)), "IQ4_NL": (32, 18, (0,)), "IQ4_XS": (256, 136, (0,)),
    "IQ3_XXS": (256, 98, (0,)), "IQ3_S": (256, 110, (0,)), "IQ2_XXS": (256, 66, (0,)), "IQ2_XS": (256, 74, (0,)),
    "IQ2_S": (256, 82, (0,)), "IQ1_S": (256, 50, (0,)), "IQ1_M": (256, 56, ()), "MXFP4": (32, 17, ()),
    "TQ2_0": (256, 66, (64,)), "TQ1_0": (256, 54, (52,)),
}  # fmt: skip
TYPES = tuple(_LAYOUT)
_KEPT = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q8_0")  # operators take them as they are
_GROUP = 32  # inputs in a block of Q4_0 and Q8_0
_MOST_EXPONENT = 252  # of MXFP4: 6 · 2^125 is the largest that bf16 and fp32 hold; 255 stands for NaN
_DRAWN_BLOCKS = 9_973  # then they repeat: to draw all takes longer than to pack them
_AT_ONCE = 1 << 18  # values; their intermediates take some 8 MB, which the cache may hold


def random_rows(kind: str, shape: Sequence[int]) -> GgufRows:
    """A weight [..., n, k] of random codes and small scales.

    kind    the name of a type that operators take as it is: "q4_k"
    """
    inputs, size, halves = _LAYOUT[kind.upper()]
    count = math.prod(shape) // inputs
    drawn = torch.randint(0, 256, (min(count, _DRAWN_BLOCKS), size), dtype=torch.uint8, device="cpu")
    for half in halves:
        drawn[:, half : half + 2] = torch.tensor([1e-4], dtype=torch.float16, device="cpu").view(torch.uint8)
    blocks = drawn.repeat(-(-count // len(drawn)), 1)[:count]
    return GgufRows(kind, blocks.view(*shape[:-1], -1), inputs, size)


class GgufBlocks(SourceFormat):
    title = "most types of GGUF"

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        info = reader.tensors.get(key)
        return (key,) if info is not None and info.dtype in TYPES else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        dtype, is_stack = reader.tensors[key].dtype, len(reader.tensors[key].shape) > 2
        # MXFP4 of gpt-oss's own checkpoints lies in other tensors, in another order.
        if dtype == "MXFP4":
            return Format("gguf_mxfp4", encoding="mxfp4", exact_in=("bf16", "mxfp4"))
        if dtype == "Q4_0":
            return Format("q4_0", group_size=_GROUP, encoding="int4", scales="F16", by_slice=is_stack)
        if dtype not in _KEPT:
            return Format(dtype.lower())
        group = _GROUP if dtype == "Q8_0" else 0
        return Format(dtype.lower(), group_size=group, encoding=dtype.lower(), by_slice=is_stack)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """fp32, as ggml dequantises them."""
        return values(reader.tensors[key].dtype, _blocks(reader, key, index))

    def stored(self, reader: Reader, key: str, form: Format) -> Stored:
        return self._stored(reader, key, form, None)

    def stored_slice(self, reader: Reader, key: str, form: Format, index: int) -> Stored:
        return self._stored(reader, key, form, index)

    @staticmethod
    def _stored(reader: Reader, key: str, form: Format, index: int | None) -> Stored:
        kind = reader.tensors[key].dtype
        if kind != "Q4_0":
            inputs, size, _ = _LAYOUT[kind]
            return GgufRows(form.name, _blocks(reader, key, index), inputs, size)
        return int_packing.from_q4_0(_blocks(reader, key, index), reader.tensors[key].shape[-1])


def _blocks(reader: Reader, key: str, index: int | None = None) -> Tensor:
    """The bytes of the blocks, their scales checked."""
    kind, rows = reader.tensors[key].dtype, reader.read(key, index)
    _, size, _ = _LAYOUT[kind]
    each = rows.unflatten(-1, (-1, size))
    if kind != "MXFP4":
        check_finite(key, _numbers(kind, each.flatten(0, -2)).unflatten(0, each.shape[:-1]))
    elif len(wrong := (each[..., 0] > _MOST_EXPONENT).flatten().nonzero()):
        position = place_of(each[..., 0], int(wrong[0]))
        text = f"scale {int(each[*position, 0])} at {position}; at most {_MOST_EXPONENT} is allowed"
        raise refused(reader, key, f"{text}. {DOWNLOAD_AGAIN}")
    return rows


def _numbers(kind: str, each: Tensor) -> Tensor:
    """each [blocks, bytes] uint8 → [blocks, fp16 numbers of a block], as they are."""
    if kind == "IQ1_M":
        return gguf_book_blocks.iq1_m_scale(each)
    _, _, places = _LAYOUT[kind]
    return torch.cat([each[:, place : place + 2].contiguous().view(torch.float16) for place in places], -1)


def values(kind: str, rows: Tensor) -> Tensor:
    """rows [..., bytes] uint8 → [..., k] fp32."""
    inputs, size, _ = _LAYOUT[kind]
    each = rows.reshape(-1, size)
    found = torch.empty(len(each), inputs, dtype=torch.float32, device="cpu")
    decoder, step = _DECODERS[kind], _AT_ONCE // inputs
    for start in range(0, len(each), step):
        some = each[start : start + step]
        numbers = () if kind == "MXFP4" else _numbers(kind, some).float().split(1, -1)
        found[start : start + step] = decoder(some, *numbers)
    return found.view(*rows.shape[:-1], -1)


_TWO_BITS = torch.arange(0, 8, 2, dtype=torch.uint8, device="cpu")[:, None]


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """[..., n] bytes → [..., 2 n] codes: of every `run` bytes first the lower halves, then the upper ones."""
    each = codes.unflatten(-1, (-1, run))
    return torch.cat((each & 15, each >> 4), -1).flatten(-2)


def _q5(each: Tensor, at: int) -> Tensor:
    """Codes of 5 bits whose upper ones, as bits in the order of the inputs, begin at byte `at`."""
    fifth = each[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return _nibbles(each[..., at + 4 :], 16) | fifth.flatten(-2) << 4


def _q4_0(each: Tensor, d: Tensor) -> Tensor:
    return d * (_nibbles(each[..., 2:], 16).float() - 8)


def _q4_1(each: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return d * _nibbles(each[..., 4:], 16).float() + m


def _q5_0(each: Tensor, d: Tensor) -> Tensor:
    return d * (_q5(each, 2).float() - 16)


def _q5_1(each: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return d * _q5(each, 4).float() + m


def _q8_0(each: Tensor, d: Tensor) -> Tensor:
    return d * each[..., 2:].contiguous().view(torch.int8).float()


def _runs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 12] bytes → s and t of eight runs: the first four in bytes 0 to 7, the others in what is left."""
    a, b, c = packed.unflatten(-1, (3, 4)).unbind(-2)
    s = torch.cat((a & 63, c & 15 | a >> 6 << 4), -1)
    t = torch.cat((b & 63, c >> 4 | b >> 6 << 4), -1)
    return s.float(), t.float()


def _k(each: Tensor, codes: Tensor, d: Tensor, m: Tensor) -> Tensor:
    s, t = _runs(each[..., 4:16])
    runs = codes.float().unflatten(-1, (8, 32))
    return ((d * s)[..., None] * runs - (m * t)[..., None]).flatten(-2)


def _q4_k(each: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return _k(each, _nibbles(each[..., 16:], 32), d, m)


def _q5_k(each: Tensor, d: Tensor, m: Tensor) -> Tensor:
    # Bit r of byte i belongs to input i of run r.
    fifth = each[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8, device="cpu")[:, None] & 1
    return _k(each, _nibbles(each[..., 48:], 32) | fifth.flatten(-2) << 4, d, m)


def _q2_k(each: Tensor, d: Tensor, m: Tensor) -> Tensor:
    s, t = each[:, :16, None] & 15, each[:, :16, None] >> 4
    codes = _twos(each[:, 16:80]).float().unflatten(-1, (16, 16))
    return (d[..., None] * s.float() * codes - m[..., None] * t.float()).flatten(-2)


def _q3_k(each: Tensor, d: Tensor) -> Tensor:
    lower, upper = each[:, 96:104], each[:, 104:108]
    s = torch.cat((lower & 15, lower >> 4), -1) | (upper[:, None] >> _TWO_BITS & 3).flatten(1) << 4
    third = each[:, None, :32] >> torch.arange(8, dtype=torch.uint8, device="cpu")[:, None] & 1
    codes = (_twos(each[:, 32:96]) | third.flatten(-2) << 2).float().sub_(4).unflatten(-1, (16, 16))
    return ((d * (s.float() - 32))[..., None] * codes).flatten(-2)


def _twos(codes: Tensor) -> Tensor:
    """[n, 64] bytes → [n, 256] of two bits: of every 32 bytes first the lowest two, then the next, and so on."""
    return (codes.unflatten(-1, (-1, 1, 32)) >> _TWO_BITS & 3).flatten(-3)


def _q6_k(each: Tensor, d: Tensor) -> Tensor:
    # Two halves of 128 inputs; bits 2 r and 2 r + 1 of byte i belong to input i of run r of 32.
    codes = _nibbles(each[..., :128], 64) | _twos(each[..., 128:192]) << 4
    s = each[..., 192:208].contiguous().view(torch.int8).float()
    runs = codes.float().sub_(32).unflatten(-1, (16, 16))
    return ((d * s)[..., None] * runs).flatten(-2)


_DECODERS: dict[str, Callable[..., Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    **{
        kind: getattr(gguf_book_blocks, kind.lower())
        for kind in ("IQ4_NL", "IQ4_XS", "IQ3_XXS", "IQ3_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M", "MXFP4",
                     "TQ2_0", "TQ1_0")
    },
}  # fmt: skip
