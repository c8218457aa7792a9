"""Long prompts: the packed experts of each layer are streamed to the GPU, which computes them.

The experts stay packed in page-locked RAM. A ring of slots on the GPU (`ring.py`) receives copies of them, a chunk of
experts at a time; those that lie on the GPU for decoding, packed in the same way, are read where they are. The GPU
unpacks each chunk to bf16 and multiplies it with the tokens of its experts. So the time of a layer is that of the bus,
for any number of tokens that the GPU multiplies meanwhile.

If CPU and bus need about equally long, each gets a part of the experts, and both work at the same time. The CPU gets
its part first. A kernel reads its result directly from page-locked RAM, since a copy would wait behind the experts that
are queued for the bus.

Other GPUs of the model can help (`links.py`): each has a bus of its own. The layer's GPU sorts the tokens by their
experts and sends them over; each of the others streams its part of the experts through its own ring and sends back one
sum for each token. The host queues the work of all of them, a chunk of each in turn, behind the only look that it takes
at the counts.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.offload import lent, links, ring
from ktinject.operators.offload.links import Links
from ktinject.operators.offload.one_link import OneLink, Routes
from ktinject.operators.offload.ring import Asked, Chunk
from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.support import SUPPORTED, Support

log = logging.getLogger("ktinject")

# With fewer tokens, `auto` never streams: rates are measured with many tokens, and decoding must not depend on them.
FEWEST_TOKENS = 128
_MOST_RANKS = 2  # tables of a layer that stay on the GPU: of all experts, and of a part
# Bytes for the answers of a layer, one for each pair of a token and an expert. They are kept until all experts have
# passed, so a longer prompt goes through the layer in parts.
ANSWER_BYTES = 1 << 30


class _Helper(OneLink):
    """The part of a layer's experts that another GPU than the layer's streams."""

    def __init__(self, home: StreamedExperts, device: torch.device) -> None:
        self._home = weakref.ref(home)
        super().__init__(home.spec, home.native, home.source, device, home.first)

    def foreseen(self, asked: Asked) -> Sequence[int]:
        home = self._home()
        return () if home is None else home.foreseen_of(self, asked)


class _HelperFullError(torch.OutOfMemoryError):
    """There is no room on the device of a helper."""

    def __init__(self, helper: _Helper) -> None:
        super().__init__(f"no room on {helper.ring.device}")
        self.helper = helper


@contextmanager
def _blaming(link: OneLink) -> Iterator[None]:
    """Inside the `with` block, a lack of memory is that of a helper, if `link` is one."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if isinstance(link, _Helper):
            raise _HelperFullError(link) from error
        raise


class StreamedExperts(OneLink):
    """The experts of one layer, streamed through the ring of a device and computed there.

    native  the experts in RAM, with weights
    first   the experts before this one have no weights in RAM, and are skipped
    gone    others without weights in RAM; they must be `here`
    uses    [num_experts] int64 on the GPU: how often each one was computed for a token; None: nobody looks
    here    those that need not be sent
    linked  whether other GPUs help; None: where that was measured to pay
    """

    uses: Tensor | None = None
    linked: bool | None = None

    def __init__(
        self,
        spec: ExpertsSpec,
        native: _native.Experts,
        device: torch.device,
        first: int = 0,
        gone: Collection[int] = (),
    ) -> None:
        self.in_ram = tuple(expert for expert in range(first, spec.num_experts) if expert not in gone)
        self.helpers: tuple[_Helper, ...] = ()
        self._links: Links | None = None
        self._nowhere = (-1,) * spec.num_experts
        self._ranks: tuple[tuple[tuple[int, ...], Tensor], ...] = ()
        super().__init__(spec, native, _native.Streamed(native, first), device, first)

    @staticmethod
    def support(spec: ExpertsSpec) -> Support:
        """Whether experts of this shape can be streamed."""
        if spec.hidden_size % 8 or spec.intermediate_size % 8:
            widths = f"{spec.hidden_size} and {spec.intermediate_size}"
            return Support.no(
                f"experts are streamed where both widths are multiples of 8, and these are {widths}"
            )
        return SUPPORTED

    def places(self) -> Sequence[int]:
        """Expert → its place on the GPU, or -1, at present."""
        return self._nowhere if self.here is None else self.here.places()

    def passing(self, count: int, places: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which experts pass through the GPU if `count` do, those before `first` counted in.

        places   expert → its place in the memory of `here`, or -1
        Returns  those that are there, all of them; and the first ones of the others, which come over the bus
        """
        experts = range(self.first, self.spec.num_experts)
        here = [expert for expert in experts if places[expert] >= 0]
        absent = [expert for expert in experts if places[expert] < 0]
        return here, absent[: max(0, count - self.first - len(here))]

    def passes(self, ids: Tensor, count: int, places: Sequence[int]) -> Tensor:
        """Of ids, which are those of experts that pass through the GPU: bool of their shape. Other ids are not."""
        here, absent = self.passing(count, places)
        return self._rank(ids, (*here, *absent)) < self.spec.num_experts

    def _rank(self, ids: Tensor, experts: tuple[int, ...]) -> Tensor:
        """The place of each id among `experts`; num_experts for ids that are not among them."""
        num_experts = self.spec.num_experts
        ranks = next((table for of, table in self._ranks if of == experts), None)
        if ranks is None:
            of_expert = [num_experts] * (num_experts + 1)
            for rank, expert in enumerate(experts):
                of_expert[expert] = rank
            ranks = torch.tensor(of_expert, device=ids.device, dtype=torch.int64)
            self._ranks = ((experts, ranks), *self._ranks[: _MOST_RANKS - 1])
        if ranks.is_cuda:  # another thread may take it off the list, and its memory comes from another stream
            ranks.record_stream(torch.cuda.current_stream(ranks.device))
        return ranks[torch.where((ids < 0) | (ids > num_experts), num_experts, ids).long()]

    @property
    def devices(self) -> set[torch.device]:
        """The layer's GPU, and those that help."""
        return {self.ring.device, *(helper.ring.device for helper in self.helpers)}

    def add_helper(self, device: torch.device) -> None:
        """Let another GPU help. Raises RuntimeError where it cannot be used."""
        self.helpers += (_Helper(self, device),)

    def links_for(self, tokens: int) -> Links | None:
        """What the links take, where other GPUs help with so many tokens; None: the own link alone is used.

        The links are measured at the first call.

        Raises   torch.OutOfMemoryError if there is no room to measure, and somebody can give back some
        """
        if not self.helpers or self.linked is False:
            return None
        if self._links is None:
            chunk = self.in_ram[: max(1, links.CHUNK_BYTES // self.source.packed_bytes(1))]
            devices = [self.ring.device, *(helper.ring.device for helper in self.helpers)]
            try:
                rates = links.measure(self.source, chunk, self.spec.hidden_size, devices)
            except torch.OutOfMemoryError:
                if lent.is_lent(self.devices):
                    raise
                self._leave_out(self.helpers)
                return None
            size = self.source.packed_bytes(self.spec.num_experts - self.first)
            self._links = rates.of_layer(size, self.spec.hidden_size)
        places = self.places()[self.first :]
        absent = sum(place < 0 for place in places) / len(places)
        return self._links if self.linked or self._links.pay(tokens, absent) else None

    def _leave_out(self, helpers: Sequence[_Helper]) -> None:
        """Do without some helpers from now on."""
        for helper in helpers:
            log.warning(
                "%s: no room for the experts of long prompts of a layer on %s, which streams all of them itself",
                helper.ring.device,
                self.ring.device,
            )
        self.helpers = tuple(helper for helper in self.helpers if helper not in helpers)
        self._links = None

    def _dealt(self, absent: Sequence[int], linked: bool) -> list[tuple[int, ...]]:
        """The experts that come over each link, the own one first, then those of `helpers`."""
        if not linked:
            return [tuple(absent), *(() for _ in self.helpers)]
        shares = (1.0,) * (1 + len(self.helpers)) if self._links is None else self._links.shares
        return links.deal(absent, shares)

    def foreseen_of(self, link: OneLink, asked: Asked) -> Sequence[int]:
        """As `foreseen`, of one of the links."""
        known: tuple[OneLink, ...] = (self, *self.helpers)
        if link not in known:
            return ()
        return self._dealt(self.passing(asked.passing, self.places())[1], asked.linked)[known.index(link)]

    def foreseen(self, asked: Asked) -> Sequence[int]:
        return self.foreseen_of(self, asked)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first_experts: int | None = None,
        dtype: torch.dtype | None = None,
        places: Sequence[int] | None = None,
    ) -> Tensor:
        """The weighted sum of the experts' outputs. Expert weights and activations are bf16, sums are fp32.

        x              [m, hidden] on the GPU
        ids, weights   [m, t] on the GPU; ids of -1 and num_experts are skipped
        first_experts  compute only so many experts, see `passing`; None: all
        dtype          of the result; None: that of x
        places         expert → its place in the memory of `here`, or -1, which nobody writes to until the stream is
                       through; None: all experts come over the bus
        Returns        [m, hidden]
        Raises         OperatorError for an invalid id; torch.OutOfMemoryError if there is no room for one expert and
                       FEWEST_TOKENS tokens, or for more and somebody can give back some
        """
        out = torch.empty_like(x, dtype=dtype or x.dtype)
        if x.shape[0] == 0:
            return out
        linked = self.links_for(x.shape[0]) is not None
        asked = Asked(ring.ALL if first_experts is None else first_experts, linked)
        most = min(x.shape[0], max(1, ANSWER_BYTES // (2 * ids.shape[1] * self.spec.hidden_size)))
        with ExitStack() as held:
            # In one order in all threads: another layer's own ring may be that of a helper here.
            rings = {self.ring, *(helper.ring for helper in self.helpers if asked.linked)}
            for one in sorted(rings, key=lambda one: str(one.device)):
                held.enter_context(one.lock)
            self.ring.reserve()
            parts = self._parts(asked, places)
            done = 0
            while done < x.shape[0]:
                part = slice(done, min(done + most, x.shape[0]))
                try:
                    self._part(x[part], ids[part], weights[part], parts, out[part])
                except _HelperFullError as full:
                    if lent.is_lent({full.helper.ring.device}):
                        raise
                    self._leave_out([full.helper])
                    parts = self._parts(asked, places)
                    continue
                except torch.OutOfMemoryError:
                    if lent.is_lent({x.device}):
                        raise
                    if len(parts) > 1:
                        # What helpers answer takes memory, too, and each further pass would send all experts again.
                        asked = asked._replace(linked=False)
                        parts = self._parts(asked, places)
                    elif most > FEWEST_TOKENS:
                        most = max(most // 2, FEWEST_TOKENS)
                    else:
                        raise
                    continue
                done = part.stop
        return out

    def _parts(self, asked: Asked, places: Sequence[int] | None) -> list[tuple[OneLink, list[Chunk]]]:
        """What each device computes, the own one first. Helpers without room are left out."""
        if asked.linked:
            for helper in self.helpers:
                try:
                    helper.ring.reserve()
                except torch.OutOfMemoryError:
                    if lent.is_lent({helper.ring.device}):
                        raise
                    self._leave_out([helper])
        places = self._nowhere if places is None else places
        here, absent = self.passing(asked.passing, places)
        linked = asked.linked and bool(self.helpers)
        own, *others = self._dealt(absent, linked)
        parts: list[tuple[OneLink, list[Chunk]]] = [(self, self.ring.chunks(self, own, here, places))]
        for helper, experts in zip(self.helpers, others):
            if experts:
                parts.append((helper, helper.ring.chunks(helper, experts)))
        for link, _ in parts:
            link.ring.asked = asked._replace(linked=linked)
        return parts

    def _part(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        parts: Sequence[tuple[OneLink, list[Chunk]]],
        out: Tensor,
    ) -> None:
        """Compute some tokens: each device its chunks."""
        routes = self._routes(x, ids, weights, [chunks for _, chunks in parts])
        if len(parts) == 1:
            for _ in self.sum_of_answers(routes[0], parts[0][1], out):
                pass
        else:
            self._together(routes, parts, out)
        if self.uses is not None:  # at the end: where memory is short, a part is tried again
            for one in routes:
                experts = ids.reshape(-1)[one.pairs].long()
                self.uses.scatter_add_(0, experts, torch.ones_like(experts))

    def _together(
        self, routes: Sequence[Routes], parts: Sequence[tuple[OneLink, list[Chunk]]], out: Tensor
    ) -> None:
        """Let all devices compute their parts, and add up what they answer, always in the same order."""
        home, stream = out.device, torch.cuda.current_stream(out.device)
        own = torch.empty(out.shape, dtype=torch.float32, device=home)
        arriving = [torch.empty(out.shape, dtype=torch.float32, device=home) for _ in parts[1:]]
        usable, arrived = torch.cuda.Event(), torch.cuda.Event()
        usable.record(stream)  # what the memory was used for before is queued
        sums, working = [own], [(parts[0][0], self.sum_of_answers(routes[0], parts[0][1], own))]
        for (helper, chunks), theirs in zip(parts[1:], routes[1:]):
            device = helper.ring.device
            with _blaming(helper):
                sums.append(torch.empty(out.shape, dtype=torch.float32, device=device))
                working.append((helper, helper.sum_of_answers(theirs.to(device), chunks, sums[-1])))
        while working:  # a chunk of each in turn, so that all of them have work
            for link, steps in [*working]:
                with _blaming(link):
                    if next(steps, None) is None:
                        working.remove((link, steps))
        # In a stream of its own: between GPUs, torch lets a copy wait for what is queued on both.
        arrivals = self.ring.arrivals
        with torch.cuda.stream(arrivals):
            arrivals.wait_event(usable)
            for there, part in zip(arriving, sums[1:]):
                there.copy_(part, non_blocking=True)
            arrived.record(arrivals)
        stream.wait_event(arrived)
        for there in arriving[:-1]:
            own += there
        torch.add(own, arriving[-1], out=out)

    def _routes(
        self, x: Tensor, ids: Tensor, weights: Tensor, chunks: Sequence[Sequence[Chunk]]
    ) -> list[Routes]:
        """For the chunks of each device, what it computes; on this device. The host waits for the counts.

        Raises   OperatorError for an invalid id
        """
        num_experts = self.spec.num_experts
        expert = ids.reshape(-1)
        strangers = (expert < -1) | (expert > num_experts)
        passing = [[expert for chunk in some for expert in chunk.experts] for some in chunks]
        rank = self._rank(expert, tuple(itertools.chain(*passing)))
        order = rank.argsort(stable=True)
        ends = torch.bincount(rank, minlength=num_experts + 1).cumsum(0)
        inputs, weights = x.to(torch.bfloat16), weights.contiguous()
        *bounds, found = [0, *torch.cat([ends, strangers.sum()[None]]).tolist()]
        if found:
            raise OperatorError(
                f"top_k_index: found {int(ids[strangers.view(ids.shape)][0])}; allowed are 0 to {num_experts - 1}, and "
                f"-1 and {num_experts} to skip."
            )
        routes, first = [], 0
        for some in passing:
            last = first + len(some)
            low, high = bounds[first], bounds[last]
            routes.append(
                Routes(
                    inputs,
                    weights,
                    order[low:high],
                    expert[order[low:high]] if self.spec.has_bias else None,
                    (ends[first:last] - low).to(torch.int32),
                    [bound - low for bound in bounds[first : last + 1]],
                )
            )
            first = last
        return routes
