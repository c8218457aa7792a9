"""Captured steps of several graphs. One GPU does for them: layers that follow each other on it are cut apart as if the
next one were another's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from double import EXPERTS, memory_in_use
from test_generate import PLAIN, assert_stock, name_of, prompt, stock, swapped
from transformers import PreTrainedModel

import ktinject
from ktinject.distributed import layer_split
from ktinject.errors import OperatorError
from ktinject.generation import piecewise_graph
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.support import SUPPORTED

gpu = pytest.mark.gpu


def cut(model: PreTrainedModel, device: str = "cuda:0") -> PreTrainedModel:
    """Stage boundaries before layer 1, before the last one, and behind it."""
    layers = list(model.model.layers)
    for run in (layers[1:-1], layers[-1:]):
        layer_split.StageBoundary(device, layer_split.pending_outputs(model)).install_on(run)
    layers[-1].register_forward_hook(layer_split.return_hook(torch.device(device)), with_kwargs=True)
    return model


def parts(model: PreTrainedModel) -> set[int]:
    """Graphs of each captured step."""
    runners = model.ktinject_decoding.runners.values()
    return {len(step.parts) for runner in runners for step in runner._steps.values()}


class At:
    """A streamer that does something at its n-th token."""

    def __init__(self, number: int, do: Callable[[], object]) -> None:
        self.left, self.do = number, do

    def put(self, _: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.do()

    def end(self) -> None:
        pass


def assert_a_failure_crosses(model: PreTrainedModel, experts: Any, device: str) -> None:
    """Routed to an expert that is not there, in the middle of a request, these raise; the next request is right."""
    model.ktinject_decoding.fused = None  # its submit routes by itself
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    start = experts.start
    experts.start = lambda x, ids, *rest: start(x, ids + wrong, *rest)
    arguments = {**prompt(device="cuda"), "eos_token_id": None}
    wanted = model.generate(**arguments)
    for _ in range(2):
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
        late = At(3, lambda: wrong.fill_(experts.num_experts + 1))
        with pytest.raises(OperatorError, match="routed to expert"):
            model.generate(**{**arguments, "max_new_tokens": 200}, streamer=late)
        wrong.zero_()
        assert torch.equal(model.generate(**arguments), wanted)


def test_what_crosses_is_packed_where_its_dtype_may_stand() -> None:
    tensors = [
        torch.randn(3, 1, 5).bfloat16(),
        torch.rand(2, 1, 1, 7) > 0.5,
        torch.arange(3)[:, None],
        torch.randn(4, 6)[:, ::2],
        torch.tensor([9]),
        torch.randn(2, 8).half(),
    ]
    found = piecewise_graph.unpack(piecewise_graph.pack(tensors).clone(), tensors)
    assert [t.shape for t in found] == [t.shape for t in tensors]
    assert all(torch.equal(*pair) and pair[0].dtype == pair[1].dtype for pair in zip(found, tensors))


@gpu
def test_what_lies_elsewhere_is_copied_from_there_at_each_replay() -> None:
    """As what crosses to a third GPU: from the CPU here."""
    home = torch.device("cuda:0")
    x, elsewhere, out = torch.ones(4, device=home), torch.ones(4), torch.zeros(4, device=home)

    def work(stages: piecewise_graph.Stages) -> None:
        near, far = stages.transfer([x + 1, elsewhere], home)
        out.copy_(near * 2 + far)

    with piecewise_graph.EagerStages(home, piecewise_graph.capture_stream) as stages:
        work(stages)
    assert torch.equal(out.cpu(), torch.full([4], 5.0))
    recorded = piecewise_graph.capture(work, home, torch.cuda.graph_pool_handle())
    for number in range(3):
        x.fill_(number)
        elsewhere.fill_(10 * number)
        recorded.replay()
        assert torch.equal(out.cpu(), torch.full([4], 2.0 + 12 * number))


@gpu
def test_a_capture_outlives_other_graphs_that_are_garbage() -> None:
    """Graphs in a cycle: nobody but the collector of garbage destroys them, and not within a capture."""
    home, pool = torch.device("cuda:0"), torch.cuda.graph_pool_handle()
    x, thresholds = torch.zeros(1, device=home), gc.get_threshold()
    held: list[Any] = []

    def work(stages: piecewise_graph.Stages) -> None:
        x.add_(1)
        if held:
            held.clear()
            gc.set_threshold(1, 1, 1)
            assert [[] for _ in range(1000)] and dead() is not None

    with piecewise_graph.EagerStages(home, piecewise_graph.capture_stream) as stages:
        work(stages)
    held.append(piecewise_graph.capture(work, home, pool))
    dead = weakref.ref(held[0])
    held[0].itself = held[0]
    try:
        recorded = piecewise_graph.capture(work, home, pool)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert dead() is None
    before = x.item()
    recorded.replay()
    assert x.item() == before + 1


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_until_the_last_capture_has_ended(is_on: bool) -> None:
    before = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        first, second = (piecewise_graph.without_collecting() for _ in range(2))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert not gc.isenabled()
        second.__exit__(None, None, None)
        assert gc.isenabled() == is_on
        with pytest.raises(ZeroDivisionError), piecewise_graph.without_collecting():
            _ = 1 / 0
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()


def test_stage_boundaries_change_nothing_on_the_tensors_of_a_graph() -> None:
    """Without a GPU: all that layers are given crosses, at each step, through the runner's own cache."""
    model = cut(swapped("qwen3_moe", num_hidden_layers=4), "cpu")
    model.ktinject_decoding.graphs = SUPPORTED
    arguments = prompt()
    found = model.generate(**arguments)
    assert "CUDA graphs" in model.ktinject_decoding.reason, "the runner's own: it was used"
    assert torch.equal(found, stock(model, **arguments))


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return cut(swapped(request.param, device="cuda", num_hidden_layers=4))


@gpu
@pytest.mark.parametrize("case", PLAIN[::3], ids=name_of)
def test_several_graphs_give_the_stock_loop_s_tokens(model: PreTrainedModel, case: dict[str, Any]) -> None:
    for seed, batch in enumerate([1, 3, 8, 1]):
        arguments = {**prompt(batch, device="cuda"), **case}
        assert_stock(model, seed, arguments)
        if arguments["max_new_tokens"] > 1:
            assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
            assert parts(model) == {4}


@gpu
def test_a_long_answer_goes_on_in_other_graphs(model: PreTrainedModel) -> None:
    arguments = {**prompt(1, 200, "cuda", 0), "max_new_tokens": 120, "eos_token_id": None}
    ours = model.generate(**arguments)
    assert torch.equal(ours, stock(model, **arguments))
    assert len(model.ktinject_decoding.runners[1]._steps) > 1


@gpu
def test_requests_take_no_more_memory(model: PreTrainedModel) -> None:
    arguments = {**prompt(2, device="cuda"), "max_new_tokens": 6}

    for i in range(10):
        model.generate(**arguments, do_sample=bool(i % 2))
    before = memory_in_use()
    for i in range(60):
        model.generate(**arguments, do_sample=bool(i % 2))
    after = memory_in_use()
    assert after[0] <= before[0] and after[1] <= before[1] + 2**21, (before, after)


@gpu
def test_what_cannot_be_captured_behind_a_stage_boundary_runs_eagerly_and_says_so() -> None:
    made = models.tiny("qwen3_moe", num_hidden_layers=4).to("cuda")
    last = {"match": {"path": r".*\.3\.mlp\.experts"}, "replace": {"operator": "looking_experts"}}
    rules = [{"name": "last", **last}, {**EXPERTS, "replace": {"operator": "gathered_experts"}}]
    model = cut(ktinject.optimize(made, rules, progress=False))
    for _ in range(2):
        stream = torch.cuda.current_stream()
        assert torch.equal(model.generate(**prompt(device="cuda")), stock(model, **prompt(device="cuda")))
        assert model.ktinject_decoding.last == "eager loop"
        assert "captur" in model.ktinject_decoding.reason
        assert torch.cuda.current_stream() == stream
    other = cut(swapped("qwen3_moe", device="cuda", num_hidden_layers=4))
    ours = other.generate(**prompt(device="cuda"))
    assert other.ktinject_decoding.last == "graph loop", other.ktinject_decoding.reason
    assert torch.equal(ours, stock(other, **prompt(device="cuda")))


@pytest.fixture(scope="module", params=[0, 3])
def hybrid(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    yield of_hybrid_experts(request.param)


def of_hybrid_experts(on_gpu: int) -> PreTrainedModel:
    """In bfloat16, which decode steps have kernels of their own for."""
    made = models.tiny("qwen3_moe", num_hidden_layers=4, hidden_size=64, head_dim=32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)
    replace = {"operator": "hybrid_experts", "gpu_experts": on_gpu}
    return ktinject.optimize(made.bfloat16().to("cuda"), [{**EXPERTS, "replace": replace}], progress=False)


@gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_experts_on_the_cpu_in_several_graphs(hybrid: PreTrainedModel, batch: int) -> None:
    """The tokens of the same kernels in one graph."""
    arguments = prompt(batch, device="cuda")
    wanted = hybrid.generate(**arguments)
    assert hybrid.ktinject_decoding.last == "graph loop", hybrid.ktinject_decoding.reason
    model = cut(
        of_hybrid_experts(len(next(m for m in hybrid.modules() if isinstance(m, HybridExperts)).resident))
    )
    for _ in range(3):
        assert torch.equal(model.generate(**arguments), wanted)
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
    assert parts(model) == {4} and parts(hybrid) == {1}
    steps = {path for path in model.ktinject_decoding.fused._steps if path.count(".") == 2}
    assert (
        steps == {f"model.layers.{layer}" for layer in range(4)} and not model.ktinject_decoding.fused.refused
    )


@gpu
def test_a_failure_in_a_worker_behind_a_stage_boundary() -> None:
    model = cut(of_hybrid_experts(0))
    experts: Any = [module for module in model.modules() if isinstance(module, HybridExperts)][-1]
    assert_a_failure_crosses(model, experts, "cuda")
