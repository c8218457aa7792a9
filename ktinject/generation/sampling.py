"""The plain ways to choose the next token, on tensors alone, so that a CUDA graph can hold them.

    transformers' processors ──► `read` ──► Sampling ──► `Sampler.choose`: logits [b, v] → tokens [b], on the device

Same arithmetic, in the same order and from the same random numbers, as transformers' own loop: a seed gives the same
tokens in both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.generation.cuda.chooser import Chooser
from ktinject.support import Support

_TIES = 64  # tokens beyond the k-th that may tie with it, looked at where top-p follows top-k


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; equal ones share a captured graph.

    steps         (name, value) of each processor, in order; the length of "min_length" is the request's, not in here
    do_sample     draw, or take the most likely
    ends          end tokens
    pad           what a finished row goes on with; None: whatever it produces
    keeps_scores  what is chosen from can be read afterwards, see `Sampler.scores`
    keeps_rows    what a finished row computes is returned, so it is computed like the others
    """

    steps: tuple[tuple[str, float], ...]
    do_sample: bool
    ends: tuple[int, ...]
    pad: int | None
    keeps_scores: bool = False
    keeps_rows: bool = False

    @property
    def has_penalty(self) -> bool:
        return any(name == "penalty" for name, _ in self.steps)


@dataclass(frozen=True)
class Request:
    """What of the choice belongs to one request only.

    min_length  tokens with the prompt before which no end token is chosen
    ignore      leading tokens of each row that a repetition penalty does not count
    """

    min_length: int = 0
    ignore: int | Tensor | None = None


def read(
    processors: Iterable[Any],
    do_sample: bool,
    ends: Tensor | None,
    pad: int | None,
    *,
    keeps_scores: bool = False,
    keeps_rows: bool = False,
) -> tuple[Sampling, Request] | Support:
    """transformers' prepared processors as a Sampling, or why that cannot be: one of them is not plain.

    ends  of the end-token criterion; None if there is none, and then no row is padded
    """
    # A list in a list, as some generation configs have them, is read by transformers, too.
    end_tokens = tuple(ends.flatten().tolist()) if ends is not None else ()
    steps: list[tuple[str, float]] = []
    min_length, ignore = 0, None
    for processor in processors:
        kind = type(processor)
        if (
            getattr(processor, "filter_value", -inf) != -inf
            or getattr(processor, "min_tokens_to_keep", 1) != 1
        ):
            return Support.no(f"{kind.__name__} with a filter value or a number of tokens to keep")
        if kind is TemperatureLogitsWarper:
            steps.append(("temperature", processor.temperature))
        elif kind is TopKLogitsWarper:
            steps.append(("top_k", processor.top_k))
        elif kind is TopPLogitsWarper:
            steps.append(("top_p", processor.top_p))
        elif kind is MinPLogitsWarper:
            steps.append(("min_p", processor.min_p))
        elif kind is RepetitionPenaltyLogitsProcessor:
            steps.append(("penalty", processor.penalty))
            ignore = processor.prompt_ignore_length
        elif kind in (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor):
            if tuple(processor.eos_token_id.flatten().tolist()) != end_tokens:
                return Support.no(f"{kind.__name__} with end tokens of its own")
            if kind is MinLengthLogitsProcessor:
                least = processor.min_length
            else:
                least = processor.prompt_length_to_skip + processor.min_new_tokens
            min_length = max(min_length, least)
            steps.append(("min_length", 0))
        else:
            return Support.no(kind.__name__)
    names = [name for name, _ in steps]
    if names.count("penalty") > 1:
        return Support.no("two repetition penalties")
    chosen = Sampling(tuple(steps), do_sample, end_tokens, pad, keeps_scores, keeps_rows)
    return chosen, Request(min_length, ignore)


class Sampler:
    """Chooses the tokens of one batch, step after step; all state is in tensors that stay where they are.

    ids     [b, 1] int64: receives the chosen tokens, where the model reads them
    result  [2, b] int64: the same tokens, and 1 for each row that goes on
    scores  [b, v] fp32: what the last tokens were chosen from, where the sampling keeps scores; the logits themselves
            where nothing processes them. A replay of a captured choice writes it anew, other replays may write over it.
    """

    def __init__(self, sampling: Sampling, ids: Tensor, vocab_size: int) -> None:
        batch, device = len(ids), ids.device
        self.sampling = sampling
        self.ids = ids
        self.result = torch.zeros(2, batch, dtype=torch.int64, device=device)
        self.scores: Tensor | None = None
        self._length = torch.zeros(1, dtype=torch.int64, device=device)
        self._min_length = torch.zeros(1, dtype=torch.int64, device=device)
        self._ends = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        # -1, that no text ends, would be the last token.
        self._ends[[end for end in sampling.ends if 0 <= end < vocab_size]] = True
        seen = (
            vocab_size + 1 if sampling.has_penalty else 0
        )  # one more, for ids the model's head does not have
        self._seen = torch.zeros(batch, seen, dtype=torch.bool, device=device)
        self._chooser: Chooser | None = None
        if ids.is_cuda and _native.cuda_built():
            self._chooser = Chooser(ids, self.result, self._length, self._seen, self._ends, sampling.pad)
        self._choice: Any = None
        if ids.is_cpu and (not sampling.do_sample or _draws_as_torch()):
            self._choice = _native.TokenChoice(
                ids=ids, result=self.result, length=self._length, ends=self._ends, pad=sampling.pad
            )

    def begin(self, prompt: Tensor, request: Request) -> None:
        """Start a request.

        prompt  [b, n] int64, on the sampler's device
        """
        self.result[1] = 1
        self._length.fill_(prompt.shape[1])
        self._min_length.fill_(request.min_length)
        if self.sampling.has_penalty:
            absent = self._seen.shape[1] - 1
            positions = torch.arange(prompt.shape[1], device=prompt.device)
            ignore = (
                request.ignore or 0 if not isinstance(request.ignore, Tensor) else request.ignore[:, None]
            )
            counted = prompt.clamp(max=absent).masked_fill(positions < ignore, absent)
            self._seen.zero_().scatter_(1, counted, True)

    def end_row(self, row: int) -> None:
        """A row is finished by what the device does not see, a stop string."""
        self.result[1, row] = 0

    def choose(self, logits: Tensor) -> None:
        """Choose a token for each row of logits [b, v] fp32; `ids` and `result` then hold them."""
        scores = self._process(logits)
        if self.sampling.keeps_scores:
            self.scores = scores
        if self._chooser is not None:
            noise = torch.empty_like(scores).exponential_(1) if self.sampling.do_sample else None
            self._chooser(scores, noise)
            return
        if self._choice is not None:
            _choose(self._choice.choose, scores, draws=self.sampling.do_sample)
            self._choice.take()
            if self.sampling.has_penalty:
                self._seen.scatter_(1, self.ids, True)
            return
        tokens = _drawn(scores) if self.sampling.do_sample else greatest(scores)
        alive = self.result[1]
        if self.sampling.pad is not None:
            tokens = torch.where(alive == 1, tokens, self.sampling.pad)
        self.result[0].copy_(tokens)
        self.ids.copy_(tokens[:, None])
        if self.sampling.ends:
            alive.mul_(~self._ends[tokens.clamp(max=len(self._ends) - 1)])
        if self.sampling.has_penalty:
            self._seen.scatter_(1, tokens[:, None], True)
        self._length.add_(1)

    def _process(self, scores: Tensor) -> Tensor:
        steps = list(self.sampling.steps)
        while steps:
            name, value = steps.pop(0)
            if name == "penalty":
                changed = torch.where(scores < 0, scores * value, scores / value)
                scores = torch.where(self._seen[:, :-1], changed, scores)
            elif name == "min_length":
                scores = scores.masked_fill(self._ends & (self._length < self._min_length), -inf)
            elif name == "temperature":
                scores = scores / value
            elif name == "top_k" and steps and steps[0][0] == "top_p":
                scores = _top_k_top_p(scores, int(value), steps.pop(0)[1])
            elif name == "top_k":
                least = scores.topk(min(int(value), scores.shape[-1])).values[:, -1:]
                scores = scores.masked_fill(scores < least, -inf)
            elif name == "top_p":
                ascending, order = scores.sort(-1)
                scores = scores.masked_fill(torch.zeros_like(order, dtype=torch.bool).scatter(
                    1, order, _outside(ascending, value)), -inf)  # fmt: skip
            else:
                weights = scores.softmax(-1)
                scores = scores.masked_fill(weights < value * weights.amax(-1, keepdim=True), -inf)
        return scores


def greatest(scores: Tensor) -> Tensor:
    """The likeliest of scores [b, v]."""
    return _native_choice(scores, None) if scores.is_cpu else scores.argmax(-1)


def _drawn(scores: Tensor) -> Tensor:
    """A token for each row of scores [b, v], as torch.multinomial draws it, which looks at its input."""
    if not scores.is_cpu or not _draws_as_torch():
        return _drawn_by_torch(scores, None)
    tokens = torch.empty(len(scores), dtype=torch.int64, device="cpu")
    _choose(functools.partial(_native.choose, tokens=tokens), scores, draws=True)
    return tokens


def _drawn_by_torch(scores: Tensor, generator: torch.Generator | None) -> Tensor:
    weights = scores.softmax(-1)
    return (weights / torch.empty_like(weights).exponential_(1, generator=generator)).argmax(-1)


def _native_choice(scores: Tensor, state: Tensor | None) -> Tensor:
    tokens = torch.empty(len(scores), dtype=torch.int64, device="cpu")
    _native_call(functools.partial(_native.choose, tokens=tokens), scores, state)
    return tokens


def _choose(choose: Callable[..., None], scores: Tensor, *, draws: bool) -> None:
    """Have a native function choose tokens by scores [b, v], and move torch's generator on if it draws them."""
    if not draws:
        return _native_call(choose, scores, None)
    while True:
        state = torch.default_generator.get_state()
        drawn = state.clone()
        _native_call(choose, scores, drawn)
        # Where another thread has drawn from the generator meanwhile, these numbers are his.
        if _native.exchange_state(torch.default_generator, state, drawn):
            return


def _native_call(choose: Callable[..., None], scores: Tensor, state: Tensor | None) -> None:
    try:
        choose(scores=scores.contiguous(), generator=state)
    except ValueError as error:
        raise OperatorError(
            f"generate: {error}. Load the model in bfloat16 or float32 if its values are beyond float16, and check "
            "its weights."
        ) from None


@functools.cache
def _draws_as_torch() -> bool:
    """Whether this torch draws random numbers in the way that the native core knows."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 500, generator=generator, dtype=torch.float32, device="cpu")
    for _ in range(4):
        state = generator.get_state()
        wanted = _drawn_by_torch(scores, generator)
        try:
            found = _native_choice(scores, state)
        except ValueError:
            return False
        if not torch.equal(found, wanted) or not torch.equal(state, generator.get_state()):
            return False
    return True


def _outside(ascending: Tensor, top_p: float) -> Tensor:
    """Which of scores in ascending order do not belong to the likeliest ones that have `top_p` together."""
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[:, -1] = False
    return removed


def _top_k_top_p(scores: Tensor, k: int, top_p: float) -> Tensor:
    """Both in one, without sorting the vocabulary. Of tokens that tie with the k-th, `_TIES` are kept at most."""
    k = min(k, scores.shape[-1])
    found, order = scores.topk(min(k + _TIES, scores.shape[-1]))
    ascending = found.masked_fill(found < found[:, k - 1 : k], -inf).flip(-1)
    kept = ascending.masked_fill(_outside(ascending, top_p), -inf)
    return torch.full_like(scores, -inf).scatter(1, order.flip(-1), kept)
