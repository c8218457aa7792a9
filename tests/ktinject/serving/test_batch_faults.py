"""What goes wrong in a request or a batch ends what it belongs to: nobody waits for ever, and the next one is served.

The model and transformers' manager are stand-ins, which fail where a test wants it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from ktinject.errors import OperatorError
from ktinject.generation import next_turns
from ktinject.generation.batching_sampling import NO_TOKEN, Choice
from ktinject.serving.batches import Batches
from ktinject.serving.running import Complete, Request, Unavailable

WRITTEN = [5, 6, 7]


class Model:
    """Writes three tokens."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        text = SimpleNamespace(vocab_size=9)
        self.config = SimpleNamespace(get_text_config=lambda: text)
        self.error: Exception | None = None

    def generate(
        self, input_ids: Tensor, streamer: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> Tensor:
        if self.error is not None:
            raise self.error
        streamer.put(input_ids)
        for token in WRITTEN[: generation_config.max_new_tokens]:
            streamer.put(torch.tensor([token]))
            input_ids = torch.cat([input_ids, torch.tensor([[token]])], 1)
            if any(criterion(input_ids, None).all() for criterion in stopping_criteria):
                break
        return input_ids


class Prefixes:
    def take(self, text: list[int]) -> tuple[None, int]:
        return None, 0

    def keep(self, text: list[int], cache: Any) -> None:
        pass


class Sink:
    """Keeps tokens. fails_at, completes_at: with which of them it raises."""

    def __init__(self, fails_at: int = 0, completes_at: int = 0) -> None:
        self.may_complete = bool(completes_at)
        self._fails_at, self._completes_at = fails_at, completes_at
        self.tokens: list[int] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        if value.dim() > 1:
            return
        self.tokens += value.tolist()
        if len(self.tokens) == self._fails_at:
            raise TypeError("a fault of a sink")
        if len(self.tokens) == self._completes_at:
            raise Complete

    def found(self, tokens: int) -> None:
        pass

    def end(self) -> None:
        self.has_ended = True


class Manager:
    """A batch whose steps a test takes."""

    def __init__(self, batches: Batches) -> None:
        self._take = batches._take
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.accepts: bool | Exception = True
        self._generation_thread = threading.Thread(target=lambda: None)
        self._generation_thread.start()

    def add_request(self, ids: list[int], request_id: str, **_: Any) -> str | None:
        if isinstance(self.accepts, Exception):
            raise self.accepts
        if self.accepts:
            self.asked.append(request_id)
        return request_id if self.accepts else None

    def cancel_request(self, name: str) -> None:
        self.cancelled.append(name)

    def give(self, name: str, tokens: list[int], error: str | None = None, is_finished: bool = False) -> None:
        finished = is_finished or error is not None
        output = SimpleNamespace(
            request_id=name, generated_tokens=tokens, error=error, is_finished=lambda: finished
        )
        self._take(self, output)

    def stop(self, **_: Any) -> None:
        pass


class Scene:
    """Requests to `Batches`, in which batches are begun by a test."""

    def __init__(self) -> None:
        self.model, self.managers, self.clients = Model(), [], ThreadPoolExecutor(8)
        prefixes: Any = Prefixes()
        self.batches = Batches(self.model, 2, 1000, prefixes)
        self.batches._made = self._made  # type: ignore[method-assign]

    def _made(self) -> Manager:
        self.managers.append(Manager(self.batches))
        self.batches._manager = self.managers[-1]
        return self.managers[-1]

    def ask(self, sink: Sink | None = None) -> Any:
        config = GenerationConfig(max_new_tokens=3)
        return self.clients.submit(self.batches.generate, [1, 2], config, sink or Sink(), None)

    def batch(self) -> Manager:
        """With two requests in it, one of which was alone at first."""
        manager = self._made()
        with self.batches._changed:
            for number in range(2):
                request = Request([1], GenerationConfig(max_new_tokens=3), Sink(), {}, Choice())
                name = manager.add_request([1], f"before {number}")
                assert name is not None
                request.manager, self.batches._batch[name] = manager, request
        return manager

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.002)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(Choice, "of", lambda *_: Choice())
    monkeypatch.setattr(next_turns, "between_requests", lambda *_: False)
    found = Scene()
    yield found
    found.batches.close()
    found.clients.shutdown(wait=False)
    assert not found.batches._batch


def test_a_batch_that_fails_while_another_request_waits(scene: Scene) -> None:
    """The waiting one begins between two of the failures, and takes the batch that fails from the server."""
    manager = scene.batch()
    first, second = scene.batches._batch.values()
    third = scene.ask()
    scene.until(lambda: len(scene.batches._waiting) == 1)
    manager.accepts = False  # transformers' manager stops first, and then fails its requests
    manager.give("before 0", [], error="out of memory")
    scene.until(lambda: not scene.batches._waiting)
    manager.give("before 1", [], error="out of memory")
    for failed in (first, second):
        assert failed.done.wait(60) and isinstance(failed.error, OperatorError)
    assert "out of memory" in str(first.error)
    scene.until(lambda: third.done() or len(scene.managers) == 2)
    if not third.done():
        scene.until(lambda: len(scene.managers[1].asked) == 1)
        scene.managers[1].give(scene.managers[1].asked[0], WRITTEN, is_finished=True)
    assert third.result(60)[0].tolist() == [1, 2, *WRITTEN]


def test_a_batch_that_dies_leaves_nobody_waiting(scene: Scene) -> None:
    manager = scene.batch()
    left = [*scene.batches._batch.values()]
    scene.batches._ended(manager)
    assert all(request.done.is_set() for request in left)
    with pytest.raises(OperatorError, match="the batch ended"):
        raise left[0].error
    assert scene.ask().result(60)[0].tolist() == [1, 2, *WRITTEN], "both places are free again"


def test_a_row_without_a_token_ends_its_request_alone(scene: Scene) -> None:
    manager = scene.batch()
    bad, good = scene.batches._batch.values()
    manager.give("before 0", [4, NO_TOKEN])
    manager.give("before 1", [4])
    assert bad.done.wait(60) and "not finite" in str(bad.error) and bad.sink.tokens == [4]
    assert manager.cancelled == ["before 0"] and not good.done.is_set()
    manager.give("before 1", [4, 5], is_finished=True)
    assert good.done.wait(60) and good.error is None and good.written == [4, 5]


@pytest.mark.parametrize("place", ["alone", "batch"])
def test_a_sink_ends_its_request_alone(scene: Scene, place: str) -> None:
    complete, broken = Sink(completes_at=2), Sink(fails_at=2)
    if place == "alone":
        assert scene.ask(complete).result(60)[0].tolist() == [1, 2, 5, 6]
        with pytest.raises(TypeError, match="a fault of a sink"):
            scene.ask(broken).result(60)
    else:
        manager = scene.batch()
        one, two = scene.batches._batch.values()
        one.sink, two.sink = complete, broken
        for name in ("before 0", "before 1"):
            manager.give(name, WRITTEN)
        assert one.done.wait(60) and one.error is None and one.written == [5, 6]
        assert two.done.wait(60) and isinstance(two.error, TypeError)
        assert manager.cancelled == ["before 0", "before 1"]
    assert complete.has_ended and not broken.has_ended
    assert scene.ask().result(60)[0].tolist() == [1, 2, *WRITTEN]


def test_what_nobody_expects_ends_one_request(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> bool:
        raise ZeroDivisionError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(scene.batches, "_run_alone", fail)
        with pytest.raises(ZeroDivisionError):
            scene.ask().result(60)
    with monkeypatch.context() as patch:  # once the request has its answer
        patch.setattr(next_turns, "between_requests", fail)
        patch.setattr(scene.batches, "_generate", lambda request: request.written.append(5) or [1])
        assert scene.ask().result(60)[0].tolist() == [1, 2, 5]
    manager = scene.batch()
    manager.accepts = TypeError("a fault")
    manager.give("before 0", WRITTEN, is_finished=True)
    with pytest.raises(TypeError, match="a fault"):
        scene.ask().result(60)
    manager.give("before 1", WRITTEN, is_finished=True)
    assert scene.ask().result(60)[0].tolist() == [1, 2, *WRITTEN]


def test_a_server_that_can_compute_nothing_more_says_so(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.batch()
    waiting = [*scene.batches._batch.values()]

    def fail() -> bool:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(scene.batches, "_may_begin", fail)
    for _ in range(2):
        with pytest.raises(
            Unavailable, match=r"the server is broken: ZeroDivisionError: a fault\. Start it anew"
        ):
            scene.ask().result(60)
    assert all(request.done.is_set() for request in waiting)
    scene.batches._batch.clear()
