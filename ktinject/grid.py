"""Text for terminals. Lines are folded between words, and a word that is too long after its dots, slashes and the like.

So no part of a path, a class or a tensor's name is ever broken, however narrow the terminal.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

# Where a word may be broken, and, if its parts are still too long, where else. Not before a digit: 0.25 and layers.3
# stay whole.
_JOINTS = (r"(?<=[./,:=|])(?=[^\d./,:=|])", r"(?<=[._/,:=|])(?=[^\d._/,:=|])")
_WIDEST_GAP = 3


def fold(text: str, width: int) -> list[str]:
    """The lines of a text; a part that cannot be broken and is longer than `width` stays whole."""
    lines = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split():
            if line and cell_len(f"{line} {word}") > width >= cell_len(word):
                lines.append(line)
                line = ""
            space = " " if line else ""
            for part in _parts(word, width):
                if line and cell_len(line + space + part) > width:
                    lines.append(line)
                    line, space = "", ""
                line, space = line + space + part, ""
        lines.append(line)
    return lines


def _parts(word: str, width: int) -> list[str]:
    parts = [word]
    for joint in _JOINTS:
        if max(map(cell_len, parts)) > width:
            parts = re.split(joint, word)
    return parts


def _widest(cells: Sequence[str], pattern: str) -> int:
    return max((cell_len(part) for cell in cells for part in re.split(pattern, cell)), default=0)


class Lines:
    """Lines that a console prints folded."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.text import Text

        for line in self.lines:
            yield from (Text(part, overflow="fold") for part in fold(line, options.max_width))


class Grid:
    """A table that prints itself as wide as it needs, and folded where the terminal is narrower.

    right   titles of columns whose cells stand on the right and are never folded, such as numbers
    narrow  what is printed in its place where even folded cells do not fit
    """

    def __init__(
        self,
        titles: Sequence[str],
        rows: Sequence[Sequence[str]],
        right: Collection[str] = (),
        narrow: Grid | None = None,
    ) -> None:
        self.titles, self.rows, self.narrow = titles, rows, narrow
        self._right = [title in right for title in titles]

    def lines(self, width: int) -> list[str]:
        """The titles, a rule, and a line or more for each row."""
        columns = list(zip(self.titles, *self.rows, strict=True))
        natural = [_widest(cells, "\n") for cells in columns]
        # Cells are folded between words where that is enough; titles always between words only.
        least: list[list[int]] = []
        for pattern in (r"\s", *(rf"\s|{joint}" for joint in _JOINTS)):
            least.append(
                [
                    max(_widest(cells[:1], r"\s"), _widest(cells[1:], "\n" if right else pattern))
                    for cells, right in zip(columns, self._right)
                ]
            )
            for gap in range(_WIDEST_GAP, 0, -1):
                room = width - 1 - gap * (len(columns) - 1)
                if sum(least[-1]) <= room:
                    return list(self._set(_shrink(natural, least, room), gap))
        return self.narrow.lines(width) if self.narrow else list(self._set(least[-1], 1))

    def _set(self, widths: Sequence[int], gap: int) -> Iterator[str]:
        for number, row in enumerate([self.titles, *self.rows]):
            cells = [fold(cell, width) for cell, width in zip(row, widths)]
            for line in itertools.zip_longest(*cells, fillvalue=""):
                padded = [
                    " " * (width - cell_len(text)) + text if right else text + " " * (width - cell_len(text))
                    for text, width, right in zip(line, widths, self._right)
                ]
                yield f" {(' ' * gap).join(padded)}".rstrip()
            if number == 0:
                yield " " + "─" * (sum(widths) + gap * (len(widths) - 1))

    def __str__(self) -> str:
        return "\n".join(self.lines(200))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        from rich.text import Text

        lines = self.lines(options.max_width)
        rule = next(number for number, line in enumerate(lines) if line.startswith(" ─"))
        yield ""
        for number, line in enumerate(lines):
            yield Text(line, style="bold" if number < rule else "", overflow="fold")
        yield ""


def _shrink(widths: Sequence[int], least: Sequence[Sequence[int]], room: int) -> list[int]:
    """Widths that fit into `room`, the widest column reduced first: each to its first least, then to the next ones."""
    widths = list(widths)
    for floor in least:
        while sum(widths) > room and any(width > low for width, low in zip(widths, floor)):
            widest = max((i for i, low in enumerate(floor) if widths[i] > low), key=widths.__getitem__)
            widths[widest] -= 1
    return widths
