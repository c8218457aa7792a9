"""How an answer is shown while it is written: Markdown in a terminal, plain text where nobody looks.

In a terminal a block (a paragraph, a list, a table, code) is drawn anew as it grows, and stays as it is once the next
one begins: what has left the screen cannot be drawn again.
"""

from __future__ import annotations

import re
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)
_THINKING = re.compile(r"</?think(ing)?>")
_LEAST_SECONDS = 0.1  # between two drawings: they take time from the CPU that computes


class Display:
    """Shows the pieces of one answer. Use as a context.

    markdown  False: as it is written
    """

    def __init__(self, console: Console, markdown: bool) -> None:
        self._console, self._markdown = console, markdown
        self._block, self._drawn = "", 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._markdown:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is None:
            self._console.file.write("\n")
            self._console.file.flush()
            return
        self._live.update(Text(""))
        self._live.stop()
        if self._block.strip():
            self._console.print(_drawn(self._block))

    def show(self, text: str) -> None:
        if self._live is None:
            self._console.file.write(text)
            self._console.file.flush()
            return
        self._block += text
        done, self._block = split(self._block)
        if done.strip():
            self._live.update(Text(""), refresh=True)
            self._console.print(_drawn(done))
            self._console.print()
        now = time.monotonic()
        if done or now - self._drawn >= _LEAST_SECONDS:
            self._drawn = now
            # Of a block that is higher than the screen, the end: more could not be taken back.
            height, lines = max(4, self._console.height - 4), self._block.splitlines()
            tall = len(lines) > height
            self._live.update(Text("\n".join(lines[-height:])) if tall else _drawn(self._block), refresh=True)


def split(text: str) -> tuple[str, str]:
    """Markdown as the blocks that are complete, and the one that is still written: they part at an empty line."""
    at = len(text)
    while (at := text.rfind("\n\n", 0, at)) >= 0:
        # Not within code; nor before an indented line, which may go on with a list.
        if len(_FENCE.findall(text[:at])) % 2 == 0 and not text[at + 2 : at + 3].isspace() and text[at + 2 :]:
            return text[: at + 2], text[at + 2 :]
    return "", text


def _drawn(block: str) -> Markdown:
    # Markdown would take it for HTML and leave it out.
    return Markdown(_THINKING.sub(lambda found: f"*{found[0].strip('<>')}*", block))
