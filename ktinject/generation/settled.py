"""What follows from a greedy step of several tokens, settled where the step runs: the host waits for nothing before it.

    host: last token, candidates ──► page-locked ──► the step ──► logits ──► the likeliest tokens
                                                                                 │ compared with the candidates
    host: tokens that the text goes on with  ◄── page-locked ◄───────────────────┤
                                                                                 ▼
                                            caches and positions behind those that are kept, and the next step's token

So a step costs one wait of the host, at its end. What is kept is what the host would keep: candidates up to the first
that is wrong, or up to an end of the text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ktinject.generation import consecutive, sampling
from ktinject.generation.consecutive import Past
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.loop import Mailbox
from ktinject.generation.piecewise_graph import PiecewiseGraph, Stages


class Settler:
    """Settles the steps of a runner.

    ids    [most] int64: the tokens that a step reads, and then any
    count  [1] int64: how many these are
    """

    def __init__(self, runner: GraphRunner, order: Tensor, past: Past | None) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        order  [most] int64: 0, 1 …, for as many tokens as a step may have
        past   what notes states in a step of several tokens; None: there are none
        """
        most = len(order)
        device, size = runner.device, 2 * most + 1
        self._runner, self._past, self._order, self._most = runner, past, order, most
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        with torch.inference_mode(False):
            self._given = torch.zeros(size, dtype=torch.int64, device=device)
            self._found = torch.zeros(most + 1, dtype=torch.int64, device=device)  # tokens; how many are kept
        # Of each token that is read, which one behind it lets the text go on with what is read next; -1: none.
        self.ids, self._expected, self.count = self._given.split([most, most, 1])
        self._ends: frozenset[int] = frozenset()
        self._mailbox = Mailbox(self._found)
        self._choices: dict[int, PiecewiseGraph | None] = {}
        self._settles: dict[int, PiecewiseGraph | None] = {}

    def begin(self, ends: Iterable[int]) -> None:
        """The text of this request ends with any of these tokens."""
        self._ends = frozenset(ends)

    def give(self, tokens: Sequence[int], size: int) -> None:
        """Have the next step read these; the size of a step may be greater."""
        # The step before has been read, so nobody reads this any more.
        host, count, most = self._host.numpy(), len(tokens), self._most
        host[:count], host[count:size], host[-1] = tokens, tokens[-1], count
        host[most : most + size] = -1
        # What is kept ends with an end, be it right or not.
        host[most : most + count - 1] = [-1 if token in self._ends else token for token in tokens[1:]]
        self._given.copy_(self._host, non_blocking=True)

    def settle(self, logits: Tensor) -> int:
        """Queue what follows from logits [size, v]; returns what `read` takes."""
        runner, size = self._runner, len(logits)
        choice = functools.partial(self._choose, logits)
        runner.replay(runner.graph_of(self._choices, size, choice), choice, is_step=False)
        sent = self._mailbox.send()
        settle = functools.partial(self._settle, size)
        graph = runner.graph_of(self._settles, size, settle, runner.cache.state)
        runner.replay(graph, settle, is_step=False)
        return sent

    def read(self, sent: int) -> list[int]:
        """Wait for the tokens that the text goes on with: candidates that were right, and one more."""
        *tokens, kept = self._mailbox.read(sent).tolist()
        return tokens[:kept]

    def _choose(self, logits: Tensor, _: Stages) -> None:
        size = len(logits)
        chosen = self._found[:size].copy_(sampling.greatest(logits))
        is_last = chosen != self._expected[:size]  # the last one always is
        self._found[-1:].copy_(is_last.byte().argmax() + 1)

    def _settle(self, size: int, _: Stages) -> None:
        cache, order, kept = self._runner.cache, self._order[:size], self._found[-1:]
        if self._past is not None:
            self._past.note_end(size)
        consecutive.keep(cache, self._past, order, kept)
        cache.advance_by(kept, order)
        self._runner.ids.copy_(self._found.index_select(0, kept - 1)[:, None])
