"""What goes wrong while a model writes with its experts beside a GPU: a clear error, and the next request works."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from waiting import ctrl_c_ends

import ktinject
from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload import ring

pytestmark = pytest.mark.gpu
PLACEMENTS: list[dict[str, Any]] = [{}, {"gpu_experts": 0.5}, {"prefill": "gpu"}]
TIMEOUT_S = 0.3


@pytest.fixture(scope="module", params=PLACEMENTS, ids=["on the CPU", "half on the GPU", "prompts streamed"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    before = _native.answer_timeout()
    _native.set_answer_timeout(TIMEOUT_S)  # captured graphs keep it
    made = models.tiny("qwen3_moe", hidden_size=64, head_dim=32).to("cuda")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4)  # a rounding error must not decide the next token
    replace = {"operator": "hybrid_experts", **request.param}
    rules = [{"name": "experts", "match": {"path": r".*\.experts"}, "replace": replace}]
    yield ktinject.optimize(made, rules, progress=False)
    _native.set_answer_timeout(before)


def prompt(new_tokens: int = 24) -> dict[str, Any]:
    """Long enough to be streamed where prompts are."""
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(0)).cuda()
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "eos_token_id": None,
    }


@pytest.fixture
def wanted(model: PreTrainedModel) -> Iterator[Tensor]:
    """What the model writes; asked for again after the fault."""
    before = model.generate(**prompt())
    assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
    yield before
    assert torch.equal(model.generate(**prompt()), before)
    assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason


class After:
    """A streamer that does something at the third token."""

    def __init__(self, do: Callable[[], object]) -> None:
        self.left, self.do = 3, do

    def put(self, _: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.do()

    def end(self) -> None:
        pass


def first(model: PreTrainedModel) -> HybridExperts:
    return next(module for module in model.modules() if isinstance(module, HybridExperts))


def test_an_exception_in_a_worker_during_a_prompt(model: PreTrainedModel, wanted: Tensor) -> None:
    experts = first(model)

    def misroute(module: Any, arguments: Any) -> Any:
        x, ids, weights = arguments
        return x, ids + experts.num_experts + 1, weights

    hook = experts.register_forward_pre_hook(misroute)
    try:
        with pytest.raises(OperatorError, match=r"expert|allowed are 0 to"):
            model.generate(**prompt())
    finally:
        hook.remove()


def test_an_exception_in_a_worker_within_a_graph(model: PreTrainedModel) -> None:
    experts = first(model)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    start = experts.start
    experts.start = lambda x, ids, *rest: start(x, ids + wrong, *rest)  # type: ignore[method-assign]
    model.ktinject_decoding.release()
    try:
        wanted = model.generate(**prompt())
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
        with pytest.raises(OperatorError, match="routed to expert"):
            model.generate(**prompt(400), streamer=After(lambda: wrong.fill_(experts.num_experts + 1)))
        wrong.zero_()
        assert torch.equal(model.generate(**prompt()), wanted)
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
    finally:
        del experts.start  # type: ignore[attr-defined]
        model.ktinject_decoding.release()


def test_a_pool_that_does_not_answer(model: PreTrainedModel, wanted: Tensor) -> None:
    begun = time.monotonic()
    try:
        with pytest.raises(OperatorError, match="no answer"):
            model.generate(**prompt(400), streamer=After(lambda: _native.handoff_pause(True)))
    finally:
        _native.handoff_pause(False)
    assert time.monotonic() < begun + 200 * TIMEOUT_S, "not each of 400 steps waited"


@pytest.mark.parametrize("new_tokens", [5000, 1], ids=["decode", "prompt"])
def test_ctrl_c(model: PreTrainedModel, wanted: Tensor, new_tokens: int) -> None:
    ctrl_c_ends(lambda: model.generate(**prompt(new_tokens)))


def test_no_room_on_the_gpu(model: PreTrainedModel, wanted: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a prompt far too long, and, where prompts are streamed, for the ring."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**27) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model.generate(torch.full((64, 20_000), 5, device="cuda"), max_new_tokens=4)
        assert any("the next request can run" in note for note in caught.value.__notes__)
        del caught
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if first(model).config.prefill == "gpu":

        def full(self: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(ring.Ring, "reserve", full)
        with pytest.raises(OperatorError, match="no room to stream experts"):
            model.generate(**prompt())
        monkeypatch.undo()


def test_no_room_for_experts_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan saw room that is gone: refused, the model as it was, memory given back."""
    made = models.tiny("qwen3_moe", hidden_size=64, head_dim=32).to("cuda")
    own, experts = type(made), {type(module) for module in made.modules()}
    rules = [
        {
            "name": "experts",
            "match": {"path": r".*\.experts"},
            "replace": {"operator": "hybrid_experts", "gpu_experts": 1.0},
        }
    ]
    gc.collect()
    before, real = torch.cuda.memory_allocated(), torch.empty

    def scarce(*shape: Any, **how: Any) -> Tensor:
        if how.get("dtype") == torch.uint8 and str(how.get("device", "")).startswith("cuda"):
            raise torch.OutOfMemoryError("taken by another process")
        return real(*shape, **how)

    with monkeypatch.context() as short:
        short.setattr(torch, "empty", scarce)
        with pytest.raises(
            OperatorError, match=r"no room for \d+ experts of .* on cuda:0. Give fewer gpu_experts"
        ):
            ktinject.optimize(made, rules, progress=False)
    gc.collect()
    assert type(made) is own and {type(module) for module in made.modules()} == experts
    assert torch.cuda.memory_allocated() <= before
    ktinject.optimize(made, rules, progress=False)
    assert made.generate(**prompt()).shape == (2, 84)
