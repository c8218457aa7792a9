"""What becomes of a failure in the experts on the CPU.

SGLang ends the whole server if a layer raises. So where our plug-in is at work, a failure is kept here, the layer's
output is NaN, and the plug-in ends the requests that were computed. Without the plug-in nobody would ask for it, and
the next call of the layer raises it.
"""

from __future__ import annotations

import threading
from collections import deque

_MOST = 16  # further ones say nothing new

_lock = threading.Lock()
_kept: deque[str] = deque(maxlen=_MOST)
_are_kept = False


def keep() -> None:
    """From now on, failures are kept for `take`."""
    global _are_kept
    _are_kept = True


def are_kept() -> bool:
    """Whether somebody takes them; else a layer raises its own."""
    return _are_kept


def note(text: str) -> None:
    """Keep a failure."""
    with _lock:
        _kept.append(text)


def take() -> list[str]:
    """The failures since the last call, the oldest first."""
    with _lock:
        found = [*_kept]
        _kept.clear()
    return found
