"""Steps of one token in one native call: the same logits, to the bit, as with torch's operations around the layers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from test_generate import prompt
from test_native_decoder import logits_of, swapped
from torch import Tensor

from ktinject import _native
from ktinject.generation.cpu import native_rotation
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cpu.native_layers import NativeLayers

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def both_ways(
    monkeypatch: pytest.MonkeyPatch, family: str, weights: str = "bf16", **config: Any
) -> tuple[Tensor, Tensor, list[Any]]:
    """Logits of more steps than rotations are found for at once, behind padding; and the native steps of them."""
    model = swapped(family, weights, **config)
    native = NativeDecoder(model)
    logits_of(model, native, batch=1)
    assert native.is_proven, native.support.reason
    steps = native_rotation._AHEAD + 10
    ours, runner = logits_of(model, native, batch=1, steps=steps)
    made = [*native._token_steps.values()]
    native._token_steps.clear()
    monkeypatch.setattr(NativeLayers, "plain_head", lambda *_: None)
    around, other = logits_of(model, native, batch=1, steps=steps)
    for a, b in zip(runner.cache.layers, other.cache.layers):
        assert all(map(torch.equal, a, b))
    return ours, around, made


@pytest.mark.parametrize(
    "family, config",
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"rope_parameters": DYNAMIC, "max_position_embeddings": 24}),
        ("gpt_oss", {}),  # yarn, and windows
        ("deepseek_v3", {}),
    ],
)
def test_logits_are_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, family: str, config: dict[str, Any]
) -> None:
    ours, around, made = both_ways(monkeypatch, family, **config)
    assert torch.equal(ours, around)
    assert any(step is not None for step in made)


def test_logits_of_a_quantised_head_are_rounded_to_the_model_s_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, around, _ = both_ways(monkeypatch, "qwen3_moe", "int8")
    assert torch.equal(ours, around) and torch.equal(ours, ours.bfloat16().float())


def test_rotations_that_go_by_the_longest_text_are_found_one_by_one() -> None:
    configs: list[tuple[dict[str, Any], int]] = [
        ({}, native_rotation._AHEAD),
        ({"rope_parameters": DYNAMIC}, 1),
    ]
    for config, count in configs:
        rotations = NativeDecoder(swapped("qwen3_moe", **config))._layers.rotations
        cos, sin = rotations.ahead(torch.zeros(1, 1, 40).bfloat16(), 7)
        assert cos is not None and sin is not None and len(cos) == len(sin) == count


def test_what_is_made_of_embeddings_and_logits_keeps_torch_s_operations() -> None:
    model = swapped("qwen3_moe")
    layers = NativeDecoder(model)._layers
    assert layers.plain_head(model) is model.lm_head.native
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    assert layers.plain_head(model) is None
    handle.remove()
    layers._casts_for_head = True
    assert layers.plain_head(model) is None


def test_several_rows_keep_torch_s_operations() -> None:
    model = swapped("qwen3_moe")
    native = NativeDecoder(model)
    logits_of(model, native)
    assert native.is_proven
    _, runner = logits_of(model, native)
    assert runner.rows == 3 and [*native._token_steps.values()] == [None]


def step_of(**changes: Any) -> tuple[Any, dict[str, Any]]:
    model = swapped("qwen3_moe")
    native = NativeDecoder(model)
    _, runner = logits_of(model, native, batch=1)
    layers, view = native._layers, runner.cache.bucket(runner.cache.capacity)
    given = {
        "decoder": layers.decoder,
        "cache": native._cache_of(view),
        "norm": layers.norm,
        "head": model.lm_head.native,
        "embeddings": layers.embed.weight.detach(),
        "ids": runner.ids,
        "positions": runner.cache.positions,
        "mask": runner.cache.mask[0, 0, 0],
        "logits": runner.logits,
        "turns": True,
        **changes,
    }
    return _native.TokenStep(**given), {"model": model, "layers": layers, **given}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"embeddings": torch.zeros(9, 7).bfloat16()},
            "embeddings must be [vocabulary, 40] of the model's dtype",
        ),
        ({"embeddings": torch.zeros(9, 40)}, "embeddings must be [vocabulary, 40] of the model's dtype"),
        (
            {"logits": torch.zeros(1, 3)},
            "the output layer must take 40 values and give as many as there are logits",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        step_of(**changes)


def test_steps_without_a_rotation_a_place_or_a_token_are_refused() -> None:
    step, given = step_of()
    first = int(given["positions"])
    assert not step.run(15)  # nothing is known of the rotation
    cos, sin = given["layers"].rotations.ahead(given["embeddings"][:1, None], first)
    step.turn(cos, sin, first + 1)
    assert not step.run(15)
    step.turn(cos, sin, first)
    assert step.run(15)
    with pytest.raises(ValueError, match="found place 256 of a mask of 256"):
        step.run(256)
    with pytest.raises(ValueError, match="found 16 tokens of a prompt before place 15"):
        step.run(15, 16)
    given["ids"].fill_(10**6)
    with pytest.raises(
        ValueError, match=re.escape(f"token 1000000; the model embeds 0 to {len(given['embeddings']) - 1}")
    ):
        step.run(15)
    with pytest.raises(ValueError, match="cos and sin must be"):
        step.turn(cos, sin[:3], first)


def test_a_weight_that_is_changed_in_place_is_seen_in_the_next_step() -> None:
    model = swapped("qwen3_moe")
    request = {
        **prompt(batch=1, padding=0),
        "output_logits": True,
        "return_dict_in_generate": True,
        "do_sample": False,
    }
    first = model.generate(**request)
    assert model.ktinject_decoding.last == "native loop"
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
        model.model.rotary_emb.inv_freq.mul_(0.5)
    again = model.generate(**request)
    assert model.ktinject_decoding.last == "native loop"
    model.ktinject_decoding.release()
    model.ktinject_decoding._watch = None
    fresh = model.generate(**request)
    assert not torch.equal(first.logits[3], again.logits[3])
    assert all(map(torch.equal, again.logits, fresh.logits))
