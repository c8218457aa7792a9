"""Steps of a model that drops its cache at some length and reads the text again, as Phi-3.5-MoE does.

recorded steps ──► as many tokens as `replaced.read_again_at` says ──► one step of the model's own, which reads all
                                                                      of the text ──► recorded steps on that cache
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktinject.generation import kept_cache, replaced
from ktinject.generation.decoding import Decoding
from ktinject.generation.eligibility import PlainRequest
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.steps import GraphStep, last_logits
from ktinject.hf import compat


class RereadingStep(GraphStep):
    """A `GraphStep` that reads the whole text at one length.

    cache  as `own_loop.run` has it: that of the last time the text was read
    """

    def __init__(
        self,
        model: Any,
        runner: GraphRunner,
        plain: PlainRequest,
        decoding: Decoding,
        prompt: Tensor,
        model_kwargs: dict[str, Any],
        cache: Any,
        positions: Tensor | None,
    ) -> None:
        """prompt [b, n]; model_kwargs of transformers, for the first step; positions [b or 1, 1] of that."""
        super().__init__(runner, plain, decoding)
        self._model, self._kwargs, self._texts = model, model_kwargs, [prompt]
        self._at, self._length, self._positions = replaced.read_again_at(model), prompt.shape[1], positions
        self.cache = cache

    def __call__(self) -> None:
        self._texts.append(self.sampler.ids.clone())
        if self._runner.cache.used != self._at:
            super().__call__()
            return
        self._read_again(torch.cat(self._texts, dim=1))
        self._choose()

    def _read_again(self, text: Tensor) -> None:
        """text [b, n], with the token that the step is to read."""
        if kept_cache.is_callers(self.cache):  # it keeps what it held
            kept_cache.hand_back(self.cache, self._runner.cache, text.shape[1] - 1)
        kwargs, new = self._kwargs, text.shape[1] - 1 - self._length
        if new:
            kwargs = self._model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=new)
        inputs = self._model.prepare_inputs_for_generation(text, next_sequence_length=1, **kwargs)
        outputs = self._model(**inputs, return_dict=True)
        self.cache = outputs.get(compat.CACHE)
        positions = None if self._positions is None else self._positions + new + 1
        self._runner.begin(self.cache, text.shape[1], kwargs.get("attention_mask"), positions)
        if self._decoding.native is not None:
            self._decoding.native.refresh()
        self._runner.found.copy_(last_logits(outputs, text))
