"""A pass that finds no room on a GPU: experts give back their memory, and it is made again as though nothing was."""

from __future__ import annotations

import logging
from typing import Any

import models
import pytest
import torch
from double import on_meta
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ktinject
from ktinject import _native, machine
from ktinject.generation import batching, short_memory
from ktinject.machine import Machine
from ktinject.model_class import put_before
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload import lent

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


class Room:
    """A GPU without room until somebody gives back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_short = self.lends = True
        self.given_back = 0
        monkeypatch.setattr(lent, "is_lent", lambda devices: self.lends)
        monkeypatch.setattr(lent, "give_back", self.give_back)

    def give_back(self, devices: Any) -> int:
        found = int(self.lends)
        self.given_back += found
        self.lends = self.is_short = False
        return found

    def ask(self, *_: Any) -> None:
        if self.is_short:
            raise torch.OutOfMemoryError("no room")


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


def short_of_memory(room: Room, family: str = "qwen3_moe") -> PreTrainedModel:
    """A model whose last layer finds no room."""
    model = ktinject.optimize(models.tiny(family), "auto", devices="cpu", progress=False)
    model.model.layers[-1].register_forward_pre_hook(room.ask)
    put_before(model, short_memory._Again)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("before", [0, 5])
def test_the_cache_has_every_token_once(room: Room, family: str, before: int) -> None:
    """Layers before the one that found no room had their tokens already."""
    model = short_of_memory(room, family)
    caches = []
    with torch.no_grad():
        for is_short in (False, True):
            room.is_short, cache = False, DynamicCache(config=model.config)
            if before:
                model(IDS[:, :before], past_key_values=cache)
            room.is_short = room.lends = is_short
            logits = model(IDS[:, before:], past_key_values=cache).logits
            caches.append((logits, cache))
    (wanted, whole), (found, again) = caches
    assert room.given_back == 1 and torch.equal(found, wanted)
    for one, other in zip(whole.layers, again.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_a_pass_without_a_cache_is_made_again(room: Room) -> None:
    model = short_of_memory(room)
    with torch.no_grad():
        found = model(IDS, use_cache=False).logits
        assert room.given_back == 1
        assert torch.equal(found, model(IDS, use_cache=False).logits)


def test_generate_writes_the_same(room: Room) -> None:
    model = short_of_memory(room)
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "do_sample": False}
    found = model.generate(IDS, **asked)
    assert room.given_back == 1 and torch.equal(found, model.generate(IDS, **asked))


def test_a_cache_that_nobody_can_set_back_is_the_callers_matter(room: Room) -> None:
    model = short_of_memory(room)
    cache = StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        model(IDS, past_key_values=cache)
    assert "another try has more room" in str(caught.value.__notes__)
    assert room.given_back == 1


def test_states_are_set_back_only_for_prompts() -> None:
    """Copies of them would cost a step more than it takes."""
    config = models.tiny("qwen3_next").config
    cache = DynamicCache(config=config)
    for tokens, can in ((1, False), (64, True)):
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        assert (short_memory._undo((), {"input_ids": ids, "past_key_values": cache}) is not None) == can
    assert short_memory._undo((cache, cache), {}) is None


def test_nothing_is_caught_where_nothing_is_lent(room: Room) -> None:
    model = short_of_memory(room)
    room.lends = False
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError) as caught:
        model(IDS)
    assert not hasattr(caught.value, "__notes__") and room.given_back == 0


def test_a_paged_cache_gets_the_room_that_it_takes(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of what is free, or a number of blocks."""

    class Of:
        device = torch.device("cuda:0")
        ktinject = type(
            "Plan", (), {"runtime_memory": {"cuda:0": type("R", (), {"kv_bytes_per_token": 1024})()}}
        )

    class Config:
        block_size, page_size, num_blocks = 256, None, None

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(lent, "free_bytes", lambda device: 3 << 30)
    config: Any = Config()
    for blocks, times in ((1 << 12, 0), (1 << 13, 0), (1 << 14, 1), (None, 1)):
        room.given_back, room.lends, config.num_blocks = 0, True, blocks
        batching._make_room(Of, config)
        assert room.given_back == times, blocks


# --- on a GPU ---

WIDE = {"hidden_size": 512, "head_dim": 64, "moe_intermediate_size": 512, "num_experts": 128}


def wide(on_gpu: Any) -> PreTrainedModel:
    """400 MB of experts."""
    model = models.tiny("qwen3_moe", **WIDE).to(torch.bfloat16)
    return ktinject.optimize(
        model.to("cuda"), "auto", devices="cuda:0", progress=False, variables={"gpu_experts": on_gpu}
    )


@pytest.mark.gpu
@pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")
def test_a_request_that_fits_without_experts_on_the_gpu_fits(caplog: pytest.LogCaptureFixture) -> None:
    """A batch that takes far more than the longest text of the model, on a GPU that is too small for both."""
    torch.cuda.init()
    ids = torch.randint(3, 60, (16, 2048), generator=torch.Generator().manual_seed(1)).cuda()
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    for _ in range(2):  # the first also takes what a process takes once
        model = wide(0)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.generate(ids, **asked)
        need = torch.cuda.max_memory_allocated() - before
        del model
        torch.cuda.empty_cache()
    model = wide("auto")
    device = torch.device("cuda:0")
    experts = lent.lent_bytes(device)
    assert experts > 300 << 20
    model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False)
    torch.cuda.empty_cache()
    # Room for what the request takes and half of the experts, but not for both.
    total = torch.cuda.get_device_properties(device).total_memory
    room = torch.cuda.memory_reserved() - experts + need + experts // 2
    try:
        torch.cuda.set_per_process_memory_fraction(room / total, device)
        with caplog.at_level(logging.WARNING, "ktinject"):
            found = model.generate(ids, **asked)
            assert lent.lent_bytes(device) == 0, "it was too small for both"
            again = model.generate(ids, **asked)
        assert found.shape == again.shape == (16, 2052)
        assert model.ktinject_decoding.last == "graph loop"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    said = [record.getMessage() for record in caplog.records if "short of memory" in record.getMessage()]
    assert len(said) == 1 and "gave back" in said[0]
    assert all(one.on_gpu is None for one in model.modules() if isinstance(one, HybridExperts))


@pytest.mark.gpu
@pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")
def test_steps_are_recorded_anew_behind_it() -> None:
    model = wide("auto")
    decoding = model.ktinject_decoding
    ids = torch.arange(3, 12, device="cuda")[None]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    first = model.generate(ids, **asked)
    runner = decoding.runners[1]
    assert decoding.give_back() > 300 << 20 and decoding.give_back() == 0
    assert decoding.expert_hits().uses > 0
    again = model.generate(ids, **asked)
    assert decoding.last == "graph loop" and decoding.runners[1] is not runner
    assert first.shape == again.shape
    with torch.no_grad():
        wanted = model(again[:, :-1]).logits[:, -1].argmax(-1)
    assert wanted == again[0, -1]


@pytest.mark.gpu
@pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")
def test_a_second_model_gets_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan counts what the first one's experts would give back."""
    device = torch.device("cuda:0")
    first = wide("auto")
    torch.cuda.empty_cache()
    held = lent.lent_bytes(device)
    assert held > 300 << 20
    free: list[int] = []  # of the GPU, which other processes may use as well

    def detect(**asked: Any) -> Machine:
        found = own_detect(**asked)
        free.append(found.gpus[0].free_bytes)
        return found

    own_detect = machine.detect
    monkeypatch.setattr(machine, "detect", detect)
    monkeypatch.setattr(lent, "free_bytes", lambda device: 1 << 20)
    with torch.device("meta"):
        plan = ktinject.plan(on_meta(models.tiny("qwen3_moe", **WIDE)), "auto", devices="cuda:0")
    assert plan.limits["cuda:0"] >= free[0] + held - (256 << 20)
    second = wide(0)
    assert lent.lent_bytes(device) == 0
    ids = torch.arange(3, 12, device="cuda")[None]
    for model in (first, second):
        assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] <= 13
