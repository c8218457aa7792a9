"""What the page looks for in a text, without a browser: the pattern means the same to Python."""

from __future__ import annotations

import re
import time

import pytest

from ktinject.serving import page

INLINE = re.compile(re.search(rb"INLINE =\s+/(.+)/g;", page.files()["/page/markdown.js"][1])[1].decode())  # type: ignore[index]


@pytest.mark.parametrize(
    "text, found",
    [
        ("a `b * c` d", ["`b * c`"]),
        ("``a``, ```b```", ["``a``", "```b```"]),
        ("**bold** and *slanted*", ["**bold**", "*slanted*"]),
        ("2 * 3 * 4", []),
        ("[a b](https://c.example/d?e=f#g), [1]", ["[a b](https://c.example/d?e=f#g)"]),
        ("[a](javascript:alert)", []),
    ],
)
def test_marks_are_found(text: str, found: list[str]) -> None:
    assert [match[0] for match in INLINE.finditer(text)] == found


@pytest.mark.parametrize("piece", ["[", "[a](http://", "`", "``a`", "*a", "**a", "[a", "*", "[[a]("])
def test_a_text_of_many_beginnings_takes_no_longer_than_another(piece: str) -> None:
    """A hundred thousand of them would take a minute and more, and the page draws a text again with each token."""
    began = time.process_time()
    list(INLINE.finditer(piece * 100_000))
    assert time.process_time() - began < 3
