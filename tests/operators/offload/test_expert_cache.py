"""Experts on the GPU as a cache: what the policy chooses, and that every step is right while experts move."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import reference
import torch
from expert_cases import ON_GPU
from test_hybrid_experts import (  # noqa: F401
    EXPERTS,
    HIDDEN,
    cuda,
    hybrid,
    inputs,
    module,
    placed,
    plain,
)
from torch import nn

from ktinject import _native
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig
from ktinject.operators.offload import expert_cache, handoff, streaming
from ktinject.operators.offload.gpu_experts import GpuExperts

CUDA_PARTS = pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks/routing_traces.py"
    spec = importlib.util.spec_from_file_location("routing_traces", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(trace: torch.Tensor, places: int, most: int = 2, experts: int = 128) -> _native.ReusePolicy:
    """A policy after a trace, that may exchange so many experts after each step."""
    policy = _native.ReusePolicy(experts, list(range(places)))
    for row in trace:
        policy.count(torch.bincount(row, minlength=experts).tolist())
        policy.exchange(most)
    return policy


# --- the policy ---


def test_the_trace_follows_the_published_curve(traces: ModuleType) -> None:
    trace = traces.reuse(2000)
    assert all(len({*row}) == 8 for row in trace.tolist())
    assert abs(traces.again(trace, 1) - 0.45) < 0.02
    assert abs(traces.again(trace, 8) - 0.80) < 0.02


def test_a_cache_hits_where_a_fixed_set_misses(traces: ModuleType) -> None:
    """The first quarter of a trace only warms up."""
    trace = traces.reuse(1600)
    for places, least, fewer_misses in ((51, 0.94, 10), (32, 0.75, 3)):  # 40 % and 25 % of 128 experts
        before, after = run(trace[:400], places), run(trace, places)
        rate = (after.hits - before.hits) / (after.uses - before.uses)
        fixed = places / 128  # of a set chosen without knowing the trace, on average
        assert rate >= least
        assert 1 - fixed >= fewer_misses * (1 - rate)
        # A copy saves more than one use on the CPU.
        assert after.pays and (rate - fixed) * 8 * 1200 > 1.5 * (after.exchanges - before.exchanges)


def test_nothing_moves_where_it_does_not_pay(traces: ModuleType) -> None:
    for places in (8, 32, 96):
        policy = run(traces.uniform(600), places)
        assert not policy.pays and policy.exchanges == 0 and policy.hits > 0


def test_traffic_that_turns_is_followed_and_what_stays_stays() -> None:
    """Four experts are asked for again and again, then four others."""
    policy = _native.ReusePolicy(EXPERTS, [0, 1, 2, 3])
    resident = {0, 1, 2, 3}
    for hot in ([8, 9, 10, 11], [3, 6, 12, 15]):
        for step in range(100):
            policy.count([int(e in hot) + int(e == step % EXPERTS) for e in range(EXPERTS)])
            for leaving, coming in policy.exchange(1):
                assert leaving in resident and coming not in resident
                resident = (resident - {leaving}) | {coming}
        assert resident == {*hot}
    before = policy.exchanges
    for _ in range(50):
        policy.count([int(e in resident) for e in range(EXPERTS)])
        assert policy.exchange(1) == []
    assert policy.exchanges == before


def test_the_same_uses_give_the_same_exchanges(traces: ModuleType) -> None:
    trace = traces.reuse(300)
    one, other = run(trace, 32), run(trace, 32)
    assert (one.hits, one.exchanges, one.gain) == (other.hits, other.exchanges, other.gain)


def test_what_the_policy_refuses() -> None:
    for resident in ([16], [-1], [3, 3]):
        with pytest.raises(ValueError, match="resident experts: found"):
            _native.ReusePolicy(EXPERTS, resident)
    with pytest.raises(ValueError, match="found 3 counts; expected 16"):
        _native.ReusePolicy(EXPERTS, [0]).count([1, 2, 3])


# --- the layer ---


def test_what_can_move() -> None:
    """Experts that are copied as they are: in the format of those in RAM, where it has a kernel on GPUs."""
    for arguments, words in (
        ({"weights": "int8", "gpu_weights": "bf16"}, "weights is int8 and gpu_weights bf16"),
        # An expert that is packed for the GPU alone has no zero points, and no other could follow.
        (
            {"weights": "int4", "gpu_weights": "int4", "symmetric": False},
            "int4 with zero points and gpu_weights",
        ),
        ({"weights": "q4_k"}, "weights is q4_k and gpu_weights same"),
    ):
        with pytest.raises(ValueError, match=words):
            HybridExpertsConfig(dynamic=True, **arguments)  # type: ignore[arg-type]
        assert not HybridExpertsConfig(gpu_experts="auto", **arguments).moves  # type: ignore[arg-type]
    assert HybridExpertsConfig(weights="q4_k", gpu_experts="auto").gpu_format == "bf16"
    mixed = HybridExpertsConfig(weights="q8_0", down_weights="q6_k", gpu_experts="auto")
    assert mixed.gpu_format == "bf16" and not mixed.moves
    assert HybridExpertsConfig(weights="q8_0", down_weights="q8_0", gpu_experts="auto").moves
    for kind in ON_GPU.values():
        made = HybridExpertsConfig(gpu_experts="auto", **kind)
        assert made.moves and made.gpu_format == made.weights
        assert not HybridExpertsConfig(gpu_experts="auto", dynamic=False, **kind).moves
        assert not HybridExpertsConfig(gpu_experts=0.5, **kind).moves, "a number says which ones"
        assert HybridExpertsConfig(gpu_experts=0.5, dynamic=True, **kind).moves


@CUDA_PARTS
def test_a_layer_takes_spare_places_where_experts_move() -> None:
    assert placed(gpu_experts=2, weights="int4", dynamic=True) == [(0, 1)] * 2
    taken = [
        hybrid_footprint(gpu_experts=count, dynamic=dynamic)
        for count, dynamic in ((4, False), (4, True), (12, True), (EXPERTS, True))
    ]
    experts = [size - GpuExperts.table_bytes(EXPERTS) for size in taken]
    one = experts[0] // 4
    assert experts == [4 * one, 5 * one, 13 * one, EXPERTS * one]


def hybrid_footprint(**arguments: Any) -> int:
    config = HybridExpertsConfig(device="cuda:0", **arguments)
    placement = HybridExperts.plan_placement(nn.Module(), {"e": (module(), config)}, {"cuda:0": 1 << 34})["e"]
    assert not isinstance(placement, str)
    made = HybridExperts.build(module(), config)
    made.place(placement)
    return made.footprint()["cuda:0"]


def moving(cuda: str, kind: str = "bf16", count: int = 4) -> HybridExperts:  # noqa: F811
    made = hybrid(cuda, gpu_experts=count, dynamic=True, **ON_GPU[kind])
    assert made.seat is not None and made.experts_on_gpu() == [*range(count)]
    return made


def ids_of(step: int, hot: list[int]) -> torch.Tensor:
    """Two tokens' experts [2, 4]: three of four hot ones, and another one."""
    random = torch.Generator().manual_seed(step)
    rows = torch.tensor(hot)[torch.rand(2, 4, generator=random).argsort(-1)]
    rows[:, :1] = torch.randint(EXPERTS, (2, 1), generator=random)
    return rows


def assert_places_hold_their_experts(made: HybridExperts) -> None:
    """The table on the GPU is the one that the host knows, and each place has the bytes of its expert."""
    assert made.on_gpu is not None and made.seat is not None
    torch.cuda.synchronize()
    places = made.on_gpu.places.tolist()
    assert places == made.seat.places()
    size = made.on_gpu.native.bytes
    assert len({place for place in places if place >= 0}) == len(made.resident)
    for expert, place in enumerate(places):
        if place < 0:
            continue
        want = torch.empty(size, dtype=torch.uint8, device=made.on_gpu.memory.device)
        stream = torch.cuda.current_stream()
        made.on_gpu.native.copy(
            made.native, expert, want.data_ptr(), (stream.device_index, stream.cuda_stream)
        )
        assert torch.equal(want, made.on_gpu.memory[place * size : (place + 1) * size]), expert


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ON_GPU)
def test_steps_are_right_while_experts_move(cuda: str, kind: str, graph: bool) -> None:  # noqa: F811
    """The traffic turns to other experts; each result is compared with the CPU's alone."""
    made = moving(cuda, kind)
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device=cuda)
    ids = torch.zeros(2, 4, dtype=torch.int64, device=cuda)
    routing = torch.rand(2, 4, device=cuda)
    steps = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        out = made(x, ids, routing)
        if graph:
            with torch.cuda.graph(steps):
                out = made(x, ids, routing)
        for hot in ([8, 9, 10, 11], [3, 6, 12, 15]):
            worst = 0.0
            for step in range(80):
                x.normal_()
                ids.copy_(ids_of(step, hot))
                if graph:
                    expert_cache.step()
                    handoff.wake()
                    steps.replay()
                else:
                    out = made(x, ids, routing)
                want = plain(**ON_GPU[kind])(x.cpu(), ids.cpu(), routing.cpu())
                worst = max(worst, reference.relative_error(out.cpu(), want))
            assert made.experts_on_gpu() == hot
            assert_places_hold_their_experts(made)
            # The CPU rounds activations to int8, the GPU to bf16.
            assert worst <= (4e-2 if made.config.weights in ("int4", "int8", "q8_0") else 8e-3)
    made.handoff.check()
    found = made.hits()
    assert found.moves and found.fetches >= 8 and found.bytes == found.fetches * made.on_gpu.native.bytes  # type: ignore[union-attr]
    assert found.uses >= 159 * 8 and 0.5 < found.rate < 1


@pytest.mark.gpu
def test_the_same_steps_give_the_same_bits(cuda: str) -> None:  # noqa: F811
    """However long copies and steps take: the second time, the host dawdles between the steps."""
    outs = []
    for dawdles in (False, True):
        made = moving(cuda, "int4")
        found = []
        for step in range(100):
            x, _, routing = inputs(2, step, cuda)
            ids = ids_of(step, [8, 9, 10, 11] if step < 50 else [1, 9, 12, 13]).to(cuda)
            with torch.inference_mode():
                found.append(made(x, ids, routing))
            if dawdles and step % 7 == 0:
                torch.cuda.synchronize()
                threading.Event().wait(0.003)
        outs.append((torch.stack(found).cpu(), made.experts_on_gpu(), made.hits()))
        del made
    assert torch.equal(outs[0][0], outs[1][0])
    assert outs[0][1] == outs[1][1] and outs[0][2].fetches == outs[1][2].fetches > 0


def step_beside(made: Any, device: str, work: Callable[[], None], ended: threading.Event) -> None:
    """Steps that exchange experts, beside those of an operator on the CPU, while a thread works until `ended`."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        with torch.inference_mode():
            for step in range(300):
                x, _, routing = inputs(2, step, device)
                hot = [[8, 9, 10, 11], [3, 6, 12, 15], [0, 1, 9, 14]][step // 50 % 3]
                ids = ids_of(step, hot).to(device)
                out = made(x, ids, routing)
                want = plain()(x.cpu(), ids.cpu(), routing.cpu())
                assert reference.relative_error(out.cpu(), want) <= 8e-3
    finally:
        ended.set()
        thread.join()


@pytest.mark.gpu
def test_two_threads_share_a_layer_whose_experts_move(cuda: str) -> None:  # noqa: F811
    """One thread's steps exchange experts, the other one submits on a stream of its own meanwhile."""
    made, wrong = moving(cuda), []
    ended = threading.Event()

    def others() -> None:
        with torch.cuda.stream(torch.cuda.Stream(cuda)), torch.inference_mode():
            step = 1000
            while not ended.is_set():
                x, _, routing = inputs(2, step, cuda)
                ids = ids_of(step, [0, 8, 9, 12]).to(cuda)
                # not `made(...)`, which begins a step of its own
                asked = made.on_gpu.ask(ids)  # type: ignore[union-attr]
                ticket = made.handoff.submit(x, ids, routing, asked)
                part = made.on_gpu.forward(x, asked.chosen, routing)  # type: ignore[union-attr, arg-type]
                out = made.handoff.wait(ticket, addend=part)
                want = plain()(x.cpu(), ids.cpu(), routing.cpu())
                wrong.append(reference.relative_error(out.cpu(), want))
                step += 1

    step_beside(made, cuda, others, ended)
    assert wrong and max(wrong) <= 8e-3
    assert made.hits().fetches >= 12
    assert_places_hold_their_experts(made)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False], ids=["CPU and GPU", "GPU alone"])
def test_prompts_read_experts_that_move(cuda: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """One thread's steps exchange experts, the other one's prompts read those on the GPU where they lie."""
    made, wrong, seen = moving(cuda), [], set()
    streams = lambda self, tokens, top_k: 0 if tokens < 100 else 9 if shared else EXPERTS  # noqa: E731
    monkeypatch.setattr(HybridExperts, "_streams", streams)
    forward = streaming.StreamedExperts.forward

    def noting(self: Any, *given: Any, **more: Any) -> torch.Tensor:
        places = more.get("places") or given[5]
        seen.add(tuple(expert for expert, place in enumerate(places) if place >= 0))
        return forward(self, *given, **more)

    monkeypatch.setattr(streaming.StreamedExperts, "forward", noting)
    ended = threading.Event()

    def prompts() -> None:
        with torch.cuda.stream(torch.cuda.Stream(cuda)), torch.inference_mode():
            step = 1000
            while not ended.is_set():
                x, ids, routing = inputs(150, step, cuda)
                out = made(x, ids, routing)
                wrong.append(reference.relative_error(out.cpu(), plain()(x.cpu(), ids.cpu(), routing.cpu())))
                step += 1

    step_beside(made, cuda, prompts, ended)
    assert wrong and max(wrong) <= 8e-3
    assert made.hits().fetches >= 12 and len(seen) > 3, "prompts saw them move"
    assert_places_hold_their_experts(made)


@pytest.mark.gpu
def test_a_layer_that_goes_leaves_the_others(cuda: str) -> None:  # noqa: F811
    first, second = moving(cuda), moving(cuda)
    assert first.seat is not None and second.seat is not None and first.seat.cache is second.seat.cache
    assert first.seat.begins() and not second.seat.begins()
    arguments = inputs(2, 0, cuda)
    for _ in range(40):
        first(*arguments)
    del first
    assert second.seat.begins()
    for step in range(60):
        x, _, routing = inputs(2, step, cuda)
        second(x, ids_of(step, [5, 6, 7, 8]).to(cuda), routing)
    assert second.experts_on_gpu() == [5, 6, 7, 8]
    assert_places_hold_their_experts(second)
