"""What a model takes beside its weights: found without running it, and compared with what it then takes."""

from __future__ import annotations

import json
from typing import Any

import models
import pytest
import torch
from double import EXPERTS, HeldExperts, machine, on_meta
from transformers import PreTrainedConfig

from ktinject import rules
from ktinject.generation import own_caches
from ktinject.generation.cache import FixedCache
from ktinject.generation.cache_layers import kinds_of
from ktinject.operators import register_operator
from ktinject.operators.probes.answer import Memory
from ktinject.planning import memory
from ktinject.planning.devices import show_bytes
from ktinject.planning.plan import Plan
from ktinject.planning.planner import make

torch.set_num_threads(1)
# No kernel for its expert widths, no cache of keys at all, and a cache that leaves layers out.
UNKNOWN = {"nemotron_h", "kimi_linear", "minimax"}


@register_operator("sharing_experts")
class SharingExperts(HeldExperts):
    """Takes 600 bytes, or 200 where there are no more, and caches 5 values a token."""

    kv_values_per_token = 5

    def workspace(self) -> dict[tuple[str, str], tuple[int, int]]:
        return {("cpu", "a buffer"): (200, 600), ("elsewhere", "nothing"): (1, 1)}


def planned(operator: str = "held_experts", **machine_of: Any) -> Plan:
    ruleset = rules.read([{**EXPERTS, "replace": {"operator": operator}}])
    return make(on_meta(models.tiny("qwen3_moe")), ruleset, None, machine(**machine_of))


@pytest.mark.parametrize("family", models.AVAILABLE)
def test_the_cache_is_as_large_as_was_said(family: str) -> None:
    model = models.tiny(family)
    dtype = model.config.dtype
    kept = memory.cached_values(model)
    found = None if kept is None else [each.values for each in kept]
    assert model.config.dtype == dtype
    # Aria's experts were two grouped products at first, which count their tokens on the CPU.
    if family in UNKNOWN or (family == "aria_text" and hasattr(models.leaf(model)[1], "fc1")):
        assert found is None or family in UNKNOWN
        return
    ids = torch.randint(3, 60, (2, 20))
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    held = [memory._values(layer) / ids.numel() for layer in cache.layers]
    assert found == held and sum(held) > 0


def test_masks_of_flex_attention_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: Any, **__: Any) -> None:
        raise AssertionError("a mask is compiled")

    model = on_meta(models.tiny("qwen3_moe"))
    expected = memory.cached_values(model)
    model.config._attn_implementation = "flex_attention"
    monkeypatch.setattr("transformers.masking_utils.create_block_mask", create)
    assert memory.cached_values(model) == expected is not None
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_cuda_is_not_started_to_count_what_is_cached(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(True))
    monkeypatch.setattr(memory, "_ANSWERS", Memory())
    assert memory.cached_values(on_meta(models.tiny(family))) is not None and not asked


def test_each_distinct_model_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory.cached_values(on_meta(models.tiny("qwen3_moe")))
    asked: list[PreTrainedConfig] = []

    def meta_model(config: PreTrainedConfig, *_: Any) -> Any:
        asked.append(config)
        raise MemoryError

    monkeypatch.setattr(memory.models, "meta_model", meta_model)
    assert memory.cached_values(on_meta(models.tiny("qwen3_moe"))) == found and not asked
    other = on_meta(models.tiny("qwen3_moe", num_key_value_heads=1))
    for times in (1, 2):
        assert memory.cached_values(other) is None, "what may pass is not remembered"
        assert len(asked) == 2 * times, "shortened, and whole"
    monkeypatch.undo()
    halved = memory.cached_values(other)
    assert found is not None and halved == [memory.Kept(each.values // 2) for each in found]


def test_what_cannot_be_told_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cached_values", lambda model: None)
    plan = planned()
    assert plan.runtime_memory == {} and not plan.problems


def test_the_plan_shows_it_and_counts_the_largest_buffer_once() -> None:
    plain, plan = planned(), planned("sharing_experts", memory=2**30)
    assert len(plan.replacements) > 1
    found = plan.runtime_memory["cpu"]
    assert found.workspace == {"a buffer": 600} and found.kv_bytes_per_token == 5 * 4 * len(plan.replacements)
    assert (
        plain.runtime_memory["cpu"].workspace == {}
        and plain.runtime_memory["cpu"].kv_bytes_per_token > found.kv_bytes_per_token
    )
    for line in ("cpu: 600 B for a buffer", "of cache for a token, room for"):
        assert line in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["runtime_memory"]["cpu"]["workspace"] == {"a buffer": 600}


def test_room_is_what_weights_and_buffers_leave() -> None:
    weights = planned().to_load["cpu"]
    token = planned("sharing_experts", memory=2**30).runtime_memory["cpu"].kv_bytes_per_token
    for tokens in (256, 1024):
        room = weights + 600 + 2 * tokens * token
        plan = planned("sharing_experts", memory=room)
        assert plan.runtime_memory["cpu"].longest_request == tokens and not plan.problems
        below = planned("sharing_experts", memory=room - 1).runtime_memory["cpu"]
        # A short request has its cache before the buffer has what it wants.
        assert below.longest_request == max(256, tokens // 2)
        assert below.workspace == {"a buffer": 600 if tokens > 256 else 599}


def test_what_does_not_fit_is_refused() -> None:
    weights = planned().to_load["cpu"]
    token = planned("sharing_experts", memory=2**30).runtime_memory["cpu"].kv_bytes_per_token
    short = planned("sharing_experts", memory=weights + 300)
    assert short.runtime_memory["cpu"].workspace == {"a buffer": 200}
    assert short.problems == [
        f"cpu has 100 B left beside the weights, and the cache of a request takes {show_bytes(512 * token)}: no room "
        "for 256 tokens."
    ]
    none = planned("sharing_experts", memory=weights + 100)
    assert none.problems[0] == "cpu has 100 B left beside the weights, and a buffer need 200 B."
    assert planned("sharing_experts", memory=weights + 200 + 512 * token - 1).problems
    assert not planned("sharing_experts", memory=weights + 200 + 512 * token).problems


def test_layers_with_a_window_keep_no_more_than_it() -> None:
    size = memory.CacheSize.sum([memory.CacheSize({None: 8}), memory.CacheSize({128: 4, None: 1})])
    assert size.parts == {None: 9, 128: 4} and size.per_token == 13
    assert size.of(100) == 2 * 13 * 100 and size.of(1024) == 2 * (9 * 1024 + 4 * 128)
    for tokens in (256, 4096):
        assert memory._longest(size.of(tokens), size) == tokens
        assert memory._longest(size.of(tokens) - 1, size) == (tokens // 2 if tokens > 256 else 0)
    assert memory._longest(4 * 128 * 2, memory.CacheSize({128: 4})) == memory._LONGEST, "it grows no more"


# One family for each kind of state: gated delta, Mamba-2, Mamba-1, lightning attention, convolution, Kimi's delta.
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {},
    "minimax": {},
    "lfm2_moe": {},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text", "deepseek_v4", "afmoe", "qwen3_moe", *STATES])
def test_a_long_request_takes_what_its_cache_holds(family: str) -> None:
    """As decode steps hold it; what compressed keys are made of, which is of fixed size, is counted too wide."""
    if family not in models.AVAILABLE:
        pytest.skip(f"this transformers has no {family}")
    model, tokens = models.tiny(family, **STATES.get(family, {})), 2048
    sizes = memory.cache_sizes([], model, memory.cached_values(model))
    counted = memory.CacheSize.sum(sizes.values()).of(tokens) / 2
    with torch.inference_mode():
        cache = model(input_ids=torch.randint(3, 60, (1, 3)), use_cache=True).past_key_values
    held = FixedCache(own_caches.as_dynamic(model, cache), tokens, 1, model.device, kinds_of(model.config))
    taken = sum(
        tensor.numel() * tensor.element_size()
        for index in range(len(held.layers))
        for tensor in (*held.with_room(index), *_compressed(held.compressed[index]))
    )
    assert taken <= counted <= taken * (3 if family == "deepseek_v4" else 1)
    assert (family in STATES) == any(size.fixed for size in sizes.values())
    twice = memory.CacheSize.sum(sizes.values()).of(2 * tokens) / 2
    assert (twice - counted) / tokens < memory.CacheSize.sum(sizes.values()).per_token or family in (
        "qwen3_moe",
        *STATES,
    )


def _compressed(kept: Any) -> list[torch.Tensor]:
    parts = [] if kept is None else [*kept.parts.values()]
    return [held for part in parts for held in (part.kv, part.gate, part.keys, *part.overlap)]
