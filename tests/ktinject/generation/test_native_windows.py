"""Native decode steps of layers with sliding windows and sinks: beyond the window, among other steps, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_native_decoder import (
    assert_as_exact_as_its_own,
    assert_same_but_for_roundings,
    assert_same_tokens,
    exact,
    swapped,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

import ktinject
from ktinject.generation import cache_layers, masks
from ktinject.generation.cache_layers import LayerKind
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.support import Support
from tests.models import tiny

torch.set_num_threads(1)
# Of which layers some have a window. All experts are taken, so that none can turn over.
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "mixtral": {},
    "qwen2_moe": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
}
CASES = [("gpt_oss", 3), ("gpt_oss", 8), ("gpt_oss", 16), ("mixtral", 8), ("qwen2_moe", 16)]


def windows_of(family: str, window: int) -> dict[str, Any]:
    return {"sliding_window": window, "num_experts_per_tok": 6, **FAMILIES[family]}


def model_of(family: str, window: int) -> PreTrainedModel:
    """With weights as they are: of gpt-oss' twice as large, steps in bf16 differ by a fifth from exact ones."""
    model = tiny(family, **windows_of(family, window)).bfloat16()
    return ktinject.optimize(model, "auto", devices=["cpu"], progress=False)


def assert_native(model: PreTrainedModel) -> None:
    decoding = model.ktinject_decoding
    assert decoding.last in ("native loop", "native, stock loop: MaxTimeCriteria"), decoding.reason
    assert decoding.native is not None and decoding.native.is_proven and not decoding.reason


@pytest.mark.parametrize("family, window", [("gpt_oss", 2), ("gpt_oss", 6), *((f, 12) for f in FAMILIES)])
def test_steps_are_as_exact_as_the_model_s_own(family: str, window: int) -> None:
    changes = windows_of(family, window)
    assert_as_exact_as_its_own(swapped(family, **changes), exact(family, **changes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    changes = windows_of("gpt_oss", 12)
    assert_as_exact_as_its_own(swapped("gpt_oss", weights, **changes), exact("gpt_oss", **changes), 6e-2)


@pytest.mark.parametrize(
    "family, window, case",
    [
        *((*case, {}) for case in CASES),
        ("gpt_oss", 3, {"cache_implementation": "static"}),
        ("gpt_oss", 16, {"cache_implementation": "static"}),
        ("mixtral", 8, {"max_time": 1e6}),
        ("gpt_oss", 8, {"max_time": 1e6, "cache_implementation": "static"}),
        ("qwen2_moe", 16, {"max_time": 1e6, "cache_implementation": "static"}),
    ],
    ids=str,
)
def test_tokens_are_the_stock_loop_s(family: str, window: int, case: dict[str, Any]) -> None:
    """Prompts of 9 tokens and 24 more: longer than the window, or than it becomes on the way."""
    model = model_of(family, window)
    for batch in (1, 3):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, **case})
        assert_native(model)


def test_a_window_longer_than_the_cache_is_at_first() -> None:
    model = model_of("gpt_oss", 300)
    assert_same_tokens(
        model, {**prompt(2), "cache_implementation": "static"}
    )  # which is shorter than the window
    ids = torch.randint(3, 90, (2, 250), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    long = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 70, "eos_token_id": None}
    assert_same_tokens(model, long)
    assert_native(model)
    [runner] = model.ktinject_decoding.runners.values()
    assert sorted({keys.shape[2] for keys, _ in runner.cache.layers} | {runner.cache.capacity}) == [300, 512]


class EverySecond:
    """Changes the model after each token, so that native steps take turns with the model's own."""

    def __init__(self, change: Callable[[bool], None]) -> None:
        self.change, self.tokens = change, 0

    def put(self, _: Tensor) -> None:
        self.tokens += 1
        self.change(self.tokens % 2 == 1)

    def end(self) -> None:
        self.change(False)


def taking_turns(model: PreTrainedModel) -> tuple[EverySecond, list[int]]:
    """A streamer that hooks into the model and out again, and how many steps the hook saw."""
    layer, calls = model.get_submodule("model.layers.1"), [0]

    def change(hooks: bool) -> None:
        vars(layer).pop("forward", None)
        if hooks:
            layer.forward = forward

    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return own(*args, **kwargs)

    return EverySecond(change), calls


def assert_steps_take_turns(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Every second step of a request for 24 tokens is the model's own."""
    streamer, calls = taking_turns(model)
    found = model.generate(**arguments, streamer=streamer)
    assert calls[0] == 12
    assert_same_but_for_roundings(model, arguments, found, stock(model, **arguments))


def assert_lookup_changes_no_token(model: PreTrainedModel) -> None:
    """Of a text that repeats itself, where candidates are tried and some taken back."""
    ids = torch.tensor([[5, 6, 7, 8] * 5])
    arguments = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "eos_token_id": None,
    }  # fmt: skip
    want = model.generate(**arguments)
    found = model.generate(**arguments, prompt_lookup_num_tokens=3)
    assert "lookup" in model.ktinject_decoding.last and not model.ktinject_decoding.reason
    assert torch.equal(found, want)


@pytest.mark.parametrize("family, window", CASES[1:])
def test_steps_take_turns_with_the_model_s_own(family: str, window: int) -> None:
    model = model_of(family, window)
    arguments = {**prompt(1, padding=2), "eos_token_id": None}
    assert_same_tokens(model, arguments)
    assert_native(model)
    assert_steps_take_turns(model, arguments)


class TestWhatChanges:
    def test_sinks(self) -> None:
        model = model_of("gpt_oss", 8)
        before = model.generate(**prompt(), eos_token_id=None)
        attention: Any = model.model.layers[1].self_attn
        with torch.no_grad():
            attention.sinks.add_(6.0)  # nearly all of the weight
        changed = model.generate(**prompt(), eos_token_id=None)
        assert not torch.equal(before, changed)
        assert_same_tokens(model, {**prompt(), "eos_token_id": None})
        assert_native(model)
        attention.sinks = nn.Parameter(attention.sinks.detach() - 6.0)
        assert_same_tokens(model, {**prompt(), "eos_token_id": None})
        assert_native(model)

    def test_the_window(self) -> None:
        model = model_of("gpt_oss", 16)
        before = model.generate(**prompt(), eos_token_id=None)
        model.config.sliding_window = 4
        assert not torch.equal(before, model.generate(**prompt(), eos_token_id=None))
        assert_same_tokens(model, {**prompt(), "eos_token_id": None})
        assert_native(model)

    def test_the_kinds_of_layers(self) -> None:
        model = model_of("gpt_oss", 4)
        before = model.generate(**prompt(), eos_token_id=None)
        model.config.layer_types.reverse()
        assert not torch.equal(before, model.generate(**prompt(), eos_token_id=None))
        assert_same_tokens(model, {**prompt(), "eos_token_id": None})
        assert_native(model)

    def test_how_attention_computes(self) -> None:
        model = model_of("gpt_oss", 8)
        model.generate(**prompt(), eos_token_id=None)
        attention: Any = model.model.layers[0].self_attn
        attention.scaling = 0.9
        assert_same_tokens(model, {**prompt(), "eos_token_id": None})
        assert_native(model)


def odd(module: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model whose layers get changed masks where the tokens before are more than a prompt of 9."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [*self.layers]
        for layer in layers:
            own = layer.forward
            vars(layer)["forward"] = lambda *args, own=own, **kwargs: own(
                *args, **{**kwargs, "attention_mask": changed(kwargs["attention_mask"])}
            )
        try:
            return type(self).__mro__[1].forward(self, *args, **kwargs)
        finally:
            for layer in layers:
                del vars(layer)["forward"]

    def changed(mask: Any) -> Any:
        return change(mask) if mask is not None and mask.shape[-1] > 10 else mask

    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})
    return module


def without_oldest(mask: Tensor) -> Tensor:
    """As of a window that is shorter by one token."""
    mask = mask.clone()
    mask[..., 0] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask


class TestMasks:
    """Seen at a position beyond all windows, where no request has been."""

    @pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", *FAMILIES])
    def test_of_families(self, family: str) -> None:
        model = tiny(family, **windows_of(family, 20) if family in FAMILIES else {})
        kinds = cache_layers.kinds_of(model.config)
        assert isinstance(masks.of_model(model, kinds), masks.Masks)
        has_windows = LayerKind(20) in kinds
        assert has_windows == (family in FAMILIES)
        changed = [LayerKind(21 if kind.window == 20 else 20) for kind in kinds]
        refused = masks.of_model(model, changed)
        # Without windows in the config, masks are made for what the cache's layers hold.
        assert isinstance(refused, Support) == has_windows
        assert not has_windows or "its mask shows something else than a window of" in refused.reason

    def test_of_chunks(self) -> None:
        model = tiny(
            "llama4_text", attention_chunk_size=20, layer_types=["chunked_attention", "full_attention"]
        )
        chunks, full = kinds = cache_layers.kinds_of(model.config)
        assert kinds == [LayerKind(20, is_chunked=True), LayerKind()]
        assert isinstance(masks.of_model(model, kinds), masks.Masks)
        for other, what in ((LayerKind(20), "window"), (LayerKind(19, is_chunked=True), "chunk")):
            refused = masks.of_model(model, [other, full])
            assert isinstance(refused, Support)
            assert refused.reason.startswith(f"layer 0: its mask shows something else than a {what} of")
        refused = masks.of_model(model, [chunks, LayerKind(20)])
        assert isinstance(refused, Support) and refused.reason.endswith("of as many tokens")

    def test_a_model_with_another_mask_is_refused(self) -> None:
        model = tiny("gpt_oss", sliding_window=16)
        odd(model.model, without_oldest)
        refused = masks.of_model(model)
        assert isinstance(refused, Support)
        assert refused.reason == "layer 0: its mask shows something else than a window of 16 tokens"

    def test_and_keeps_its_own_steps(self) -> None:
        model = model_of("gpt_oss", 16)
        odd(model.model, without_oldest)
        assert "its mask shows something else" in NativeDecoder(model).support.reason
        # In fp32: roundings of the prompt's attention, which is not transformers' own, turn choices of experts over.
        model = tiny("gpt_oss", **windows_of("gpt_oss", 16))
        ktinject.optimize(model, "auto", devices=["cpu"], progress=False, variables={"experts": "bf16"})
        odd(model.model, without_oldest)
        assert_same_tokens(model, {**prompt(), "eos_token_id": None})
        assert model.ktinject_decoding.last == "eager loop"

    def test_what_a_mask_hides_in_a_ring_is_hidden(self) -> None:
        """Padding lies in the window at first, and wanders out of it."""
        model = model_of("gpt_oss", 12)
        for padding in (1, 5, 8):
            assert_same_tokens(model, {**prompt(2, padding=padding), "eos_token_id": None})
        assert_native(model)
