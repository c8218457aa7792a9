"""Experts of `gpu_experts: auto` give back their memory: steps and prompts are right before, meanwhile and behind."""

from __future__ import annotations

import logging
import threading
from typing import Any

import expert_cases
import pytest
import reference
import torch
from expert_cases import ON_GPU
from test_hybrid_experts import EXPERTS, cuda, hybrid, inputs, module, plain  # noqa: F401

from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig
from ktinject.operators.offload import expert_cache, handoff, lent
from ktinject.operators.offload.expert_placement import ExpertPlacement


class Borrower:
    """A layer whose memory is not on a GPU."""

    def __init__(self, size: int, stays: bool = False) -> None:
        self.memory: torch.Tensor | None = torch.empty(size, dtype=torch.uint8)
        self.stays = stays

    def lent(self) -> torch.Tensor | None:
        return self.memory

    def give_back(self) -> torch.Tensor | None:
        if self.stays:
            raise RuntimeError("a copy is under way")
        found, self.memory = self.memory, None
        return found


CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has borrowed anything; a device is through at once."""
    monkeypatch.setattr(lent, "_borrowers", ())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.usefixtures("alone")
def test_what_is_lent_is_given_back_once(caplog: pytest.LogCaptureFixture) -> None:
    one, other, stuck = Borrower(3 << 20), Borrower(1 << 20), Borrower(1 << 20, stays=True)
    for each in (one, other, stuck):
        lent.lend(each)
    assert lent.is_lent({CPU}) and lent.lent_bytes(CPU) == 5 << 20
    assert not lent.is_lent({torch.device("cuda:0")}) and lent.give_back({torch.device("cuda:0")}) == 0
    before = lent.times()
    with caplog.at_level(logging.WARNING, "ktinject"):
        assert lent.give_back({CPU}) == 4 << 20
    assert lent.times() == before + 1
    said = [record.getMessage() for record in caplog.records]
    assert sorted(text.partition(":")[0] for text in said) == [
        "cpu is short of memory",
        "experts on a GPU cannot give back their memory",
    ]
    assert one.lent() is other.lent() is None and lent.lent_bytes(CPU) == 1 << 20
    assert lent.give_back({CPU}) == 0 and lent.times() == before + 1


@pytest.mark.usefixtures("alone")
def test_what_finds_no_room_is_tried_again() -> None:
    tries = []

    def make() -> int:
        tries.append(lent.lent_bytes(CPU))
        if tries[-1]:
            raise torch.OutOfMemoryError("no room")
        return len(tries)

    layer = Borrower(8)
    lent.lend(layer)
    assert lent.retried(make, {CPU}) == 2 and tries == [8, 0]
    layer.memory = torch.empty(8, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        lent.retried(make, {torch.device("cuda:0")})
    assert layer.lent() is not None, "on another device"


# --- on a GPU ---


def partly(device: str, kind: str, count: int = 8, **arguments: Any) -> HybridExperts:
    """A layer that `auto` gave so many experts on the GPU."""
    config = HybridExpertsConfig(device=device, gpu_experts="auto", **arguments, **ON_GPU[kind])
    made = HybridExperts.build(module(), config)
    made.place(ExpertPlacement(tuple(range(count))))
    made.allocate()
    for name, parameter in reference.parameters_of(module()).items():
        expert_cases.load(made, name, parameter)
    made.finish()
    return made


def error(made: HybridExperts, kind: str, step: int, tokens: int = 2) -> float:
    x, ids, weights = inputs(tokens, step, made.config.device)
    with torch.inference_mode():
        out = made(x, ids, weights)
    return reference.relative_error(out.cpu(), plain(**ON_GPU[kind])(x.cpu(), ids.cpu(), weights.cpu()))


def allowed(kind: str) -> float:
    # The CPU rounds activations to int8, the GPU to bf16.
    return 4e-2 if ON_GPU[kind].get("weights") in ("int4", "int8", "q8_0") else 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ON_GPU)
@pytest.mark.parametrize("count", [8, EXPERTS])
def test_steps_and_prompts_are_right_behind_it(cuda: str, kind: str, count: int) -> None:  # noqa: F811
    made, device = partly(cuda, kind, count), torch.device(cuda)
    assert made.lends and (made.seat is not None) == (count < EXPERTS)
    assert made.experts_on_gpu() == [*range(count)]
    for step in range(20):
        assert error(made, kind, step) <= allowed(kind)
    before, memory = made.hits(), made.lent()
    assert memory is not None and before.uses > 0
    size = memory.nbytes
    del memory
    held = torch.cuda.memory_allocated(device)
    assert lent.lent_bytes(device) >= size and lent.give_back({device}) >= size
    assert held - torch.cuda.memory_allocated(device) >= size
    # What was theirs is somebody else's.
    other = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    assert made.experts_on_gpu() == [] and made.lent() is None and made.seat is None
    assert made.hits().uses >= before.uses and not made.hits().moves
    for tokens in (2, 100, 2000):
        for step in range(3):
            assert error(made, kind, 50 + step, tokens) <= allowed(kind)
    made.handoff.check()
    assert bool((other == 0xFF).all())
    assert lent.give_back({device}) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [8, EXPERTS])
def test_graphs_that_were_captured_before_are_right_behind_it(cuda: str, count: int) -> None:  # noqa: F811
    made, kind = partly(cuda, "bf16", count), "bf16"
    x, ids, weights = inputs(2, 0, cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        made(x, ids, weights)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = made(x, ids, weights)
        others = []
        for step in range(40):
            now, chosen, routing = inputs(2, step)
            x.copy_(now), ids.copy_(chosen), weights.copy_(routing)
            expert_cache.step()
            handoff.wake()
            graph.replay()
            want = plain(**ON_GPU[kind])(now, chosen, routing)
            assert reference.relative_error(out.cpu(), want) <= allowed(kind), step
            if step == 20:
                memory = made.lent()
                assert memory is not None
                size = memory.nbytes
                del memory
                assert lent.give_back({torch.device(cuda)}) >= size
                others.append(torch.full((size,), 0xFF, dtype=torch.uint8, device=cuda))
    made.handoff.check()


@pytest.mark.gpu
def test_another_thread_goes_on_meanwhile(cuda: str) -> None:  # noqa: F811
    """On a stream of its own, with steps and prompts."""
    layers = [partly(cuda, "bf16") for _ in range(6)]
    wrong: list[float] = []
    ended = threading.Event()

    def others() -> None:
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            step = 0
            while not ended.is_set():
                wrong.extend(error(made, "bf16", step, 2 if step % 5 else 700) for made in layers)
                step += 1

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for made in layers:
            for step in range(10):
                error(made, "bf16", 100 + step)
            memory = made.give_back()
            assert memory is not None
            torch.cuda.synchronize()
            torch.cuda.synchronize()
            memory.fill_(0xFF)
        for step in range(5):
            wrong.extend(error(made, "bf16", 200 + step) for made in layers)
    finally:
        ended.set()
        thread.join()
    assert wrong and max(wrong) <= allowed("bf16")


@pytest.mark.gpu
def test_what_somebody_asked_for_stays(cuda: str) -> None:  # noqa: F811
    made = hybrid(cuda, gpu_experts=0.5, dynamic=True)
    assert not made.lends
    lent.give_back({torch.device(cuda)})
    assert made.experts_on_gpu() == [*range(EXPERTS // 2)]
