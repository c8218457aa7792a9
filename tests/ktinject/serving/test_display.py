"""How an answer appears in a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ktinject.serving.display import Display, split


@pytest.mark.parametrize(
    "text, done",
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\n\ntwo\n\nthr", "one\n\ntwo\n\n"),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("- a\n\n  b", ""),
    ],
)
def test_blocks_part_where_nothing_goes_on(text: str, done: str) -> None:
    assert split(text) == (done, text[len(done) :])


def shown(text: str, markdown: bool, height: int = 25) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=height, color_system=None, _environ={})
    with Display(console, markdown) as display:
        for piece in text.splitlines(keepends=True):
            display.show(piece)
    return file.getvalue()


def test_markdown_is_drawn_and_each_block_stays_once() -> None:
    found = shown("# Title\n\nSome *words*.\n\n```python\nx = 1\n\ny = 2\n```\n\n<think>\nlast", True)
    for text in ("Title", "Some words.", "x = 1", "y = 2", "think last"):
        assert text in found
    final = found.rpartition("\x1b[")[2]
    assert "last" in final and "words" not in final, "what is complete is not drawn again"
    assert "*" not in found and "```" not in found


def test_of_a_high_block_the_end_is_seen_meanwhile_and_all_of_it_stays() -> None:
    lines = "".join(f"line {number}  \n" for number in range(30))
    found = shown(lines, True, height=10)
    final = found.rpartition("\x1b[2K")[2]
    assert all(f"line {number}" in final for number in range(30))


def test_plain_is_as_it_is_written() -> None:
    assert shown("# a\n\n*b*", False) == "# a\n\n*b*\n"
