"""The handoff against one plain call of the experts: results, order, failures, and no time spent when idle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from handoff_cases import EXPERTS, HIDDEN, RANKS, by_rank, inputs, plain, way

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.offload import handoff, submits


@pytest.fixture
def nobody_answers() -> Iterator[None]:
    before = _native.answer_timeout()
    _native.set_answer_timeout(0.2)
    _native.handoff_pause(True)
    yield
    _native.handoff_pause(False)
    _native.set_answer_timeout(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 5, 100])
def test_the_result_is_that_of_a_plain_call(tokens: int, dtype: torch.dtype) -> None:
    arguments, here = inputs(tokens, dtype=dtype), way()
    out = here.wait(here.submit(*arguments))
    assert out.dtype == dtype
    assert torch.equal(out, plain(arguments))


def test_several_are_under_way_and_waited_for_in_any_order() -> None:
    here, other = way(), way(seed=1)
    calls = [inputs(3, seed) for seed in range(4)]
    tickets = [here.submit(*call) for call in calls]
    foreign = other.submit(*calls[0])
    for index in (2, 0, 3, 1):
        assert torch.equal(here.wait(tickets[index]), plain(calls[index]))
    assert torch.equal(other.wait(foreign), plain(calls[0], seed=1))


def test_experts_elsewhere_are_left_out_and_an_addend_is_added() -> None:
    x, ids, weights = inputs(6, dtype=torch.float32)
    places = torch.arange(EXPERTS, dtype=torch.int32)
    places[1::2] = -1
    on_gpu = submits.OnGpu(places, torch.zeros(6, 2, dtype=torch.int32))
    here, addend = way(), torch.randn(6, HIDDEN)
    out = torch.full_like(x, torch.nan)
    assert here.wait(here.submit(x, ids, weights, on_gpu), out, addend) is out
    kept = torch.where(ids % 2 == 1, ids, -1)
    assert torch.equal(out, plain((x, kept, weights)) + addend)
    assert torch.equal(on_gpu.chosen.long(), torch.where(ids % 2 == 1, -1, ids))


@pytest.mark.parametrize("ranks", RANKS)
def test_only_experts_of_some_ranks(ranks: tuple[int, int]) -> None:
    """Also where weights are negative or equal."""
    x, ids, weights = inputs(9, dtype=torch.float32, top_k=4)
    weights[1] = 0.25
    weights[2:4] *= -1
    here = way()
    out = here.wait(here.submit(x, ids, weights, ranks=ranks))
    assert torch.equal(out, plain((x, by_rank(ids, weights, ranks), weights)))


def test_a_failure_is_raised_at_the_wait_and_the_next_call_works() -> None:
    x, ids, weights = inputs(2)
    here = way()
    ticket = here.submit(x, ids + EXPERTS + 1, weights)
    good = here.submit(x, ids, weights)
    with pytest.raises(OperatorError, match="routed to expert"):
        here.wait(ticket)
    assert torch.equal(here.wait(good), plain((x, ids, weights)))


def test_a_ticket_can_be_dropped() -> None:
    here, arguments = way(), inputs(40)
    for _ in range(20):
        here.submit(*arguments)
    assert torch.equal(here.wait(here.submit(*arguments)), plain(arguments))


def test_a_ticket_is_waited_for_once() -> None:
    here = way()
    ticket = here.submit(*inputs(1))
    here.wait(ticket)
    with pytest.raises(OperatorError, match="waited for already"):
        here.wait(ticket)


def test_a_lost_dispatcher_is_an_error(nobody_answers: None) -> None:
    here, arguments = way(), inputs(1)
    ticket = here.submit(*arguments)
    with pytest.raises(OperatorError, match="no answer from the experts within"):
        here.wait(ticket)
    _native.handoff_pause(False)
    _native.set_answer_timeout(600)
    assert torch.equal(here.wait(here.submit(*arguments)), plain(arguments))


def test_wrong_arguments_are_refused() -> None:
    x, ids, weights = inputs(2)
    here = way()
    for bad in [
        (x[:, :5], ids, weights),
        (x, ids[:1], weights[:1]),
        (x, ids, weights[:, :1]),
        (x.double(), ids, weights),
        (x, ids.float(), weights),
    ]:
        with pytest.raises(OperatorError, match="found"):
            here.submit(*bad)
    ticket = here.submit(x, ids, weights)
    with pytest.raises(OperatorError, match="must be contiguous"):
        here.wait(ticket, torch.empty(HIDDEN, 2, dtype=x.dtype).T)
    here.wait(ticket)


def test_many_threads() -> None:
    calls = {seed: inputs(3, seed) for seed in range(4)}
    want = {seed: plain(call) for seed, call in calls.items()}
    here, wrong = way(), []

    def work(seed: int) -> None:
        for _ in range(50):
            if not torch.equal(here.wait(here.submit(*calls[seed])), want[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_has_a_dispatcher_of_its_own() -> None:
    here, arguments = way(), inputs(2)
    want = here.wait(here.submit(*arguments))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(not torch.equal(here.wait(here.submit(*arguments)), want))
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_idle_dispatcher_takes_no_time() -> None:
    here = way()
    here.wait(here.submit(*inputs(1)))
    used = []
    for _ in range(5):  # the workers' and the dispatcher's spinning ends, sooner or later
        before = time.process_time()
        time.sleep(0.3)
        used.append(time.process_time() - before)
        if used[-1] < 0.003:
            return
    pytest.fail(f"seconds computed while there was nothing to do: {used}")


def test_workers_that_the_dispatcher_starts_have_the_cpus_of_the_process() -> None:
    """The pool is made where it is first used; threads inherit the mask of the thread that starts them."""
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("one CPU")
    here, arguments = way(), inputs(2)
    _native.set_threads(1)
    here.wait(here.submit(*arguments))
    before = {*os.listdir("/proc/self/task")}
    _native.set_threads(0)
    here.wait(here.submit(*arguments))
    started = {*os.listdir("/proc/self/task")} - before
    assert len(started) == _native.threads() - 1
    # Worker 0 is the caller; the others have a CPU each, or all CPUs.
    found = set().union(*(os.sched_getaffinity(int(thread)) for thread in started))
    assert len(found) >= len(started) and found & (cpus - {min(cpus)})


def test_only_a_gpu_routes() -> None:
    x, ids, weights = inputs(2)
    with pytest.raises(OperatorError, match="2 tokens on cpu to be routed"):
        way().submit(x, ids, weights, routing=submits.Routing(torch.zeros(2, EXPERTS), True))


def test_short_waits_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of a GPU whose driver ends kernels that run for seconds: in the plan, and by one warning."""
    monkeypatch.setattr(handoff, "has_gpu", lambda device: True)
    monkeypatch.setattr(_native, "cuda_built", lambda: True)
    monkeypatch.setattr(_native, "why_no_flags", lambda device: "")
    monkeypatch.setattr(handoff, "limits_of", lambda index: {"ends_long_kernels": index == 1})
    handoff._warn_of_short_waits.cache_clear()
    devices = [torch.device("cuda", index) for index in (0, 1, 1)]
    assert way().describe(devices[0]) == "flags"
    assert way().describe(devices[1]).startswith("flags; a captured step waits 1.5 s at most for the CPU")
    with caplog.at_level("WARNING", "ktinject"):
        for device in devices:
            handoff._warn_of_short_waits(device)
    handoff._warn_of_short_waits.cache_clear()
    assert ["cuda:1: a captured step waits" in record.getMessage() for record in caplog.records] == [True]
