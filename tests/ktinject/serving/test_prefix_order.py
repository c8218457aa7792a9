"""Which kept text a request goes on from, which goes first, and that neither costs more when many are kept."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from transformers import DynamicCache

from ktinject.serving import prefixes
from ktinject.serving.beginnings import Beginnings
from ktinject.serving.prefixes import Prefixes

BYTES = 2 * 2 * 2 * 4  # of a token: keys and values of two heads of two numbers in fp32


def config() -> Any:
    return models.tiny("qwen3_moe").config.__class__(num_hidden_layers=1)


def cache_of(count: int, of: Any) -> DynamicCache:
    cache = DynamicCache(config=of)
    cache.update(torch.zeros(1, 2, count, 2), torch.zeros(1, 2, count, 2), 0)
    return cache


def common(some: list[int], others: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(some, others)) if a != b), min(len(some), len(others)))


@dataclass(eq=False)
class Text:
    ids: list[int]
    is_here: bool = True


@dataclass
class Plain:
    """The same rules, by a look at all texts: the least recently used one is the first of the list."""

    here: int
    ram: int
    is_cpu: bool
    block: int
    kept: list[Text] = field(default_factory=list)

    def bytes(self, text: Text) -> int:
        exact = len(text.ids) * BYTES
        return exact if text.is_here else -(-exact // self.block) * self.block

    def in_ram(self) -> int:
        return sum(self.bytes(text) for text in self.kept if self.is_cpu or not text.is_here)

    def on_device(self) -> int:
        return sum(len(text.ids) for text in self.kept if text.is_here)

    def take(self, ids: list[int]) -> int:
        found = [(common(text.ids, ids[:-1]), text) for text in self.kept]
        whole = [(same, text) for same, text in found if same == len(text.ids)]
        same, text = max(whole, key=lambda pair: pair[0], default=(0, None))
        longest, other = max(found, key=lambda pair: pair[0], default=(0, None))
        if other is not None and longest >= max(same + 1, 16):
            self.kept.remove(other)
            self.kept.append(other)
            return longest
        if text is not None:
            self.kept.remove(text)
        return same

    def keep(self, ids: list[int]) -> None:
        self.kept = [text for text in self.kept if common(text.ids, ids) < len(text.ids)]
        self.kept.append(Text(ids))
        if self.is_cpu:
            self.make_room(0)
            return
        for text in [*self.kept]:
            if self.on_device() <= self.here:
                break
            if text.is_here and self.bytes(text) > self.ram:
                self.kept.remove(text)
            elif text.is_here:
                self.make_room(self.bytes(text))
                text.is_here = False

    def make_room(self, bytes: int) -> None:
        while self.kept and self.in_ram() + bytes > self.ram:
            self.kept.remove(next(text for text in self.kept if self.is_cpu or not text.is_here))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_texts_are_found_and_go_as_by_a_look_at_all(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random turns of conversations that share beginnings; no GPU is needed to say where a tensor would be."""
    monkeypatch.setattr(prefixes, "BLOCK", 640)
    of = config()
    model = SimpleNamespace(device=SimpleNamespace(type=device), config=of)
    for seed in range(12):
        draw = random.Random(seed)
        here, ram = (0, 8000) if device == "cpu" else (100, 8000)
        ours, plain = Prefixes(model, here, ram), Plain(here, ram, device == "cpu", 640)
        texts: list[list[int]] = [[]]
        for _ in range(120):
            start = draw.choice(texts[-12:])
            ids = start[: draw.randint(0, len(start))] if draw.random() < 0.4 else start
            ids = ids[:150] + [draw.randrange(3) for _ in range(draw.randint(1, 25))]
            cache, found = ours.take(ids)
            assert cache is not None and found == plain.take(ids)
            if draw.random() < 0.9:
                ids = ids + [draw.randrange(3) for _ in range(draw.randint(0, 4))]
            ours.keep(ids, cache_of(len(ids), of))
            plain.keep(ids)
            order = sorted(ours._beginnings._ends, key=lambda kept: kept.used)
            assert [(kept.ids, kept.is_here) for kept in order] == [
                (text.ids, text.is_here) for text in plain.kept
            ]
            assert ours.in_ram == plain.in_ram()
            if device != "cpu":
                assert ours.on_device == plain.on_device()
            texts.append(ids)


def work(prefixes_: Prefixes, of: Any, ids: list[int]) -> int:
    """Calls that a request of a text makes, of Python's and of C's functions."""
    cache, calls = cache_of(len(ids), of), 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        prefixes_.take(ids)
        prefixes_.keep(ids, cache)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_request_costs_the_same_however_many_texts_are_kept(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "BLOCK", 64)
    of, draw = config(), random.Random(0)
    model = SimpleNamespace(device=SimpleNamespace(type=device), config=of)
    found = {}
    for many in (100, 1000):
        # Full: each new text displaces one, and one of 80 tokens displaces ten.
        ours = Prefixes(model, 0 if device == "cpu" else 80, many * 8 * BYTES)
        for _ in range(many + 10):
            ids = [draw.randrange(2048) for _ in range(8)]
            ours.keep(ids, cache_of(8, of))
        short = work(ours, of, [draw.randrange(2048) for _ in range(8)])
        long = work(ours, of, [draw.randrange(2048) for _ in range(80)])
        assert len(ours._beginnings._ends) >= many - 11
        found[many] = short, long
    for few, more in zip(found[100], found[1000]):
        assert more <= 1.3 * few + 20, found


def test_a_tree_of_texts_leaves_nothing_of_those_that_went() -> None:
    """Nor edges that were cut for them."""
    tree: Beginnings[str] = Beginnings()
    tree.add("long", [1, 2, 3, 4])
    tree.add("branch", [1, 2, 9])
    tree.add("short", [1, 2])
    found = tree.find([1, 2, 3, 4, 5])
    assert (found.common, found.text, found.whole) == (4, "long", ["short", "long"])
    tree.use("long")
    assert tree.find([1, 2, 7]).text == "branch", (
        "the least recently used one of those with as much in common"
    )
    tree.remove("short")
    tree.remove("branch")
    (only,) = tree._root.children.values()
    assert only.label == [1, 2, 3, 4] and not only.children
    tree.remove("long")
    assert not tree._root.children and not tree._root.texts and tree.find([1]).text is None
