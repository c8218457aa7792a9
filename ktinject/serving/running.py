"""A request of one text while it is computed: its tokens, who gets them, and how it ends."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ktinject.errors import KTInjectError
from ktinject.generation.eligibility import RowCriterion

if TYPE_CHECKING:
    from ktinject.generation.batching_sampling import Choice


class Complete(Exception):
    """Raised by a sink that has all it wants: the request has ended, and nothing is wrong."""


class Unavailable(KTInjectError):
    """No request is computed any more."""


@dataclass(eq=False)
class Request:
    """A request of one text.

    ids          of the prompt
    sink         a streamer: `put` gets the prompt and then tokens, and may raise to end the request, `Complete` if
                 nothing is wrong (`may_complete` says whether it ever does); `end`; `found` is told how many tokens
                 of the prompt need not be read
    choice       how a batch chooses its tokens; None: a batch cannot
    is_complete  the sink has all it wants
    manager      of the batch that it is in
    """

    ids: list[int]
    config: GenerationConfig
    sink: Any
    arguments: dict[str, Any]
    choice: Choice | None
    seed: int | None = None
    is_complete: bool = False
    manager: Any = None
    written: list[int] = field(default_factory=list)
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)
    has_begun: bool = False
    moves: bool = False
    seen: int = 0  # of the tokens that the batch has written, those that were taken

    @functools.cached_property
    def prompt(self) -> Tensor:
        """[1, n]; made once, for of a long list that takes milliseconds."""
        return torch.tensor([self.ids], dtype=torch.int64, device="cpu")

    def begin(self) -> bool:
        """Give the sink the prompt; False if nobody waits any more."""
        if not self.has_begun:
            self.has_begun = True
            return self.put(self.prompt)
        return True

    def put(self, value: Tensor) -> bool:
        """False if the sink wants no more."""
        try:
            self.sink.put(value)
        except Complete:
            self.is_complete = True
            return False
        except BaseException as error:  # whatever a streamer raises to end its request
            self.error = error
            return False
        return True

    def write(self, tokens: list[int]) -> bool:
        """Take what was written; False if the sink wants no more."""
        for token in tokens:
            self.written.append(token)
            if not self.put(torch.tensor([token], dtype=torch.int64, device="cpu")):
                return False
        return True

    def end(self, error: BaseException | None = None) -> None:
        """Let who waits go on; once."""
        if self.done.is_set():
            return
        self.error = self.error or error
        if self.error is None:
            try:
                self.sink.end()
            except Exception as found:  # of a client that is gone
                self.error = found
        self.done.set()


class Moved(Exception):
    """The request goes on in the batch."""


class Relay:
    """The streamer of `generate` for a request that may move."""

    def __init__(self, request: Request) -> None:
        self._request, self._is_prompt = request, True

    def put(self, value: Tensor) -> None:
        request = self._request
        if self._is_prompt:
            self._is_prompt = False
            return
        goes_on = request.is_complete or request.write(value.flatten().tolist())
        if request.is_complete:  # it ends by its criterion, so that its cache is kept
            return
        if request.moves or not goes_on:
            raise Moved

    def end(self) -> None:
        pass


class Completed(RowCriterion):
    """Ends the row of a request whose sink has all it wants; what is written until it is asked is not taken."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full(
            (len(input_ids),), self._request.is_complete, dtype=torch.bool, device=input_ids.device
        )
