"""A request for candidates, and the candidates that transformers' generators have for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria
from transformers.modeling_outputs import BaseModelOutput

from ktinject.generation.governor import Costs, Governor
from ktinject.hf import compat, heads

# What of a request's arguments grows with the text.
_OF_TEXT = ("attention_mask", "position_ids")


@dataclass(frozen=True)
class Request:
    """What transformers hands to `_assisted_decoding`.

    assistants  its arguments for the candidate generator
    """

    input_ids: Tensor
    processors: Any
    criteria: Any
    config: GenerationConfig
    streamer: Any
    assistants: Mapping[str, Any]
    model_kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        if self.config.prompt_lookup_num_tokens is not None:
            return "prompt lookup"
        return "MTP" if self.config.use_mtp else "assisted decoding"

    @property
    def is_plain(self) -> bool:
        """Whether nothing of the user's sees the text while it is written."""
        kinds = {type(criterion) for criterion in self.criteria}
        return kinds <= {MaxLengthCriteria, EosTokenCriteria} and not len(self.processors)

    @property
    def held(self) -> Any:
        return compat.cache_of(self.model_kwargs)


class Drafts:
    """The candidates of one request.

    asks      what the model is asked for beside logits: of MTP heads, what logits are made of
    device    where texts and candidates are: for a lookup the host, if nothing else sees them
    governor  decides how many are tried; None: all are
    """

    def __init__(self, model: Any, request: Request) -> None:
        shown = heads.unswapped(model) if request.config.use_mtp else model
        self.generator = type(model)._get_candidate_generator(
            shown,
            generation_config=request.config,
            input_ids=request.input_ids,
            logits_processor=request.processors,
            model_kwargs=dict(request.model_kwargs),
            **request.assistants,
        )
        self.asks: dict[str, Any] = {}
        if self.generator.requires_model_outputs:
            self.asks = dict(self.generator.model_kwargs_overrides)
        self._model, self._draws = model, request.config.do_sample
        self._kwargs = self.of_text(request)
        self._hidden: Tensor | None = None
        self._steps = self._accepted = 0
        self.device = request.input_ids.device
        self.governor: Governor | None = None
        if isinstance(self.generator, compat.PromptLookupCandidateGenerator):
            if request.is_plain:
                self.device = torch.device("cpu")
                # With an empty list, it would ask for each candidate whether that forbids it.
                self.generator.logits_processor = None
                if self.generator.eos_token_id is not None:
                    self.generator.eos_token_id = self.generator.eos_token_id.cpu()

    @staticmethod
    def of_text(request: Request) -> dict[str, Any]:
        """What of a request's arguments grows with the text."""
        return {name: value for name, value in request.model_kwargs.items() if name in _OF_TEXT}

    def choose_by(self, costs: Costs, most: int) -> None:
        """Try as many as pay, up to so many, where tokens do not depend on it and a candidate costs nothing itself."""
        if isinstance(self.generator, compat.PromptLookupCandidateGenerator) and not self._draws:
            most = min(self.generator.num_output_tokens, most)
            self.governor = Governor(most, costs, is_shadowed=False)

    def __call__(self, text: Tensor, most: int) -> tuple[Tensor, Tensor | None]:
        """Up to so many tokens [1, k] that text [1, n] may go on with; and logits [1, k, v] they are drawn from."""
        if self.governor is not None:
            most = self.governor.count(most, queued=False)
        if not most or (self.asks and self._hidden is None):
            return text[:, :0], None
        how: dict[str, Any] = {}
        if self.asks:
            how = {
                "model_kwargs": self._kwargs,
                "model_outputs": BaseModelOutput(hidden_states=(self._hidden,)),
                "is_first_iteration": not self._steps,
                "n_last_matches": self._accepted,
            }
        found, logits = self.generator.get_candidates(text, **how)
        found = found.to(text.device)[:, text.shape[1] :][:, :most]
        return found, None if logits is None else logits.to(text.device)[:, :most]

    def read(self, hidden: Tensor | None) -> None:
        """hidden [1, n, hidden] of the tokens that were read last; None: there are no candidates without."""
        self._hidden = hidden

    def learn(self, text: Tensor, scores: Tensor, accepted: int, seconds: float) -> None:
        """text [1, n] with the tokens that were accepted, chosen by scores [1, k + 1, v].

        seconds  of the step
        """
        tried = scores.shape[1] - 1
        if self.governor is not None and tried:
            self.governor.verified(tried, accepted, seconds)
        elif self.governor is not None:
            self.governor.plain(seconds)
        if self.asks:
            self._model._update_model_kwargs_for_generation(
                BaseModelOutput(), self._kwargs, num_new_tokens=accepted + 1
            )
        self._steps, self._accepted = self._steps + 1, accepted
        self.generator.update_candidate_strategy(text, scores, accepted)

    def finish(self) -> None:
        """Leave the assistant what it has learned."""
        if isinstance(self.generator, compat.AssistedCandidateGenerator) and not self.asks:
            config: Any = self.generator.assistant_model.generation_config
            if config.num_assistant_tokens_schedule == "heuristic":
                config.num_assistant_tokens = self.generator.num_assistant_tokens
