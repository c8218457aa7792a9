"""Tokens become text in whole characters, which ends before a stop string and holds back what may begin one."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from byte_tokenizer import tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_parsing import ResponseParser

from ktinject.hf import compat
from ktinject.serving.answers import LONGEST_STOP, Answer, Decoder, StopStrings, Written

WORDS = tokenizer()
END = WORDS.eos_token_id
# The names of bytes: those of printable characters are the characters, others come in order behind them.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTES = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + at) for at, byte in enumerate(_OTHERS)}


def tokens(text: str | bytes) -> list[int]:
    """One a byte, of bytes that are no text, too."""
    data = text.encode() if isinstance(text, str) else text
    return [WORDS.convert_tokens_to_ids(BYTES[byte]) for byte in data]


def pieces(text: str | bytes | list[int], *stops: str) -> tuple[list[str], bool]:
    """What is given after each token and at the end, and whether a stop string has ended it."""
    given: list[str] = []
    answer = Answer(WORDS, stops, [END], None, given.append)
    steps = []
    for token in text if isinstance(text, list) else tokens(text):
        before = len(given)
        goes_on = answer.add(token)
        steps.append("".join(given[before:]))
        if not goes_on:
            break
    before = len(given)
    answer.finish()
    return [*steps, "".join(given[before:])], answer.has_ended


@pytest.mark.parametrize("text", ["plain", "naïve", "日本語 ok", "a😀b👩‍👩‍👧c", "\ufffd in the middle"])
def test_text_comes_in_whole_characters(text: str) -> None:
    given, _ = pieces(text)
    assert "".join(given) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in given)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_is_cut_is_dropped(cut: int) -> None:
    given, has_ended = pieces("so 😀".encode()[:-cut])
    assert "".join(given) == "so " and not has_ended


def test_a_character_that_the_model_leaves_broken_is_shown_as_such() -> None:
    given, has_ended = pieces([*tokens("so 😀".encode()[:-2]), END])
    assert "".join(given) == "so \ufffd" and has_ended


def test_bytes_that_are_no_character_do_not_wait_for_ever() -> None:
    given, _ = pieces(b"a" + b"\xff" * 100 + b"b")
    assert "".join(given) == "a" + "\ufffd" * 100 + "b"
    assert "".join(given[:60]).count("\ufffd") > 30


def test_words_keep_the_blanks_between_them() -> None:
    """Of a vocabulary whose first word loses its blank."""
    names = ["▁a", "▁b", "c", "<s>"]
    made = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=[]))
    made.decoder = decoders.Metaspace()
    words = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    decoder = Decoder(words, keeps_special=False)
    found = [decoder.add(token) for token in (0, 1, 3, 2, 1)]
    assert found == [[("a", True)], [(" b", True)], [("<s>", False)], [("c", True)], [(" b", True)]]


@pytest.mark.parametrize(
    "text, stops, shown",
    [
        ("def f():\n    pass", ("):",), "def f("),
        ("abcabd", ("abd",), "abc"),
        ("aaab", ("aab",), "a"),
        ("one two", ("two", "e t"), "on"),  # complete first
        ("xyz", ("yz", "xyz"), ""),  # complete at once: began first
        ("no such", ("zz",), "no such"),
        ("ends in z", ("zz",), "ends in z"),
        ("日本語", ("本",), "日"),
        ("a\n\nb", ("\n\n",), "a"),
        ("", ("a",), ""),
    ],
)
def test_a_text_ends_before_a_stop_string(text: str, stops: tuple[str, ...], shown: str) -> None:
    given, has_ended = pieces(text, *stops)
    assert "".join(given) == shown and has_ended == (shown != text)


def test_what_may_begin_a_stop_string_waits_and_no_more() -> None:
    given, _ = pieces("a<|b<|end", "<|end|>")
    assert given == ["a", "", "", "<|b", "", "", "", "", "", "<|end"]


def test_a_special_token_ends_a_text_and_is_not_shown() -> None:
    name = WORDS.decode([END])
    given, has_ended = pieces([*tokens("ab"), END, *tokens("c")], f"{name}c")
    assert "".join(given) == "ab" and has_ended
    assert "".join(pieces([*tokens("ab"), END, *tokens("d")], f"{name}c")[0]) == "abd"


def test_how_a_text_is_cut_into_tokens_does_not_matter() -> None:
    """Against a search in the whole text, which is complete first where it ends first."""
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("ab", k=draw.randrange(20)))
        stops = ["".join(draw.choices("ab", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 4))]
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        want = text[: min(found)[1]] if found else text
        whole, parts = StopStrings(stops), StopStrings(stops)
        assert whole.feed(text) + whole.finish() == want, (text, stops)
        assert "".join(map(parts.feed, text)) + parts.finish() == want, (text, stops)


def test_the_longest_stop_strings_cost_little() -> None:
    """By count: what is looked at for a token does not grow with the text, nor with the vocabulary."""
    stops = StopStrings(["a" * (LONGEST_STOP - 2) + f"{number:02}" for number in range(16)])
    assert sum(map(len, stops._beginnings)) < 16 * LONGEST_STOP**2
    for _ in range(2000):
        stops.feed("ab")
        assert sum(len(piece) for piece, _ in stops._held) < LONGEST_STOP
    assert not stops.is_found


QWEN = compat.get_response_template(WORDS, SimpleNamespace(config=SimpleNamespace(model_type="qwen3_moe")))


def parts(text: str) -> list[Any]:
    """Of an answer of a model of Qwen's, its tokens one a byte."""
    found: list[Any] = []
    answer = Answer(WORDS, [], [END], ResponseParser(QWEN, prefix="<|im_start|>assistant\n"), found.append)
    for token in tokens(text):
        answer.add(token)
    answer.finish()
    return found


def test_a_message_is_made_of_parts() -> None:
    text = '<think>\nhm</think>  a\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    written = Written(torch.tensor([3, 4]), parts(text))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert written.message == {"content": "  a", "thinking": "\nhm", "tool_calls": [call]}
    assert written == [3, 4] and written.text == "  a"


def test_what_is_no_call_of_a_tool_is_text() -> None:
    found = parts("a <tool_call>{not json}</tool_call> b")
    assert all(type(part) is str for part in found)
    assert "".join(found) == "a{not json}</tool_call> b"


def test_a_call_of_a_tool_that_was_cut_ends_without_one() -> None:
    class Parser:
        initial_events: list[Any] = []

        def feed(self, text: str) -> list[Any]:
            return [{"type": "region_chunk", "field": "content", "text": text}]

        def finalize(self) -> Any:
            raise ValueError("json")

    given: list[str] = []
    answer = Answer(WORDS, [], [END], Parser(), given.append)
    for token in tokens(" a"):
        assert answer.add(token)
    answer.finish()
    assert given == [" ", "a"] and not answer.has_ended
