"""Torch's own threads, beside the workers of the CPU pool on the same cores.

Torch's operations on the CPU run on OpenMP's threads. Those of GNU's libgomp, which torch brings along, spin for
milliseconds after each operation, in which our workers have to share the cores: a prompt is read at two thirds of the
speed, and on cores that other programs use, too, at a fraction. OMP_WAIT_POLICY=PASSIVE lets them sleep, but is read
when torch is loaded, which is past. What still can be done: libgomp cuts its spins to microseconds where it manages
more threads than there are CPUs. So a second team of threads is started, and sleeps.

Nor does libgomp notice a fork: the child waits for ever for threads that only its parent has. There, torch computes on
one thread, as in DataLoader's workers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ktinject import machine

# Whoever has set one of them has decided.
_DECIDED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
# Below so many values torch uses one thread only.
_PARALLEL_VALUES = 1 << 20


@functools.cache
def let_threads_sleep() -> int:
    """Cut the spins of torch's threads, once a process; returns how many teams were started for that."""
    teams = _teams(torch.get_num_threads(), len(machine.allowed_cpus()), os.environ)
    for _ in range(teams):
        started = threading.Event()
        threading.Thread(target=_hold_team, args=(started,), name="ktinject-openmp", daemon=True).start()
        started.wait()
    return teams


def _teams(threads: int, cpus: int, environ: Mapping[str, str]) -> int:
    """Teams to start, of `threads` each, so that with torch's own there are more threads than CPUs."""
    if threads < 2 or any(environ.get(name) for name in _DECIDED):
        return 0
    # Of a team, all but the one that starts it are managed; the process's first thread always is.
    return -(-(cpus + 1 - threads) // (threads - 1)) if threads <= cpus else 0


def _hold_team(started: threading.Event) -> None:
    torch.zeros(_PARALLEL_VALUES, dtype=torch.float32, device="cpu").add_(
        1
    )  # the team lives as long as this thread
    started.set()
    threading.Event().wait()


@functools.cache
def outlive_forks() -> None:
    """Let torch compute on one thread in children that are forked from now on."""
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch computes on the calling thread: to wake others takes longer than a small operation, and on a busy
    machine five times as long. Other threads of Python keep as many as they have."""
    threads = torch.get_num_threads()
    _set_threads_here(1)
    try:
        yield
    finally:
        _set_threads_here(threads)


def _set_threads_here(threads: int) -> None:
    """OpenMP's own setting is the calling thread's; torch's is kept by all threads that first use torch meanwhile."""
    _openmp_setter()(threads)


@functools.cache
def _openmp_setter() -> Any:
    # torch loads its OpenMP for all; one that is hidden leaves torch's own way.
    return getattr(ctypes.CDLL(None), "omp_set_num_threads", torch.set_num_threads)
