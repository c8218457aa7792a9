"""Weights that no tensor holds as it is: the writer of a file has changed or joined them, a recipe brings them back.

The container finds the recipes when it is opened (`Reader.made`); gguf_recipes.py has GGUF's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import Format, SourceFormat, refused
from ktinject.checkpoints.reader import Reader


class MadeOfParts(SourceFormat):
    """read    the formats that a part may be in"""

    def __init__(self, read: Sequence[SourceFormat]) -> None:
        self._read = read

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        return reader.made[key].parts if key in reader.made else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        for name in held:
            self._part(reader, name)
        return Format("made", held, shape=reader.made[key].shape)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """In the dtype that its parts are decoded to."""
        made = reader.made[key]
        each = index if made.by_slice else None
        values = [self._decoded(reader, name, each) for name in made.parts]
        try:
            found = made.make(*values)
        except ValueError as error:
            raise refused(reader, made.parts[0], f"{error}. {DOWNLOAD_AGAIN}") from None
        return found[index] if index is not None and each is None else found

    def _part(self, reader: Reader, name: str) -> tuple[SourceFormat, Format]:
        source = next(source for source in self._read if source.held(reader, name))
        return source, source.detect(reader, name, (name,))

    def _decoded(self, reader: Reader, name: str, index: int | None) -> Tensor:
        source, form = self._part(reader, name)
        return source.decode(reader, name, form, index)
