"""The interpreter's end while daemon threads still compute.

Python 3.11 to 3.13 end a daemon thread when it next asks for the GIL, by pthread_exit. Code in C++ that has released
the GIL cannot be left in that way: the process aborts, with "terminate called without an active exception". Nearly all
of torch's operations release it, so a daemon thread that runs any model makes a script end like that. With a swapped
model it does not: before the interpreter ends, such threads get a SystemExit, which ends them between two operations.
They are waited for until they are gone: what their frames held is freed last, and that releases the GIL, too.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
import threading
import time
from types import FrameType

from torch import nn

_LIMIT_SECONDS = 10.0
# Of a thread that gets no SystemExit, because it waits for another one, nothing has to be feared.
_WAITING_LIMIT_SECONDS = 3.0
_AGAIN_SECONDS = 0.5  # code of C++ that calls Python may lose an exception
_QUIET_ROUNDS = 10  # of a millisecond: a thread may be between two requests, and another process on its core
_CALL = getattr(getattr(nn.Module, "_wrapped_call_impl", None), "__code__", None)


@functools.cache
def install() -> None:
    """Let the interpreter end in peace, once a process."""
    atexit.register(_end_threads)


def _end_threads() -> None:
    told: dict[int, float] = {}
    start = time.monotonic()
    quiet = 0
    limit = _LIMIT_SECONDS
    while quiet < _QUIET_ROUNDS and (now := time.monotonic()) < start + limit:
        frames = sys._current_frames()
        busy = [thread for thread, frame in frames.items() if _computes(thread, frame)]
        for thread in busy:
            if now - told.get(thread, -1.0) >= _AGAIN_SECONDS:
                told[thread] = now
                _tell(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        waits = all(_is_in_threading(frames[thread]) for thread in busy)
        limit = _WAITING_LIMIT_SECONDS if waits else _LIMIT_SECONDS
        is_quiet = not busy and not any(_ends(frames[thread]) for thread in told.keys() & frames.keys())
        quiet = quiet + 1 if is_quiet else 0
        time.sleep(0.001)


_tell = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _is_in_threading(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == threading.__name__


def _ends(frame: FrameType | None) -> bool:
    """Whether a thread has left what it was started for."""
    while frame is not None and _is_in_threading(frame):
        frame = frame.f_back
    return frame is None


def _computes(thread: int, frame: FrameType | None) -> bool:
    """Whether a thread other than this one is in a swapped model, or in the engine."""
    if thread == threading.get_ident():
        return False
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if (
            name.startswith("ktinject.") and name != "ktinject.generation.cpu.openmp"
        ):  # whose threads only wait
            return True
        if frame.f_code is _CALL and hasattr(frame.f_locals.get("self"), "ktinject"):
            return True
        frame = frame.f_back
    return False
