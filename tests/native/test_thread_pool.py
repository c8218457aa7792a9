"""The workers: their number changes no result, faults reach the caller, forks and crowds are survived."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import prepared
import pytest
import torch
from silu_layers import silu_experts
from waiting import exit_code

from ktinject import _native

SIZES = {"experts": 16, "hidden_size": 256, "intermediate_size": 128}


@pytest.fixture(autouse=True)
def automatic_threads():
    yield
    _native.set_threads(0)


def layer(weights: str = "bf16", seed: int = 0) -> _native.Experts:
    experts = silu_experts(**SIZES, weights=weights, group_size=32 if weights == "int4" else 0)
    experts.allocate()
    torch.manual_seed(seed)
    for e in range(SIZES["experts"]):
        for projection, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
            experts.load(projection, e, torch.randn(shape) * 0.05)
    return experts


def problem(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(tokens, 256), torch.rand(tokens, 16).topk(4).indices, torch.rand(tokens, 4)


def run(experts: _native.Experts, tokens: int = 64, seed: int = 0) -> torch.Tensor:
    x, index, weight = problem(tokens, seed)
    out = torch.empty_like(x)
    experts.forward(x, index, weight, out)
    return out


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_results_do_not_depend_on_the_number_of_threads(weights, tokens):
    experts = layer(weights)
    outputs = []
    for threads in (1, 2, 3, 7, 16):
        _native.set_threads(threads, crowded=True)
        assert _native.threads() == threads
        outputs.append(run(experts, tokens))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("threads", [-1, 5000])
def test_an_impossible_number_of_threads_is_refused(threads):
    with pytest.raises(ValueError, match=rf"found {threads}; allowed: 0"):
        _native.set_threads(threads)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_an_exception_in_a_worker_comes_back_and_the_pool_lives_on(threads):
    _native.set_threads(threads, crowded=True)
    experts = layer("int8")
    before = run(experts)
    bad = torch.randn(128, 256)
    bad[77, 3] = math.nan
    for _ in range(50):
        with pytest.raises(ValueError, match="expert 2, gate: output row 77 holds a NaN"):
            experts.load("gate", 2, bad)
    good = layer("int8")
    assert torch.equal(run(good), before)


def test_threads_of_python_share_the_pool():
    models = [layer(weights, seed) for seed, weights in enumerate(["bf16", "int8", "int4", "bf16"])]
    want = [[run(model, tokens, tokens) for tokens in (1, 9, 40)] for model in models]
    wrong = []

    def work(number: int) -> None:
        for _ in range(60):
            for slot, tokens in enumerate((1, 9, 40)):
                if not torch.equal(run_quietly(models[number], tokens), want[number][slot]):
                    wrong.append(number)

    inputs = {tokens: problem(tokens, tokens) for tokens in (1, 9, 40)}

    def run_quietly(experts: _native.Experts, tokens: int) -> torch.Tensor:
        x, index, weight = inputs[tokens]
        out = torch.empty_like(x)
        experts.forward(x, index, weight, out)
        return out

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_starts_its_own_workers():
    _native.set_threads(3, crowded=True)
    experts = layer()
    want = run(experts)
    for _ in range(20):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if torch.equal(run(experts), want) else 2
            finally:
                os._exit(code)
        assert exit_code(child) == 0
        assert torch.equal(run(experts), want)


def test_idle_workers_use_no_cpu():
    code = """
        import time
        from ktinject import _native
        _native.set_threads(8, crowded=True)
        _native.read_bandwidth(1 << 20)
        for _ in range(20):  # their spinning ends, on a busy machine later
            start = time.process_time()
            time.sleep(0.3)
            used = time.process_time() - start
            if used < 0.006:
                break
        print(used)
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert float(answer.stdout) < 0.006


def test_more_threads_than_cores_has_no_cliff():
    """Workers that share a core must not wait for scheduler ticks (of milliseconds, in every call): four times the
    threads, at most twice the time. Other processes may slow down calls, but hardly all of so many."""
    experts = layer()
    x, index, weight = problem(32)
    out = torch.empty_like(x)

    def best(threads: int) -> float:
        _native.set_threads(threads, crowded=True)
        times = []
        for _ in range(100):
            start = time.perf_counter()
            experts.forward(x, index, weight, out)
            times.append(time.perf_counter() - start)
        return min(times)

    cores = _native.default_threads()
    alone, crowded = math.inf, math.inf
    for _ in range(100):
        alone, crowded = min(alone, best(cores)), min(crowded, best(4 * cores))
        if crowded < 2 * alone + 200e-6:
            return
    pytest.fail(
        f"{crowded * 1e6:.0f} µs with four times the threads, {alone * 1e6:.0f} with one for each core"
    )


def test_threads_respect_affinity():
    code = """
        import os
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
        from ktinject import _native
        print(_native.default_threads(), _native.threads())
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["1", "1"]


# A container's seccomp profile may refuse the call: BPF that answers sched_getaffinity (204 on x86-64) by EPERM.
REFUSED = """
    import ctypes, logging, struct
    from ktinject import _native, machine
    assert _native.affinity_refused() == ""
    online = _native.allowed_cpus()
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 204), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
    logging.basicConfig(format="%(message)s")
    _native.set_threads(0)
    found = [machine.detect(with_gpus=False) for _ in range(2)][0]
    print(_native.affinity_refused(), _native.threads() == found.threads == len(found.cpus) == found.cpu_count)
    from ktinject.tools import doctor
    print(doctor._explain_cpu(found).reason)
"""


def test_all_cpus_are_used_where_the_system_does_not_say_which(monkeypatch):
    monkeypatch.delenv("KTINJECT_THREADS", raising=False)
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(REFUSED)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines() == [
        "Operation not permitted True",
        "the system does not say which CPUs are allowed (Operation not permitted)",
    ]
    assert answer.stderr.count("does not say which CPUs this process may use") == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_a_state_that_fades_is_zero_in_a_call_and_denormals_are_the_callers_own_elsewhere(threads):
    """With denormals, a step of the delta rule takes forty times as long."""
    _native.set_threads(threads, crowded=True)
    small = torch.tensor([1e-38])
    assert (small * 0.125).item() != 0
    torch.manual_seed(0)
    shape = (1, 300, 4, 64)
    q, k, v = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    states, out = torch.full((1, 4, 64, 64), 1e-37), torch.empty(shape)
    _native.delta_prompt(
        q=q, k=k, v=v, g=torch.full(shape[:3], -0.05), beta=torch.zeros(shape[:3]), unit_length=False, scale=1.0,
        states=states, out=out,
    )  # fmt: skip
    assert (states == 0).all()  # they would be near 3e-44
    assert (small * 0.125).item() != 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
@pytest.mark.parametrize("threads", [2, 5])
def test_workers_get_the_process_s_cpus_whoever_starts_them(threads):
    """A thread that keeps to one CPU may be the first to compute; its workers must not be kept there, too."""
    code = """
        import os, threading, time
        from ktinject import _native
        mine = os.sched_getaffinity(0)
        before = set(os.listdir("/proc/self/task"))
        def first():
            os.sched_setaffinity(0, {min(mine)})
            _native.set_threads(THREADS, crowded=True)
            before.add(str(threading.get_native_id()))
            _native.read_bandwidth(4096)
        thread = threading.Thread(target=first)
        thread.start()
        thread.join()
        time.sleep(0.1)  # a listing may skip entries while a thread is ending
        workers = set(os.listdir("/proc/self/task")) - before
        found = {cpu for worker in workers for cpu in os.sched_getaffinity(int(worker))}
        print(len(workers), found == (mine if THREADS > len(mine) else mine - {min(mine)}), len(mine))
    """.replace("THREADS", str(threads))
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    workers, right, cpus = answer.stdout.split()
    assert int(workers) == threads - 1
    assert right == "True" or int(cpus) > 2


def test_more_workers_than_cpus_are_not_started():
    _native.set_threads(4096)
    assert _native.threads() == len(os.sched_getaffinity(0))


def test_ctrl_c_ends_a_long_call():
    """Many seconds of work in one call: KeyboardInterrupt soon, as this process computes, and the next call works."""
    code = """
        import math, sys
        import torch
        from ktinject import _native
        sys.path.insert(0, HERE)
        from waiting import LATE_SECONDS, ctrl_c_ends
        native = _native.Experts(experts=1, hidden_size=512, intermediate_size=16384, weights="bf16", group_size=0,
                                 has_gate=True, has_bias=False, activation="silu", alpha=1.0, gate_max=math.inf,
                                 up_limit=math.inf, up_offset=0.0, kernel="auto")
        native.allocate()
        native.mark_loaded()
        x = torch.ones(60000, 512)
        index, weight, out = torch.zeros(60000, 1, dtype=torch.int64), torch.ones(60000, 1), torch.empty_like(x)
        native.forward(x[:2], index[:2], weight[:2], out[:2])
        # Each thread ends its task, which takes a second without AVX-512 where others compute beside it. The whole call
        # takes half a minute there.
        ctrl_c_ends(lambda: native.forward(x, index, weight, out), late=4 * LATE_SECONDS)
        native.forward(x[:2], index[:2], weight[:2], out[:2])
    """.replace("HERE", repr(str(Path(__file__).parents[1])))
    answer = prepared.run(textwrap.dedent(code))
    assert answer.returncode == 0, answer.stderr


def test_threads_that_cannot_be_started_are_refused_and_nothing_is_left():
    code = """
        import os, resource
        from ktinject import _native
        _native.set_threads(1)
        before = len(os.listdir("/proc/self/task"))
        pages = int(open("/proc/self/statm").read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + (200 << 20)  # room for the stacks of some twenty threads
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        _native.set_threads(1000, crowded=True)
        try:
            _native.threads()
        except RuntimeError as error:
            print(error)
        _native.set_threads(3, crowded=True)
        print(_native.threads(), _native.read_bandwidth(4096) > 0)
        _native.set_threads(1)
        _native.threads()
        print(len(os.listdir("/proc/self/task")) - before)
    """
    answer = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.splitlines() == [
        "could not start 1000 worker threads; set KTINJECT_THREADS lower",
        "3 True",
        "0",
    ]
