"""Weights in formats that are not read, or of which tensors are absent: recognised by those that are there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from ktinject.checkpoints.formats.base import Format, SourceFormat, is_told, unread
from ktinject.checkpoints.reader import Reader
from ktinject.errors import shown

# What the name of a tensor that comes with a format has in place of ".weight".
_NEVER_READ = {
    ".weight.absmax": "bitsandbytes 4-bit",
    ".absmax": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes int8",
}


class Unsupported(SourceFormat):
    """`held` gives the tensor that tells the format.

    read    the formats that are read: a weight gets here if none of them holds it
    """

    def __init__(self, read: Sequence[SourceFormat]) -> None:
        self.found = _NEVER_READ | {suffix: source.title for source in read for suffix in source.tells}

    def may_be_in(self, endings: Collection[str]) -> bool:
        return is_told(self.found, endings)

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        stem, names = key.removesuffix(".weight"), reader.names
        return next(((stem + suffix,) for suffix in self.found if stem + suffix in names), ())

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        stem = key.removesuffix(".weight")
        title = self.found[held[0].removeprefix(stem)]
        raise unread(
            reader, key, f"{title}, to which {shown(held[0])} belongs, is not read or not whole here"
        )

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        raise NotImplementedError("detect refuses")
