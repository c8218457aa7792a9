"""Prompt lookup, assistants and MTP heads in recorded steps: candidates are verified by steps of several tokens.

    transformers' candidate generator ──► candidates ──► `SeveralTokens.step` ──► logits of each
                  ▲                                                                  │ processors, choice
                  └──────────────────── what was accepted ◄── `SeveralTokens.keep` ◄─┘

The rules of acceptance are those of transformers' `_assisted_decoding`, and so are the tokens, drawn ones from the same
random numbers. What differs is what a request need not know: of greedy lookups and MTP heads, as many candidates are
tried as pay (governor.py), since tokens do not depend on it. Where nothing but the loop sees the text, governed.py runs
them; this file's loop has the others.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ktinject.generation import cache as caches
from ktinject.generation import governed, kept_cache, sampling, several, sources
from ktinject.generation.candidates import Drafts, Request
from ktinject.generation.cpu import openmp
from ktinject.generation.decoding import Decoding
from ktinject.generation.governor import Costs
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.several import SeveralTokens
from ktinject.generation.steps import begin, first_positions, last_logits, runner_for, tokens_in
from ktinject.hf import compat
from ktinject.support import SUPPORTED, Support


def support(decoding: Decoding, request: Request, synced_gpus: bool) -> Support:
    """Whether our own loop can run a request that recorded steps can serve."""
    config = request.config
    if synced_gpus:
        return Support.no("synced_gpus")
    if decoding.group is not None:
        return Support.no("several processes share the model")
    if config.output_attentions or config.output_hidden_states:
        return Support.no(
            "attentions or hidden states are asked for (output_attentions, output_hidden_states)"
        )
    if len(request.input_ids) != 1 or not request.input_ids.shape[1]:
        return Support.no("candidates are of one prompt of ids")
    if type(request.held) is not DynamicCache:
        return Support.no(f"the cache is a {type(request.held).__name__}")
    for name in ("assistant_early_exit", "assistant_ensemble_weight", "speculation_type"):
        if getattr(config, name, None):
            return Support.no(f"{name}={getattr(config, name)!r}")
    runner = decoding.runners.get(1)
    if config.do_sample and runner is not None:
        # Without candidates, other random numbers would be drawn.
        if not (known := several.known_support(runner, decoding.native)):
            return known
    if type(request.assistants["assistant_model"]).__name__.startswith("Gemma4"):
        return Support.no("the assistant reads the model's own keys and values")
    return SUPPORTED


def how(decoding: Decoding, request: Request) -> str:
    """How such a request runs, as `Decoding.last` says it."""
    runner = decoding.runners.get(1)
    kind = "graph" if runner is None or runner.graphs else "eager"
    return f"{'native' if decoding.native is not None else kind} loop, {request.name}"


def foreseen(decoding: Decoding) -> Support:
    """Whether all of a request that `support` lets in will run as it should, as far as that is known before."""
    runner = decoding.runners.get(1)
    if runner is None:
        return SUPPORTED
    if decoding.native is None and not runner.graphs:
        return runner.graphs
    return _tried(several.known_support(runner, decoding.native))


def _tried(several_tokens: Support) -> Support:
    return several_tokens or Support.no(f"no candidates are tried: {several_tokens.reason}")


class _Refused(Exception):
    """A request shows within that it cannot be run here."""

    def __init__(self, reason: Support) -> None:
        super().__init__(reason.reason)
        self.support = reason


def run(model: Any, request: Request) -> tuple[Any, Support, Any]:
    """A request that was not refused.

    Returns  what transformers' `_assisted_decoding` returns, or None; whether all steps were recorded ones; and, where
             there is no result, the cache that such a loop may begin with
    """
    untouched = request.held if kept_cache.is_callers(request.held) else copy.deepcopy(request.held)
    try:
        with kept_cache.restored(request.held):
            found, recorded = _run(model, request)
    except _Refused as refused:
        return None, refused.support, untouched
    return found, recorded, None


def _run(model: Any, request: Request) -> tuple[Any, Support]:
    decoding: Decoding = model.ktinject_decoding
    config, input_ids = request.config, request.input_ids
    model_kwargs = dict(request.model_kwargs)
    drafts = Drafts(model, request)
    before = tokens_in(request.held)
    outputs = model._prefill(input_ids, config, {**model_kwargs, **drafts.asks}, is_first_iteration=True)
    logits = last_logits(outputs, input_ids)
    hidden = outputs.hidden_states[-1][0] if drafts.asks else None
    cache = outputs.get(compat.CACHE)
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    del outputs
    mask = model_kwargs.get("attention_mask")
    positions = first_positions(model, input_ids, logits, model_kwargs)
    if isinstance(positions, Support):
        raise _Refused(positions)
    new_tokens = config.max_length - input_ids.shape[1] + several.SIZES[-1]
    runner, recorded = runner_for(decoding, cache, logits, input_ids, before, mask, new_tokens)
    if runner is None:
        raise _Refused(recorded)
    is_lookup = isinstance(drafts.generator, compat.PromptLookupCandidateGenerator)
    # An assistant computes with torch's own threads.
    alone = openmp.one_thread() if decoding.native is not None and is_lookup else nullcontext()
    with model._optimize_model_for_decode(), alone:
        length = tokens_in(cache)
        recorded = begin(decoding, runner, logits, cache, mask, positions)
        if not recorded:
            raise _Refused(recorded)
        steps = SeveralTokens(runner, decoding.native, decoding.several_forwards)
        steps.prove(logits, lambda: runner.begin(cache, length, mask, positions))
        if not steps.support and config.do_sample:
            raise _Refused(steps.support)
        if not kept_cache.is_callers(cache):
            caches.give_back(cache)
        is_kept = config.return_dict_in_generate or kept_cache.is_callers(cache)
        source = sources.source_of(drafts, model, request, hidden)
        loop: governed.GovernedLoop | _Loop
        if source is not None:
            # A step that is queued beyond the end of the text leaves states that have gone on.
            is_queued = decoding.native is None and not (is_kept and runner.cache.has_states)
            loop = governed.GovernedLoop(decoding, runner, request, source, steps, is_queued=is_queued)
        else:
            drafts.read(None if hidden is None else hidden[None])
            drafts.choose_by(runner.costs.setdefault(request.name, Costs()), steps.most - 1)
            loop = _Loop(decoding, runner, request, drafts, steps)
        tokens = loop.run(logits)
    if is_kept:
        kept_cache.hand_back(cache, runner.cache, length + tokens.shape[1] - input_ids.shape[1] - 1)
    drafts.finish()
    reason = runner.changed if decoding.native is not None else runner.graphs.reason or runner.changed
    recorded = Support.no(reason) if reason else _tried(steps.support)
    if not config.return_dict_in_generate:
        return tokens, recorded
    found = compat.GenerateDecoderOnlyOutput(sequences=tokens, **{compat.CACHE: cache}, **loop.records())
    return found, recorded


class _Loop:
    """The steps of one request."""

    def __init__(
        self,
        decoding: Decoding,
        runner: GraphRunner,
        request: Request,
        drafts: Drafts,
        steps: SeveralTokens,
    ) -> None:
        self._decoding, self._runner, self._request = decoding, runner, request
        self._drafts, self._steps = drafts, steps
        config = request.config
        self._ends = getattr(config, "_eos_token_tensor", None)
        is_kept = config.return_dict_in_generate
        self._scores: list[Tensor] | None = [] if is_kept and config.output_scores else None
        self._logits: list[Tensor] | None = [] if is_kept and config.output_logits else None
        self._is_plain = request.is_plain
        self._captures = runner.captures
        self._end_tokens = set() if self._ends is None else set(self._ends.tolist())

    def _keep(self, scores: Tensor, logits: Tensor) -> None:
        """Those of tokens that the text goes on with, [m, v], if they are asked for."""
        for kept, values in ((self._scores, scores), (self._logits, logits)):
            if kept is not None:
                kept.extend(values.split(1))

    def records(self) -> dict[str, tuple[Tensor, ...] | None]:
        """Scores and logits, by the names of transformers' output."""
        found = {"scores": self._scores, "logits": self._logits}
        return {name: None if kept is None else tuple(kept) for name, kept in found.items()}

    def run(self, first: Tensor) -> Tensor:
        """The text [1, n + new].

        first  logits [1, v] of the prompt's last token
        """
        request, steps = self._request, self._steps
        text, known = request.input_ids.to(self._drafts.device), first
        while True:
            sure = 1 - len(known)  # the last token was not read yet, but behind the prompt
            start = time.perf_counter()
            drafted, draft_logits = self._drafts(text, steps.most - sure)
            ids = torch.cat([text[:, text.shape[1] - sure :], drafted], dim=1)
            has_hidden = bool(self._drafts.asks)
            logits = torch.cat([known, steps.step(ids.to(first.device), sure, has_hidden=has_hidden)])
            if has_hidden and sure:  # else they are those of the prompt
                self._drafts.read(None if steps.hidden is None else steps.hidden[None])
            known = logits[:0]
            self._require()
            count = len(logits) - 1
            drafted = drafted[:, :count]
            scores = self._processed(text, drafted, logits)
            valid = self._valid(text, drafted, draft_logits, scores)
            accepted = valid.shape[1] - 1
            steps.keep(accepted + sure)
            text = torch.cat([text, valid], dim=1)
            seconds = self._cost(count + sure, time.perf_counter() - start)
            if request.streamer is not None:
                request.streamer.put(valid.cpu())
            self._drafts.learn(text, scores, accepted, seconds)
            self._keep(scores[0, : accepted + 1], logits[: accepted + 1])
            if self._is_done(text):
                break
        if request.streamer is not None:
            request.streamer.end()
        return text.to(request.input_ids.device)

    def _cost(self, tokens: int, seconds: float) -> float:
        """What a step of so many tokens took; 0 if something was captured meanwhile."""
        if not tokens or self._captures != self._runner.captures:
            self._captures, seconds = self._runner.captures, 0.0
        elif self._drafts.governor is not None:
            self._drafts.governor.costs.note(tokens, seconds)
        return seconds

    def _require(self) -> None:
        if self._decoding.native is None:
            self._decoding.require(self._runner.graphs)

    def _processed(self, text: Tensor, drafted: Tensor, logits: Tensor) -> Tensor:
        """Scores [1, k + 1, v] of the tokens behind the text and behind each candidate."""
        processors = self._request.processors
        if not len(processors):
            return logits[None]
        whole, length = torch.cat([text, drafted], dim=1), text.shape[1]
        rows = [processors(whole[:, : length + at], row[None].clone()) for at, row in enumerate(logits)]
        return torch.stack(rows, dim=1)

    def _valid(self, text: Tensor, drafted: Tensor, draft_logits: Tensor | None, scores: Tensor) -> Tensor:
        """The tokens [1, m] that the text goes on with: candidates that are right, and one more."""
        config, count = self._request.config, drafted.shape[1]
        if config.do_sample and draft_logits is not None and count:
            valid = _drawn(drafted[0], draft_logits[0, :count], scores[0])
        else:
            if config.do_sample:
                chosen = torch.multinomial(scores[0].softmax(-1), num_samples=1)[:, 0]
            else:
                chosen = sampling.greatest(scores[0])
            chosen = chosen.to(self._drafts.device)
            right = int((chosen[:-1] == drafted[0]).long().cumprod(0).sum())
            valid = chosen[: right + 1]
        self._decoding.check()
        valid = valid[: config.max_length - text.shape[1]]
        if self._end_tokens:
            tokens = valid.tolist()
            end = next((at for at, token in enumerate(tokens) if token in self._end_tokens), len(tokens))
            valid = valid[: end + 1]
        return valid[None]

    def _is_done(self, text: Tensor) -> bool:
        if not self._is_plain:
            scores = None if self._scores is None else tuple(self._scores)
            return bool(self._request.criteria(text, scores).all())
        return text.shape[1] >= self._request.config.max_length or int(text[0, -1]) in self._end_tokens


def _drawn(drafted: Tensor, draft_logits: Tensor, scores: Tensor) -> Tensor:
    """Speculative sampling (Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding,
    arXiv 2211.17192, algorithm 1), with the random numbers that transformers draws for it.

    drafted       [k], drawn from draft_logits [k, v]
    scores        [k + 1, v]
    Returns       [m], up to k + 1 tokens
    """
    q, p = draft_logits.softmax(-1), scores.softmax(-1)
    at = torch.arange(len(drafted), device=drafted.device)
    ratio = p[at, drafted] / q[at, drafted]
    is_kept = torch.rand_like(ratio) <= ratio
    kept = int(is_kept.long().cumprod(0).sum())
    rest = p[kept]
    if kept < len(drafted):
        rest = (rest - q[kept]).clamp(min=0)
        rest = rest / rest.sum()
    return torch.cat([drafted[:kept], torch.multinomial(rest, num_samples=1)])
