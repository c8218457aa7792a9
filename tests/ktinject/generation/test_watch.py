"""What a user changes after the first request counts in the next one, and in the next step."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from test_generate import GatheredExperts, prompt, stock, swapped
from test_native_decoder import assert_same_tokens, sure
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.models.qwen3_moe import modeling_qwen3_moe

import ktinject
from ktinject.generation.cuda.fused import Fused
from ktinject.generation.watch import Watch
from ktinject.operators import register_operator
from ktinject.operators.cpu_experts import CpuExperts

torch.set_num_threads(1)
FAMILY = "qwen3_moe"
STEPS = prompt()["max_new_tokens"]


@pytest.fixture
def model() -> PreTrainedModel:
    """After a request whose steps ran natively."""
    found = sure(FAMILY)
    found.generate(**prompt(), eos_token_id=None)
    assert found.ktinject_decoding.last == "native loop"
    return found


class Calls:
    """A wrapper of a forward that counts, and turns what comes out of a layer."""

    def __init__(self, forward: Callable[..., Any], turn: float = 1.0) -> None:
        self.forward, self.turn, self.count = forward, turn, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        out = self.forward(*args, **kwargs)
        return out * self.turn if isinstance(out, Tensor) else out


class TestWhatAUserPutsInPlace:
    """Called in every step, and the reason is there to be read; when it is gone, steps are native again."""

    @pytest.mark.parametrize("path", ["", "model", "model.layers.1", "model.layers.0.mlp.experts", "lm_head"])
    def test_a_forward(self, model: PreTrainedModel, path: str) -> None:
        module = model.get_submodule(path)
        module.forward = calls = Calls(module.forward, turn=1.5)  # type: ignore[method-assign]
        ours = model.generate(**prompt(), eos_token_id=None)
        assert calls.count == STEPS
        assert torch.equal(ours, stock(model, **prompt(), eos_token_id=None))
        why = model.ktinject_decoding.reason
        assert why == f"{path or 'the model'} has a forward of its own"
        del module.forward
        assert_same_tokens(model, prompt())
        assert model.ktinject_decoding.last == "native loop"

    def test_accelerate_s_hooks(self, model: PreTrainedModel) -> None:
        hooks = pytest.importorskip("accelerate.hooks")

        class Steer(hooks.ModelHook):  # type: ignore[misc,name-defined]
            count = 0

            def post_forward(self, module: nn.Module, output: Tensor) -> Tensor:
                self.count += 1
                return output * 1.5

        hook = Steer()
        hooks.add_hook_to_module(model.model.layers[0], hook)
        ours = model.generate(**prompt(), eos_token_id=None)
        assert hook.count == STEPS
        assert torch.equal(ours, stock(model, **prompt(), eos_token_id=None))

    def test_a_forward_of_a_class(self, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(model.model.layers[0].self_attn)
        own, count = kind.forward, 0

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return own(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)
        model.generate(**prompt(), eos_token_id=None)
        assert count == STEPS * len(model.model.layers)
        assert "whose forward is from test_watch;" in model.ktinject_decoding.reason

    def test_a_class(self, model: PreTrainedModel) -> None:
        norm = model.model.norm
        calls = Calls(type(norm).forward)
        norm.__class__ = type("Counted", (type(norm),), {"forward": lambda self, x: calls(self, x)})
        model.generate(**prompt(), eos_token_id=None)
        assert calls.count == STEPS
        assert "model.norm is a Counted, whose forward is from test_watch;" in model.ktinject_decoding.reason

    def test_a_way_to_prepare_steps(self, model: PreTrainedModel) -> None:
        own = model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = calls = Calls(own)  # type: ignore[method-assign]
        model.generate(**prompt(), eos_token_id=None)
        assert calls.count == STEPS
        assert model.ktinject_decoding.reason.startswith("prepare_inputs_for_generation of the model was")
        model.prepare_inputs_for_generation = own  # type: ignore[method-assign]  # as PEFT puts it back
        model.generate(**prompt(), eos_token_id=None)
        assert model.ktinject_decoding.last == "native loop"

    def test_a_mode_that_sees_every_operation(self, model: PreTrainedModel) -> None:
        class Seen(TorchDispatchMode):
            count = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.count += func is torch.ops.aten.embedding.default
                return func(*args, **(kwargs or {}))

        with Seen() as seen:
            model.generate(**prompt(), eos_token_id=None)
        assert seen.count == STEPS


@register_operator("counted_experts")
class CountedExperts(CpuExperts):
    """A user's own, derived from ours."""

    def forward(self, *args: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args)


def test_an_operator_derived_from_ours_is_called_in_every_step() -> None:
    model = models.tiny(FAMILY).bfloat16()
    dense = {
        "name": "dense",
        "match": {"path": ".*", "class": "Linear"},
        "replace": {"operator": "cpu_linear"},
    }
    router = {"name": "router", "match": {"path": r".*\.gate"}, "replace": {"operator": "cpu_router"}}
    own = {"name": "own", "match": {"path": r".*\.experts"}, "replace": {"operator": "counted_experts"}}
    ktinject.optimize(model, [own, router, dense], devices=["cpu"], progress=False)
    for number in (1, 2):
        model.generate(**prompt(), eos_token_id=None)
        assert model.model.layers[0].mlp.experts.calls == number * STEPS
    assert "is a CountedExperts, whose forward is from test_watch;" in model.ktinject_decoding.reason


def scale(model: Any, _: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.01


def epsilon(model: Any, _: Any) -> None:
    model.model.layers[0].input_layernorm.epsilon = 0.3


def other_data(model: Any, _: Any) -> None:
    norm = model.model.layers[0].input_layernorm.weight
    norm.data = norm.data.flip(0).clone() * 3


def in_place(model: Any, _: Any) -> None:
    model.model.norm.weight.data.mul_(torch.linspace(0.2, 2, 40))


def router(model: Any, _: Any) -> None:
    layers = model.model.layers
    layers[0].mlp.gate, layers[1].mlp.gate = layers[1].mlp.gate, layers[0].mlp.gate


def exchanged(model: Any, _: Any) -> None:
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def rotation(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_qwen3_moe, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q, k))


@pytest.mark.parametrize("change", [scale, epsilon, other_data, in_place, router, exchanged, rotation])
def test_what_a_user_changes_is_computed_with(
    model: PreTrainedModel, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    change(model, monkeypatch)
    after = model.generate(**arguments)
    assert not torch.equal(before, after), "it makes a difference"
    assert_same_tokens(model, arguments)


class At:
    """A streamer that does something at its n-th token."""

    def __init__(self, number: int, do: Callable[[], object]) -> None:
        self.left, self.do = number, do

    def put(self, _: Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            self.do()

    def end(self) -> None:
        pass


def test_a_change_within_a_request_counts_from_the_next_step_on(model: PreTrainedModel) -> None:
    layer, arguments = model.model.layers[0], {**prompt(1, padding=0), "eos_token_id": None}
    calls = Calls(layer.forward, turn=1.5)

    def replace() -> None:
        layer.forward = calls

    ours = model.generate(**arguments, streamer=At(6, replace))  # the first is the prompt
    assert calls.count == STEPS - 5
    assert model.ktinject_decoding.reason == "model.layers.0.forward was changed"
    del layer.forward
    plain = model.generate(**arguments)
    prefix = arguments["input_ids"].shape[1] + 6
    assert torch.equal(ours[:, :prefix], plain[:, :prefix]) and not torch.equal(ours, plain)
    assert model.ktinject_decoding.last == "native loop"


def test_a_change_of_another_thread_counts_from_the_next_step_on(model: PreTrainedModel) -> None:
    layer = model.model.layers[0]
    started, replaced = threading.Event(), threading.Event()

    def pause() -> None:
        started.set()
        assert replaced.wait(600)

    def work() -> None:
        assert started.wait(600)
        layer.forward = Calls(layer.forward)
        replaced.set()

    thread = threading.Thread(target=work)
    thread.start()
    model.generate(**prompt(1, padding=0), eos_token_id=None, streamer=At(6, pause))
    thread.join()
    assert layer.forward.count == STEPS - 5


def test_another_attention_within_a_request_gets_its_own_masks(model: PreTrainedModel) -> None:
    arguments = {**prompt(2, padding=3), "eos_token_id": None}
    other = At(6, lambda: model.set_attn_implementation("eager"))
    ours = model.generate(**arguments, streamer=other)
    assert model.ktinject_decoding.reason.endswith("was changed")
    model.set_attn_implementation("sdpa")
    theirs = model.generate(**arguments)
    assert torch.equal(ours[:, :20], theirs[:, :20])  # a rounding may decide a later token


def test_the_stock_loop_s_replays_see_it_too(model: PreTrainedModel) -> None:
    arguments = {**prompt(), "eos_token_id": None, "max_time": 1e6}
    model.generate(**arguments)
    assert model.ktinject_decoding.last.startswith("native, stock loop")
    layer: Any = model.model.layers[0]
    layer.forward = Calls(layer.forward)
    model.generate(**arguments)
    assert layer.forward.count == STEPS
    assert model.ktinject_decoding.reason == "model.layers.0 has a forward of its own"


class TestWatch:
    def test_it_names_what_changed(self, model: PreTrainedModel) -> None:
        watch = Watch(model)
        assert watch.change() == ""
        layer: Any = model.model.layers[1]
        norm, kept = layer.input_layernorm, layer.input_layernorm.weight
        norm.weight = nn.Parameter(kept.detach().clone())
        assert watch.change() == "model.layers.1.input_layernorm._parameters.weight was changed"
        norm.weight = kept
        assert watch.change() == ""
        model.config.rope_parameters["rope_theta"] = 5.0
        assert watch.change() == "config.rope_parameters.rope_theta was changed"

    def test_what_held_nothing_and_holds_something_now_is_named(self, model: PreTrainedModel) -> None:
        watch, norm = Watch(model), model.model.layers[1].input_layernorm
        handle = norm.register_forward_hook(lambda *_: None)
        assert watch.change() == f"model.layers.1.input_layernorm._forward_hooks.{handle.id} was changed"
        handle.remove()
        assert watch.change() == ""
        norm.register_buffer("offset", torch.ones(1))
        assert watch.change() == "model.layers.1.input_layernorm._buffers.offset was changed"
        del norm.offset
        assert watch.change() == ""

    def test_the_same_in_another_order_is_the_same(self, model: PreTrainedModel) -> None:
        watch, module = Watch(model), model.model.layers[0]
        values = vars(module)
        for name in list(values)[:3]:
            values[name] = values.pop(name)
        assert watch.change() == ""
        module.something = 1
        assert watch.change() == "model.layers.0.something was changed"
        del module.something
        assert watch.change() == ""

    def test_what_a_request_changes_is_no_change(self, model: PreTrainedModel) -> None:
        watch = Watch(model)
        for case in ({"do_sample": True}, {"max_time": 1e6}, {"cache_implementation": "static"}):
            model.generate(**prompt(), **case)
        assert watch.change() == ""

    def test_it_keeps_no_model(self) -> None:
        model = sure(FAMILY)
        watch, gone = Watch(model), weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None and watch is not None


def test_the_hooks_of_an_output_that_was_asked_for_once_slow_nothing_down(model: PreTrainedModel) -> None:
    found = model.generate(**prompt(), output_hidden_states=True, return_dict_in_generate=True)
    assert len(found.hidden_states[0]) == len(model.model.layers) + 1
    assert any(module._forward_hooks for module in model.modules()), "transformers leaves them there"
    assert_same_tokens(model, prompt())
    assert model.ktinject_decoding.last == "native loop"
    again = model.generate(**prompt(), output_hidden_states=True, return_dict_in_generate=True)
    assert all(torch.equal(*pair) for pair in zip(found.hidden_states[-1], again.hidden_states[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
class TestOnAGpu:
    """The same of captured steps."""

    @pytest.fixture
    def captured(self, family: str) -> PreTrainedModel:
        found = swapped(family, device="cuda")
        found.generate(**prompt(device="cuda"), eos_token_id=None)
        assert found.ktinject_decoding.last == "graph loop", found.ktinject_decoding.reason
        return found

    def assert_as_stock(self, model: PreTrainedModel, how: str = "graph loop", **case: Any) -> None:
        arguments = {**prompt(device="cuda"), "eos_token_id": None, **case}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert model.ktinject_decoding.last.startswith(how), model.ktinject_decoding.reason

    @pytest.mark.parametrize("path", ["", "model.layers.1", "model.layers.1.mlp.experts", "lm_head"])
    def test_a_forward(self, captured: PreTrainedModel, path: str) -> None:
        module: Any = captured.get_submodule(path)
        module.forward = calls = Calls(module.forward, turn=1.5)
        captured.generate(**prompt(device="cuda"), eos_token_id=None)
        assert calls.count == STEPS
        assert captured.ktinject_decoding.reason == f"{path or 'the model'} has a forward of its own"
        self.assert_as_stock(captured, "eager loop")
        del module.forward
        self.assert_as_stock(captured)

    def test_a_forward_of_a_class(self, captured: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        kind: Any = type(captured.model.layers[0].self_attn)
        own = kind.forward
        monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
        self.assert_as_stock(captured, "eager loop")
        assert "whose forward is from test_watch;" in captured.ktinject_decoding.reason

    def test_an_attribute(self, captured: PreTrainedModel) -> None:
        before = captured.generate(**prompt(device="cuda"), eos_token_id=None)
        captured.model.layers[0].self_attn.scaling = 0.01
        assert not torch.equal(captured.generate(**prompt(device="cuda"), eos_token_id=None), before)
        self.assert_as_stock(captured)

    def test_weights(self, captured: PreTrainedModel) -> None:
        weight = captured.lm_head.weight
        weight.data = weight.data.flip(0).clone()
        self.assert_as_stock(captured)
        weight.data.mul_(torch.linspace(0.5, 2, len(weight), device="cuda")[:, None])
        self.assert_as_stock(captured)

    @pytest.mark.parametrize("case", [{}, {"max_time": 1e6}], ids=["own loop", "stock loop"])
    def test_within_a_request(self, captured: PreTrainedModel, case: dict[str, Any]) -> None:
        """Our own loop has queued one step by then."""
        layer: Any = captured.model.layers[0]
        calls = Calls(layer.forward, turn=1.5)

        def replace() -> None:
            layer.forward = calls

        arguments = {**prompt(1, padding=0, device="cuda"), "eos_token_id": None, **case}
        captured.generate(**arguments)
        captured.generate(**arguments, streamer=At(6, replace))
        # The stock loop's streamer hears the prompt first.
        assert calls.count in (STEPS - 6, STEPS - 5)
        assert captured.ktinject_decoding.reason == "model.layers.0.forward was changed"

    def test_outputs_that_were_asked_for_once(self, captured: PreTrainedModel) -> None:
        captured.generate(**prompt(device="cuda"), output_hidden_states=True, return_dict_in_generate=True)
        self.assert_as_stock(captured)

    def test_an_operator_derived_from_one_that_is_captured(self, family: str) -> None:
        model = swapped(family, "looking_twice_experts", device="cuda")
        self.assert_as_stock(model, "eager loop")
        assert "whose forward is from test_watch;" in model.ktinject_decoding.reason

    def test_the_first_answer_is_that_of_all_later_ones(self, family: str) -> None:
        for seed in range(3):
            model = swapped(family, device="cuda")
            ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(seed)).cuda()
            first = model.generate(ids, max_new_tokens=40, eos_token_id=None)
            for _ in range(2):
                assert torch.equal(model.generate(ids, max_new_tokens=40, eos_token_id=None), first)

    def test_an_interrupted_capture_leaves_nothing(
        self, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = swapped(family, device="cuda")
        names = {path: set(vars(module)) for path, module in model.named_modules()}
        comparing = Fused._comparing

        def interrupted(self: Fused, path: str, module: nn.Module, step: Any) -> Any:
            own = comparing(self, path, module, step)

            def forward(*args: Any, **kwargs: Any) -> Any:
                if path == "model.norm":
                    raise KeyboardInterrupt
                return own(*args, **kwargs)

            return forward

        with monkeypatch.context() as patch:
            patch.setattr(Fused, "_comparing", interrupted)
            model.ktinject_decoding.fused = Fused(model)
            with pytest.raises(KeyboardInterrupt):
                model.generate(**prompt(device="cuda"))
        assert {path: set(vars(module)) for path, module in model.named_modules()} == names
        model.ktinject_decoding.fused = Fused(model)
        model.ktinject_decoding.release()
        self.assert_as_stock(model)


@register_operator("looking_twice_experts")
class LookingTwiceExperts(GatheredExperts):
    """A user's own, derived from one that says that it can be captured."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights)
