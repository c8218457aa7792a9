"""GGUF's quantised blocks, from their bytes to values.

    type   inputs  bytes of a block, in their order                     value of code q
    Q4_0   32      d 2, codes 16                                        d · (q - 8)
    Q4_1   32      d 2, m 2, codes 16                                   d · q + m
    Q5_0   32      d 2, fifth bits 4, codes 16                          d · (q - 16)
    Q5_1   32      d 2, m 2, fifth bits 4, codes 16                     d · q + m
    Q8_0   32      d 2, codes 32 (signed)                               d · q
    Q4_K   256     d 2, m 2, s and t of 8 runs of 32 in 12, codes 128   d · s · q - m · t
    Q5_K   256     d 2, m 2, s and t in 12, fifth bits 32, codes 128    d · s · q - m · t
    Q6_K   256     codes 128, upper bits 64, s of 16 runs of 16, d 2    d · s · (q - 32)

d and m are fp16; s and t have 6 bits, in Q6_K s is a signed byte. Of a byte of codes, the upper half is of the input
16 after the lower half's in blocks of 32, 32 after it in Q4_K and Q5_K, and 64 in Q6_K.

Source: ggml's block_* structures. Products are taken in the order of ggml's own dequantisation, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ktinject.checkpoints.formats import int4_packing
from ktinject.checkpoints.formats.base import Codes, Format, SourceFormat, check_finite
from ktinject.checkpoints.reader import Reader

# Bytes of a block, and where its fp16 numbers begin.
_LAYOUT = {
    "Q4_0": (18, (0,)), "Q4_1": (20, (0, 2)), "Q5_0": (22, (0,)), "Q5_1": (24, (0, 2)), "Q8_0": (34, (0,)),
    "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,)),
}  # fmt: skip
TYPES = tuple(_LAYOUT)
_Q4_0_GROUP = 32  # inputs in a block


class GgufBlocks(SourceFormat):
    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        info = reader.tensors.get(key)
        return (key,) if info is not None and info.dtype in TYPES else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        dtype = reader.tensors[key].dtype
        return Format(dtype.lower(), group_size=_Q4_0_GROUP if dtype == "Q4_0" else 0)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """fp32, as ggml dequantises them."""
        return values(form.name.upper(), _blocks(reader, key, form, index))

    def stored(self, reader: Reader, key: str, form: Format) -> Codes:
        assert form.name == "q4_0", "the one type that operators take as it is"
        return int4_packing.from_q4_0(_blocks(reader, key, form), reader.tensors[key].shape[-1])


def _blocks(reader: Reader, key: str, form: Format, index: int | None = None) -> Tensor:
    """The bytes of the blocks, their fp16 numbers checked."""
    rows = reader.read(key, index)
    check_finite(key, scales(form.name.upper(), rows))
    return rows


def scales(kind: str, rows: Tensor) -> Tensor:
    """rows [..., bytes] uint8 → [..., blocks, fp16 numbers of a block], as they are."""
    size, places = _LAYOUT[kind]
    each = rows.unflatten(-1, (-1, size))
    found = [each[..., place : place + 2].contiguous().view(torch.float16) for place in places]
    return torch.cat(found, -1)


def values(kind: str, rows: Tensor) -> Tensor:
    """rows [..., bytes] uint8 → [..., k] fp32."""
    size, _ = _LAYOUT[kind]
    numbers = scales(kind, rows).float().unbind(-1)
    return _DECODERS[kind](
        rows.unflatten(-1, (-1, size)), *(number[..., None] for number in numbers)
    ).flatten(-2)


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """[..., n] bytes → [..., 2 n] codes: of every `run` bytes first the lower halves, then the upper ones."""
    each = codes.unflatten(-1, (-1, run))
    return torch.cat((each & 15, each >> 4), -1).flatten(-2)


def _q5(each: Tensor, at: int) -> Tensor:
    """Codes of 5 bits whose upper ones, as bits in the order of the inputs, begin at byte `at`."""
    fifth = each[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
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
    fifth = each[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return _k(each, _nibbles(each[..., 48:], 32) | fifth.flatten(-2) << 4, d, m)


def _q6_k(each: Tensor, d: Tensor) -> Tensor:
    # Two halves of 128 inputs; bits 2 r and 2 r + 1 of byte i belong to input i of run r of 32.
    upper = (
        each[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    )
    codes = _nibbles(each[..., :128], 64) | upper.flatten(-3) << 4
    s = each[..., 192:208].contiguous().view(torch.int8).float()
    runs = codes.float().sub_(32).unflatten(-1, (16, 16))
    return ((d * s)[..., None] * runs).flatten(-2)


_DECODERS: dict[str, Callable[..., Tensor]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip
