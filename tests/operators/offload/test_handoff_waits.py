"""How long a GPU and the host wait for the experts on the CPU, and what that costs meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from device_limits import pretended
from handoff_cases import inputs, plain, way
from test_handoff_gpu import captured, replay

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.offload import handoff

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return "cuda:0"


def test_the_dispatcher_naps_as_long_as_there_are_graphs(cuda: str) -> None:
    """In a process of its own, whose only graphs these are."""
    script = """
        import gc, time
        import torch
        from handoff_cases import inputs, way
        from ktinject import _native

        here, (x, ids, weights) = way(mode="flags"), inputs(2, device="cuda:0")
        out = here.wait(here.submit(x, ids, weights))
        torch.cuda.synchronize()
        assert not _native.handoff_naps()
        graphs = []
        for _ in range(2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                again = here.wait(here.submit(x, ids, weights))
        assert _native.handoff_naps()
        graphs.pop().replay()
        torch.cuda.synchronize()
        assert torch.equal(out, again)
        gc.collect()
        time.sleep(0.5)
        assert _native.handoff_naps(), "there is another graph"
        graphs.pop().replay()
        torch.cuda.synchronize()
        gc.collect()
        end = time.monotonic() + 10  # CUDA drops what graphs keep on a thread of its own
        while _native.handoff_naps() and time.monotonic() < end:
            time.sleep(0.01)
        assert not _native.handoff_naps()
        assert torch.equal(out, here.wait(here.submit(x, ids, weights)))
    """
    folder = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        },
    )


class TestShortKernels:
    """On a device whose driver ends kernels that run for seconds, no kernel waits for so long."""

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_an_eager_wait_may_take_longer_than_a_kernel(self, cuda: str, tokens: int) -> None:
        here, given = way(mode="flags"), inputs(tokens, device=cuda)
        want = plain(given)
        with pretended("sm_90 H200", ends_long_kernels=True):
            assert torch.equal(here.wait(here.submit(*given)).cpu(), want)
            _native.handoff_pause(True)
            awake = threading.Timer(_native.LONGEST_KERNEL_SECONDS + 1, lambda: _native.handoff_pause(False))
            awake.start()
            try:
                out = here.wait(here.submit(*given))
                torch.cuda.synchronize()
            finally:
                awake.join()
                _native.handoff_pause(False)
            assert torch.equal(out.cpu(), want)
            here.check()

    def test_a_captured_wait_gives_up_before_the_driver_does(self, cuda: str) -> None:
        here, given = way(mode="flags"), inputs(2, device=cuda)
        want = plain(given)
        with pretended("sm_90 H200", ends_long_kernels=True):
            here.wait(here.submit(*given))
            out = torch.empty_like(given[0])
            graph = captured(lambda: here.wait(here.submit(*given), out))
            replay(graph)
            torch.cuda.synchronize()
            assert torch.equal(out.cpu(), want)
            _native.handoff_pause(True)
            try:
                start = time.monotonic()
                replay(graph)
                torch.cuda.synchronize()
                took = time.monotonic() - start
            finally:
                _native.handoff_pause(False)
            assert _native.LONGEST_KERNEL_SECONDS <= took < 2 and out.isnan().all()
            with pytest.raises(
                OperatorError, match=r"or 1\.5\d* s in a captured step: the driver of this device ends"
            ):
                here.check()
            replay(graph)
            torch.cuda.synchronize()
            assert torch.equal(out.cpu(), want)
            here.check()

    def test_it_is_said(self, cuda: str, caplog: pytest.LogCaptureFixture) -> None:
        device = torch.device(cuda)
        handoff._warn_of_short_waits.cache_clear()
        with pretended("sm_90 H200", ends_long_kernels=True), caplog.at_level("WARNING", "ktinject"):
            for seed in range(2):
                here = way(seed, mode="flags")
                here.prepare(device)
            described = way(mode="auto").describe(device)
        handoff._warn_of_short_waits.cache_clear()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1 and "waits 1.5 s at most for the CPU" in said[0]
        assert described.startswith("flags; a captured step waits 1.5 s at most")


def test_host_functions_wait_asleep(cuda: str) -> None:
    """CUDA's thread, on which they run, takes no CPU from the workers that it waits for."""
    here, given = way(mode="host_func"), inputs(2, device=cuda)
    want = plain(given)
    assert torch.equal(here.wait(here.submit(*given)).cpu(), want)
    _native.handoff_pause(True)
    try:
        out = here.wait(here.submit(*given))
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(1)
        # The dispatcher itself spins where it is paused, and nobody else.
        used = time.process_time() - before
    finally:
        _native.handoff_pause(False)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), want)
    assert used < 0.5, used


@pytest.mark.parametrize("tokens", [1, 8])
def test_waits_that_take_different_times(cuda: str, tokens: int) -> None:
    """Answers that come in the part of a wait that reads one word, after it, and before the wait."""
    here = way(mode="flags")
    given = inputs(tokens, device=cuda)
    want, out = plain(given), torch.empty_like(given[0])
    graph = captured(lambda: here.wait(here.submit(*given), out))
    for held_up in (0, 0.03, 0.03, 0.03, 0.001, 0.1, 0, 0, 0.02, 0):
        out.fill_(torch.nan)
        _native.handoff_pause(held_up > 0)
        try:
            replay(graph)
            time.sleep(held_up)
        finally:
            _native.handoff_pause(False)
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), want)
    here.check()
