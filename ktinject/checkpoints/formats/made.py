"""Weights that no tensor holds as it is: the writer of a file has changed or joined them, a recipe brings them back.

The container finds the recipes when it is opened (`Reader.made`); gguf_recipes.py has GGUF's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.formats.base import Codes, Format, GgufRows, SourceFormat, Stored, refused
from ktinject.checkpoints.reader import Made, Reader


class MadeOfParts(SourceFormat):
    """read    the formats that a part may be in"""

    def __init__(self, read: Sequence[SourceFormat]) -> None:
        self._read = read

    def held(self, reader: Reader, key: str) -> tuple[str, ...]:
        return reader.made[key].parts if key in reader.made else ()

    def detect(self, reader: Reader, key: str, held: tuple[str, ...]) -> Format:
        forms = [self._part(reader, name)[1] for name in held]
        made, first = reader.made[key], forms[0]
        # Rows of blocks keep them all; of matrices that stand across, only codes and scales can be told apart.
        is_int4 = first.encoding == "int4" and not (first.has_zeros or first.is_ordered)
        can_move = is_int4 or (first.encoding == first.name and made.rows == "moved")
        if made.rows and first.encoding and can_move and all(form == first for form in forms):
            return replace(first, companions=held, shape=made.shape, by_slice=made.by_slice)
        return Format("made", held, shape=made.shape)

    def decode(self, reader: Reader, key: str, form: Format, index: int | None) -> Tensor:
        """In the dtype that its parts are decoded to."""
        made = reader.made[key]
        each = index if made.by_slice else None
        found = self._make(reader, made, [self._decoded(reader, name, each) for name in made.parts])
        return found[index] if index is not None and each is None else found

    def stored(self, reader: Reader, key: str, form: Format) -> Stored:
        return self._stored(reader, key, None)

    def stored_slice(self, reader: Reader, key: str, form: Format, index: int) -> Stored:
        return self._stored(reader, key, index)

    def _stored(self, reader: Reader, key: str, index: int | None) -> Stored:
        """What is done to rows of values is done to rows of blocks, or to those of codes and those of scales."""
        made, parts = reader.made[key], []
        for name in made.parts:
            source, form = self._part(reader, name)
            if index is None:
                parts.append(source.stored(reader, name, form))
            else:
                parts.append(source.stored_slice(reader, name, form, index))
        blocks = [part for part in parts if isinstance(part, GgufRows)]
        if blocks:
            rows = self._make(reader, made, [part.rows for part in blocks])
            return replace(blocks[0], rows=rows.contiguous())
        stored = [part for part in parts if isinstance(part, Codes)]
        codes = self._make(reader, made, [part.codes for part in stored])
        scales = self._make(reader, made, [part.scales for part in stored])
        # What stands across is turned back as views, when it is cut into projections.
        return (
            Codes(codes, scales) if made.rows == "across" else Codes(codes.contiguous(), scales.contiguous())
        )

    @staticmethod
    def _make(reader: Reader, made: Made, parts: Sequence[Tensor]) -> Tensor:
        try:
            return made.make(*parts)
        except ValueError as error:
            raise refused(reader, made.parts[0], f"{error}. {DOWNLOAD_AGAIN}") from None

    def _part(self, reader: Reader, name: str) -> tuple[SourceFormat, Format]:
        source = next(source for source in self._read if source.held(reader, name))
        return source, source.detect(reader, name, (name,))

    def _decoded(self, reader: Reader, name: str, index: int | None) -> Tensor:
        source, form = self._part(reader, name)
        return source.decode(reader, name, form, index)
