"""Long prompts whose experts pass through the GPU: when, and that the sum stays the same."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cases import EXPERTS, checkpoint, drop_failures, expected, filled, forward, inputs, is_near
from torch import Tensor

from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.offload import prefill_rates
from ktinject.operators.offload.prefill_rates import Rates
from ktinject.operators.offload.submits import only
from ktinject.sglang import failures, graphs, plugin, prompts, ranks
from ktinject.sglang.prompts import Prompts

DEVICE = "cuda:0"
ALL = Rates(bus_s=1e-3, cpu_s=((1, 1e-2),))
SOME = Rates(bus_s=0.1, cpu_s=((1, 0.1), (100_000, 0.2)))


def of(rates: Rates, experts: int, first: int, top_k: int) -> Prompts:
    streamed: Any = SimpleNamespace(first=first, spec=SimpleNamespace(num_experts=experts))
    return Prompts(streamed, rates, top_k)


def test_experts_pass_where_the_bus_is_faster_than_the_cpu() -> None:
    rates = Rates(bus_s=5e-3, cpu_s=((128, 3e-3), (1024, 5e-3), (8192, 30e-3)), host_s=0.0)
    whole = of(rates, 128, 0, 8)
    assert [whole.passing(tokens) for tokens in (1, 127, 128, 1024, 8192)] == [0, 0, 0, 0, 128]
    # A layer's time on the CPU is that of the routes that are the CPU's: half of them here, and so of the bytes.
    half = of(Rates(bus_s=2.5e-3, cpu_s=rates.cpu_s, host_s=0.0), 128, 64, 8)
    assert half.passing(512) == 0 and half.passing(2048) == 64
    few = of(Rates(bus_s=1e-4, cpu_s=((128, 1e-3), (1024, 8e-3)), host_s=0.0), 128, 124, 8)
    assert few.passing(8192) == 4


def test_a_part_of_the_experts_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_fruitless", set())
    monkeypatch.setattr(ranks, "_mine", ranks.Share(0, 2))
    made = filled()
    experts = made._layer._experts
    assert experts is not None
    assert Prompts.of(made.arguments, experts, torch.device("meta")) is None and not prompts._fruitless


def test_a_graph_is_cut_only_where_it_can_be() -> None:
    module, current = ModuleType("breakable"), [None]
    seen = []

    def eager_on_graph(enable: bool) -> Callable[..., Any]:
        return lambda inner: lambda *given: (seen.append(enable), inner(*given))[1]

    try:
        plugin._mend_breakable(module)  # of a SGLang that has other graphs
        assert graphs.cut(max) is None
        module.eager_on_graph = eager_on_graph  # type: ignore[attr-defined]
        module._current_capture_var = SimpleNamespace(get=lambda: current[0])  # type: ignore[attr-defined]
        plugin._mend_breakable(module)
        assert graphs.cut(max) is None
        current[0] = "a capture"  # type: ignore[call-overload]
        cut = graphs.cut(max)
        assert cut is not None and cut(2, 3) == 3 and seen == [True]
        plugin._has_ranks = True  # the others would not wait at this cut
        assert graphs.cut(max) is None
    finally:
        plugin._has_ranks = False
        graphs.cuts_by(None, None)


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A layer that was built for a GPU, with rates; and what is given to the ring."""
    if not _native.cuda_built():
        pytest.skip("built without CUDA")
    checkpoint()
    monkeypatch.setattr(prompts, "_fruitless", set())

    def made(rates: Rates, **others: Any) -> Any:
        monkeypatch.setattr(prefill_rates, "measure", lambda *_: rates)
        with torch.device(DEVICE):
            layer = filled(**others)
        assert layer._layer._prompts is not None
        return layer

    return made


def counted(layer: Any) -> list[int]:
    """The number of experts that each call streams."""
    seen: list[int] = []
    original = layer._layer._prompts.forward

    def forward(x: Tensor, ids: Tensor, weights: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        seen.append(count)
        return original(x, ids, weights, count, dtype)

    layer._layer._prompts.forward = forward
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("rates", [ALL, SOME])
@pytest.mark.parametrize("on_gpu", [0, 3, EXPERTS - 2])
def test_a_long_prompt_passes_through_the_gpu(passing: Callable[..., Any], rates: Rates, on_gpu: int) -> None:
    made = passing(rates, num_gpu_experts=on_gpu)
    seen = counted(made)
    for m in (4, 127, 128, 700):
        x, ids, weights = inputs(m, m, device=DEVICE)
        ids[m // 2, 1], ids[m // 3, 2] = -1, EXPERTS + 5
        want, held = expected(x, ids, weights, on_gpu=set(range(on_gpu))), ids.clone()
        stream = torch.cuda.current_stream().cuda_stream
        made.submit_forward(x, held, weights, stream)
        held.fill_(-1)
        assert is_near(made.sync_forward(x, stream), want)
    assert len(seen) == 2 and all(0 < count <= EXPERTS - on_gpu for count in seen)


@pytest.mark.gpu
def test_a_mask_is_that_of_the_moment(passing: Callable[..., Any]) -> None:
    mask = torch.zeros(EXPERTS, dtype=torch.bool)
    mask[2] = True
    made = passing(ALL, num_gpu_experts=None, gpu_experts_mask=mask)
    given = inputs(200, device=DEVICE)
    for on_gpu in ({2}, {0}, {5}):
        new = torch.zeros(EXPERTS, dtype=torch.bool)
        new[[*on_gpu]] = True
        made.gpu_experts_mask.copy_(new)
        assert is_near(forward(made, given), expected(*given, on_gpu=on_gpu))


@pytest.mark.gpu
@pytest.mark.parametrize("rates", [ALL, SOME])
def test_rows_that_are_no_tokens_are_zeros(passing: Callable[..., Any], rates: Rates) -> None:
    made, (x, ids, weights) = passing(rates), inputs(200, device=DEVICE)
    live = torch.arange(200, device=DEVICE) < 150
    with only(live):
        found = forward(made, (x, ids, weights))
    want = expected(x, ids.masked_fill(~live[:, None], -1), weights)
    assert is_near(found, want) and not found[150:].any()


@pytest.mark.gpu
def test_without_room_the_cpu_takes_over(
    passing: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    made, given = passing(SOME), inputs(300, device=DEVICE)

    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("no more")

    made._layer._prompts.forward = full
    assert is_near(forward(made, given), expected(*given))
    assert "prompts stay on the CPU" in caplog.text and made._layer._prompts is None
    assert is_near(forward(made, given), expected(*given))


@pytest.mark.gpu
def test_a_failure_ends_in_nan_where_the_plug_in_takes_it(passing: Callable[..., Any]) -> None:
    made, given = passing(ALL), inputs(300, device=DEVICE)

    def broken(*_: Any) -> Tensor:
        raise OperatorError("this test")

    made._layer._prompts.forward = broken
    with pytest.raises(OperatorError, match="this test"):
        forward(made, given)
    failures.keep()
    try:
        assert forward(made, given).isnan().all()
        assert failures.take() == ["layer 0: this test"]
    finally:
        drop_failures()


class Cut:
    """Segments of a graph, and what the host does between them, as SGLang's breakable graphs."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.pool = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self.pool)

    def end(self) -> None:
        self.graph.capture_end()
        self.parts.append(self.graph.replay)

    def cut(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*given: Any) -> Tensor:
            self.end()
            out = inner(*given)
            self.parts.append(lambda: out.copy_(inner(*given)))
            self.begin()
            return out

        return wrapped

    def replay(self) -> None:
        for part in self.parts:
            part()


@pytest.mark.gpu
@pytest.mark.parametrize("rates", [ALL, SOME])
def test_a_graph_that_is_cut_streams_at_each_replay(passing: Callable[..., Any], rates: Rates) -> None:
    made = [passing(rates, layer=layer, num_gpu_experts=2) for layer in (0, 1)]
    seen = counted(made[1])
    m, capture = 160, Cut()
    held = inputs(m, device=DEVICE)

    def run() -> list[Tensor]:
        outs = []
        for layer in made:
            ids = held[1] + 0
            stream = torch.cuda.current_stream().cuda_stream
            layer.submit_forward(held[0], ids, held[2], stream)
            ids.fill_(-1)
            outs.append(layer.sync_forward(held[0], stream) + 0)
        return outs

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        torch.cuda.synchronize()
        graphs.cuts_by(capture.cut, lambda: True)
        try:
            capture.begin()
            outs = run()
            capture.end()
        finally:
            graphs.cuts_by(None, None)
        assert len(capture.parts) == 5 and len(seen) == 2
        for seed in range(5):
            for tensor, value in zip(held, inputs(m, seed, device=DEVICE)):
                tensor.copy_(value)
            capture.replay()
            torch.cuda.synchronize()
            for layer, out in enumerate(outs):
                assert is_near(out, expected(*held, layer=layer, on_gpu={0, 1}))
    assert len(seen) == 7
    # A graph that cannot be cut is computed by the CPU.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    graph.replay()
    assert is_near(outs[1], expected(*held, layer=1, on_gpu={0, 1})) and len(seen) == 7


@pytest.mark.gpu
def test_what_the_cpu_computes_faster_takes_no_memory(passing: Callable[..., Any]) -> None:
    slow = Rates(bus_s=10.0, cpu_s=((128, 1e-6), (8192, 2e-6)))
    with pytest.raises(AssertionError):
        passing(slow)
    assert prompts._fruitless
