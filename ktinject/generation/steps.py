"""The three kinds of decode step: replayed in our loop, eager in our loop, replayed in transformers' loop."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import CausalLMOutputWithPast

from ktinject.generation import cache as caches
from ktinject.generation import compressed, kept_cache, step_inputs
from ktinject.generation.cpu.native_decoder import TRIES
from ktinject.generation.decoding import Decoding
from ktinject.generation.eligibility import PlainRequest
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.sampling import Sampler
from ktinject.hf import compat
from ktinject.support import SUPPORTED, Support


def tokens_in(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def runner_for(
    decoding: Decoding,
    cache: Any,
    logits: Tensor,
    prompt: Tensor,
    before: int,
    mask: Tensor | None,
    new_tokens: int,
) -> tuple[GraphRunner | None, Support]:
    """The runner for a request after its prefill, or why there is none.

    before  tokens that the cache held before the prefill
    mask    [b, n + 1] of the next step
    """
    # Asked again, for the prefill ran code of the model.
    length = tokens_in(cache)
    support = caches.length_support(cache, prompt, before) and mask_support(mask, length)
    support = support and decoding.model_support()
    if not support:
        return None, support
    return decoding.runner(cache, logits, length + new_tokens)


def first_positions(
    model: Any, prompt: Tensor, logits: Tensor, model_kwargs: dict[str, Any]
) -> Tensor | None | Support:
    """The positions [b or 1, 1] of the first step, or why no recorded one serves the request.

    prompt        [b, n]
    logits        [b, v] behind it
    model_kwargs  of transformers, for that step
    """
    inputs: dict[str, Any] = model_kwargs
    if step_inputs.beside(model_kwargs):
        tokens = torch.cat([prompt, logits.argmax(-1, keepdim=True)], dim=1)
        inputs = model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **model_kwargs)
    decoding: Decoding = model.ktinject_decoding
    return decoding.step_support(inputs)


def begin(
    decoding: Decoding,
    runner: GraphRunner,
    logits: Tensor,
    cache: Any,
    mask: Tensor | None,
    positions: Tensor | None,
) -> Support:
    """Have a runner take over a prefill's cache, which stays as it is. Returns whether the runner's steps may run.

    logits     [b, v] of the prefill
    mask       [b, n], 0 or False for padding
    positions  [b or 1, 1] of the next token
    """
    length = int(cache.get_seq_length())
    if any(kept is not None for kept in runner.cache.compressed):
        if not (support := compressed.positions_support(positions, length)):
            return support
    take_over = functools.partial(runner.begin, cache, length, mask, positions)
    take_over()
    native = decoding.native
    if native is None:
        return SUPPORTED
    native.refresh()
    # The likeliest ones, not what a greedy text would go on with: that may be one token again and again, and of experts
    # that tie behind it, all tries would take the same. A head may be wider than the embedding.
    logits = logits[:, : native.embedded]
    tokens = itertools.cycle(logits.topk(min(TRIES, logits.shape[-1])).indices.split(1, dim=-1))

    def step() -> None:
        runner.put(next(tokens))
        runner.step()

    shortest = length if positions is None else int(positions.min())
    return native.prove(step, take_over, shortest)


def mask_support(mask: Tensor | None, length: int) -> Support:
    """Whether the mask of a next step, [b, n] or made for a static cache, is of the cache's tokens and one more."""
    if mask is None or mask.dim() != 2 or mask.shape[1] == length + 1:
        return SUPPORTED
    return Support.no(f"the attention mask has {mask.shape[1] - 1} columns, the cache {length} tokens")


def last_logits(outputs: Any, input_ids: Tensor) -> Tensor:
    """[b, v] fp32, a copy: a view would keep the logits of a long prompt alive."""
    return outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)


class Records:
    """What a request returns of each step beside the tokens, on the device; a list where it is asked for, else None.

    scores  [b, v] fp32 each: what the tokens were chosen from, after all processors
    logits  [b, v] fp32 each: the model's
    """

    def __init__(self, plain: PlainRequest) -> None:
        self._are_equal = not plain.sampling.steps  # nothing processes the logits
        self.scores: list[Tensor] | None = [] if plain.has_scores else None
        self.logits: list[Tensor] | None = [] if plain.has_logits else None

    def add(self, logits: Tensor, scores: Tensor | None) -> None:
        """Keep those of a step: tensors that nothing writes to any more."""
        if self.logits is not None:
            self.logits.append(logits)
        if self.scores is not None:
            assert scores is not None
            self.scores.append(scores)

    def add_copies(self, logits: Tensor, scores: Tensor | None) -> None:
        """Copy those of a step, which the next one writes over, within the stream."""
        if self.logits is not None or (self.scores is not None and self._are_equal):
            logits = logits.clone()
        if self.scores is not None:
            assert scores is not None
            scores = logits if self._are_equal else scores.clone()
        self.add(logits, scores)

    def first(self, steps: int) -> dict[str, tuple[Tensor, ...] | None]:
        """Those of the first steps, by the names of transformers' output."""
        found = {"scores": self.scores, "logits": self.logits}
        return {name: None if kept is None else tuple(kept[:steps]) for name, kept in found.items()}


class GraphStep:
    """A `loop.Step` of two replays: the forward pass, then the choice."""

    def __init__(self, runner: GraphRunner, plain: PlainRequest, decoding: Decoding) -> None:
        self._runner, self._decoding = runner, decoding
        self._sampling, self.sampler = plain.sampling, runner.sampler(plain.sampling)
        self.records = Records(plain)
        self.result, self.end_row = self.sampler.result, self.sampler.end_row
        if decoding.group is not None:
            self.result = torch.cat([self.result, self.result[:1]])  # a third row, see `check`

    def first(self, logits: Tensor) -> None:
        self._runner.found.copy_(logits)
        self._choose()

    def __call__(self) -> None:
        self._runner.step()
        if self._decoding.native is None:
            self._decoding.require(self._runner.graphs)
        self._choose()

    def _choose(self) -> None:
        self._runner.choose(self._sampling)
        self.records.add_copies(self._runner.found, self.sampler.scores)
        if self._decoding.group is not None:
            self.result[:2].copy_(self.sampler.result)
            self.result[2].copy_(self._runner.found[:, 0].isnan())

    def check(self, result: Tensor) -> None:
        group = self._decoding.group
        if group is None:
            if self._decoding.native is None:  # else steps on the CPU have raised it
                self._decoding.check()
        elif bool(result[2].any()):
            group.raise_failures()  # all processes see NaN in the same step


class EagerStep:
    """A `loop.Step` as transformers makes it, with our choice of the token."""

    def __init__(
        self, model: Any, plain: PlainRequest, logits: Tensor, input_ids: Tensor, model_kwargs: dict[str, Any]
    ) -> None:
        self._model, self._tokens, self._kwargs = model, input_ids, model_kwargs
        self.sampler = Sampler(plain.sampling, input_ids[:, -1:].clone(), logits.shape[1])
        self.result, self.end_row = self.sampler.result, self.sampler.end_row
        self.records = Records(plain)

    def first(self, logits: Tensor) -> None:
        self._choose(logits)

    def check(self, result: Tensor) -> None:
        pass  # the forward pass raises what went wrong

    def __call__(self) -> None:
        self._tokens = torch.cat([self._tokens, self.sampler.ids], dim=1)
        inputs = self._model.prepare_inputs_for_generation(
            self._tokens, next_sequence_length=1 if self._kwargs["use_cache"] else None, **self._kwargs
        )
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs)
        self._choose(last_logits(outputs, self._tokens))

    def _choose(self, logits: Tensor) -> None:
        self.sampler.choose(logits)
        self.records.add(logits, self.sampler.scores)


class StockReplay:
    """Stands for the model in the stock loop. The first step with one token shows the shapes; the next ones replay.

    max_length  tokens of the text when the loop ends, of which `prompt` are there; 0: it is not known
    support     whether all steps that could be replayed were
    tokens      in the runner's cache
    """

    def __init__(self, model: Any, max_length: int, prompt: int) -> None:
        self._model, self._max_length, self._prompt = model, max_length, prompt
        self._steps = 0
        self._shape: Tensor | None = None
        self._runner: GraphRunner | None = None
        self._support = SUPPORTED
        self._cache: Any = None  # the loop's own
        self.tokens = 0

    @property
    def support(self) -> Support:
        runner = self._runner
        if not self._support or runner is None:
            return self._support
        if runner.changed:
            return Support.no(runner.changed)
        return SUPPORTED if self._model.ktinject_decoding.native is not None else runner.graphs

    def __call__(self, **inputs: Any) -> Any:
        ids: Tensor = inputs["input_ids"]
        if self._runner is None and self._shape is not None:
            self._runner, self._shape = self._begin(inputs, self._shape), None
            self._model.ktinject_decoding.require(self._support)
        if self._runner is not None:
            self._runner.put(ids)
            self._runner.step()
            if self._model.ktinject_decoding.native is None:
                self._model.ktinject_decoding.require(self._runner.graphs)
            self.tokens += 1
            logits = self._runner.found[:, None]
            if (group := self._model.ktinject_decoding.group) is not None:
                group.raise_if_failed(logits)
            return CausalLMOutputWithPast(logits=logits, **{compat.CACHE: inputs[compat.CACHE]})
        outputs = self._model(**inputs)
        if ids.shape[1] == 1:
            self._shape = outputs.logits[:, -1] if self._steps == 0 else None
            self._steps += 1
        return outputs

    def _begin(self, inputs: dict[str, Any], logits: Tensor) -> GraphRunner | None:
        decoding: Decoding = self._model.ktinject_decoding
        self._support = decoding.model_support()
        if not self._support:
            return None
        cache, mask = inputs[compat.CACHE], inputs.get("attention_mask")
        length = int(cache.get_seq_length())
        mask = _mask_of_tokens(mask, length + 1)
        self._support = mask_support(mask, length)
        if not self._support:
            return None
        # The cache may have begun with more than the prompt. One token was made and read since.
        tokens = max(self._max_length, length + max(1, self._max_length - self._prompt - 1))
        positions = decoding.step_support(inputs)
        if isinstance(positions, Support):
            self._support = positions
            return None
        runner, self._support = decoding.runner(cache, logits, tokens)
        if runner is None:
            return None
        self._support = begin(decoding, runner, logits, cache, mask, positions)
        if not self._support:
            return None
        self._cache, self.tokens = cache, length
        return runner

    def hand_back(self) -> None:
        """Bring the loop's cache, which the replays did not write to, up to date. To be called after the loop."""
        if self._runner is not None:
            kept_cache.hand_back(self._cache, self._runner.cache, self.tokens)


def _mask_of_tokens(mask: Any, tokens: int) -> Tensor | None:
    """[b, n], as a request has it: of what transformers makes for static caches, a mask or one for each kind of layer.

    tokens  in the cache with the one of the step
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention", mask.get("sliding_attention"))
    if mask is None or mask.dim() != 4:
        return mask
    # One that is not of bool is added to scores.
    found: Tensor = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    # Where all layers have a window, what was before it is seen no more. A static cache has room for more tokens.
    return functional.pad(found, (max(0, tokens - found.shape[1]), 0), value=True)[:, :tokens]
