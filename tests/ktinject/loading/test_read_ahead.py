"""Reading ahead: order, bounds, and an end without threads left, whatever goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from double import saved

import ktinject
from ktinject.errors import CheckpointError
from ktinject.loading import read_ahead
from ktinject.loading.read_ahead import Pace, ReadAhead


def ahead(
    count: int, read: Callable[[int], int], size: int = 1, threads: int = 4, room: int = 8
) -> ReadAhead[int, int]:
    return ReadAhead(range(count), read, lambda item: size, threads, room)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ktinject-read"]


def test_values_come_in_order_whoever_is_done_first() -> None:
    later = threading.Event()

    def read(item: int) -> int:
        if item == 0:
            assert later.wait(60)
        if item == 3:
            later.set()
        return item * item

    with ahead(50, read) as values:
        assert list(values) == [(item, item * item) for item in range(50)]
    assert not readers()


@pytest.mark.parametrize(("size", "most"), [(1, 8), (3, 2), (20, 1)])
def test_no_more_is_held_than_there_is_room_for(size: int, most: int) -> None:
    changed = threading.Condition()
    begun = taken = 0

    def read(item: int) -> int:
        nonlocal begun
        with changed:
            begun += 1
            assert begun - taken <= most
            changed.notify()
        return item

    def are_read(wanted: int) -> bool:
        return changed.wait_for(lambda: begun >= min(40, wanted), 60)

    with ahead(40, read, size) as values:
        for item, _ in values:
            with changed:
                # All that there is room for is read before the first is given back.
                assert are_read(taken + most)
                taken += 1
            assert item == taken - 1


def test_what_a_read_raises_comes_in_its_turn() -> None:
    def read(item: int) -> int:
        if item >= 3:
            raise CheckpointError(f"tensor {item}: damaged.")
        return item

    seen = []
    with pytest.raises(CheckpointError, match="tensor 3"), ahead(10, read) as values:
        for item, _ in values:
            seen.append(item)
    assert seen == [0, 1, 2]
    assert not readers()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_threads_end_before_the_caller_goes_on(error: type[BaseException]) -> None:
    with pytest.raises(error), ahead(1000, lambda item: item) as values:
        for item, _ in values:
            if item == 5:
                raise error
    assert not readers()


def test_a_thread_that_fails_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its items."""

    def fail(enters: bool) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(read_ahead._native, "compute_alone", fail)
    with (
        pytest.raises(MemoryError, match="bad_alloc"),
        ahead(50, lambda item: item, threads=1) as values,
    ):
        list(values)
    assert not readers()


def test_fewer_threads_or_none_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    original, started, allowed = threading.Thread.start, [], [0]

    def start(self: threading.Thread) -> None:
        if len(started) == allowed[0]:
            raise RuntimeError("can't start new thread")
        started.append(self)
        original(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    for allowed[0] in (2, 0):
        started.clear()
        with ahead(20, lambda item: item) as values:
            assert len(list(values)) == 20
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    assert read_ahead.usual_threads() == 0
    assert not readers()


@pytest.mark.parametrize(("waited", "stalled", "slow"), [(3.0, 1.0, "reading"), (1.0, 3.0, "packing")])
def test_a_line_says_what_the_bottleneck_was(waited: float, stalled: float, slow: str) -> None:
    text = str(Pace(8 << 30, 4.0, waited, stalled))
    assert text.startswith(f"loaded in 4.0 s, 2.0 GiB/s; {slow} was the bottleneck") and text.endswith(
        "75% of the time"
    )


def test_a_load_shows_a_bar_and_ends_with_that_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ktinject.load(saved(models.tiny("qwen3_moe"), tmp_path), "auto", devices="cpu")
    shown = capfd.readouterr()
    assert "loading" in shown.err and "was the bottleneck" in shown.err.splitlines()[-1]
    assert not shown.out and not readers()
