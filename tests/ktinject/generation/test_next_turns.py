"""A next turn that is read by a captured pass: it writes what it would have written, and leaves the same cache.

On a CPU, passes run on the tensors of a graph, with attention that is computed by hand; on a GPU they are captured.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from test_batching import share_of_best
from torch import Tensor
from torch.nn import functional
from trained import trained_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import ktinject
from ktinject.generation import batching, next_turns, turn_pass
from ktinject.hf import compat
from ktinject.operators.torch_ops.packed_attention import causal_mask
from ktinject.support import SUPPORTED

torch.set_num_threads(1)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
NEW = 6


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, ends: Any = None) -> tuple[Tensor, Tensor]:
    """What `turn_pass.flash` gives."""
    if ends is None:
        groups = q.shape[2] // k.shape[2]
        k, v = (part.repeat_interleave(groups, 2) for part in (k, v))
        scores = torch.einsum("bnhd,bshd->bhns", q, k) * scale
        scores = scores.masked_fill(~causal_mask(q.shape[1], k.shape[1], q.device), -torch.inf)
        return torch.einsum("bhns,bshd->bnhd", scores.softmax(-1), v), scores.logsumexp(-1)
    outs, sums = [], []
    for at in range(len(ends[0]) - 1):
        rows, seen = slice(*ends[0][at : at + 2].tolist()), slice(*ends[1][at : at + 2].tolist())
        scores = torch.einsum("nhd,shd->hns", q[rows], k[seen]) * scale
        outs.append(torch.einsum("hns,shd->nhd", scores.softmax(-1), v[seen]))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


@pytest.fixture(autouse=True)
def on_cpu_by_hand(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own, support = turn_pass.flash, turn_pass.attention_support
    support.cache_clear()
    monkeypatch.setattr(turn_pass, "flash", lambda q, *rest: (own if q.is_cuda else by_hand)(q, *rest))
    yield
    support.cache_clear()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes for short texts."""
    for name, value in {"SIZES": (4, 8), "FEWEST_HELD": 12, "_COMPARED_BEHIND": 20, "_MOST_PARTS": 4}.items():
        monkeypatch.setattr(turn_pass, name, value)


@pytest.mark.parametrize("kv, groups, held, new", [(4, 2, 300, 16), (2, 1, 77, 64), (1, 8, 33, 5)])
@pytest.mark.parametrize("device", DEVICES)
def test_parts_are_joined_to_the_whole(device: str, kv: int, groups: int, held: int, new: int) -> None:
    kind = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 64, generator=generator).to(**kind)
        for heads, tokens in ((kv * groups, new), (kv, 400), (kv, 400))
    )
    position = torch.tensor([held], device=device)
    parts = turn_pass.Parts(position, position + torch.arange(new, device=device))
    found = parts.attend(q, k, v, 0.2)
    k, v = (part[:, :, : held + new].float().repeat_interleave(groups, 1) for part in (k, v))
    want = functional.scaled_dot_product_attention(
        q.float(), k, v, causal_mask(new, held + new, q.device), scale=0.2
    )
    assert found.dtype == kind["dtype"] and parts.calls == 1
    tolerance = 1e-5 if device == "cpu" else 1e-2
    assert (found.float() - want).norm() <= tolerance * want.norm()


def tiny(family: str, device: str) -> Any:
    model = models.tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # a rounding error must not decide the next token
    if device != "cpu":
        model = model.to(device, torch.bfloat16)
    rules = [
        {"name": "experts", "match": {"path": r".*\.experts"}, "replace": {"operator": "hybrid_experts"}}
    ]
    return ktinject.optimize(model, rules, progress=False)


class Conversation:
    """Turns of a text, each with tokens of its own, and how they were read.

    passes  sizes of the passes that have read a turn
    """

    def __init__(self, family: str, device: str, monkeypatch: pytest.MonkeyPatch, model: Any = None) -> None:
        """model  None: a tiny one of the family"""
        self.model: Any = tiny(family, device) if model is None else model
        decoding = self.model.ktinject_decoding
        decoding.graphs = decoding.graphs or SUPPORTED
        self.cache = DynamicCache(config=self.model.config)
        self.text = self.some(24, 0)
        self.passes: list[int] = []
        self.asked: list[list[int]] = []
        self.wanted: list[list[int]] = []
        self.found: list[list[int]] = []
        own = next_turns.read

        def read(*args: Any) -> Any:
            found = own(*args)
            if found is not None:
                self.passes.append(args[1].shape[1] - self.cache.get_seq_length())
            return found

        monkeypatch.setattr(next_turns, "read", read)

    def some(self, count: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, 90, (1, count), generator=generator).to(self.model.device)

    def written(self, ids: Tensor, **more: Any) -> Tensor:
        asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found: Tensor = self.model.generate(ids, **{**asked, **more})
        return found

    def turn(self, new: int) -> None:
        """One more turn, which leaves a cache as that of the whole text."""
        ids = torch.cat([self.text, self.some(new, len(self.text[0]))], dim=1) if new else self.text
        want = self.written(ids)
        self.text = self.written(ids, past_key_values=self.cache)
        self.asked.append(ids[0].tolist())
        self.wanted.append(want[0, ids.shape[1] :].tolist())
        self.found.append(self.text[0, ids.shape[1] :].tolist())
        whole = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(self.text[:, :-1], past_key_values=whole)
        tolerance = 1e-3 if self.model.dtype == torch.float32 else 0.1
        for layer, other in zip(self.cache.layers, whole.layers, strict=True):
            for here, there in ((layer.keys, other.keys), (layer.values, other.values)):
                assert here.shape == there.shape
                # Of some tokens, a rounding may have chosen another expert.
                error, size = (part.float().square().sum((0, 1, 3)) for part in (here - there, there))
                assert (error / size).sqrt().median() <= tolerance

    def check(self) -> None:
        """All turns are as without a cache; on a GPU up to roundings of bf16."""
        if self.model.dtype == torch.float32:
            assert self.found == self.wanted
            return
        want = share_of_best("qwen3_moe", self.asked, self.wanted)
        assert share_of_best("qwen3_moe", self.asked, self.found) >= want - 0.15 and want > 0.7


@pytest.mark.parametrize("device", DEVICES)
def test_turns_are_read_by_passes(
    device: str, small: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ktinject")
    talk = Conversation("qwen3_moe", device, monkeypatch)
    talk.turn(0)
    talk.turn(3)  # behind which passes are made ready
    assert talk.passes == []
    passes = talk.model.ktinject_decoding.runners[1].turns
    assert passes.support and passes._proven == {4, 8}, caplog.text
    for new in (3, 1, 7, 5):
        talk.turn(new)
        assert talk.passes[-1] == new + 1, "the last token of an answer was not read"
    count = len(talk.passes)
    talk.turn(8)  # more than the largest pass
    assert len(talk.passes) == count
    talk.turn(3)
    assert len(talk.passes) == count + 1
    talk.check()
    assert talk.model.ktinject_decoding.last == ("graph loop" if device == "cuda" else "eager loop")


@pytest.mark.parametrize("device", DEVICES)
def test_a_trained_model_goes_on_as_without(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 it writes the same tokens; on a GPU, those that it writes are as likely."""
    folder = trained_model("tiny-qwen3-moe")
    monkeypatch.setattr(turn_pass, "SIZES", (16, 48))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    arguments: dict[str, Any] = {"variables": {"experts": "bf16"}, "dtype": dtype, "progress": False}
    model = ktinject.load(folder, devices=[device], **arguments)
    talk = Conversation("", device, monkeypatch, model)
    ids = AutoTokenizer.from_pretrained(folder)(trained_model("heldout.txt").read_text("utf-8"))
    talk.some = lambda count, seed: torch.tensor([ids["input_ids"][seed : seed + count]], device=model.device)
    talk.text = talk.some(340, 0)
    for new in (0, 12, 9, 33):
        talk.turn(new)
    assert talk.passes == [10, 34]
    if device == "cpu":
        talk.check()
        return
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shares = []
    for written in (talk.found, talk.wanted):
        best = []
        for text, new in zip(talk.asked, written, strict=True):
            with torch.no_grad():
                logits = exact(torch.tensor([text + new])).logits[0, len(text) - 1 : -1]
            best += (logits.argmax(-1) == torch.tensor(new)).tolist()
        shares.append(sum(best) / len(best))
    assert shares[0] >= shares[1] - 0.1 and shares[1] > 0.8


def test_what_no_pass_is_for(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation("qwen3_moe", "cpu", monkeypatch)
    talk.turn(0)
    talk.turn(3)
    ids = torch.cat([talk.text, talk.some(3, 5)], dim=1)
    kwargs = {compat.CACHE: talk.cache, "attention_mask": torch.ones_like(ids)}
    config = talk.model.generation_config
    read = next_turns.read
    assert read(talk.model, ids, config, kwargs, 4) is not None
    padded = torch.ones_like(ids)
    padded[0, 0] = 0
    shifted = torch.arange(ids.shape[1])[None] + 1
    for change in (
        {"attention_mask": padded},
        {"attention_mask": torch.ones(1, ids.shape[1] + 1)},  # of a prompt that is only what is new
        {"position_ids": shifted},
        {"pixel_values": torch.ones(1)},
        {compat.CACHE: DynamicCache(config=talk.model.config)},
    ):
        assert read(talk.model, ids, config, {**kwargs, **change}, 4) is None, change
    chunks = copy.copy(config)
    chunks.prefill_chunk_size = 2
    assert read(talk.model, ids, chunks, kwargs, 4) is None
    assert read(talk.model, talk.text[:, : talk.cache.get_seq_length()], config, kwargs, 4) is None
    assert read(talk.model, ids, config, kwargs, 1000) is None, "the runner's cache is too short"
    assert read(talk.model, ids, config, {**kwargs, "position_ids": shifted - 1}, 4) is not None
    talk.model.model.norm.variance_epsilon *= 2
    assert read(talk.model, ids, config, kwargs, 4) is None, "the model has changed"


def test_another_model_s_passes_are_refused(
    small: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass whose tokens see half of those before is found out."""
    caplog.set_level(logging.INFO, "ktinject")
    own = turn_pass.Parts.__init__
    monkeypatch.setattr(
        turn_pass.Parts, "__init__", lambda self, position, places: own(self, position // 2, places)
    )
    monkeypatch.setattr(turn_pass, "attention_support", lambda *_: SUPPORTED)
    talk = Conversation("qwen3_moe", "cpu", monkeypatch)
    for new in (0, 3, 3):
        talk.turn(new)
    talk.check()
    assert talk.passes == []
    assert "next turns are read one kernel at a time: a pass differs from the model" in caplog.text


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next", "deepseek_v3"])
def test_other_layers_have_no_passes(family: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, states of fixed size, and attention that a layer computes by itself."""
    talk = Conversation(family, "cpu", monkeypatch)
    for count in (24, 30, 36):
        ids = talk.some(count, 0)
        talk.written(ids, past_key_values=talk.cache, max_new_tokens=2)
        assert talk.cache.get_seq_length() == count + 1
        talk.cache = DynamicCache(config=talk.model.config)
        with torch.no_grad():
            talk.model(ids, past_key_values=talk.cache)
    assert talk.passes == [] and not talk.model.ktinject_decoding.runners[1].turns.support


def test_experts_that_are_streamed_are_not_in_a_pass(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "is_streamed", lambda model, tokens: tokens >= 8)
    talk = Conversation("qwen3_moe", "cpu", monkeypatch)
    for new in (0, 3, 3, 5):
        talk.turn(new)
    talk.check()
    assert talk.passes == [4]
