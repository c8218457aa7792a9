"""The object for a layer's experts in CUDA streams and graphs, as SGLang uses it."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from sglang_cases import EXPERTS, HIDDEN, TOP_K, expected, filled, inputs, is_near
from torch import Tensor

from ktinject import _native
from ktinject.sglang import KTMoEWrapper

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def cuda() -> None:
    if not _native.cuda_built():
        pytest.skip("built without CUDA")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def call(made: KTMoEWrapper, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """As SGLang: it overwrites the ids while the CPU computes."""
    ids = ids.clone()
    made.submit_forward(x, ids, weights, stream())
    ids.fill_(-1)
    return made.sync_forward(x, stream())


class Captured:
    """A graph of one layer for m tokens, and its inputs and output."""

    def __init__(self, made: list[KTMoEWrapper], m: int, pool: Any = None) -> None:
        self.inputs = inputs(m, device=DEVICE)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run(made)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.out = self.run(made)

    def run(self, made: list[KTMoEWrapper]) -> list[Tensor]:
        return [call(one, *self.inputs) for one in made]

    def replay(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        m = len(self.inputs[0])
        new = inputs(m, seed, device=DEVICE)
        for held, value in zip(self.inputs, new):
            held.copy_(value)
        self.graph.replay()
        return new


def test_inputs_are_read_when_the_stream_gets_there() -> None:
    for m in (4, 40):
        made, (x, ids, weights) = filled(), inputs(m, device=DEVICE)
        late = [torch.zeros_like(tensor) for tensor in (x, ids, weights)]
        torch.cuda._sleep(200_000_000)
        for held, value in zip(late, (x, ids, weights)):
            held.copy_(value, non_blocking=True)
        assert is_near(call(made, *late), expected(x, ids, weights))


@pytest.mark.parametrize("m", [4, 2048])
def test_the_host_does_not_wait(m: int) -> None:
    made, given = filled(), inputs(m, device=DEVICE)
    call(made, *given)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second
    begin = torch.cuda.Event()
    begin.record()
    out = call(made, *given)
    assert not begin.query(), "the host waited for the stream"
    assert is_near(out, expected(*given))


def test_graphs_of_all_sizes_are_replayed_in_any_order() -> None:
    made = [filled(layer, num_gpu_experts=2) for layer in (0, 1)]
    pool = torch.cuda.graph_pool_handle()
    sizes = (1, 2, 4, 8, 12, 16, 24, 32, 40, 64, 128, 256, 512, 8192)
    graphs = {m: Captured(made, m, pool) for m in reversed(sizes)}
    order = random.Random(0)
    for step in range(1000):
        m = order.choice(sizes[:-2] if step % 50 else sizes)
        given = graphs[m].replay(step)
        checked = step % 20 == 0 or m > 256
        outs = [out.clone() for out in graphs[m].out]
        if step % 7 == 0:  # another size, eagerly, before anybody waited
            eager = inputs(order.choice((3, 33, 100)), step, device=DEVICE)
            assert is_near(call(made[0], *eager), expected(*eager, on_gpu={0, 1}))
        if checked:
            for layer, out in enumerate(outs):
                assert is_near(out, expected(*given, layer=layer, on_gpu={0, 1}))


def test_a_replay_after_silence() -> None:
    graph = Captured([filled()], 4)
    torch.cuda.synchronize()
    time.sleep(10)
    given = graph.replay(5)
    assert is_near(graph.out[0], expected(*given))


def test_two_forwards_are_enqueued_before_the_first_has_run() -> None:
    graph = Captured([filled(layer) for layer in (0, 1)], 8)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    found = []
    for seed in range(6):
        given = graph.replay(seed)
        found.append((given, [out.clone() for out in graph.out]))
    for given, outs in found:
        for layer, out in enumerate(outs):
            assert is_near(out, expected(*given, layer=layer))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("m", [4, 100])
def test_a_side_stream_with_events(captured: bool, m: int) -> None:
    """As SGLang's fork: fork, submit and sync in a side stream on a slice of a buffer, join, record_stream."""
    made, side = filled(), torch.cuda.Stream()
    staging = torch.zeros(8192, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    held = inputs(m, device=DEVICE)

    def run() -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        x = staging[:m]
        with torch.cuda.stream(side):
            x.copy_(held[0])
            made.submit_forward(x, held[1], held[2], side.cuda_stream)
            out = made.sync_forward(x, side.cuda_stream)
            done = side.record_event()
        main.wait_event(done)
        out.record_stream(main)
        return out + 0

    assert is_near(run(), expected(*held))
    if captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run()
        for seed in range(20):
            for tensor, value in zip(held, inputs(m, seed, device=DEVICE)):
                tensor.copy_(value)
            graph.replay()
            assert is_near(out, expected(*held))


def test_a_mask_changes_between_replays() -> None:
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[:2] = True
    made = filled(num_gpu_experts=None, gpu_experts_mask=mask)
    graph = Captured([made], 4)
    for step, on_gpu in enumerate(({0, 1}, {3, 7}, {5, 6}, {0, 1})):
        new = torch.zeros(EXPERTS, dtype=torch.bool)
        new[[*on_gpu]] = True
        torch.cuda.synchronize()
        made.gpu_experts_mask.copy_(new)
        given = graph.replay(step)
        assert is_near(graph.out[0], expected(*given, on_gpu=on_gpu))


@pytest.mark.parametrize("m", [1, 40])
def test_deferred_experts_in_a_graph_are_those_of_an_eager_pass(m: int) -> None:
    made = [filled(layer, max_deferred_experts_per_token=TOP_K - 1) for layer in range(3)]
    graph = Captured(made, m)
    for seed in range(30):
        given = graph.replay(seed)
        eager = [call(one, *given) for one in made]
        for found, want in zip(graph.out, eager):
            assert torch.equal(found, want)


def test_the_sum_of_all_layers_is_that_without_deferral() -> None:
    given = inputs(6, device=DEVICE)
    sums = []
    for count in (0, 2):
        made = [filled(layer, max_deferred_experts_per_token=count) for layer in range(3)]
        sums.append(sum(call(one, *given).double() for one in made))
        del made
    assert ((sums[0] - sums[1]).norm() / sums[0].norm()).item() < 1e-2
