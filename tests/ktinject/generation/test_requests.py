"""Requests beside, after and within each other: each has the answer that it has alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import tiny
from test_generate import prompt, stock
from test_native_decoder import assert_same_tokens, sure, swapped
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteria

import ktinject
from ktinject import OperatorError
from ktinject.generation import sampling
from ktinject.generation.cpu import native_decoder
from ktinject.model_class import own_class
from ktinject.support import Support

torch.set_num_threads(1)
FAMILIES = ["qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return sure("qwen3_moe")


@pytest.mark.parametrize(
    "family, seeds, how",
    [
        ("qwen3_moe", [2, 4], {}),
        ("deepseek_v3", [5, 8], {}),
        ("qwen3_moe", [2, 10], {"max_time": 1e6}),
    ],
    ids=str,
)
def test_the_first_answer_of_a_model_is_that_of_all_later_ones(
    family: str, seeds: list[int], how: dict[str, Any]
) -> None:
    """Texts that turn on how a step is rounded."""
    for seed in seeds:
        model = swapped(family)
        ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(seed))
        arguments = {"input_ids": ids, "max_new_tokens": 40, "do_sample": False, "eos_token_id": None, **how}
        first = model.generate(**arguments)
        assert model.ktinject_decoding.last.startswith("native")
        assert torch.equal(first, model.generate(**arguments)), seed


def test_the_first_answer_is_that_of_all_later_ones_where_steps_stay_the_model_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_decoder, "_agreement", lambda *_: Support.no("for this test"))
    model = swapped("qwen3_moe")
    arguments = {**prompt(1, padding=0), "eos_token_id": None}
    first = model.generate(**arguments)
    assert model.ktinject_decoding.last == "eager loop"
    assert model.ktinject_decoding.reason.endswith(": for this test")
    assert torch.equal(first, stock(model, **arguments))
    assert torch.equal(first, model.generate(**arguments))


@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_interrupt_while_steps_are_compared_leaves_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sure("qwen3_moe")
    hooks = [(m, dict(m._forward_hooks), set(vars(m))) for m in model.modules()]
    register, calls = nn.Module.register_forward_hook, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return register(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "register_forward_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**prompt())
    assert all(dict(m._forward_hooks) == before and set(vars(m)) == names for m, before, names in hooks)
    assert_same_tokens(model, prompt())
    assert model.ktinject_decoding.last == "native loop"


class Waits(StoppingCriteria):
    """At the first step, lets another thread in; unknown to us, so the request runs in the stock loop."""

    def __init__(self, within: threading.Event, go_on: threading.Event) -> None:
        self.within, self.go_on = within, go_on

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        self.within.set()
        assert self.go_on.wait(600)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_a_thread_that_comes_in_meanwhile_takes_nothing_along(model: PreTrainedModel) -> None:
    within, go_on = threading.Event(), threading.Event()
    arguments = {**prompt(), "eos_token_id": None}
    case = {**arguments, "stopping_criteria": [Waits(within, go_on)]}
    go_on.set()
    wanted, plain = model.generate(**case), model.generate(**arguments)
    within.clear(), go_on.clear()
    found: dict[str, Tensor] = {}

    def work(name: str, given: dict[str, Any]) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.update({name: model.generate(**given)}))
        thread.start()
        return thread

    first = work("first", case)
    assert within.wait(600)
    second = work("second", arguments)
    decoding, entered = model.ktinject_decoding, 0
    while not entered:  # the second stands where it waits for its turn
        entered = sum("turn" in str(frame) for frame in _frames_of(second))
    assert decoding.replay is None, "this thread has none"
    go_on.set()
    first.join(), second.join()
    assert torch.equal(found["first"], wanted) and torch.equal(found["second"], plain)
    assert "_replay" not in vars(model)
    assert_same_tokens(model, {**arguments, "max_time": 1e6})


def _frames_of(thread: threading.Thread) -> list[str]:
    import sys
    import traceback

    frame = sys._current_frames().get(thread.ident or 0)
    return [] if frame is None else [entry.name for entry in traceback.extract_stack(frame)]


def test_minus_one_ends_no_text(model: PreTrainedModel) -> None:
    """Not the vocabulary's last token either, which this model is made to say."""
    head = model.config.vocab_size - 1
    arguments = {**prompt(), "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 12}
    sampler = sampling.Sampler(sampling.Sampling((), False, (-1, 3), 0), torch.zeros(1, 1).long(), head + 1)
    assert sampler._ends.nonzero().flatten().tolist() == [3]
    assert model.generate(**arguments).shape == stock(model, **arguments).shape == (3, 9 + 12)


def test_a_cache_grows_with_the_text_and_not_with_what_is_allowed(model: PreTrainedModel) -> None:
    """A text that ends, and may be as long as no memory holds."""
    arguments = {**prompt(2), "eos_token_id": list(range(30, 90)), "max_new_tokens": 10**12}
    wanted = stock(model, **arguments)
    assert torch.equal(model.generate(**arguments), wanted)
    assert model.ktinject_decoding.last == "native loop"
    assert model.ktinject_decoding.runners[2].cache.capacity == 256


@pytest.mark.parametrize("how", [{}, {"max_time": 1e6}], ids=["own loop", "stock loop"])
def test_a_text_that_outgrows_its_cache_goes_on(model: PreTrainedModel, how: dict[str, Any]) -> None:
    arguments = {**prompt(2, 200), "eos_token_id": None, "max_new_tokens": 400, **how}
    model.ktinject_decoding.release()
    grown = model.generate(**arguments)
    runner = model.ktinject_decoding.runners[2]
    assert runner.cache.capacity == 1024
    assert torch.equal(grown, model.generate(**arguments)), "from a cache that is long enough at once"
    assert model.ktinject_decoding.runners[2] is runner


def test_no_memory_to_grow_is_said_as_such(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros

    def limited(*shape: Any, **options: Any) -> Tensor:
        if len(shape) == 4 and shape[2] > 256:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*shape, **options)

    arguments = {**prompt(2, 200), "eos_token_id": None, "max_new_tokens": 100}
    wanted = model.generate(**arguments)
    model.ktinject_decoding.release()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", limited)
        with pytest.raises(torch.OutOfMemoryError, match="a cache of 512 tokens") as caught:
            model.generate(**arguments)
        assert any("the next request can run" in note for note in caught.value.__notes__)
        model.generate(**prompt(2))
    assert torch.equal(model.generate(**arguments), wanted)


class TestPeft:
    @pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
    @pytest.mark.parametrize("how", [{}, {"max_time": 1e6}], ids=["own loop", "stock loop"])
    def test_virtual_tokens_are_attended_to(self, kind: str, how: dict[str, Any]) -> None:
        """They stand in the cache and not in the ids."""
        peft = pytest.importorskip("peft")
        model = sure("qwen3_moe")
        arguments = {**prompt(), "eos_token_id": None, **how}
        plain = model.generate(**arguments)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
        tuned = peft.get_peft_model(model, config).eval()
        found = tuned.generate(**arguments)
        assert model.ktinject_decoding.reason.startswith("prepare_inputs_for_generation of the model was")
        ours, model.__class__ = type(model), own_class(model)
        assert torch.equal(found, tuned.generate(**arguments)) and not torch.equal(found, plain)
        model.__class__ = ours
        assert torch.equal(model.generate(**arguments), plain)
        assert model.ktinject_decoding.last.startswith("native")

    def test_a_merged_adapter_counts(self) -> None:
        peft = pytest.importorskip("peft")
        model = sure("qwen3_moe")
        arguments = {**prompt(), "eos_token_id": None}
        plain = model.generate(**arguments)
        torch.manual_seed(0)
        lora = peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=4, init_lora_weights=False)
        merged = peft.get_peft_model(model, lora).eval().merge_and_unload()
        found = merged.generate(**arguments)
        assert merged is model and model.ktinject_decoding.last == "native loop"
        assert not torch.equal(found, plain)
        assert_same_tokens(model, arguments)


class TestRandomNumbers:
    def test_threads_never_get_the_same(self, model: PreTrainedModel) -> None:
        """All draw from torch's one generator: together as many numbers as one after the other, each once."""
        torch.manual_seed(0)
        scores = torch.zeros(1, 40_000)
        alone = {int(sampling._drawn(scores)) for _ in range(48)}
        state = torch.get_rng_state()
        torch.manual_seed(0)
        found: list[int] = []
        threads = [
            threading.Thread(target=lambda: found.extend(int(sampling._drawn(scores)) for _ in range(12)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(found) == alone and len(found) == 48
        assert torch.equal(torch.get_rng_state(), state)

    def test_numbers_that_another_draws_meanwhile_stay_his(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call, draws = sampling._native_call, 0

        def meanwhile(choose: Any, scores: Tensor, state: Tensor | None) -> None:
            nonlocal draws
            call(choose, scores, state)
            if draws == 0:
                torch.rand(100)
            draws += 1

        scores = torch.randn(2, 50)
        torch.manual_seed(3)
        torch.rand(100)
        wanted, state = sampling._drawn(scores), torch.get_rng_state()
        torch.manual_seed(3)
        monkeypatch.setattr(sampling, "_native_call", meanwhile)
        assert torch.equal(sampling._drawn(scores), wanted) and draws == 2
        assert torch.equal(torch.get_rng_state(), state)
        # Of what is drawn once more, nothing has followed: the first tokens would have ended a row.
        draws = 0
        torch.manual_seed(3)
        last = int(wanted.max())
        sampler = sampling.Sampler(
            sampling.Sampling((), True, tuple(i for i in range(50) if i not in wanted), last),
            torch.zeros(2, 1).long(),
            50,
        )
        sampler.begin(sampler.ids, sampling.Request())
        sampler.choose(scores)
        assert draws == 2 and torch.equal(sampler.ids[:, 0], wanted)
        assert sampler.result.tolist() == [wanted.tolist(), [1, 1]] and sampler._length.item() == 2


@pytest.mark.parametrize("do_sample", [False, True])
def test_end_tokens_in_a_list_of_lists_are_read_as_transformers_reads_them(
    model: PreTrainedModel, do_sample: bool
) -> None:
    given = prompt(1, padding=0)
    width = given["input_ids"].shape[1]
    asked = {**given, "do_sample": do_sample, "max_new_tokens": 8, "eos_token_id": None}

    def written(**more: Any) -> list[int]:
        torch.manual_seed(5)
        found: list[int] = model.generate(**{**asked, **more})[0, width:].tolist()
        return found

    end = written()[3]
    plain, nested = written(eos_token_id=[end]), written(eos_token_id=[[end]])
    assert nested == plain and nested[-1] == end and len(nested) < 8
    assert written(eos_token_id=[[end]], min_new_tokens=7) == written(eos_token_id=[end], min_new_tokens=7)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"num_beams": 2}], ids=str)
def test_a_token_that_the_model_does_not_embed_is_refused(is_native: bool, more: dict[str, Any]) -> None:
    """A head may be wider than the embedding, where nothing beyond it is chosen."""
    dtype = torch.bfloat16 if is_native else torch.float32
    plain = tiny("qwen3_moe").to(dtype)
    with torch.no_grad():
        wide = nn.Linear(plain.lm_head.in_features, 128, bias=False, dtype=dtype)
        wide.weight[:96].copy_(plain.lm_head.weight)
        wide.weight[96:].copy_(8 * plain.lm_head.weight[:32])
    plain.lm_head = wide
    model: Any = ktinject.optimize(plain, "auto", devices=["cpu"], progress=False)
    asked = {**prompt(1, padding=0), "max_new_tokens": 5, "eos_token_id": None, **more}
    with pytest.raises(
        OperatorError, match=r"it embeds 96 tokens, and its head scores 128\..*suppress_tokens"
    ):
        model.generate(**asked)
    assert int(model.generate(**asked, suppress_tokens=[*range(96, 128)]).max()) < 96
    assert ("native" in model.ktinject_decoding.last) == is_native, model.ktinject_decoding.reason
