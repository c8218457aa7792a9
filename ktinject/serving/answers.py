"""What a client gets of an answer: tokens become text, which ends before a stop string, and the text its parts.

    tokens ──► Decoder: whole characters ──► StopStrings ──► transformers' parser of answers ──► parts
                                                                                text, reasoning, calls of tools

An answer that is streamed and one that is given whole come out of the same parts, so their texts are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ktinject.hf import compat

MOST_STOPS, LONGEST_STOP = 16, 256  # stop strings of a request, and characters of one
_BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not yet
_BYTES = 3  # of a character that may be missing its last one
_WAITS = 16  # tokens that may go by before bytes that are no character are taken for that


class Decoder:
    """Text of tokens as they come, in whole characters.

    A token may end within a character. What it has of it waits for the next one.

    keeps_special  special tokens are part of the text
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keeps_special: bool) -> None:
        self._decode = tokenizer.backend_tokenizer.decode
        known = tokenizer.added_tokens_decoder.items()
        self._special = {number: token.content for number, token in known if token.special}
        self.keeps_special = keeps_special
        # Tokens are decoded with those before them: whether a blank belongs to a word depends on what precedes it.
        self._ids: list[int] = []
        self._read = 0  # of the tokens, those whose text was given whole
        self._given = 0  # characters of the text of all

    def add(self, token: int) -> list[tuple[str, bool]]:
        """Pieces of text, and whether a reader is shown them: special tokens are not."""
        if token in self._special and not self.keeps_special:
            rest = self.finish()
            return [(rest, True)] * bool(rest) + [(self._special[token], False)]
        self._ids.append(token)
        text = self._text(self._ids)
        broken = len(text) - len(text.rstrip(_BROKEN))
        if broken and len(self._ids) - self._read < _WAITS:
            whole = len(text) - min(broken, _BYTES)
            piece = text[self._given : whole]
            self._given = max(self._given, whole)
        else:
            piece = text[self._given :]
            self._settle()
        return [(piece, True)] if piece else []

    def finish(self) -> str:
        """What no token completes any more."""
        if self._read == len(self._ids):
            return ""
        rest = self._text(self._ids)[self._given :]
        self._settle()
        return rest

    def _settle(self) -> None:
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._given = len(self._text(self._ids))

    def _text(self, ids: list[int]) -> str:
        text: str = self._decode(ids, skip_special_tokens=False)
        return text


class StopStrings:
    """Ends a text before the first of some strings, and holds back what may be the beginning of one.

    The string that is complete first ends the text; of several that are at once, the one that began first.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._longest = max(map(len, strings), default=0)
        self._beginnings = {string[:length] for string in strings for length in range(1, len(string))}
        self._held: list[tuple[str, bool]] = []
        self.is_found = False

    def feed(self, text: str, is_shown: bool = True) -> str:
        """What is certain of the text so far, and not given yet; of what is not shown, nothing."""
        if self.is_found:
            return ""
        self._held.append((text, is_shown))
        if not self._strings:
            return self._given(len(text))
        held = "".join(piece for piece, _ in self._held)
        ends = ((at + len(string), at) for string in self._strings if (at := held.find(string)) >= 0)
        found = min(ends, default=None)
        if found is not None:
            self.is_found = True
            return self._given(found[1])
        first = max(0, len(held) - self._longest + 1)
        waits = (at for at in range(first, len(held)) if held[at:] in self._beginnings)
        return self._given(next(waits, len(held)))

    def finish(self) -> str:
        """What was held back, since nothing comes after it."""
        return "" if self.is_found else self._given(sum(len(piece) for piece, _ in self._held))

    def _given(self, count: int) -> str:
        given, left = [], []
        for piece, is_shown in self._held:
            if is_shown:
                given.append(piece[:count])
            if piece[count:]:
                left.append((piece[count:], is_shown))
            count = max(0, count - len(piece))
        self._held = left
        return "".join(given)


class Answer:
    """An answer while it is written.

    stops   strings before which it ends
    ends    tokens that end it
    parser  transformers' parser of answers; None: all is text
    give    called with each part: text, reasoning or a call of a tool, as transformers' handlers take them
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        ends: Iterable[int],
        parser: Any,
        give: Callable[[Any], None],
    ) -> None:
        self._decoder, self._stops = Decoder(tokenizer, keeps_special=parser is not None), StopStrings(stops)
        self._ends, self._parser, self._give = frozenset(ends), parser, give
        self._is_whole = False  # the last token has ended it
        self.may_end = bool(stops)  # by its text
        self._unread = self._call = (
            ""  # text that the parser has not taken yet, and that of a call being written
        )
        if parser is not None:
            self._give_parts(parser.initial_events)

    @property
    def has_ended(self) -> bool:
        """By itself, not since it may have no more tokens."""
        return self._stops.is_found or self._is_whole

    def add(self, token: int) -> bool:
        """Whether the answer goes on after it."""
        self._is_whole = token in self._ends
        for text, is_shown in self._decoder.add(token):
            self._hand_on(self._stops.feed(text, is_shown))
        return not self._stops.is_found

    def finish(self) -> None:
        """Give what was held back; of a character whose bytes were cut, nothing."""
        if self._is_whole:
            self._hand_on(self._stops.feed(self._decoder.finish()))
        self._hand_on(self._stops.finish())
        if self._parser is not None:
            try:
                events = self._parser.finalize()[1]
            except (ValueError, RuntimeError):  # it was cut within the call of a tool
                events = []
            self._give_parts(events)

    def _hand_on(self, text: str) -> None:
        if not text:
            return
        if self._parser is None:
            self._give(text)
            return
        self._unread += text
        try:
            events = self._parser.feed(text)
        except (
            ValueError
        ):  # what the model wrote as the call of a tool is none: it is text, and so is all behind it
            self._parser, self._decoder.keeps_special = None, False
            self._give(self._call + self._unread)
            return
        self._give_parts(events)

    def _give_parts(self, events: Any) -> None:
        for event in events:
            if event["type"] == "region_chunk":
                self._unread = self._unread[len(event["text"]) :]
                self._call += event["text"] if event.get("dirty") else ""
            else:
                self._call = self._unread = ""
        for part in compat.response_events_to_chunks(events):
            self._give(part)


class Written(list[int]):
    """Tokens of a whole answer, and the message that its parts are.

    transformers' handlers hand it to the tokenizer's `parse_response`, which gives the message back.
    """

    def __init__(self, tokens: torch.Tensor, parts: Sequence[Any]) -> None:
        super().__init__(tokens.tolist())
        calls = [part for part in parts if isinstance(part, compat.ToolCall)]
        thoughts = [part for part in parts if isinstance(part, compat.ReasoningText)]
        texts = [
            part for part in parts if isinstance(part, str) and not isinstance(part, compat.ReasoningText)
        ]
        self.text = "".join(texts)
        self.message = {
            "content": self.text,
            "thinking": "".join(thoughts) or None,
            "tool_calls": [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ],
        }
