"""Piecewise CUDA graphs: work on several GPUs as one graph for each stage, replayed in order.

    graph on cuda:0 ──► copy ──► graph on cuda:1 ──► copy ──► graph on cuda:0

The work calls `Stages.transfer` where it goes on on another GPU. On one GPU it never does, and there is one graph. A
graph ends by packing all tensors that cross, so they cross in one copy. Copies and graphs are queued in the current
streams of their GPUs. These streams wait for each other; the host waits for none.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from ktinject.errors import OperatorError


class Stages(Protocol):
    """How work goes on from the stage on one GPU to the stage on the next."""

    def transfer(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Go on on this device, which becomes the current one. Returns the tensors there."""


class EagerStages(ExitStack):
    """The stages of work that is computed at once. A context manager: leave it when the work is queued.

    stream_of  the stream to use on a GPU
    """

    def __init__(
        self,
        home: torch.device,
        stream_of: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.current_stream,
    ) -> None:
        super().__init__()
        self._stream_of = stream_of
        self.transfer([], home)

    def transfer(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        if device.type == "cuda":
            stream, outer = self._stream_of(device), torch.cuda.current_stream(device)
            if stream != outer:
                stream.wait_stream(outer)
                self.callback(outer.wait_stream, stream)
            self.enter_context(torch.cuda.stream(stream))
        return [tensor.to(device, non_blocking=True) for tensor in tensors]


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures on a GPU: cuBLAS keeps 32 MiB for every stream that it was used on."""
    return torch.cuda.Stream(device)


_collecting = threading.Lock()
_captures, _was_collecting = 0, False


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage is collected in this process meanwhile, in no thread.

    Graphs in reference cycles, such as those of a failed request, would be destroyed in the middle of a capture, which
    CUDA forbids: the capture would fail.
    """
    global _captures, _was_collecting
    with _collecting:
        if _captures == 0:
            _was_collecting = gc.isenabled()
            gc.disable()
        _captures += 1
    try:
        yield
    finally:
        with _collecting:
            _captures -= 1
            if _captures == 0 and _was_collecting:
                gc.enable()


class PiecewiseGraph:
    """Captured work.

    parts  graphs in order, each with the copies (to, from) that follow it
    """

    def __init__(self) -> None:
        self.parts: list[tuple[torch.cuda.CUDAGraph, list[tuple[Tensor, Tensor]]]] = []

    def replay(self) -> None:
        for graph, crossing in self.parts:
            graph.replay()
            for there, here in crossing:
                there.copy_(here, non_blocking=True)


class NotCapturable(Exception):
    """A capture failed; says why.

    first  the exception that made it fail
    """

    def __init__(self, first: BaseException) -> None:
        super().__init__(f"{type(first).__name__}: {str(first).splitlines()[0]}")
        self.first = first


def capture(work: Callable[[Stages], None], home: torch.device, pool: Any) -> PiecewiseGraph:
    """Capture work that begins on `home`; it must have been run before, in `capture_stream`s.

    pool     of the memory that graphs take on each GPU
    Raises   NotCapturable; whatever else the work raises
    """
    capturing = _Capture(pool)
    try:
        with without_collecting(), capturing.open:
            capturing.begin(home)
            work(capturing)
    except (RuntimeError, OperatorError) as error:
        first = error.__context__ or error  # the end of a spoiled capture fails, too
        capturing.clean_up()
        raise NotCapturable(first) from error
    return capturing.graph


class _Capture:
    """The stages of work that is being captured.

    open   the contexts of the stage's graph
    """

    def __init__(self, pool: Any) -> None:
        self.graph, self.open = PiecewiseGraph(), ExitStack()
        self._pool = pool
        self._device = torch.device("cpu")

    def begin(self, device: torch.device) -> None:
        self._device = device
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(device)
        # Outside of the graph's own context, which forgets to go back to the stream before if its end fails.
        self.open.enter_context(torch.cuda.stream(stream))
        # Calls of other threads must not spoil the capture.
        options: Any = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        self.open.enter_context(torch.cuda.graph(graph, **options))
        self.graph.parts.append((graph, []))

    def transfer(self, tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        here = [tensor for tensor in tensors if tensor.device == self._device]
        bundle = pack(here)  # the last thing in the graph
        self.open.close()
        # Written by replays, which inference mode would allow in inference mode only.
        with torch.inference_mode(False):
            there = torch.empty_like(bundle, device=device)
            # What lies on a third GPU still lies there when this is replayed.
            others = {id(t): torch.empty_like(t, device=device) for t in tensors if t.device != self._device}
        _, crossing = self.graph.parts[-1]
        crossing.append((there, bundle))
        crossing.extend((others[id(t)], t) for t in tensors if id(t) in others)
        arrived = iter(unpack(there, here))
        self.begin(device)
        return [others[id(t)] if id(t) in others else next(arrived) for t in tensors]

    def clean_up(self) -> None:
        """A capture that fails leaves the allocator recording, and the random numbers marked as being captured."""
        with torch.cuda.device(self._device):
            with suppress(RuntimeError):  # newer versions of torch stop it themselves
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            something = torch.zeros(1, device=self._device, dtype=torch.float32)
            with (
                without_collecting(),
                torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"),
            ):
                something.add_(0)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one device side by side, [bytes] uint8, each aligned for its dtype."""
    return torch.cat([tensors[at].contiguous().view(-1).view(torch.uint8) for at in _order(tensors)])


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of a copy of `pack(like)`."""
    order = _order(like)
    parts = packed.split([like[at].nbytes for at in order])
    found = {at: part.view(like[at].dtype).view(like[at].shape) for at, part in zip(order, parts)}
    return [found[at] for at in range(len(like))]


def _order(tensors: Sequence[Tensor]) -> list[int]:
    """Indices, those first whose size has the greatest power of two as a factor: so each tensor begins aligned."""
    return sorted(range(len(tensors)), key=lambda at: -(tensors[at].nbytes & -tensors[at].nbytes))
