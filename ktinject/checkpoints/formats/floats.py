"""bf16, fp16 and fp32: the tensor is the weight."""

from __future__ import annotations

from torch import Tensor

from ktinject.checkpoints.formats.base import FLOATS, Format, SourceFormat, unread
from ktinject.checkpoints.reader import Reader


class Floats(SourceFormat):
    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        return (key,) if key in reader.names else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        if not reader.complete:
            return Format("float")
        dtype = reader.tensors[key].dtype
        if dtype not in FLOATS:
            raise unread(reader, key, f"dtype {dtype} is not that of a weight without scales")
        return Format(FLOATS[dtype], exact_in=("bf16",) if dtype == "BF16" else ())

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        return reader.read(key, index)
