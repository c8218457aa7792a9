"""A conversation with a model: its messages, and the cache that makes a next turn read only what is new.

    messages ── chat template ──► text ──► tokens ── those behind what the cache holds ──► generate ──► answer
                                                                 cache ◄─── all tokens but the last ───┘

A model without a chat template goes on with the text: messages follow one another as they are. A conversation with
pictures is read whole in each turn, by the model's own processor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from ktinject.errors import PlanError
from ktinject.generation.cache_layers import ALL_TOKENS, kind_of, kind_support
from ktinject.hf import compat, pictures, templates
from ktinject.tools import evaluate

Message = dict[str, Any]  # as hf/pictures.py has them


@dataclass(frozen=True)
class Answer:
    """What a turn has given.

    text         what was written
    prompt       tokens of the whole conversation before it
    read         of them, those that had to be read
    tokens       tokens written, one that ends the answer included
    first        seconds until the first of them
    seconds      seconds from the first to the last
    ended        "stop": the model ended it; "length": there is no room for more; "interrupted"
    """

    text: str
    prompt: int
    read: int
    tokens: int
    first: float | None
    seconds: float
    ended: str

    @property
    def rate(self) -> float | None:
        """Tokens/s behind the first; None if there is but one."""
        return (self.tokens - 1) / self.seconds if self.tokens > 1 and self.seconds > 0 else None


class Conversation:
    """Messages of system, user and assistant, and what the model has read of them.

    options   of `generate`, such as temperature
    longest   the most tokens of an answer
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        system: str | None = None,
        longest: int = 1024,
        **options: Any,
    ) -> None:
        self.model, self.tokenizer, self.options, self.longest = model, tokenizer, options, longest
        self.limit = evaluate.longest_text(model.config)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self._ids: list[int] = []  # in the cache
        self._all: list[int] = []  # of the last turn: those and the last one written, which together
        self._text = ""  # mean this
        self._processor: Any = None
        self._forget()

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.chat_template)

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first.get("content") if first.get("role") == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        """Begins anew."""
        self.messages = [{"role": "system", "content": text}] if text else []
        self._forget()

    def clear(self) -> None:
        """Forget all but the system message."""
        self.system = self.system

    def restore(self, messages: list[Message]) -> None:
        """Go on from other messages."""
        self.messages = messages
        self._forget()

    def undo(self) -> str | None:
        """Take the last question and its answer back. Returns the question, None if there is none."""
        while self.messages and self.messages[-1]["role"] != "system":
            last = self.messages.pop()
            if last["role"] == "user":
                return last["content"]
        return None

    @property
    def question(self) -> Message | None:
        """The last one."""
        return next((message for message in reversed(self.messages) if message["role"] == "user"), None)

    def check_picture(self, file: Path) -> None:
        """Raises  KTInjectError if a picture cannot be read, or the model reads none"""
        pictures.check_reads(self.model)
        pictures.read_picture(file)
        self._pictures()

    def ask(self, text: str, show: Callable[[str], None], images: Sequence[str] = ()) -> Answer:
        """Add a question and let the model answer. Ctrl-C ends the answer; what is there of it stays.

        show    called with each piece of the answer
        images  paths of pictures, before the question
        Raises  PlanError if the conversation does not fit the model, or as `check_picture`; it is then as it was
        """
        self.messages.append({"role": "user", "content": text, **({"images": [*images]} if images else {})})
        try:
            whole, ids, more = self._tokens()
            room = self.limit - len(ids)
            if room < 1:
                raise PlanError(
                    f"the conversation has {len(ids)} tokens, and the model was made for {self.limit}. Begin a "
                    "new one, or ask something shorter."
                )
            evaluate.check_prompt(self.model, torch.tensor(ids, dtype=torch.int64, device="cpu"), 1)
        except BaseException:
            self.messages.pop()
            raise
        if more:  # positions behind pictures are not those of tokens, so nothing is kept
            self._forget()
        else:
            self._crop(ids)
        return self._answer(whole, ids, more, min(room, self.longest), show)

    def _answer(
        self, whole: str, ids: list[int], more: dict[str, Any], most: int, show: Callable[[str], None]
    ) -> Answer:
        read, streamer = len(ids) - self._cache.get_seq_length(), _Streamer(self.tokenizer, show)
        start, ended = time.perf_counter(), "interrupted"
        try:
            found = self.model.generate(
                torch.tensor([ids], device=self.model.device, dtype=torch.int64),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self.model.device),
                streamer=streamer,
                max_new_tokens=most,
                **self.options,
                **(pictures.placed(more, self.model) if more else {compat.CACHE: self._cache}),
            )[0].tolist()
            if not more:
                self._ids = found[: self._cache.get_seq_length()]
                self._all, self._text = found, whole + self.tokenizer.decode(found[len(ids) :])
            ended = "length" if len(streamer.tokens) >= most and not self._ends(found[-1]) else "stop"
        except KeyboardInterrupt:
            streamer.end()
            if self._cache.get_seq_length() != len(self._ids):  # of a kind that is not put back
                self._forget()
        except BaseException:
            self.messages.pop()
            self._forget()
            raise
        # As the next turn's text has it; the pieces that were shown may differ within a broken character.
        text: str = self.tokenizer.decode(streamer.tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        times = streamer.times
        return Answer(
            text=text,
            prompt=len(ids),
            read=read,
            tokens=len(streamer.tokens),
            first=times[0] - start if times else None,
            seconds=times[1] - times[0] if times else 0.0,
            ended=ended,
        )

    def _tokens(self) -> tuple[str, list[int], dict[str, Any]]:
        """The conversation as text and as tokens, which begin as those in the cache do where the text does.

        Third, what `generate` takes of pictures; with it, there is no text. Raises KTInjectError for pictures.
        """
        if any(message.get("images") for message in self.messages):
            pictures.check_reads(self.model)
            return "", *pictures.encode(self._pictures(), self.messages)
        if self.has_template:
            whole = templates.render(self.tokenizer, self.messages)
        else:
            whole = "".join(message["content"] for message in self.messages)
        # An answer's tokens need not be those of its text.
        if self._text and whole.startswith(self._text) and whole != self._text:
            return whole, self._all + self._encode(whole[len(self._text) :]), {}
        return whole, self._encode(whole, begins=not self.has_template), {}

    def _pictures(self) -> Any:
        """The processor of the model's folder. Raises KTInjectError."""
        if self._processor is None:
            self._processor = pictures.load_processor(Path(self.model.ktinject.checkpoint))
        return self._processor

    def _encode(self, text: str, begins: bool = False) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=begins)["input_ids"]
        return found

    def _crop(self, ids: list[int]) -> None:
        """Leave in the cache what the tokens begin with, all but the last; nothing where it cannot be cut there."""
        pairs = zip(self._ids, ids[:-1])
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(self._ids), len(ids) - 1))
        known = bool(kind_support(self._cache))  # else nobody knows how many tokens it holds
        if known and same == len(self._ids):
            return
        # Windows and states of fixed size have passed what was there, and an index is not cut with the keys.
        whole = kind_support(self._cache) and all(
            kind_of(layer) == ALL_TOKENS for layer in self._cache.layers
        )
        if known and same and whole:
            self._cache.crop(same - len(self._ids))  # so many tokens less
            self._ids = self._ids[:same]
        else:
            self._forget()

    def _ends(self, token: int) -> bool:
        ends = self.model.generation_config.eos_token_id
        return token in (ends if isinstance(ends, list) else [ends])

    def _forget(self) -> None:
        self._cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        self._ids, self._all, self._text = [], [], ""


class _Streamer(TextStreamer):
    """Hands pieces of text on, and keeps tokens and times."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            now = time.perf_counter()
            self.times = [*self.times[:1], now] if self.times else [now, now]
            self.tokens += value.flatten().tolist()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.show(text)
