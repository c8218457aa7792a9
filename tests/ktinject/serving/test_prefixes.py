"""What was read of earlier texts: a next turn reads only what is new, and writes what it would have written."""

from __future__ import annotations

import threading
from typing import Any

import models
import pytest
import torch
from test_batching import share_of_best
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

import ktinject
from ktinject.generation import next_turns
from ktinject.serving import prefixes
from ktinject.serving.batches import Batches
from ktinject.serving.prefixes import Prefixes

torch.set_num_threads(1)
LARGE = 1 << 30
NEW = 8


class Sink:
    may_complete = False

    def __init__(self, ends_at: int | None = None) -> None:
        self.cached, self.tokens, self._ends_at = 0, 0, ends_at

    def found(self, tokens: int) -> None:
        self.cached = tokens

    def put(self, value: Tensor) -> None:
        self.tokens += 1
        if self.tokens == self._ends_at:
            raise ConnectionError("gone")

    def end(self) -> None:
        pass


class Reader:
    """Requests to a model, and how many tokens it read for each."""

    def __init__(self, family: str, ram: int = LARGE, device: str = "cpu", here: int = 0) -> None:
        model = models.tiny(family)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # a rounding error must not decide the next token
        if device == "cpu":
            self.model: PreTrainedModel = ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
        else:
            self.model = model.to(device, torch.bfloat16)
            rules = [
                {
                    "name": "experts",
                    "match": {"path": r".*\.experts"},
                    "replace": {"operator": "hybrid_experts"},
                }
            ]
            self.model = ktinject.optimize(self.model, rules, progress=False)
        self.prefixes = Prefixes(self.model, here, ram)
        self.batches = Batches(self.model, 1, 0, self.prefixes)
        self.model.generation_config.eos_token_id = None
        self.read = 0

        def count(module: Any, args: Any, out: Any) -> None:
            self.read = max(self.read, args[0].shape[-1])

        count.capturable = True  # type: ignore[attr-defined]  # so steps stay recorded, which it need not see
        self.model.get_input_embeddings().register_forward_hook(count)

    def write(self, ids: list[int], cached: int, sink: Sink | None = None, **config: Any) -> list[int]:
        """The whole text, after a look at how much of it was read."""
        self.read, sink = 0, sink or Sink()
        asked = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, **config)
        found = self.batches.generate(ids, asked, sink, None)[0].tolist()
        assert sink.cached == cached and self.read == len(ids) - cached, (sink.cached, self.read)
        return found

    def alone(self, ids: list[int]) -> list[int]:
        given = torch.tensor([ids], device=self.model.device)
        return self.model.generate(given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()


def text(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "deepseek_v4"])
def test_a_second_turn_reads_what_is_new(family: str) -> None:
    """Keys and values, a latent, windows, states of fixed size, and compressed keys."""
    reader = Reader(family)
    first = reader.write(text(30), 0)
    assert first == reader.alone(text(30))
    turn = first + text(5, 1)
    second = reader.write(turn, len(first) - 1)  # the last token was read by no step
    assert second == reader.alone(turn)
    assert reader.write(second + text(3, 2), len(second) - 1) == reader.alone(second + text(3, 2))


def test_next_turns_are_prepared_for_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader("qwen3_moe")
    asked: list[list[int]] = []
    is_done = threading.Event()

    def prepare(model: Any, ids: list[int]) -> bool:
        asked.append(ids)
        if len(asked) == 3:
            is_done.set()
        return len(asked) < 3

    monkeypatch.setattr(next_turns, "between_requests", prepare)
    first = reader.write(text(20), 0)
    is_done.wait()
    assert asked == [first[:-1]] * 3
    with pytest.raises(ConnectionError):
        reader.write(text(20, 1), 0, Sink(ends_at=2))
    written = [reader.write(text(20, seed), 0)[:-1] for seed in (2, 3)]
    assert all(ids in written for ids in asked[3:]), "not behind a request that failed"


def test_a_text_that_parts_earlier_copies_the_beginning() -> None:
    reader = Reader("qwen3_moe")
    first = reader.write(text(30), 0)
    other = first[:24] + text(6, 3)
    assert reader.write(other, 24) == reader.alone(other)
    assert reader.write(first + text(2, 4), len(first) - 1) == reader.alone(first + text(2, 4))
    assert reader.write(first[:9] + text(6, 5), 0) == reader.alone(first[:9] + text(6, 5)), (
        "too few in common"
    )
    assert reader.write(text(30), 29) == first, "the same again"


def test_states_that_have_passed_a_place_are_not_cut() -> None:
    reader = Reader("qwen3_next")
    first = reader.write(text(30), 0)
    other = first[:24] + text(6, 3)
    assert reader.write(other, 0) == reader.alone(other)


def test_a_request_that_is_ended_leaves_what_was_there() -> None:
    reader = Reader("qwen3_moe")
    first = reader.write(text(30), 0)
    turn = first + text(5, 1)
    with pytest.raises(ConnectionError):
        reader.write(turn, len(first) - 1, Sink(ends_at=4))
    assert reader.write(turn, len(first) - 1) == reader.alone(turn)


def test_the_least_recently_used_text_goes_first() -> None:
    reader = Reader("qwen3_moe")
    texts = [reader.write(text(30, seed), 0) for seed in range(2)]
    reader.prefixes._ram = reader.prefixes.in_ram * 3 // 2
    turn = reader.write(texts[0] + text(2, 7), len(texts[0]) - 1)  # the second is now the least recently used
    third = reader.write(text(30, 2), 0)
    assert reader.prefixes.in_ram <= reader.prefixes._ram
    reader.write(third + text(2, 8), len(third) - 1)
    reader.write(turn + text(2, 9), len(turn) - 1)
    reader.write(texts[1] + text(2, 9), 0)


def test_nothing_is_kept_without_room() -> None:
    reader = Reader("qwen3_moe", ram=0)
    first = reader.write(text(30), 0)
    assert reader.write(first + text(2, 1), 0) == reader.alone(first + text(2, 1))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_what_goes_to_ram_comes_back_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that begin and end within blocks, of several types, some of them empty or not contiguous."""
    monkeypatch.setattr(prefixes, "BLOCK", 1000)
    model = models.tiny(family)
    cache = DynamicCache(config=model.config)
    model(torch.tensor([text(30)]), past_key_values=cache)
    layer: Any = cache.layers[-1]
    layer.keys = layer.keys.transpose(2, 3).contiguous().transpose(2, 3)
    layer.more = {
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "one": torch.tensor(7),
    }
    kept = prefixes._Kept(text(30), cache)
    held = [part.clone() for part in kept._held()]
    assert len(held) > 5
    kept.leave()
    assert {part.device.type for part in kept._held()} == {"meta"} and not kept.is_here
    assert 0 <= kept.bytes - sum(part.nbytes for part in held) < 1000
    assert cache.layers[-1] is layer and torch.equal(layer.more["flags"], held[-3])
    kept.come_back()
    for found, want in zip(kept._held(), held, strict=True):
        assert found.dtype == want.dtype and torch.equal(found, want)
    assert kept.is_here and kept.bytes == sum(part.nbytes for part in held)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_on_a_gpu_texts_wait_in_ram(family: str) -> None:
    """As exact as without them, up to roundings of bf16, which choose another expert now and then."""
    reader = Reader(family, device="cuda", here=50)
    texts = [reader.write(text(30, seed), 0) for seed in range(3)]
    assert reader.prefixes.on_device <= 50 and reader.prefixes.in_ram > 0
    turns = [first + text(5, 1) for first in texts]
    found = [reader.write(turn, len(turn) - 6)[len(turn) :] for turn in turns]
    want = share_of_best(family, turns, [reader.alone(turn)[len(turn) :] for turn in turns])
    assert share_of_best(family, turns, found) >= want - 0.15 and want > 0.7
