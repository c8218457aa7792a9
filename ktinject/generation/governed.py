"""The loop of greedy texts with candidates: steps of several tokens where they pay, plain ones elsewhere.

    off  step ──► step ──► step     queued ahead, as in a request without candidates; the host looks for candidates
          │        ╰─ candidates that pay ─╮     meanwhile, in the text without the token that is on its way
          ▼                                ▼
    on   candidates ──► a step that verifies them ──► tokens on the host ──► candidates …

What is verified has to be known on the host, so a step with candidates cannot be queued ahead. Which of the two comes
next is decided by governor.py, and does not show in the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ktinject.generation import sampling
from ktinject.generation.candidates import Request
from ktinject.generation.decoding import Decoding
from ktinject.generation.governor import Costs, Governor, Shadow
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.loop import Mailbox
from ktinject.generation.sampling import Sampling
from ktinject.generation.several import SeveralTokens
from ktinject.generation.sources import Source

# The likeliest token, of a text whose end the host sees.
_GREEDY = Sampling((), do_sample=False, ends=(), pad=None)


class GovernedLoop:
    """The steps of one request."""

    def __init__(
        self,
        decoding: Decoding,
        runner: GraphRunner,
        request: Request,
        source: Source,
        steps: SeveralTokens,
        *,
        is_queued: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """is_queued  steps without candidates may be queued before the end of the one before is known"""
        self._decoding, self._runner, self._request = decoding, runner, request
        self._source, self._steps, self._queues, self._clock = source, steps, is_queued, clock
        config = request.config
        is_kept = config.return_dict_in_generate
        self._kept: list[Tensor] | None = (
            [] if is_kept and (config.output_scores or config.output_logits) else None
        )
        ends = getattr(config, "_eos_token_tensor", None)
        self._ends = set() if ends is None else {*ends.tolist()}
        costs = runner.costs.setdefault(request.name, Costs(0.0 if source.is_free else None))
        self._governor = Governor(min(source.most, steps.most - 1), costs, is_shadowed=source.is_free)
        self._shadow = Shadow(self._governor)
        self._look()
        self._text: list[int] = request.input_ids[0].tolist()
        self._captures = runner.captures
        self._started = 0.0
        self._chosen = torch.empty(steps.most, dtype=torch.int64, device=runner.device)
        self._verified = Mailbox(self._chosen)
        self._sampled: Mailbox | None = None
        self._is_put = False  # whether the runner has the text's last token
        steps.begin(self._ends)

    def records(self) -> dict[str, tuple[Tensor, ...] | None]:
        """Scores and logits, by the names of transformers' output: they are the same where nothing processes them."""
        config, kept = self._request.config, None if self._kept is None else tuple(self._kept)
        return {
            "scores": kept if config.output_scores else None,
            "logits": kept if config.output_logits else None,
        }

    def run(self, first: Tensor) -> Tensor:
        """The text [1, n + new].

        first  logits [1, v] of the prompt's last token
        """
        request = self._request
        self._add(sampling.greatest(first).tolist(), first)
        switches = False  # whether the step before verified candidates
        while not self._is_done:
            found = self._candidates()
            if found:
                self._verify(found)
            else:
                self._plain(switches)
            switches = bool(found)
        if request.streamer is not None:
            request.streamer.end()
        ids = request.input_ids
        return torch.tensor([self._text], dtype=ids.dtype, device=ids.device)

    @property
    def _is_done(self) -> bool:
        return len(self._text) >= self._request.config.max_length or self._text[-1] in self._ends

    def _most(self, ahead: int = 0) -> int:
        """Candidates of a step that the text has room for.

        ahead  tokens that are on their way
        """
        room = self._request.config.max_length - len(self._text) - 1 - ahead
        return max(0, min(self._source.most, self._steps.most - 1, room))

    def _candidates(self) -> Sequence[int]:
        """Those that the next step verifies. Nothing is queued."""
        most, self._started = self._most(), self._clock()
        if not most:
            return ()
        if not self._source.is_free:
            count = self._governor.count(most, queued=False)
            if count and self._governor.costs.price is None:
                self._measure()
                count = self._governor.count(min(most, self._source.most), queued=False)
                self._started = self._clock()
            return self._source.candidates(count) if count else ()
        found = self._source.candidates(most)
        return found[: self._governor.count(len(found), queued=False)]

    def _measure(self) -> None:
        """What the source's candidates cost."""
        costs, start = self._governor.costs, self._clock()
        costs.price = self._source.price() / costs.of(1)
        self._governor.switched(self._clock() - start)
        self._look()

    def _look(self) -> None:
        """Do without the source where it cannot pay: what its candidates are made of costs time, too."""
        if self._governor.is_hopeless:
            self._source.most = 0

    def _verify(self, found: Sequence[int]) -> None:
        """A step of the last token and candidates."""
        asks = self._source.asks_hidden
        verified = self._steps.verify(
            [self._text[-1], *found], has_hidden=asks, has_logits=self._kept is not None
        )
        if verified is None:
            self._verify_on_host(found)
            return
        sent, logits = verified
        self._require()
        self._runner.look()
        tokens = self._steps.read(sent)
        self._decoding.check()
        self._is_put = True
        self._note_verified(len(found), len(tokens) - 1)
        self._go_on(tokens, logits)

    def _verify_on_host(self, found: Sequence[int]) -> None:
        """The same where the host compares."""
        steps, device = self._steps, self._runner.device
        ids = torch.tensor([[self._text[-1], *found]], dtype=torch.int64, device="cpu").to(device)
        logits = steps.step(ids, 1, has_hidden=self._source.asks_hidden)
        self._require()
        self._chosen[: len(logits)].copy_(sampling.greatest(logits))
        chosen: list[int] = self._verified.read(self._verified.send())[: len(logits)].tolist()
        self._decoding.check()
        count = len(chosen) - 1  # fewer, where such a step turned out not to be served
        accepted = next((at for at, token in enumerate(found[:count]) if token != chosen[at]), count)
        tokens = self._cut(chosen[: accepted + 1])
        steps.keep(len(tokens))
        self._is_put = False
        self._note_verified(count, accepted)
        self._go_on(tokens, logits)

    def _note_verified(self, count: int, accepted: int) -> None:
        """A step verified so many candidates, of which the first ones were right."""
        seconds = self._clock() - self._started
        if self._captures != self._runner.captures or not count:
            self._captures, seconds = self._runner.captures, 0.0
        else:
            self._governor.costs.note(count + 1, seconds)
        self._governor.verified(count, accepted, seconds)

    def _go_on(self, tokens: list[int], logits: Tensor | None) -> None:
        """A step that verified candidates wrote these tokens."""
        if self._source.asks_hidden:
            hidden = self._steps.hidden
            self._source.read(None if hidden is None else hidden[: len(tokens)])
        self._shadow.forget()
        self._add(tokens, logits)

    def _plain(self, switches: bool) -> None:
        """Steps of one token, until there are candidates that pay, or the text ends.

        switches  the step before was of another kind
        """
        queue, read = self._plain_steps()
        most = self._request.config.max_length - len(self._text)
        queued, start, is_first = 1, self._clock(), True
        waiting = queue()
        while True:
            ahead = None
            if self._queues and queued < most and not self._is_wanted():
                ahead, queued = queue(), queued + 1
            sent, logits, hidden = waiting
            token = read(sent)
            self._decoding.check()
            now = self._clock()
            self._note_plain(now - start, is_first=is_first, switches=switches)
            start, is_first = now, False
            if self._source.asks_hidden:
                self._source.read(hidden)
            self._shadow.see(token)
            self._add([token], logits)
            if self._is_done:
                return
            if not self._queues:
                if self._is_wanted():
                    return
                ahead = queue()
            if ahead is None:
                return
            waiting = ahead

    def _is_wanted(self) -> bool:
        """Whether to look for candidates behind the next token, instead of queueing one more step."""
        ahead = int(self._queues)
        most = self._most(ahead)
        if not most:
            return False
        if self._source.is_free:
            found = self._source.candidates(most + ahead)
            if self._shadow.is_idle:
                self._shadow.begin(found)
            most = len(found) - ahead
        return self._governor.count(most, queued=self._queues) > 0

    def _plain_steps(self) -> tuple[Callable[[], Any], Callable[[Any], int]]:
        """How a step of one token is queued, which gives (what to read, logits, hidden); and how its token is read."""
        runner, steps = self._runner, self._steps
        asks = self._source.asks_hidden and self._source.most > 0 and steps.most > 1
        # A twin with few kernels notes what its logits are made of, others do so in steps of several tokens alone.
        if asks and self._decoding.fused is None:
            mailbox, ids = (
                self._verified,
                torch.tensor([self._text[-1:]], dtype=torch.int64, device="cpu").to(runner.device),
            )
            self._is_put = False

            def queue_with_hidden() -> Any:
                nonlocal ids
                logits = steps.step(ids, 1, has_hidden=True)
                self._require()
                steps.keep(1)
                found = sampling.greatest(logits)
                self._chosen[:1].copy_(found)
                ids = found[:, None]
                return mailbox.send(), logits, steps.hidden

            return queue_with_hidden, lambda sent: int(mailbox.read(sent)[0])
        if not self._is_put:
            runner.put(torch.tensor([self._text[-1:]], dtype=torch.int64, device="cpu").to(runner.device))
        self._is_put = True  # by each step, for the next one
        sampler = runner.sampler(_GREEDY)
        mailbox = self._sampled = self._sampled or Mailbox(sampler.result)

        def queue() -> Any:
            runner.step(has_hidden=asks)
            self._require()
            runner.choose(_GREEDY)
            logits = None if self._kept is None else runner.found.clone()
            return mailbox.send(), logits, None if runner.hidden is None else runner.hidden.clone()

        return queue, lambda sent: int(mailbox.read(sent)[0, 0])

    def _note_plain(self, seconds: float, *, is_first: bool, switches: bool) -> None:
        """A step of one token took so long.

        is_first  nothing was queued before it; a step that is not queued ahead is none
        """
        governor = self._governor
        if self._captures != self._runner.captures:  # something was captured meanwhile
            self._captures = self._runner.captures
            return
        if is_first and self._queues:
            if switches and governor.costs.knows(1):
                governor.costs.note_switch(seconds)
                governor.switched(max(0.0, seconds - governor.costs.of(1)))
            return
        governor.costs.note(1, seconds)
        governor.plain(seconds)

    def _cut(self, tokens: list[int]) -> list[int]:
        """Those that the text has room for, up to an end."""
        tokens = tokens[: self._request.config.max_length - len(self._text)]
        end = next((at for at, token in enumerate(tokens) if token in self._ends), len(tokens))
        return tokens[: end + 1]

    def _add(self, tokens: Sequence[int], logits: Tensor | None) -> None:
        """The text goes on with tokens, chosen by the first of logits [n, v]."""
        self._text.extend(tokens)
        self._source.extend(tokens)
        if self._kept is not None:
            assert logits is not None
            self._kept.extend(logits[: len(tokens)].split(1))
        if self._request.streamer is not None:
            self._request.streamer.put(torch.tensor([tokens], dtype=torch.int64, device="cpu"))

    def _require(self) -> None:
        if self._decoding.native is None:
            self._decoding.require(self._runner.graphs)
