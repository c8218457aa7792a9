"""What a load shows of itself on stderr."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("ktinject")


class Shown:
    """Called with the number of bytes of each read; may be called from several threads.

    say   called with a line of text, which is shown below the bar and logged
    """

    def __init__(self, advance: Callable[[int], None], show: Callable[[str], None]) -> None:
        self._advance, self._show = advance, show

    def __call__(self, count: int) -> None:
        self._advance(count)

    def say(self, text: str) -> None:
        self._show(text)
        logger.info("%s", text)


@contextmanager
def progress(total: int, shown: bool, title: str = "loading") -> Iterator[Shown]:
    """Show a progress bar on stderr with bytes, rate and time left.

    total    bytes to read
    shown    False: show nothing
    title    what happens
    """
    if not shown:
        yield Shown(lambda count: None, lambda text: None)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn(title),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    lines: list[str] = []
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield Shown(lambda count: bar.advance(task, count), lines.append)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
