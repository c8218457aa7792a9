"""Reads what is loaded next while the last of it is packed, by several threads, in bounded memory.

    threads: read, decode ──► values, in the order of the items, at most `room` bytes of them ──► the caller packs

Or the threads pack small pieces, too, each its own: nothing waits for a slower thread, and values are in the caches of
the core that packs them. Then there are as many threads as pack otherwise.

Items are admitted in their order, so the one that is waited for is always under way and nobody waits for ever. The
page cache is read, not O_DIRECT: a file that was just downloaded or loaded lies in it, a cold one is read as fast
either way (benchmarks/bench_load.py measures both).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from ktinject import _native, env, machine
from ktinject.generation.cpu import openmp

Item = TypeVar("Item")
Value = TypeVar("Value")

# As many as keep a fast disk busy; on a machine with fewer cores they would only take those from packing.
MOST_THREADS = 8
ROOM = 512 << 20
_NO_ITEM = -1  # in place of an item's number: the thread itself has failed
_LATEST_START = 5.0  # seconds, on a machine with much else to do
# Threads that pack, too; with more, they would wait for Python's lock.
MOST_PACKING_THREADS = 64


@dataclass(frozen=True)
class Pace:
    """How a load went.

    bytes     in files
    seconds   it took
    waited    seconds in which nothing was there to pack
    stalled   seconds in which the threads that read had no room, on average of them
    """

    bytes: int
    seconds: float
    waited: float
    stalled: float

    def __str__(self) -> str:
        """One line for people: the rate, and which of reading and packing held the other up."""
        slow, fast, idle = ("reading", "packing", self.waited)
        if self.waited < self.stalled:
            slow, fast, idle = ("packing", "reading", self.stalled)
        share = min(1.0, idle / max(self.seconds, 1e-9))
        return (
            f"loaded in {self.seconds:.1f} s, {self.bytes / max(self.seconds, 1e-9) / 2**30:.1f} GiB/s; "
            f"{slow} was the bottleneck: {fast} waited {share:.0%} of the time"
        )


def usual_threads() -> int:
    """0: the caller's own thread reads."""
    return 0 if env.loads_in_one_thread() else min(MOST_THREADS, len(machine.allowed_cpus()))


def packing_threads() -> int:
    """The same where the threads pack, too, or read to where it stays."""
    return 0 if env.loads_in_one_thread() else min(MOST_PACKING_THREADS, _native.threads())


class ReadAhead(Generic[Item, Value]):
    """Reads items by threads, and gives their values in order. Use it in a `with` block, which ends the threads.

    read      item → its value; called from several threads, each of which computes on itself alone
    size      item → bytes that reading it takes
    threads   how many; None: `usual_threads()`
    room      bytes that may be read and not yet packed, `ROOM` if None; one item that is larger is read alone
    """

    def __init__(
        self,
        items: Sequence[Item],
        read: Callable[[Item], Value],
        size: Callable[[Item], int],
        threads: int | None = None,
        room: int | None = None,
    ) -> None:
        self._items, self._read, self._size = items, read, size
        self._room = ROOM if room is None else room
        self._count = min(usual_threads() if threads is None else threads, len(items))
        self._threads: list[threading.Thread] = []
        # The caller may be interrupted anywhere, and Python's conditions lose their lock then: it only gets and puts.
        self._done: SimpleQueue[tuple[int, Value | BaseException]] = SimpleQueue()
        self._freed: SimpleQueue[int] = SimpleQueue()
        self._turn = threading.Lock()  # of the threads that read: what follows is theirs
        self._next = 0
        self._held = 0
        self._ended = False
        self._start = time.perf_counter()
        self._waited = self._stalled = self._seconds = 0.0

    def __enter__(self) -> ReadAhead[Item, Value]:
        try:
            for _ in range(self._count):
                # Where memory is short a thread may be refused: those that there are do the work, or the caller.
                thread = threading.Thread(target=self._work, name="ktinject-read", daemon=True)
                self._threads.append(thread)  # before it starts: a Ctrl-C may come while it does
                try:
                    thread.start()
                except RuntimeError:
                    self._threads.remove(thread)
                    break
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def __iter__(self) -> Iterator[tuple[Item, Value]]:
        """Item and value, in order. The value is to be dropped before the next is asked for.

        Raises   what reading an item raised, in its turn
        """
        ready: dict[int, Value | BaseException] = {}
        for index, item in enumerate(self._items):
            start = time.perf_counter()
            if not self._threads:
                value = self._read(item)
                self._waited += time.perf_counter() - start
                yield item, value
                del value
                continue
            while index not in ready:
                number, made = self._done.get()
                if number == _NO_ITEM and isinstance(made, BaseException):
                    raise made
                ready[number] = made
                del made
            self._waited += time.perf_counter() - start
            found = ready.pop(index)
            if isinstance(found, BaseException):
                raise found
            yield item, found
            del found
            self._freed.put(self._size(item))
        self._seconds = time.perf_counter() - self._start

    def pace(self, size: int) -> Pace:
        """How it went, after the last value.

        size   bytes that the items are in files
        """
        return Pace(size, self._seconds, self._waited, self._stalled)

    def _work(self) -> None:
        try:
            _native.compute_alone(True)
            with openmp.one_thread():
                while (index := self._admitted()) is not None:
                    found: Value | BaseException
                    try:
                        found = self._read(self._items[index])
                    except BaseException as error:  # raised again where the value is asked for
                        found = error
                    self._done.put((index, found))
                    del found
        except BaseException as error:  # else its items would be waited for without end
            self._done.put((_NO_ITEM, error))

    def _admitted(self) -> int | None:
        """The next item to read, when there is room for it; None: there is none any more."""
        start = time.perf_counter()
        with self._turn:
            while not self._ended and self._next < len(self._items):
                while not self._freed.empty():
                    self._held -= self._freed.get()
                size = self._size(self._items[self._next])
                if self._held == 0 or self._held + size <= self._room:
                    self._stalled += (time.perf_counter() - start) / self._count
                    self._held += size
                    self._next += 1
                    return self._next - 1
                self._held -= self._freed.get()
        return None

    def _end(self) -> None:
        """Let the threads end, and wait for them: who closes the files next closes none that is being read."""
        interrupted: BaseException | None = None
        while True:
            try:
                self._ended = True
                self._freed.put(0)
                for thread in self._threads:
                    _await_start(thread)
                    if thread.ident is not None:
                        thread.join()
                break
            except KeyboardInterrupt as error:  # a read takes less than a second
                interrupted = error
        while not self._done.empty():
            self._done.get()
        if interrupted is not None:
            raise interrupted


def _await_start(thread: threading.Thread) -> None:
    """Of a thread whose start was interrupted: whether the system made it is known once it runs."""
    late = time.monotonic() + _LATEST_START
    while thread.ident is None and thread in threading.enumerate() and time.monotonic() < late:
        time.sleep(0.001)
