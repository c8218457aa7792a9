"""Where candidates come from: the text itself, a class derived from transformers' lookup, MTP heads."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ktinject.generation.candidates import Drafts, Request
from ktinject.generation.lookup import Lookup
from ktinject.hf import compat

_TIMED = 3  # calls: the first one also pays for what happens once


class Source(Protocol):
    """Where candidates come from.

    most         of a step
    is_free      they cost next to nothing, and are there without what the model made of the text
    asks_hidden  they are made of what the logits of the text's tokens are made of
    """

    most: int
    is_free: bool
    asks_hidden: bool

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""

    def read(self, hidden: Tensor | None) -> None:
        """[n, hidden] of n more of the text's tokens; None: it is not known."""

    def candidates(self, most: int) -> Sequence[int]:
        """Up to so many tokens that the text may go on with."""

    def price(self) -> float:
        """What the candidates of one step cost, in seconds, measured by finding some that nobody sees."""


class _OwnLookup:
    """Prompt lookup, as lookup.py does it."""

    is_free, asks_hidden = True, False

    def __init__(self, generator: Any, prompt: Sequence[int]) -> None:
        self.most = generator.num_output_tokens
        self._lookup = Lookup(prompt, generator.max_matching_ngram_size)
        self.extend, self.candidates = self._lookup.extend, self._lookup.candidates

    def read(self, hidden: Tensor | None) -> None:
        pass

    def price(self) -> float:
        return 0.0


class _OtherLookup:
    """A class derived from transformers' lookup."""

    is_free, asks_hidden = True, False

    def __init__(self, generator: Any, prompt: Sequence[int]) -> None:
        self.most, self._generator = generator.num_output_tokens, generator
        self._text, self._length = torch.zeros(1, 0, dtype=torch.int64, device="cpu"), 0  # with room behind
        self.extend(prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > self._text.shape[1]:
            self._text = torch.cat([self._text, self._text.new_zeros(1, 2 * end)], dim=1)
        self._text[0].numpy()[self._length : end] = tokens
        self._length = end

    def read(self, hidden: Tensor | None) -> None:
        pass

    def candidates(self, most: int) -> Sequence[int]:
        found, _ = self._generator.get_candidates(self._text[:, : self._length])
        tokens: list[int] = found[0, self._length :].tolist()
        return tokens[:most]

    def price(self) -> float:
        return 0.0


class _Heads:
    """MTP heads. They read all tokens since they were last asked at once."""

    is_free, asks_hidden = False, True

    def __init__(self, drafts: Drafts, model: Any, request: Request, hidden: Tensor) -> None:
        """hidden  [n, hidden] of the prompt"""
        self._generator, self._model = drafts.generator, model
        self.most = self._generator.num_mtp_layers
        self._text, self._device = request.input_ids.clone(), request.input_ids.device
        self._new: list[int] = []  # tokens behind that
        self._kwargs = drafts.of_text(request)
        self._hidden: list[Tensor] | None = [hidden]

    def extend(self, tokens: Sequence[int]) -> None:
        self._new += tokens

    def _take_in(self) -> None:
        if not self._new:
            return
        self._text = torch.cat(
            [self._text, torch.tensor([self._new], device=self._device, dtype=torch.int64)], dim=1
        )
        self._model._update_model_kwargs_for_generation(
            BaseModelOutput(), self._kwargs, num_new_tokens=len(self._new)
        )
        self._new = []

    def read(self, hidden: Tensor | None) -> None:
        if hidden is None or self._hidden is None:
            self._hidden, self.most = None, 0  # without what one token is made of, those behind it are others
        else:
            self._hidden.append(hidden)

    def candidates(self, most: int) -> Sequence[int]:
        if not self._hidden:
            return ()
        self._take_in()
        hidden, self._hidden = torch.cat(self._hidden), []
        found, _ = self._generator.get_candidates(
            self._text,
            model_kwargs=self._kwargs,
            model_outputs=BaseModelOutput(hidden_states=(hidden[None],)),
            is_first_iteration=False,
            n_last_matches=len(hidden) - 1,
        )
        tokens: list[int] = found[0, self._text.shape[1] :].tolist()
        return tokens[:most]

    def price(self) -> float:
        """Of the text's second token alone, by heads that have read nothing; the best of some."""
        if not self._hidden:
            return 0.0
        self._take_in()
        taken = []
        for _ in range(_TIMED):
            heads = copy.copy(self._generator)
            heads.mtp_cache, heads.is_main_model_prefill = (
                type(heads.mtp_cache)(config=heads.mtp_model.config),
                True,
            )
            start = time.perf_counter()
            found, _ = heads.get_candidates(
                self._text[:, :2],
                model_kwargs={name: None if of is None else of[:, :2] for name, of in self._kwargs.items()},
                model_outputs=BaseModelOutput(hidden_states=(self._hidden[0][None, :1],)),
                is_first_iteration=False,
                n_last_matches=0,
            )
            found.tolist()
            taken.append(time.perf_counter() - start)
        return min(taken)


def source_of(drafts: Drafts, model: Any, request: Request, hidden: Tensor | None) -> Source | None:
    """The candidates of a request whose tokens do not depend on how many are tried; None: they do.

    hidden  [n, hidden] of the prompt, of a request that asks for it
    """
    if request.config.do_sample or not request.is_plain:
        return None
    generator = drafts.generator
    if isinstance(generator, compat.PromptLookupCandidateGenerator):
        kind = _OwnLookup if type(generator) is compat.PromptLookupCandidateGenerator else _OtherLookup
        return kind(generator, request.input_ids[0].tolist())
    if request.config.use_mtp and hidden is not None and hasattr(generator, "num_mtp_layers"):
        return _Heads(drafts, model, request, hidden)
    return None
