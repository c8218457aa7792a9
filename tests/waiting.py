"""Waiting for what may never come, on machines that are busy: by events and by time computed, not by the clock.

What hangs is ended by pytest's limit for a test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

# How much this process may still compute, on all cores, after Ctrl-C.
LATE_SECONDS = 1.0 * (os.cpu_count() or 1)


def exit_code(child: int) -> int:
    """Of a forked child; it does not outlive a test that is ended while it waits."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def ctrl_c_ends(work: Callable[[], object], late: float = LATE_SECONDS) -> None:
    """Do something again and again until a Ctrl-C ends it, soon after it came."""
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.process_time())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.3, interrupt)
    try:
        timer.start()
        while True:
            work()
    except KeyboardInterrupt:
        computed = time.process_time() - sent[0]
    finally:
        timer.cancel()
    assert computed < late, f"{computed:.2f} s of computing after Ctrl-C"
