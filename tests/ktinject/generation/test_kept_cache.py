"""A cache that the caller passes in: recorded steps serve the request, and it is left as transformers leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import models as tiny_models
import pytest
import torch
from answers import (
    Pair,
    assert_near_cache,
    assert_same_cache,
    assert_same_output,
    read,
)
from byte_tokenizer import tokenizer
from test_generate import Heard, Shift, prompt
from test_native_windows import model_of
from test_outputs import ALL
from torch import Tensor
from transformers import DynamicCache, DynamicLayer, StaticCache, StoppingCriteriaList
from waiting import ctrl_c_ends

from ktinject.generation import decoding, graph_runner, kept_cache
from ktinject.generation.eligibility import RowCriterion
from ktinject.hf import compat

torch.set_num_threads(1)
MORE = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}


class Chat:
    """A conversation with one model, turn by turn, in one cache.

    ids    [b, n] so far
    mask   [b, n]
    """

    def __init__(self, model: Any, batch: int = 1, cache: DynamicCache | None = None) -> None:
        given = prompt(batch, device=model.device.type, padding=0 if batch == 1 else 4)
        self.model, self.ids, self.mask = model, given["input_ids"], given["attention_mask"]
        self.cache = DynamicCache(config=model.config) if cache is None else cache

    def say(self, count: int, seed: int = 1) -> None:
        """So many tokens for each row."""
        random = torch.Generator().manual_seed(seed)
        said = torch.randint(3, 90, (len(self.ids), count), generator=random).to(self.ids.device)
        self._append(torch.cat([self.ids, said], dim=1))

    def answer(self, **changed: Any) -> Any:
        given = {"input_ids": self.ids, "attention_mask": self.mask, **MORE, **changed}
        out = self.model.generate(past_key_values=self.cache, **given)
        self._append(out if isinstance(out, Tensor) else out.sequences)
        return out

    def _append(self, ids: Tensor) -> None:
        new = self.mask.new_ones(len(ids), ids.shape[1] - self.ids.shape[1])
        self.ids, self.mask = ids, torch.cat([self.mask, new], dim=1)


def chats(models: Pair, batch: int = 1, config: bool = True) -> tuple[Chat, Chat]:
    caches = [None, None] if config else [DynamicCache(), DynamicCache()]
    return Chat(models.model, batch, caches[0]), Chat(models.plain, batch, caches[1])


def assert_same(ours: Chat, theirs: Chat) -> None:
    assert torch.equal(ours.ids, theirs.ids)
    assert_same_cache(ours.cache, theirs.cache)
    assert ours.cache.get_seq_length() == ours.ids.shape[1] - 1


@pytest.mark.parametrize("batch, config", [(1, False), (3, True)])
def test_three_turns_of_a_chat(models: Pair, batch: int, config: bool) -> None:
    ours, theirs = chats(models, batch, config)
    for turn, said in enumerate([0, 5, 1]):
        cache = ours.cache
        for chat in (ours, theirs):
            chat.say(said, seed=turn)
            chat.answer(do_sample=False)
        assert_same(ours, theirs)
        assert ours.cache is cache
        assert models.model.ktinject_decoding.last == models.last


def test_recorded_steps_serve_it(models: Pair, way: str) -> None:
    decoding = models.model.ktinject_decoding
    decoding.release()
    chat = Chat(models.model, 3)
    for _ in range(2):
        chat.answer()
        chat.say(3)
    assert [*decoding.runners] == ([] if way == "eager" else [3])
    if way == "graph":
        assert decoding.reason == "" and decoding.runners[3].replays == 2 * 7
    elif way == "fixed":
        assert decoding.reason == decoding.runners[3].graphs.reason


class Counted:
    """Tokens of each forward pass that is not replayed. A hook that recorded steps may leave out."""

    capturable = True

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        self.tokens.append(args[0].shape[1])


@pytest.fixture
def count() -> Iterator[Callable[[Any], Counted]]:
    handles = []

    def begin(model: Any) -> Counted:
        counted = Counted()
        handles.append(model.get_input_embeddings().register_forward_hook(counted))
        return counted

    yield begin
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("said", [5, 1])
def test_the_next_turn_reads_only_what_is_new(
    models: Pair, said: int, count: Callable[[Any], Counted], way: str
) -> None:
    ours, theirs = chats(models)
    counted = [count(models.model), count(models.plain)]
    for chat, found in zip((ours, theirs), counted):
        chat.answer()
        assert found.tokens[0] == 9
        chat.say(said)
        found.tokens.clear()
        chat.answer()
        # One more: the last token of an answer is not in the cache.
        assert found.tokens[0] == said + 1
    assert counted[1].tokens == [said + 1] + 7 * [1]
    if way == "graph":
        assert sum(counted[0].tokens) < sum(counted[1].tokens), "the rest was replayed"
    else:
        assert counted[0].tokens == counted[1].tokens
    assert_same(ours, theirs)


def test_a_cache_that_was_cropped(models: Pair) -> None:
    ours, theirs = chats(models, 3)
    for chat in (ours, theirs):
        chat.answer()
        chat.cache.crop(-5)
        chat.ids, chat.mask = chat.ids[:, :-5], chat.mask[:, :-5]
        assert chat.cache.get_seq_length() == chat.ids.shape[1] - 1
        chat.say(4)
        chat.answer()
    assert_same(ours, theirs)
    assert models.model.ktinject_decoding.last == models.last


def test_several_answers_to_one_prompt(models: Pair) -> None:
    ours, theirs = chats(models)
    for chat in (ours, theirs):
        torch.manual_seed(0)
        chat.mask = chat.mask.repeat_interleave(3, dim=0)
        given = {"input_ids": chat.ids, "do_sample": True, "num_return_sequences": 3}
        chat._append(chat.model.generate(past_key_values=chat.cache, **MORE | given))
        chat.say(2)
        chat.answer()
    assert_same(ours, theirs)
    assert ours.cache.layers[0].keys.shape[0] == 3


def test_a_repeated_cache_serves_several_answers(models: Pair) -> None:
    """Of a prompt that was read once."""
    ours, theirs = chats(models)
    for chat in (ours, theirs):
        chat.answer(max_new_tokens=1)
        chat.cache.batch_repeat_interleave(2)
        chat.ids, chat.mask = (tensor.repeat_interleave(2, dim=0) for tensor in (chat.ids, chat.mask))
        chat.say(2)
        torch.manual_seed(0)
        chat.answer(do_sample=True)
    assert_same(ours, theirs)


def test_a_streamer_and_stop_strings(models: Pair) -> None:
    written = Chat(models.plain, 3)
    written.answer(max_new_tokens=6)
    word = tokenizer().decode([int(written.ids[1, 11])])
    stops = {"stop_strings": [word], "tokenizer": tokenizer(), "eos_token_id": [95], "max_new_tokens": 12}
    ours, theirs = chats(models, 3)
    for chat in (ours, theirs):
        chat.answer(**stops)
    assert_same(ours, theirs)
    ours, theirs = chats(models)
    heard = Heard(), Heard()
    for chat, streamer in zip((ours, theirs), heard):
        chat.answer(streamer=streamer)
        chat.say(3)
        chat.answer(streamer=streamer, **stops)
    assert heard[0].heard == heard[1].heard
    assert_same(ours, theirs)


def test_a_criterion_that_asks_what_the_streamer_has(models: Pair) -> None:
    """Our own loop takes it, and asks it when the streamer has the step's tokens."""

    class Ends(RowCriterion):
        def __init__(self, streamer: Heard) -> None:
            self._streamer = streamer

        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.full((len(input_ids),), len(self._streamer.heard) > 4, device=input_ids.device)

    ours, theirs = chats(models)
    streamer = Heard()
    ours.answer(streamer=streamer, stopping_criteria=StoppingCriteriaList([Ends(streamer)]))
    theirs.answer(max_new_tokens=4)
    assert_same(ours, theirs)
    assert models.model.ktinject_decoding.last == models.last


def test_rows_that_end_early(models: Pair) -> None:
    written = Chat(models.plain, 3)
    written.answer()
    ours, theirs = chats(models, 3)
    for chat in (ours, theirs):
        chat.answer(eos_token_id=[int(written.ids[0, 11])], max_new_tokens=12)
        chat.say(2)
        chat.answer()
    assert_same(ours, theirs)


def test_scores_and_the_same_cache_are_returned(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the request's rows: a step may have one more, as a graph has that serves several numbers of them."""
    for module in (graph_runner, decoding):
        monkeypatch.setattr(module, "size_of", lambda batch, device: graph_runner.SIZES[batch])
    ours, theirs = chats(models, 3)
    for _ in range(2):
        found, wanted = ours.answer(**ALL), theirs.answer(**ALL)
        assert_same_output(found, wanted)
        assert found.past_key_values is ours.cache
        ours.say(3), theirs.say(3)


def test_the_stock_loop_around_recorded_steps_hands_it_back(models: Pair, way: str) -> None:
    ours, theirs = chats(models, 3)
    for _ in range(2):
        for chat in (ours, theirs):
            chat.answer(logits_processor=[Shift()])
        assert_same(ours, theirs)
        ours.say(3), theirs.say(3)
    last = models.model.ktinject_decoding.last
    assert last == ("" if way == "eager" else "graph, ") + "stock loop: Shift"


def test_only_the_new_tokens_may_be_passed(models: Pair) -> None:
    """With the mask of all of them. Then the answer has only these, too, and the cache is longer."""
    # Of 236 more tokens, the second answer ends where the recorded steps need a longer cache than for the first.
    for begin, how in ((0, {}), (0, {"logits_processor": [Shift()]}), (236, {})):
        ours, theirs = chats(models, 3)
        found = []
        for chat in (ours, theirs):
            chat.say(begin)
            chat.answer()
            chat.say(4)
            held = chat.cache.get_seq_length()
            given = {"input_ids": chat.ids[:, held:], "attention_mask": chat.mask}
            found.append(
                chat.model.generate(past_key_values=chat.cache, **MORE | given | how)  # type: ignore[arg-type]
            )
            assert found[-1].shape[1] == 5 + 8
        assert torch.equal(*found)
        assert_same_cache(ours.cache, theirs.cache)


def test_transformers_goes_on_with_it(models: Pair) -> None:
    ours, theirs = chats(models)
    for chat in (ours, theirs):
        chat.answer()
        chat.say(3)
    ours.model = models.plain
    for chat in (ours, theirs):
        chat.answer()
    ours.model = models.model
    for chat in (ours, theirs):
        chat.say(1)
        chat.answer()
    assert_same(ours, theirs)


def test_two_chats_take_turns(models: Pair) -> None:
    """The runner's own cache belongs to neither."""
    pairs = [chats(models), chats(models)]
    for ours, theirs in pairs:
        for chat in (ours, theirs):
            chat.say(len(pairs))
    for turn in range(2):
        for number, both in enumerate(pairs):
            for chat in both:
                chat.answer()
                chat.say(2 + turn, seed=number)
    for ours, theirs in pairs:
        assert torch.equal(ours.ids, theirs.ids)
        assert_same_cache(ours.cache, theirs.cache)


# What goes wrong. The cache is then as it was before the request.


def state_of(cache: DynamicCache) -> list[Any]:
    return [
        (layer, layer.is_initialized, layer.get_seq_length())
        + tuple(t.clone() if isinstance(t, Tensor) else t for t in (layer.keys, layer.values))
        for layer in cache.layers
    ]


def assert_untouched(cache: DynamicCache, before: list[Any]) -> None:
    assert len(cache.layers) == len(before)
    for layer, (other, is_initialized, length, keys, values) in zip(cache.layers, before):
        assert layer is other and layer.is_initialized == is_initialized
        assert layer.get_seq_length() == length
        for found, wanted in ((layer.keys, keys), (layer.values, values)):
            assert found is wanted is None or torch.equal(found, wanted)


class Breaks(Heard):
    """A streamer that is interrupted at some of the tokens."""

    def put(self, tokens: Tensor) -> None:
        super().put(tokens)
        if len(self.heard) == 5:
            raise KeyboardInterrupt


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Let the so-manieth call of a function fail."""
    work, calls = getattr(owner, name), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise KeyboardInterrupt
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)


# Without a config an empty cache has no layers yet; a filled one has them in either case.
@pytest.mark.parametrize("filled, config", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("how", ["a streamer", "the prefill", "a processor"])
def test_a_request_that_is_interrupted_leaves_the_cache_as_it_was(
    models: Pair, how: str, filled: bool, config: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = chats(models, config=config)
    for chat in (ours, theirs):
        if filled:
            chat.answer()
            chat.say(3)
    before = state_of(ours.cache)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if how == "the prefill":
            failing(patch, DynamicLayer, "update", 2)  # one of two layers has the new tokens
            ours.answer()
        elif how == "a streamer":
            ours.answer(streamer=Breaks())
        else:
            shift = Shift()
            failing(patch, Shift, "__call__", 4)
            ours.answer(logits_processor=[shift])
    assert_untouched(ours.cache, before)
    for chat in (ours, theirs):
        chat.answer()
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "how, number",
    [*(({}, number) for number in (1, 2, 3, 4)), ({"logits_processor": [Shift()]}, 3)],
    ids=["first keys", "first values", "second keys", "second values", "stock loop"],
)
def test_an_interrupt_while_it_is_handed_back(
    models: Pair, way: str, number: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "eager":
        pytest.skip("transformers' own steps write to it")
    ours, theirs = chats(models)
    for chat in (ours, theirs):
        chat.answer(**how)
        chat.say(3)
    before = state_of(ours.cache)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        failing(patch, kept_cache, "_copy", number)
        ours.answer(**how)
    assert_untouched(ours.cache, before)
    for chat in (ours, theirs):
        chat.answer(**how)
    assert_same(ours, theirs)


def test_ctrl_c_leaves_no_part_of_an_answer(models: Pair) -> None:
    ours, theirs = chats(models)
    for chat in (ours, theirs):
        chat.answer()
        chat.say(3)
    before = state_of(ours.cache)
    arguments = {"input_ids": ours.ids, "attention_mask": ours.mask, **MORE, "max_new_tokens": 100_000}
    ctrl_c_ends(lambda: models.model.generate(past_key_values=ours.cache, **arguments))
    models.model.ktinject_decoding.release()  # else all further steps would attend over as many tokens
    assert_untouched(ours.cache, before)
    for chat in (ours, theirs):
        chat.answer()
    assert_same(ours, theirs)


# Caches that recorded steps do not take over.


def test_a_static_cache_stays_with_the_model_s_own_steps(models: Pair) -> None:
    given = prompt(1, device=models.model.device.type, padding=0)
    answers = []
    for model in (models.model, models.plain):
        cache = StaticCache(config=model.config, max_cache_len=32)
        answers.append(model.generate(past_key_values=cache, disable_compile=True, **given | MORE))
    assert torch.equal(*answers)
    decoding = models.model.ktinject_decoding
    assert decoding.last == "eager loop"
    assert decoding.reason == f"the cache is the caller's own ({compat.CACHE}), a StaticCache"


def test_a_cache_of_another_dtype_stays_with_the_model_s_own_steps(models: Pair) -> None:
    ours, theirs = chats(models)
    for chat in (ours, theirs):
        chat.answer()
        for layer in chat.cache.layers:
            layer.keys, layer.values = layer.keys.double(), layer.values.double()
    reason = kept_cache.callers_support(models.model, ours.cache).reason
    assert reason == "the caller's cache holds torch.float64, the model computes in torch.float32"


def test_the_model_s_windows_count_not_those_that_the_cache_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DynamicCache() of a model with sliding windows has layers that know of none."""
    config = tiny_models.tiny("qwen3_moe").config
    model: Any = SimpleNamespace(config=config, dtype=torch.float32)
    assert kept_cache.callers_support(model, DynamicCache())
    assert kept_cache.callers_support(model, DynamicCache(config=config))
    partial = DynamicCache()
    partial.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    reason = kept_cache.callers_support(model, partial).reason
    assert reason == "the caller's cache has 1 layers, the model's 2"
    assert "offloaded" in kept_cache.callers_support(model, offloaded(monkeypatch)).reason

    config.layer_types = ["sliding_attention", "full_attention"]
    config.sliding_window = 4
    reason = kept_cache.callers_support(model, DynamicCache()).reason
    assert "other sliding windows or states than the model" in reason
    own = DynamicCache(config=config)
    assert kept_cache.callers_support(model, own)
    config.sliding_window = 5
    assert not kept_cache.callers_support(model, own)
    config.sliding_window = 4
    own.activate_past_recording()
    assert "have passed" in kept_cache.callers_support(model, own).reason


def offloaded(monkeypatch: pytest.MonkeyPatch) -> DynamicCache:
    """As DynamicCache(offloading=True) is, which asks for a GPU at once."""
    cache = DynamicCache()
    monkeypatch.setattr(cache, "offloading", True)
    return cache


@pytest.mark.parametrize("how", [{}, {"logits_processor": [Shift()]}], ids=["own loop", "stock loop"])
def test_a_mask_of_other_tokens_than_the_cache_holds_is_not_recorded(
    models: Pair, way: str, how: dict[str, Any]
) -> None:
    """New tokens, with a mask of some others: transformers does what it does."""
    ours, theirs = chats(models)
    found = []
    for chat in (ours, theirs):
        chat.answer()
        mask = torch.ones_like(chat.ids[:, -6:])
        mask[:, 0] = 0
        given = {"input_ids": chat.ids[:, -4:], "attention_mask": mask, **MORE, **how}
        found.append(chat.model.generate(past_key_values=chat.cache, **given))  # type: ignore[arg-type]
    assert torch.equal(*found)
    assert_same_cache(ours.cache, theirs.cache)
    if way != "eager":
        assert models.model.ktinject_decoding.reason.startswith("the attention mask has ")


def test_a_request_that_transformers_refuses_leaves_it_as_it_was(models: Pair) -> None:
    chat = Chat(models.model)
    chat.answer()
    before = state_of(chat.cache)
    with pytest.raises(RuntimeError):
        models.model.generate(chat.ids[:, -4:], past_key_values=chat.cache, **MORE)
    assert_untouched(chat.cache, before)


def assert_turns(models: Pair, batch: int) -> None:
    """Three of them, in native steps."""
    chat = Chat(models.model, batch)
    for said in (0, 5, 1):
        chat.say(said)
        chat.answer()
        assert models.model.ktinject_decoding.last == "native loop", models.model.ktinject_decoding.reason
        _, wanted = read(models.plain, chat.ids[:, :-1], chat.mask[:, :-1])
        assert_near_cache(chat.cache, wanted)


@pytest.mark.parametrize("batch", [1, 3])
def test_native_steps_serve_three_turns(native: Pair, batch: int) -> None:
    assert_turns(native, batch)


@pytest.mark.parametrize("window, batch", [(2, 3), (7, 1), (16, 3), (40, 1)])
def test_layers_with_sliding_windows(window: int, batch: int) -> None:
    """Their caches hold the last tokens alone, in native steps as rings."""
    plain = tiny_models.tiny("gpt_oss", sliding_window=window, num_experts_per_tok=6).bfloat16()
    models = Pair(model_of("gpt_oss", window), plain, "native loop")
    assert_turns(models, batch)
    out = models.model.generate(**prompt(batch), **ALL, **{"eos_token_id": None})
    mask = prompt(batch)["attention_mask"]
    assert_near_cache(out.past_key_values, read(plain, out.sequences[:, :-1], mask)[1])
    chat = Chat(models.model, batch)
    for _ in range(2):
        before = state_of(chat.cache)
        with pytest.raises(KeyboardInterrupt):
            chat.answer(streamer=Breaks())
        assert_untouched(chat.cache, before)
        chat.answer()


def test_native_steps_choose_what_the_same_text_gives_without_a_cache(native: Pair) -> None:
    chat = Chat(native.model)
    chat.answer()
    chat.say(4)
    found = chat.answer(**ALL)
    given = {"input_ids": found.sequences[:, : -MORE["max_new_tokens"]], **MORE, **ALL}
    alone = native.model.generate(**given)
    # The prompt was read in other pieces, so it was rounded otherwise.
    error = (found.scores[0] - alone.scores[0]).norm() / alone.scores[0].norm()
    assert error <= 0.1
    before = state_of(chat.cache)
    with pytest.raises(KeyboardInterrupt):
        chat.answer(streamer=Breaks())
    assert_untouched(chat.cache, before)
