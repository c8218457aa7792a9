"""`generate` of a swapped model against transformers' own loop on the same model: the same tokens."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import models
import pytest
import torch
from byte_tokenizer import tokenizer
from double import EXPERTS, HeldExperts
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, PreTrainedModel
from waiting import ctrl_c_ends

import ktinject
from ktinject.generation import decoding, graph_runner
from ktinject.generation.cache import bucket_of
from ktinject.model_class import own_class
from ktinject.operators import register_operator
from ktinject.support import SUPPORTED

torch.set_num_threads(1)
FAMILIES = ["qwen3_moe", "deepseek_v3"]


@register_operator("gathered_experts")
class GatheredExperts(HeldExperts):
    """Experts on any device, without a look at the ids, so that a graph can hold it."""

    device_types = ("cuda", "cpu")
    capturable = True

    def finish(self) -> None:
        super().finish()
        self.held = {name: tensor.to(self.config.device) for name, tensor in self.held.items()}

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        held = {name: tensor.to(hidden.dtype) for name, tensor in self.held.items()}
        gate, up = torch.einsum("mh,mkoh->mko", hidden, held["gate_up_proj"][index]).chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up * weights[..., None].to(hidden.dtype)
        return torch.einsum("mko,mkho->mh", inner, held["down_proj"][index])


@register_operator("looking_experts")
class LookingExperts(GatheredExperts):
    """Says that it can be captured, and then waits for the device."""

    capturable = True

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        assert index.max().item() >= 0
        return super().forward(hidden, index, weights)


def swapped(
    name: str, operator: str = "gathered_experts", device: str = "cpu", **config: Any
) -> PreTrainedModel:
    model = models.tiny(name, **config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # a rounding error must not decide the next token
    return ktinject.optimize(model, [{**EXPERTS, "replace": {"operator": operator}}], progress=False)


def stock(model: PreTrainedModel, **arguments: Any) -> Any:
    """transformers' own loop on the same model."""
    ours = type(model)
    model.__class__ = own_class(model)
    assert type(model)._sample is GenerationMixin._sample
    try:
        return model.generate(**arguments)
    finally:
        model.__class__ = ours


def assert_stock(model: PreTrainedModel, seed: int, arguments: dict[str, Any]) -> None:
    """On a GPU, the model writes what transformers' own loop writes, and draws as many random numbers."""
    torch.manual_seed(seed)
    ours, state = model.generate(**arguments), torch.cuda.get_rng_state()
    torch.manual_seed(seed)
    assert torch.equal(ours, stock(model, **arguments))
    assert torch.equal(state, torch.cuda.get_rng_state()), "as many random numbers are used up"


class Stock:
    """What transformers' own loop writes, and the random state it leaves; asked once for what several tests compare."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.written: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, case: dict[str, Any], batch: int, seed: int) -> tuple[Tensor, Tensor]:
        key = (id(case), batch, seed)  # one of PLAIN
        if key not in self.written:
            torch.manual_seed(seed)
            self.written[key] = stock(self.model, **request_of(case, batch)), torch.get_rng_state()
        return self.written[key]


def prompt(batch: int = 3, length: int = 9, device: str = "cpu", padding: int = 4) -> dict[str, Any]:
    ids = torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding], ids[0, :padding] = 0, 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "max_new_tokens": 24}


MANY_ENDS = {"eos_token_id": list(range(40, 60))}
PLAIN: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": False, **MANY_ENDS},
    {"do_sample": False, "eos_token_id": None, "prefill_chunk_size": 4},
    {"do_sample": False, "repetition_penalty": 1.4},
    {"do_sample": False, "min_new_tokens": 9, **MANY_ENDS},
    {"do_sample": True},
    {"do_sample": True, "top_k": 0, **MANY_ENDS},
    {"do_sample": True, "temperature": 0.6, "top_k": 5, "top_p": 0.8},
    {"do_sample": True, "top_k": 0, "top_p": 0.6},
    {"do_sample": True, "top_k": 0, "min_p": 0.2},
    {"do_sample": True, "repetition_penalty": 1.3, "min_length": 20, **MANY_ENDS},
    {"do_sample": True, "num_return_sequences": 2},
    {"do_sample": True, "max_new_tokens": 1},
    {"do_sample": True, "stop_strings": ["a", "bc"], "tokenizer": tokenizer()},
    {"do_sample": True, "stop_strings": ["a", "b", "c"], "tokenizer": tokenizer(), "eos_token_id": None},
]


def request_of(case: dict[str, Any], batch: int) -> dict[str, Any]:
    return {**prompt(batch), "max_new_tokens": 12, **case}


def name_of(case: dict[str, Any]) -> str:
    """The same in every process, as pytest-xdist wants it."""
    plain = {k: type(v[0]).__name__ if k == "logits_processor" else v for k, v in case.items()}
    return ",".join(f"{k}={v}" for k, v in plain.items() if k not in ("tokenizer", "eos_token_id"))


# How a token is chosen does not depend on the family, so each case is run with one of them, in turn.
IN_TURN = [
    pytest.param(family, case, id=f"{family}-{name_of(case)}") for family, case in zip(cycle(FAMILIES), PLAIN)
]
in_turn = pytest.mark.parametrize("model, case", IN_TURN, indirect=["model"])


@pytest.fixture(scope="module", params=FAMILIES[:1])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return swapped(request.param)


@pytest.fixture(scope="module")
def of_stock(model: PreTrainedModel) -> Stock:
    return Stock(model)


@pytest.fixture
def with_runner(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The same, its requests on the tensors of a graph, though nothing can be captured on a CPU."""
    decoding = model.ktinject_decoding
    found, decoding.graphs = decoding.graphs, SUPPORTED
    yield model
    decoding.graphs = found
    decoding.release()


@in_turn
def test_own_loop_gives_the_stock_loop_s_tokens_from_the_same_seed(
    model: PreTrainedModel, of_stock: Stock, case: dict[str, Any]
) -> None:
    for batch, seed in [(3, 1), (1, 0)] if case["do_sample"] else [(3, 1)]:
        theirs, left = of_stock(case, batch, seed)
        torch.manual_seed(seed)
        ours, state = model.generate(**request_of(case, batch)), torch.get_rng_state()
        assert torch.equal(ours, theirs)
        assert torch.equal(state, left), "as many random numbers are used up"
        assert model.ktinject_decoding.last == "eager loop"


@in_turn
def test_padded_rows_change_no_token(
    with_runner: PreTrainedModel, of_stock: Stock, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    for module in (graph_runner, decoding):
        monkeypatch.setattr(module, "size_of", lambda batch, device: batch + 3)
    with_runner.ktinject_decoding.release()
    theirs, _ = of_stock(case, 3, 1)
    torch.manual_seed(1)
    assert torch.equal(with_runner.generate(**request_of(case, 3)), theirs)
    for size, runner in with_runner.ktinject_decoding.runners.items():
        assert len(runner.ids) == size == runner.rows + 3
    with_runner.ktinject_decoding.release()


@in_turn
def test_a_late_end_on_fixed_tensors_gives_the_same_tokens(
    with_runner: PreTrainedModel, of_stock: Stock, case: dict[str, Any]
) -> None:
    for batch, seed in [(1, 0), (3, 1), (1, 0)]:
        theirs, _ = of_stock(case, batch, seed)
        arguments = request_of(case, batch)
        torch.manual_seed(seed)
        ours = with_runner.generate(**arguments)
        if arguments["max_new_tokens"] > 1:
            assert "CUDA graphs" in with_runner.ktinject_decoding.reason, "the runner's own: it was used"
        assert torch.equal(ours, theirs)


def test_a_longer_request_gets_a_longer_cache(with_runner: PreTrainedModel) -> None:
    runners = with_runner.ktinject_decoding.runners
    capacities = []
    for length in (9, 250, 9):
        arguments = {**prompt(2, length), "max_new_tokens": 9, "eos_token_id": None}
        ours = with_runner.generate(**arguments)
        assert torch.equal(ours, stock(with_runner, **arguments))
        capacities.append(runners[2].cache.capacity)
    assert capacities == [256, 512, 512]


def test_stretches_are_powers_of_two() -> None:
    assert [bucket_of(n) for n in (1, 256, 257, 512, 513, 40000)] == [256, 256, 512, 512, 1024, 65536]


class Heard:
    """A streamer that remembers what it was given."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    def put(self, tokens: Tensor) -> None:
        assert not tokens.is_cuda
        self.heard.append(tokens.flatten().tolist())

    def end(self) -> None:
        self.heard.append([-1])


@pytest.mark.parametrize("ends", [{}, {"eos_token_id": list(range(3, 70))}])
def test_a_streamer_hears_the_same(with_runner: PreTrainedModel, ends: dict[str, Any]) -> None:
    arguments = {**prompt(1, padding=0), **ends}
    ours, theirs = Heard(), Heard()
    with_runner.generate(**arguments, streamer=ours)
    stock(with_runner, **arguments, streamer=theirs)
    assert ours.heard == theirs.heard and len(ours.heard) > 2


class Shift(LogitsProcessor):
    """What the user may write: nothing that we know."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.roll(1, -1)


STOCK: list[tuple[dict[str, Any], str]] = [
    ({"logits_processor": [Shift()]}, "graph, stock loop: Shift"),
    ({"do_sample": True, "typical_p": 0.5}, "graph, stock loop: TypicalLogitsWarper"),
    ({"max_time": 1e6}, "graph, stock loop: MaxTimeCriteria"),
    ({"num_beams": 2}, "graph, stock loop: beam search"),
    ({"prompt_lookup_num_tokens": 2}, "eager loop, prompt lookup"),
    ({"cache_implementation": "dynamic"}, "eager loop"),
    ({"use_cache": False}, "eager loop"),
    (
        {"output_hidden_states": True, "output_scores": True, "return_dict_in_generate": True},
        "stock loop: attentions or hidden states",
    ),
]


@pytest.mark.parametrize("case, how", STOCK, ids=[how + name_of(case) for case, how in STOCK])
def test_every_other_case_is_the_stock_loop_s(
    with_runner: PreTrainedModel, case: dict[str, Any], how: str
) -> None:
    arguments = {**prompt(1, padding=0), **case}
    torch.manual_seed(1)
    ours = with_runner.generate(**arguments)
    assert with_runner.ktinject_decoding.last.startswith(how)
    assert with_runner.ktinject_decoding.reason, "at least that a CPU has no CUDA graphs"
    torch.manual_seed(1)
    theirs = stock(with_runner, **arguments)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert torch.equal(ours.sequences, theirs.sequences)
        assert all(torch.equal(a, b) for a, b in zip(ours.scores, theirs.scores))
        assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length()


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_prompt_of_embeddings(with_runner: PreTrainedModel, with_tokens: bool) -> None:
    arguments = prompt(2)
    embeddings = with_runner.get_input_embeddings()(arguments["input_ids"])
    want = with_runner.generate(**arguments)
    given = arguments if with_tokens else {name: v for name, v in arguments.items() if name != "input_ids"}
    found = with_runner.generate(inputs_embeds=embeddings, **given)
    assert torch.equal(found[:, -8:], want[:, -8:])
    assert "inputs_embeds" in with_runner.ktinject_decoding.reason + with_runner.ktinject_decoding.last


def test_a_static_cache_that_was_asked_for_is_taken_over(with_runner: PreTrainedModel) -> None:
    arguments = {**prompt(), "cache_implementation": "static"}
    assert torch.equal(with_runner.generate(**arguments), stock(with_runner, **arguments))
    assert (
        with_runner.ktinject_decoding.reason
        == next(iter(with_runner.ktinject_decoding.runners.values())).graphs.reason
    )


def test_each_reason_is_logged_once(with_runner: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    """Also of requests that run in the same way; reasons that differ in a number alone are the same."""
    decoding = with_runner.ktinject_decoding
    decoding.requests.clear()
    decoding._logged.clear()

    def logged(*arguments: dict[str, Any]) -> int:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ktinject"):
            for each in arguments:
                with_runner.generate(**{**each, "max_new_tokens": 2})
        return len(caplog.records)

    assert logged(prompt(65), prompt(65), prompt(66)) == 1
    handle = with_runner.lm_head.register_forward_hook(lambda *_: None)
    try:
        assert logged(prompt(), prompt(), prompt(65)) == 1
        assert caplog.messages[-1].endswith("lm_head has forward hooks")
    finally:
        handle.remove()
    assert decoding.requests["eager loop"] >= 6 and logged(prompt(65)) == 0


def test_why_there_are_no_graphs_can_be_read(
    with_runner: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    decoding = with_runner.ktinject_decoding

    def reason(**changed: Any) -> str:
        with_runner.generate(**{**prompt(1, padding=0), "max_new_tokens": 3, **changed})
        return decoding.reason

    decoding._logged.clear()
    with caplog.at_level(logging.WARNING, "ktinject"):
        assert "batch size 65" in reason(**prompt(65))
        assert "batch size 65" in reason(**prompt(65))
    assert len(caplog.records) == 1, "said once"
    handle = with_runner.lm_head.register_forward_hook(lambda *_: None)
    assert reason() == "lm_head has forward hooks"
    handle.remove()
    with torch.autocast("cuda", enabled=True) if torch.cuda.is_available() else torch.autocast("cpu"):
        pass
    with_runner.lm_head.train()
    assert reason() == "lm_head is in training mode"
    with_runner.lm_head.eval()
    assert "CUDA graphs" in reason(), "the runner's own reason: a CPU has none"


def test_graphs_of_replaced_weights_are_dropped(with_runner: PreTrainedModel) -> None:
    with_runner.generate(**prompt())
    first = with_runner.ktinject_decoding.runners[3]
    with_runner.generate(**prompt())
    assert with_runner.ktinject_decoding.runners[3] is first
    with_runner.lm_head.weight = torch.nn.Parameter(with_runner.lm_head.weight.detach().clone())
    assert torch.equal(with_runner.generate(**prompt()), stock(with_runner, **prompt()))
    assert with_runner.ktinject_decoding.runners[3] is not first


def test_threads_take_turns(with_runner: PreTrainedModel) -> None:
    arguments = [{**prompt(batch), "max_new_tokens": 12} for batch in (1, 2, 1, 2)]
    wanted = [stock(with_runner, **case) for case in arguments]
    found: list[Any] = [None] * len(arguments)

    def work(i: int) -> None:
        for _ in range(3):
            found[i] = with_runner.generate(**arguments[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(arguments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


def test_an_exception_in_a_request_leaves_the_next_one_whole(with_runner: PreTrainedModel) -> None:
    class Broken(Heard):
        def put(self, tokens: Tensor) -> None:
            super().put(tokens)
            if len(self.heard) == 5:
                raise KeyboardInterrupt

    arguments = prompt(1, padding=0)
    with pytest.raises(KeyboardInterrupt):
        with_runner.generate(**arguments, streamer=Broken())
    assert torch.equal(with_runner.generate(**arguments), stock(with_runner, **arguments))


@pytest.mark.parametrize("new_tokens", [100_000, 1], ids=["decode", "prefill"])
def test_ctrl_c_ends_a_request_at_once(with_runner: PreTrainedModel, new_tokens: int) -> None:
    arguments = {**prompt(2, 60), "max_new_tokens": new_tokens, "eos_token_id": None}
    wanted = stock(with_runner, **prompt())
    ctrl_c_ends(lambda: with_runner.generate(**arguments))
    assert torch.equal(with_runner.generate(**prompt()), wanted)


def test_a_model_that_is_dropped_takes_its_lanes_along() -> None:
    import weakref

    model = swapped("qwen3_moe")
    model.ktinject_decoding.graphs = SUPPORTED
    model.generate(**prompt())
    runner = weakref.ref(model.ktinject_decoding.runners[3])
    del model
    assert runner() is None


def test_a_refused_optimize_leaves_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktinject.generation import generate

    model = models.tiny("qwen3_moe")
    before = type(model)
    install = generate.install

    def late(model: PreTrainedModel, _: object) -> None:
        install(model)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "install", late)
    with pytest.raises(KeyboardInterrupt):
        ktinject.optimize(model, [EXPERTS], progress=False)
    assert type(model) is before and not hasattr(model, "ktinject_decoding")


def test_the_class_looks_like_the_model_s_own(model: PreTrainedModel) -> None:
    base = own_class(model)
    assert isinstance(model, base)
    assert (type(model).__name__, type(model).__module__) == (base.__name__, base.__module__)
    assert type(swapped(model.config.model_type)) is type(model), "one class, however many models"


def test_a_copy_is_of_the_model_s_own_class() -> None:
    model = models.tiny("qwen3_moe")
    wanted = model.generate(**prompt())
    ktinject.optimize(model, [{**EXPERTS, "replace": "keep"}], progress=False)
    twin = copy.deepcopy(model)
    assert type(twin) is own_class(model) and not hasattr(twin, "ktinject_decoding")
    assert torch.equal(twin.generate(**prompt()), wanted)
