"""Formats that are not read, recognised by the tensors that come with them, and refused by name."""

from __future__ import annotations

from torch import Tensor

from ktinject.checkpoints.formats.base import READ, Format, SourceFormat, refused
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown

# What the name of a tensor that comes with a format has in place of ".weight"; the first one found names the format.
UNSUPPORTED = {
    ".weight_packed": "compressed-tensors packed",
    ".g_idx": "GPTQ",
    ".qweight": "AWQ or GPTQ",
    "_blocks": "MXFP4",
    ".weight.absmax": "bitsandbytes 4-bit",
    ".absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes int8",
    ".weight_scale_2": "NVFP4",
    ".weight_scale": "FP8 with a scale per tensor or channel",
}


class Unsupported(SourceFormat):
    """`held` gives the tensor that tells the format."""

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        stem = key.removesuffix(".weight")
        return next(((stem + suffix,) for suffix in UNSUPPORTED if stem + suffix in reader.names), ())

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        name = UNSUPPORTED[held[0].removeprefix(key.removesuffix(".weight"))]
        raise refused(reader, key, f"{name} format, to which {shown(held[0])} belongs. {READ}")

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        raise NotImplementedError("detect refuses")
