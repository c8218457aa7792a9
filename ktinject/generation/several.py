"""Steps of several tokens of one text on a runner's cache, of which the last may be taken back.

    ids [1, n] ──► `SeveralTokens.step`: logits [n, v]
                   └──► `keep(m)`: the cache has the first m of them, as if the others had never been read
    or greedy ones on a GPU, of which the device keeps what is right: `verify`, and `read` waits for it, see settled.py

A candidate that is verified costs little where weights are read once for all tokens of a step. On a CPU, the native
decoder takes such steps, and takes back what it wrote to rings and states. On a GPU they are graphs, for some numbers
of tokens: a token is a row, as in steps of several texts, see consecutive.py.

That such a step does what steps of one token do is not believed: before the first one, `prove` compares the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ktinject.generation import consecutive
from ktinject.generation.cache import KVBucket, bucket_of
from ktinject.generation.cpu.native_decoder import NativeDecoder, Proof
from ktinject.generation.graph_runner import Forward, GraphRunner
from ktinject.generation.piecewise_graph import PiecewiseGraph, Stages
from ktinject.generation.settled import Settler
from ktinject.operators.offload import lent, submits
from ktinject.support import SUPPORTED, Support

# Tokens of a step that are captured; a step of another number of tokens has the next size. One is
# for those that are asked what their logits are made of.
SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
# Where layers have states, which are noted before each token: of 36 layers of Qwen3.5-35B-A3B 75 MB.
_MOST_WITH_STATES = 8
# On a CPU, where nothing is captured: more are not worth it.
_MOST_ON_CPU = 64
# By what logits of the two kinds of steps may differ, relative to the norm of a row: roundings of other kernels in many
# layers. Without one of the last tokens, or at another position, rows have little in common.
_TOLERANCE = 0.1
# Texts that are compared, and their tokens. Of two experts that tie, both are right.
_TRIES, _COMPARED = 3, 3


class GraphedSteps(Proof):
    """Steps on a runner's cache, as graphs where there are any.

    support  whether they do what steps of one token do; None: that is not known yet
    most     tokens of a step
    hidden   as `SeveralTokens` has it
    """

    def __init__(self, forwards: Sequence[Forward], runner: GraphRunner) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        forwards  each the whole model; the first one is used, and the others are there if it gives other logits
        """
        self._forwards, self._runner = [*forwards], runner
        cache, device, vocab = runner.cache, runner.device, runner.logits.shape[1]
        windows = [kind.window for kind in cache.kinds if kind.window is not None]
        self.most = min([_MOST_WITH_STATES if cache.has_states else SIZES[-1], *windows])
        self._past = consecutive.Past(cache, self.most) if cache.has_states else None
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self._order = torch.arange(self.most, device=device)
            self._kept = torch.zeros(1, dtype=torch.int64, device=device)
            self._logits = torch.zeros(self.most, vocab, dtype=torch.float32, device=device)
        self.hidden: Tensor | None = None
        self._hidden: Tensor | None = None  # [most, hidden], from the first step on that is asked for it
        self._graphs: dict[tuple[int, int, bool], PiecewiseGraph | None] = {}
        self._keeps: dict[int, PiecewiseGraph | None] = {}
        self._size = 0  # tokens of the last step, with padding
        self.settler = Settler(runner, self._order, self._past)

    def __call__(self, ids: Tensor, length: int, has_hidden: bool) -> Tensor | Support:
        """Logits [n, v] of tokens [1, n] behind so many others; or why they cannot be captured.

        has_hidden  `hidden` is asked for
        """
        count = ids.shape[1]
        size, given = self._size_of(count, length), self.settler.ids
        given[:count].copy_(ids[0])
        given[count:size] = ids[0, -1]
        self.settler.count.fill_(count)
        support = self._read(count, length, size, has_hidden)
        return self._logits[:count].clone() if support else support

    def verify(
        self, tokens: Sequence[int], length: int, *, has_hidden: bool, has_logits: bool
    ) -> tuple[int, Tensor | None] | Support:
        """A greedy step of such tokens: the text's last one and candidates, of which the device keeps what is right.

        has_logits  they are asked for
        Returns     what `settler.read` takes, and the logits [n, v]
        """
        count = len(tokens)
        size = self._size_of(count, length)
        self.settler.give(tokens, size)
        support = self._read(count, length, size, has_hidden)
        if not support:
            return support
        sent = self.settler.settle(self._logits[:size])
        return sent, self._logits[:count].clone() if has_logits else None

    def _size_of(self, count: int, length: int) -> int:
        """Tokens of the step that serves so many."""
        size = min(self.most, next(size for size in SIZES if size >= count))
        cache = self._runner.cache
        if length + size > cache.capacity:
            size = count  # there is no room for padding
        cache.reserve(size - count)  # which is written, too
        cache.give_back(size - count)
        return size

    def _read(self, count: int, length: int, size: int, has_hidden: bool) -> Support:
        """Compute what the settler has been given."""
        cache = self._runner.cache
        bucket = cache.capacity if self._order.is_cpu else bucket_of(length + size)
        self._size = size
        work = functools.partial(self._compute, bucket, size, has_hidden)
        states = [tensor for kind, held in zip(cache.kinds, cache.layers) if kind.is_state for tensor in held]
        graph = self._runner.graph_of(self._graphs, (bucket, size, has_hidden), work, states)
        if graph is None and self._runner.graphs:
            return Support.no(f"a step of {size} tokens cannot be captured")
        self._runner.replay(graph, work)
        if has_hidden and self._hidden is None:
            return Support.no("what its logits are made of cannot be seen")
        self.hidden = self._hidden[:count].clone() if has_hidden and self._hidden is not None else None
        return SUPPORTED

    def keep(self, tokens: int) -> None:
        """Leave the first ones of the last step in rings and states, before the cache has advanced."""
        cache, size = self._runner.cache, self._size
        past = self._past if tokens < size else None
        if past is None and not cache.rings:
            return
        self._kept.fill_(tokens)

        def work(_: Stages) -> None:
            consecutive.keep(cache, past, self._order[:size], self._kept)

        graph = self._runner.graph_of(self._keeps, (size, past is None), work)
        self._runner.replay(graph, work, is_step=False)

    def goes_on(self) -> bool:
        """Take the next way to compute steps, if there is one."""
        if len(self._forwards) == 1:
            return False
        self._forwards.pop(0)
        self._graphs.clear()
        return True

    def _compute(self, bucket: int, size: int, has_hidden: bool, stages: Stages) -> None:
        cache, order, settler = self._runner.cache, self._order[:size], self.settler
        view = consecutive.view_of(cache, bucket, order, self._past)
        view.stages, view.asks_hidden = stages, has_hidden
        with submits.only(order < settler.count if order.is_cuda else None):
            logits = self._forwards[0](
                settler.ids[:size, None], view.masks[None], cache.positions + order[:, None], view
            )
        view.keep_in_place()
        self._logits[:size].copy_(logits)
        if isinstance(view.hidden, Tensor) and view.hidden.shape[:-1] == (size, 1):
            if self._hidden is None:  # in a step before the one that is captured
                with torch.inference_mode(False):
                    self._hidden = view.hidden.new_zeros(self.most, view.hidden.shape[-1])
            self._hidden[:size].copy_(view.hidden[:, 0])


class SeveralTokens:
    """Such steps of one request, which is of one row.

    most     tokens of a step
    support  whether steps have more than one token, and why not
    hidden   [n, hidden]: what the logits of the last step were made of; None where that is not known
    """

    def __init__(
        self, runner: GraphRunner, native: NativeDecoder | None, forwards: Callable[[], Sequence[Forward]]
    ) -> None:
        """forwards  gives what `GraphedSteps` takes"""
        self._runner, self._native = runner, native
        self._read = self._kept = 0  # tokens of the last step, and those of them that the cache has for good
        self._view: KVBucket | None = None
        self.hidden: Tensor | None = None
        self.support = known_support(runner, native)
        self.most, self._proof = 1, Proof() if native is None else native.proof
        if native is not None:
            windows = [kind.window for kind in runner.cache.kinds if kind.window is not None]
            self.most = min([_MOST_ON_CPU, *windows])
        elif self.support:
            try:
                runner.several = runner.several or lent.retried(
                    lambda: GraphedSteps(forwards(), runner), {runner.device}
                )
                self._proof, self.most = runner.several, runner.several.most
                if self.most < _COMPARED:
                    self.support = Support.no(f"a window of {self.most} tokens")
            except torch.OutOfMemoryError:
                self.support = Support.no("there is no room for what its layers keep of several tokens")
        if not self.support:
            self.most = 1

    def step(self, ids: Tensor, sure: int, *, has_hidden: bool = False) -> Tensor:
        """Read tokens [1, n], n up to `most`; logits [m, v] fp32 of the m that were read, a tensor of its own.

        sure        0 or 1: so many of them are not taken back. Where others can no longer be, only these are read
        has_hidden  `hidden` is asked for, and given where steps may have several tokens
        """
        runner, cache = self._runner, self._runner.cache
        self.hidden = None
        is_single = not self.support or runner.is_changed()
        if is_single:
            ids = ids[:, :sure]
        count = self._read = ids.shape[1]
        self._kept = 0
        if count == sure and (is_single or not has_hidden or not count):
            if count:
                runner.put(ids)
                runner.step()
            self._kept = count
            return runner.found[:count].clone()
        length = cache.used
        cache.reserve(count)
        logits = self._several(ids, length, has_hidden)
        if isinstance(logits, Support):
            cache.give_back(count)
            self._refuse(logits)
            return self.step(ids, sure)
        return logits.float()

    def _several(self, ids: Tensor, length: int, has_hidden: bool) -> Tensor | Support:
        runner, cache = self._runner, self._runner.cache
        if self._native is None:
            assert runner.several is not None
            logits: Tensor | Support = runner.several(ids, length, has_hidden)
            self.hidden = runner.several.hidden
            return logits
        end = length + ids.shape[1]
        mask = cache.mask[0, 0, 0, :end].clone()
        mask[length:] = True
        positions = cache.positions + torch.arange(ids.shape[1], device="cpu")
        self._view = cache.bucket(cache.capacity)
        logits, self.hidden = self._native.several(ids, mask, positions, self._view, length)
        return logits

    def begin(self, ends: Iterable[int]) -> None:
        """The text of this request ends with any of these tokens, for `verify`."""
        if self._native is None and self.support:
            self._runner.several.settler.begin(ends)

    def verify(
        self, tokens: Sequence[int], *, has_hidden: bool, has_logits: bool
    ) -> tuple[int, Tensor | None] | None:
        """Queue a greedy step of the text's last token and candidates, of which the device keeps what is right.

        has_hidden  as in `step`
        has_logits  they are asked for
        Returns     what `read` takes, and the logits [n, v]; None: `step` has to serve them
        """
        runner, cache, several = self._runner, self._runner.cache, self._runner.several
        self.hidden = None
        if self._native is not None or not self.support or runner.is_changed():
            return None
        length, count = cache.used, len(tokens)
        cache.reserve(count)
        found: tuple[int, Tensor | None] | Support = several.verify(
            tokens, length, has_hidden=has_hidden, has_logits=has_logits
        )
        if isinstance(found, Support):
            cache.give_back(count)
            self._refuse(found)
            return None
        self.hidden, self._read = several.hidden, count
        return found

    def read(self, sent: int) -> list[int]:
        """Wait for the tokens that the text goes on with, which are in the cache but for the last one."""
        tokens: list[int] = self._runner.several.settler.read(sent)
        self._runner.cache.give_back(self._read - len(tokens))
        self._kept = self._read = len(tokens)
        return tokens

    def _refuse(self, why: Support) -> None:
        self.support = self._proof.support = why
        self.most = 1

    def keep(self, tokens: int) -> None:
        """Leave the first ones of the last step in the cache, at least those that are sure."""
        if self._kept:
            return
        if self._native is None:
            if self._read:
                self._runner.several.keep(tokens)
        elif tokens < self._read:
            assert self._view is not None
            self._native.keep(self._view, tokens)
        cache = self._runner.cache
        cache.give_back(self._read - tokens)
        for _ in range(tokens):
            cache.advance()
        self._kept = self._read = tokens

    def prove(self, logits: Tensor, again: Callable[[], None]) -> None:
        """Settle whether such steps do what steps of one token do, if that is open.

        logits  [1, v] of the text's last token
        again   puts the cache back to what it was before
        """
        while self.support and self._proof.support is None:
            if self._is_proven(logits, again):
                self._proof.support = SUPPORTED
            elif not self._proof.goes_on():
                self._proof.support = Support.no(
                    "steps of several tokens give other logits than steps of one"
                )
        if self.support and self._proof.support is not None:
            self.support = self._proof.support
        if not self.support:
            self.most = 1

    def _is_proven(self, logits: Tensor, again: Callable[[], None]) -> bool:
        unproven = set(range(_COMPARED + 1))
        for choice in range(1, _TRIES + 1):
            unproven -= self._agreeing(logits, again, choice)
            if not unproven:
                return True
        return False

    def _agreeing(self, logits: Tensor, again: Callable[[], None], choice: int) -> set[int]:
        """Compare them on a text that goes on with the token of some rank: which rows agree.

        The last row is of a step behind one of which tokens were taken back.
        """
        text, single = [logits.topk(choice).indices[:, -1:]], []
        for _ in range(_COMPARED):
            single.append(self.step(text[-1], 1))
            text.append(single[-1].argmax(-1, keepdim=True))
        again()
        ids = torch.cat(text[:_COMPARED], dim=1)
        together = self.step(ids, 1)
        if len(together) < _COMPARED:
            again()
            return set()
        self.keep(1)
        behind = self.step(ids[:, 1:2], 1)
        again()
        ours, wanted = torch.cat([together, behind]), torch.cat([*single, single[1]])
        error = (ours - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        return {row for row, found in enumerate(error.tolist()) if found <= _TOLERANCE}


def known_support(runner: GraphRunner, native: NativeDecoder | None) -> Support:
    """Whether a runner's steps have several tokens, as far as that is known before a request."""
    proof = runner.several if native is None else native.proof
    if proof is not None and proof.support is not None and not proof.support:
        return Support.no(proof.support.reason)
    cache = runner.cache
    if any(kind.rate is not None for kind in cache.kinds):
        return Support.no("a layer's compressed keys are not taken back")
    if native is not None:
        return SUPPORTED
    if any(kind.indexed for kind in cache.kinds):
        return Support.no("a layer's index of tokens is not taken back on a GPU")
    if any(kind.is_chunked for kind in cache.kinds):
        return Support.no("its attention is chunked, and the tokens of a step may be in two chunks")
    if cache.rings and not cache.room:
        return Support.no("its rings have no room for tokens that are taken back")
    if len(cache.devices) > 1:
        return Support.no("the model stands on several GPUs")
    return SUPPORTED
