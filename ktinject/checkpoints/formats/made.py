"""Weights that no tensor holds as it is: the writer of a file has changed or joined them, a recipe brings them back.

The container finds the recipes when it is opened (`Reader.made`); gguf_recipes.py has GGUF's.
"""

from __future__ import annotations

from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import Format, SourceFormat, refused
from ktinject.checkpoints.formats.floats import Floats
from ktinject.checkpoints.formats.gguf_blocks import GgufBlocks
from ktinject.checkpoints.reader import Reader

_PARTS = (GgufBlocks(), Floats())  # the formats that a part may be in


class MadeOfParts(SourceFormat):
    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        return reader.made[key].parts if key in reader.made else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        for name in held:
            _part(reader, name)
        return Format("made", held, shape=reader.made[key].shape)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """In the dtype that its parts are decoded to."""
        made = reader.made[key]
        each = index if made.by_slice else None
        values = [_decoded(reader, name, each) for name in made.parts]
        try:
            found = made.make(*values)
        except ValueError as error:
            raise refused(reader, made.parts[0], f"{error}. {DOWNLOAD_AGAIN}") from None
        return found[index] if index is not None and each is None else found


def _part(reader: Reader, name: str) -> tuple[SourceFormat, Format]:
    source = next(source for source in _PARTS if source.held(reader, name))
    return source, source.detect(reader, name, (name,))


def _decoded(reader: Reader, name: str, index: int | None) -> Tensor:
    source, form = _part(reader, name)
    return source.decode(reader, name, form, index)
