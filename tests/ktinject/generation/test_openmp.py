"""Torch's own threads beside the pool's: when they are made to sleep, that they do, and what forks leave of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import prepared
import pytest
import torch
from waiting import exit_code

import ktinject
from ktinject.generation.cpu.openmp import _teams, one_thread


@pytest.mark.parametrize(
    "threads, cpus, environ, teams",
    [
        (16, 16, {}, 1),
        (2, 2, {}, 1),
        (9, 16, {}, 1),
        (8, 16, {}, 2),
        (2, 16, {}, 15),
        (1, 16, {}, 0),
        (32, 16, {}, 0),
        (16, 16, {"OMP_WAIT_POLICY": "ACTIVE"}, 0),
        (16, 16, {"GOMP_SPINCOUNT": "100"}, 0),
        (16, 16, {"OMP_WAIT_POLICY": ""}, 1),
    ],
)
def test_so_many_teams_that_threads_outnumber_cpus(
    threads: int, cpus: int, environ: dict[str, str], teams: int
) -> None:
    assert _teams(threads, cpus, environ) == teams
    if teams:
        assert threads + teams * (threads - 1) > cpus >= threads + (teams - 1) * (threads - 1)


SCRIPT = """
import sys, time
import torch
from ktinject.generation.cpu import openmp

torch.set_num_threads(2)
if sys.argv[1] == "sleep":
    openmp.let_threads_sleep()
    openmp.let_threads_sleep()
used = []
for _ in range(30):
    torch.zeros(1 << 20).add_(1)
    before = time.process_time()
    time.sleep(0.01)
    used.append(time.process_time() - before)
used.sort()
# Spinning may be put off by other processes, and is made up for later; a step now and then is none.
print(used[len(used) // 2] if sys.argv[1] == "sleep" else sum(used) / len(used))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="needs as many CPUs as the script has threads")
def test_threads_that_wait_use_no_time(spinning: prepared.Server) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}

    def used(mode: str) -> float:
        return float(prepared.run(SCRIPT, mode, env=environ, check=True, server=spinning).stdout)

    assert used("sleep") < 0.5e-3 < used("spin")


def test_one_thread_is_for_the_time_being() -> None:
    with several_threads():
        with pytest.raises(KeyboardInterrupt), one_thread():
            assert torch.get_num_threads() == 1
            raise KeyboardInterrupt
        assert torch.get_num_threads() == 2


def test_one_thread_is_for_the_calling_thread() -> None:
    """Not for one that begins meanwhile, such as a server's for the next request."""
    found: list[int] = []
    with several_threads(), one_thread():
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert torch.get_num_threads() == 1 and found == [2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="torch computes on one thread anyway")
def test_a_forked_child_generates(tiny_qwen3_moe: Path) -> None:
    """Torch's threads are not there, nor is the one that had its turn when the process forked."""
    model = ktinject.load(tiny_qwen3_moe, devices=["cpu"], dtype="bfloat16", progress=False)
    prompt = torch.arange(5)[None]

    def generate() -> list[int]:
        torch.zeros(1 << 20).add_(1)  # on all threads, which a tiny model's operations are too small for
        return model.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()

    with several_threads():
        want, stop = generate(), threading.Event()
        other = threading.Thread(target=lambda: [generate() for _ in iter(stop.is_set, True)])
        other.start()
        try:
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    code = 1
                    try:
                        code = 0 if generate() == want and torch.get_num_threads() == 1 else 2
                    finally:
                        os._exit(code)
                assert exit_code(child) == 0
        finally:
            stop.set()
            other.join()
        assert generate() == want and torch.get_num_threads() == 2
    assert model.ktinject_decoding.last == "native loop"


@contextmanager
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)
