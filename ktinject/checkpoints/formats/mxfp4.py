"""MXFP4 as gpt-oss stores it: 4-bit floats with a power of two for 32 inputs.

    <key>_blocks  U8 [..., n, groups, 16]; byte i of a group has input 2 i below and input 2 i + 1 above
    <key>_scales  U8 [..., n, groups]; the exponent of two, plus 127

Source: the OCP Microscaling Formats specification 1.0 (e2m1, e8m0) and the published gpt-oss checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import Format, OwnTensors, SourceFormat, place_of, refused, unread
from ktinject.checkpoints.reader import Reader

GROUP = 32
ENCODING, EXACT_IN = "mxfp4", ("bf16", "mxfp4")
BYTES = GROUP // 2
MOST_SCALE = 252  # 6 · 2^125 is the largest that bf16 holds; 255 stands for NaN
_E2M1 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=torch.float32,
    device="cpu",
)


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., n, 32 · groups] bf16, exact for scales from 2 on; blocks and scales as above, uint8."""
    steps = (scales.int() << 23).view(torch.float32)
    return (unpacked(blocks) * steps[..., None]).flatten(-2).bfloat16()


def unpacked(codes: Tensor) -> Tensor:
    """[..., bytes] uint8, an even input in the lower half of a byte → [..., 2 · bytes] fp32, without scales."""
    return _E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]


class Mxfp4(SourceFormat):
    title = "MXFP4 as gpt-oss has it"
    methods = ("mxfp4",)
    tells = ("_blocks",)
    own = (OwnTensors(("_blocks", "_scales"), ending=""),)

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        if not reader.complete:
            return Format("mxfp4", held, encoding=ENCODING, exact_in=EXACT_IN)
        blocks, scales = (reader.tensors[name] for name in held)
        if blocks.dtype != "U8" or len(blocks.shape) < 3 or blocks.shape[-1] != BYTES:
            text = f"{blocks.dtype} {list(blocks.shape)}; U8 [..., outputs, groups, {BYTES}] is needed"
            raise unread(reader, held[0], text)
        *leading, n, groups, _ = blocks.shape
        if scales.dtype not in ("U8", "F8_E8M0") or scales.shape != (*leading, n, groups):
            text = f"{scales.dtype} {list(scales.shape)}; U8 {[*leading, n, groups]} is needed"
            raise refused(reader, held[1], f"{text}. {DOWNLOAD_AGAIN}")
        shape = (*leading, groups * GROUP, n)
        return Format("mxfp4", held, shape=shape, group_size=GROUP, encoding=ENCODING, exact_in=EXACT_IN)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """bf16 [..., k, n]."""
        assert form.shape is not None, "of a complete checkpoint"
        if index is not None and len(form.shape) < 3:
            raise refused(
                reader,
                form.companions[0],
                f"there is no expert {index} in a matrix; MXFP4 is read as whole matrices.",
            )
        blocks, scales = (reader.read(name, index) for name in form.companions)
        scales = scales.view(torch.uint8)
        wrong = (scales > MOST_SCALE).flatten().nonzero()
        if len(wrong):
            position = place_of(scales, int(wrong[0]))
            found = int(scales[tuple(position)])
            text = f"{found} at {position}; scales must be at most {MOST_SCALE}. {DOWNLOAD_AGAIN}"
            raise refused(reader, form.companions[1], text)
        return values(blocks, scales).mT
