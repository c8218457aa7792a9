"""A layer's experts on the CPU: packed weights, submits and waits, and what is deferred to the next layer.

Deferral, token by token as in deferred_moe.py: of a token's k experts the n with the smallest |weight| come one layer
later, whether they are on the CPU or the GPU; those on the GPU are SGLang's and come at once. Layers that follow each
other find what was handed on in `_Chain`. The last layer of a process defers nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ktinject import _native, env
from ktinject.errors import OperatorError
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.offload.handoff import Handoff
from ktinject.operators.offload.submits import OnGpu, Routing, Ticket, live_rows, only
from ktinject.operators.probes import twin
from ktinject.sglang import failures, graphs, weights
from ktinject.sglang.arguments import Arguments
from ktinject.sglang.prompts import Prompts

log = logging.getLogger("ktinject")

# Of a prompt, so many tokens go through a layer in one pass, where SGLang does not say that its parts are shorter.
_PASS_TOKENS = 8192

_NOT_LOADED = "KTMoEWrapper: submit_forward before load_weights. Load the weights first."

_layers: WeakSet[Layer] = WeakSet()  # of this process


class Deferred(NamedTuple):
    """What a layer handed on: of which layer, and its submit."""

    layer: Layer
    ticket: Ticket


class Guess(NamedTuple):
    """How a layer guesses at what the next one will ask for.

    layer   the next one that has experts
    choose  [1, hidden] as this layer's experts get it → ids [1, t] int64 contiguous of the next one's; None: no guess
    """

    layer: Layer
    choose: Callable[[Tensor], Tensor | None]


class _Chain(threading.local):
    """What the layers of a pass hand on to each other in one thread.

    is_on  whether this pass defers; see `defers`
    """

    handed: Deferred | None = None
    is_on: bool = True


_chain = _Chain()


def defers(is_on: bool) -> None:
    """Whether the passes of this thread defer from now on. For who knows which of them decode: a prompt should not."""
    _chain.is_on = is_on


def check_layers() -> None:
    """Keep the failures of all layers so far for `failures.take`. Cheap: reads two words of memory for each."""
    for layer in [*_layers]:
        layer.note_failures()


class Layer:
    """The experts of one layer that are on the CPU."""

    def __init__(self, given: Arguments, numa_nodes: list[int] | None) -> None:
        self.given = given
        self._nodes = _use_machine(given, numa_nodes)
        self.mask = _Mask.of(given, self._put_places)
        self._written = self.mask.writes()  # when the tables of places were made
        self._skips = len(given.held) < given.num_experts or given.num_gpu_experts > 0
        self._experts: CpuExperts | None = None
        self._handoff: Handoff | None = None
        self._old: list[Handoff] = []  # graphs may hold submits to the experts of an earlier load
        self._lost: list[Ticket] = []  # nobody answered, and their buffers may still be written to
        self._places: dict[torch.device, Tensor] = {}
        self._started: tuple[Ticket | Tensor | None, Deferred | None] | None = None
        self._prompts: Prompts | None = None
        self.guess: Guess | None = None  # see guesses.py
        self.chooses = False  # SGLang leaves the choice of experts to its submits; see routers.py
        self._is_ordered = True  # experts are in the places of their numbers
        self._waits = bool(given.weight_path)
        if self._waits:
            with twin.on_cpu():
                weights.OPENED.wait(given.weight_path)
        self._device = _default_device()
        if self._device is not None:
            self._places_on(self._device)
        _layers.add(self)

    def load(self, physical_to_logical: Tensor | None) -> None:
        given = self.given
        with twin.on_cpu():
            logical = weights.read_map(physical_to_logical, given.num_experts)
            is_first, self._waits = self._waits, False
            self._take(weights.load(given, logical, self._nodes, is_first), logical)

    def load_tensors(
        self, gate: Tensor, up: Tensor, down: Tensor, physical_to_logical: Tensor | None
    ) -> None:
        with twin.on_cpu():
            logical = weights.read_map(physical_to_logical, self.given.num_experts)
            self._take(weights.pack(self.given, (gate, up, down), logical, self._nodes), logical)

    def _take(self, experts: CpuExperts, logical: list[int]) -> None:
        self._is_ordered = logical == [*range(self.given.num_experts)]
        if self._handoff is not None:
            self._handoff.forget()
            self._old.append(self._handoff)
        self._experts, self._prompts = experts, None
        most = min(self.given.most_tokens or _PASS_TOKENS, _PASS_TOKENS)
        _native.allow_workspace(experts.native.workspace_bytes(most, self.given.top_k))
        self._handoff = Handoff(experts.native, self.given.hidden_size, foreign=True)
        if self._device is not None:
            self._handoff.prepare(self._device)
            self._prompts = Prompts.of(self.given, experts, self._device)

    def describe(self) -> dict[str, Any]:
        """See `KTMoEWrapper.describe`."""
        return {} if self._experts is None else self._experts.describe()

    def submit(self, x: Tensor, ids: Tensor, routing: Tensor, stream: int | None) -> None:
        """See `KTMoEWrapper.submit_forward`."""
        self._start(x, stream, lambda: self._submit(x, ids, routing))

    def submit_logits(
        self, x: Tensor, logits: Tensor, top_k: int, normed: bool, stream: int | None
    ) -> tuple[Tensor, Tensor]:
        """The same where the submit itself chooses, on a CUDA device and for up to MOST_TOKENS tokens.

        logits   [m, num_experts] float32, bfloat16 or float16, contiguous; of each row the top_k greatest are chosen
        normed   divide a row's weights, which are a softmax of all its logits, by their sum
        Returns  ids [m, top_k] int64 and weights [m, top_k] float32, there in the order of the stream
        """
        ids = torch.empty(len(x), top_k, dtype=torch.int64, device=x.device)
        weights = torch.empty(len(x), top_k, dtype=torch.float32, device=x.device)

        def chosen() -> Ticket:
            if self._handoff is None:
                raise OperatorError(_NOT_LOADED)
            self._check(ids)
            ticket = self._handoff.submit(x.detach(), ids, weights, routing=Routing(logits.detach(), normed))
            self._foresee(ticket, x)
            return ticket

        self._start(x, stream, chosen)
        if self._started is not None and self._started[0] is None:
            ids.zero_()  # it failed, and nobody has written them
        return ids, weights

    def _start(self, x: Tensor, stream: int | None, submitted: Callable[[], Ticket | Tensor]) -> None:
        """Keep what was submitted for `sync`."""
        handed, _chain.handed = _chain.handed, None
        if handed is not None and not self._follows(handed, x):
            handed = None  # of a pass that was aborted
        self._started = None
        self.note_failures(raises=not failures.are_kept())
        try:
            with _on(x, stream):
                now = submitted()
        except OperatorError as error:
            if not failures.are_kept() or _is_captured(x):
                raise
            failures.note(f"layer {self.given.layer_idx}: {error}")
            now = None
        self._started = now, handed

    def _submit(self, x: Tensor, ids: Tensor, routing: Tensor) -> Ticket | Tensor:
        if self._handoff is None:
            raise OperatorError(_NOT_LOADED)
        self._check(ids)
        x, ids, routing = x.detach(), ids.detach(), routing.detach()
        on_gpu = self._elsewhere(x.device)
        later = self._deferred(ids.shape[1])
        if not later:
            passed = self._pass(x, ids, routing)
            if passed is not None:
                return passed
            ticket = self._handoff.submit(x, ids, routing, on_gpu)
            self._foresee(ticket, x)
            return ticket
        few, everything = ids.shape[1] - later, ids.shape[1]
        now = self._handoff.submit(x, ids, routing, on_gpu, (0, few))
        _chain.handed = Deferred(self, self._handoff.submit(x, ids, routing, on_gpu, (few, everything)))
        return now

    @property
    def is_on_gpu(self) -> bool:
        """Whether the model around it is on a CUDA device."""
        return self._device is not None

    @property
    def is_whole(self) -> bool:
        """Whether the CPU of this process has all experts, in the places of their numbers."""
        return self._handoff is not None and self._is_ordered and not self._skips

    def is_foreseeable(self, top_k: int) -> bool:
        """Whether a guess at this layer's experts, or beside them, can pay: the GPU must have time for it."""
        return self._handoff is not None and self._handoff.is_foreseeable(top_k)

    def _foresee(self, ticket: Ticket, x: Tensor) -> None:
        """While the CPU computes one token: say what the next layer will probably ask for."""
        if self.guess is None or len(x) != 1 or not x.is_cuda:
            return
        ids, following = self.guess.choose(x), self.guess.layer._handoff
        if ids is not None and following is not None:
            following.foresee(ticket, ids)

    def _pass(self, x: Tensor, ids: Tensor, routing: Tensor) -> Tensor | None:
        """The result of a long prompt that passes through the GPU; None for others."""
        if self._prompts is None or not x.is_cuda or not self._prompts.passing(len(x)):
            return None
        if not _is_captured(x):
            return self._whole(x, ids, routing, live_rows(x))
        # The host takes part, so it is outside of graphs that SGLang can cut, and of others by the CPU alone.
        cut = graphs.cut(self._whole)
        return None if cut is None else cut(x, ids, routing, live_rows(x))

    def _whole(self, x: Tensor, ids: Tensor, routing: Tensor, live: Tensor | None) -> Tensor:
        """Submit and wait, with experts that pass through the GPU. Also at each replay of a graph that is cut here."""
        with torch.no_grad(), only(live):
            try:
                return self._streamed(x, ids, routing, live)
            except OperatorError as error:
                if not failures.are_kept():
                    raise
                failures.note(f"layer {self.given.layer_idx}: {error}")
                return torch.full_like(x, torch.nan)

    def _streamed(self, x: Tensor, ids: Tensor, routing: Tensor, live: Tensor | None) -> Tensor:
        assert self._handoff is not None
        prompts, count = self._prompts, 0 if self._prompts is None else self._prompts.passing(len(x))
        on_gpu = self._elsewhere(x.device)
        if prompts is None:
            return self._handoff.wait(self._handoff.submit(x, ids, routing, on_gpu))
        ours = (ids >= 0) & (ids < self.given.num_experts)
        if live is not None:
            ours &= live[:, None]
        mine = ids.masked_fill(~ours, -1)
        if on_gpu is not None:
            mine = on_gpu.split(mine)
        try:
            if count == prompts.count:
                return prompts.forward(x, mine, routing, count, x.dtype)
            # The CPU's part first: it would otherwise wait for the work that is queued on the GPU.
            passes = (mine >= prompts.first) & (mine < prompts.first + count)
            ticket = self._handoff.submit(x, mine.masked_fill(passes, -1), routing)
            return self._handoff.wait(ticket, addend=prompts.forward(x, mine, routing, count, torch.float32))
        except torch.OutOfMemoryError:
            log.warning("no room to pass experts through the GPU: prompts stay on the CPU")
            self._prompts = None
            return self._handoff.wait(self._handoff.submit(x, ids, routing, on_gpu))

    def sync(self, x: Tensor, stream: int | None) -> Tensor:
        """See `KTMoEWrapper.sync_forward`."""
        if self._started is None:
            raise OperatorError(
                "KTMoEWrapper: sync_forward without a submit_forward before it. Submit first."
            )
        (now, handed), self._started = self._started, None
        if now is None:
            return torch.full_like(x, torch.nan)
        assert self._handoff is not None
        try:
            with _on(x, stream):
                # It was submitted before `now`, so its wait costs nothing.
                earlier = None if handed is None else handed.layer.wait(handed.ticket)
                if isinstance(now, Tensor):
                    return now if earlier is None else now + earlier
                return self._handoff.wait(now, residual=earlier)
        except OperatorError as error:
            if isinstance(now, Ticket) and now.task is not None and not now.task.done:
                self._lost.append(now)  # to delete it is to wait for it
            if not failures.are_kept() or _is_captured(x):
                raise
            failures.note(f"layer {self.given.layer_idx}: {error}")
            return torch.full_like(x, torch.nan)

    def wait(self, ticket: Ticket) -> Tensor:
        assert self._handoff is not None
        return self._handoff.wait(ticket)

    def note_failures(self, raises: bool = False) -> None:
        """Keep the failures of submits so far, or raise the first."""
        try:
            if self._handoff is not None:
                self._handoff.check()
        except OperatorError as error:
            if raises:
                raise
            failures.note(f"layer {self.given.layer_idx}: {error}")

    def _follows(self, handed: Deferred, x: Tensor) -> bool:
        same = handed.ticket.shape == x.shape and handed.ticket.device == x.device
        return same and handed.layer.given.layer_idx < self.given.layer_idx

    def _deferred(self, top_k: int) -> int:
        if not _chain.is_on or self.given.deferred == 0:
            return 0
        is_last = all(layer.given.layer_idx <= self.given.layer_idx for layer in _layers)
        return 0 if is_last else min(self.given.deferred, top_k)

    def _check(self, ids: Tensor) -> None:
        if ids.dim() == 2 and ids.shape[1] > self.given.top_k:
            raise OperatorError(
                f"KTMoEWrapper: found {ids.shape[1]} experts a token; allowed: {self.given.top_k}, num_experts_per_tok."
            )

    def _elsewhere(self, device: torch.device) -> OnGpu | None:
        """For a submit: the experts that are not this process's CPU's to compute; None: it has all."""
        return OnGpu(self._places_on(device), None) if self._skips else None

    def _places_on(self, device: torch.device) -> Tensor:
        """[num_experts] int32: 0 for experts on the GPU or with other processes, else -1."""
        if device not in self._places:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise OperatorError(
                    f"KTMoEWrapper: the first submit on {device} is captured, and the table of experts is not there. "
                    "Run the layer once before, as SGLang does."
                )
            self._places[device] = self._table().to(device)
        elif self.given.mask is not None and self.mask.writes() != self._written:
            self._put_places()
        return self._places[device]

    def _table(self) -> Tensor:
        elsewhere = torch.ones(self.given.num_experts, dtype=torch.bool, device="cpu")
        elsewhere[self.given.held.start : self.given.held.stop] = False
        return (elsewhere | self.mask.on_gpu()).to(torch.int32) - 1

    def _put_places(self) -> None:
        """The mask has changed: also for graphs that are captured already."""
        table, self._written = self._table(), self.mask.writes()
        for places in self._places.values():
            places.copy_(table)


class _Mask(Tensor):
    """The mask of the experts on the GPU, which SGLang's fork writes to in place, and its reader elsewhere.

    on_change  called after each write
    """

    on_change: Callable[[], None]

    @classmethod
    def of(cls, given: Arguments, on_change: Callable[[], None]) -> _Mask:
        values = [given.is_on_gpu(expert) for expert in range(given.num_experts)]
        made = torch.tensor(values, dtype=torch.bool, device="cpu").as_subclass(cls)
        made.on_change = on_change
        return made

    def on_gpu(self) -> Tensor:
        """Its values, as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().clone().as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        masks = [value for value in (*args, *kwargs.values()) if isinstance(value, cls)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [mask._version for mask in masks]
            out = func(*args, **kwargs)
            written = [mask for mask, version in zip(masks, before) if mask._version != version]
        for mask in written:
            mask.on_change()
        return out

    def writes(self) -> int:
        """How often it was written to so far, also through views of it, which tell nobody."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._version


_threads: int | None = None  # that SGLang asked for; the pool belongs to the process


def _use_machine(given: Arguments, numa_nodes: Sequence[int] | None) -> int:
    """Give the process's pool its threads. Returns for how many NUMA nodes weights are cut; 0: all of them.

    KTINJECT_THREADS stands over what SGLang asks for. Where it asks for nothing, processes that wait for this one, and
    spin, have a CPU each.
    """
    global _threads
    settings, threads, beside = env.settings(), given.threads, given.share.beside
    if threads is None and _threads is None and beside and settings.threads is None:
        threads = max(1, _native.threads() // 2, _native.threads() - beside)
    there = [node for node, _ in _native.nodes()]
    if numa_nodes is not None and {*numa_nodes} != {*there}:
        raise OperatorError(
            f"--kt-numa-nodes: found {numa_nodes[:8]}; the nodes of this process are {there[:8]}, and all are used. "
            "Leave it out, and start SGLang with `numactl --cpunodebind=… --membind=…` for some of them."
        )
    if threads is not None and threads != _threads and settings.threads is None:
        _threads = threads
        _native.set_threads(threads)
        if _native.threads() < threads:
            log.warning(
                "--kt-cpuinfer %d: this process has %d CPUs, and uses these.", threads, _native.threads()
            )
    return 0 if given.nodes >= len(there) else given.nodes


def _default_device() -> torch.device | None:
    """The CUDA device that the model is being built on, if there is one."""
    device = torch.get_default_device()
    if device.type != "cuda" or not _native.cuda_built():
        return None
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _on(x: Tensor, stream: int | None) -> AbstractContextManager[Any]:
    """Makes the stream with this handle the current one, if it is not."""
    if not x.is_cuda or not stream or torch.cuda.current_stream(x.device).cuda_stream == stream:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=x.device))


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
