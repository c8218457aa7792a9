"""Which modules share a probe's answer, and which do not."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

from ktinject.operators.probes import moe_block, norm
from ktinject.operators.probes.answer import PassingRefusal, answered_once, key_of
from ktinject.support import Support


class Scaling(nn.Module):
    """A module whose arithmetic hangs on whatever a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)
        self.factor = 1.0
        self.limits = {"low": [1, 2]}
        self.config = SimpleNamespace(clamp=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def _method(module: Any) -> None:
    module.__class__ = type("Scaling", (Scaling,), {"scaled": lambda self, x: x})


CHANGES: dict[str, Any] = {
    "an attribute": lambda module: setattr(module, "factor", 2.0),
    "its type": lambda module: setattr(module, "factor", 1),
    "what lies within an attribute": lambda module: module.limits["low"].append(3),
    "a config's value": lambda module: setattr(module.config, "clamp", 2.0),
    "a forward of its own": lambda module: setattr(module, "forward", lambda x: x),
    "a function": lambda module: setattr(module, "act_fn", torch.nn.functional.silu),
    "a method": _method,
    "a shape": lambda module: setattr(module, "weight", nn.Parameter(torch.ones(4))),
    "a dtype": lambda module: module.inner.half(),
    "a child": lambda module: setattr(module, "inner", nn.Identity()),
    "a child's attribute": lambda module: setattr(module.inner, "in_features", 4),
    "a hook": lambda module: module.register_forward_hook(lambda *_: None),
    "a buffer": lambda module: module.register_buffer("offset", torch.zeros(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_module(change: str) -> None:
    module = Scaling()
    before = key_of(module)
    assert key_of(module) == before and hash(key_of(module)) == hash(before)
    CHANGES[change](module)
    assert key_of(module) != before


def test_a_method_replaced_in_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(Scaling())
    monkeypatch.setattr(Scaling, "scaled", lambda self, x: x + 1)
    assert key_of(Scaling()) != before


def test_values_and_devices_do_not_count() -> None:
    module, other = Scaling(), Scaling()
    other.weight.data.fill_(7.0)
    assert key_of(other) == key_of(module) == key_of(copy.deepcopy(module).to("meta"))


def test_layers_that_are_alike_are_run_once() -> None:
    runs: list[str] = []

    @answered_once
    def probe(module: nn.Module) -> int | Support:
        runs.append(type(module).__name__)
        return Support.no("it has no experts") if isinstance(module, nn.Linear) else len(runs)

    model: Any = models.tiny("qwen3_moe")
    layers = model.model.layers
    assert len(layers) > 1 and len({probe(layer.mlp) for layer in layers}) == 1
    assert len({probe(layer.input_layernorm) for layer in layers}) == 1
    assert all(probe(layer.self_attn.q_proj) == Support.no("it has no experts") for layer in layers)
    assert len(runs) == 3
    probe(models.tiny("qwen3_moe", intermediate_size=80, moe_intermediate_size=32).model.layers[0].mlp)
    assert len(runs) == 4


def _chained() -> Exception:
    error = ValueError("the cache could not be made")
    error.__cause__ = MemoryError()
    return error


PASSING = {
    "no memory": MemoryError(),
    "no memory on a GPU": torch.OutOfMemoryError("CUDA out of memory"),
    "no memory of torch's on the CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    "a deep stack": RecursionError("maximum recursion depth exceeded"),
    "too many files": OSError(24, "Too many open files"),
    "no memory, told as something else": _chained(),
}


raised: list[BaseException] = []  # not of a module or its class: a key would tell one from the other


@pytest.fixture(autouse=True)
def _nothing_raised() -> Iterator[None]:
    yield
    raised.clear()


class Failing(nn.Module):
    """An RMS norm that raises what is in `raised`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for error in raised:
            raise error
        return norm.formula(x, self.weight, 1e-6)


def failing() -> nn.Module:
    """Of a class of its own, of which nothing is remembered."""
    return type("Failing", (Failing,), {})()


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING)
def test_a_failure_that_may_pass_is_not_remembered(error: Exception) -> None:
    module = failing()
    raised.append(error)
    found = norm.probe(module)
    assert isinstance(found, PassingRefusal) and f"{type(error).__name__}: {error}" in found.reason
    raised.clear()
    assert norm.probe(module) == norm.RmsNormSpec(16, 1e-6, False, True)


def test_ctrl_c_is_not_remembered() -> None:
    module = failing()
    raised.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        norm.probe(module)
    raised.clear()
    assert isinstance(norm.probe(module), norm.RmsNormSpec)


def test_what_a_module_always_raises_is_remembered() -> None:
    module = failing()
    raised.append(ValueError("expected a gate"))
    found = norm.probe(module)
    assert isinstance(found, Support) and "ValueError: expected a gate" in found.reason
    raised.clear()
    assert norm.probe(module) is found


def test_a_passing_failure_of_a_child_is_not_remembered_of_its_block() -> None:
    block: Any = models.tiny("qwen3_moe").model.layers[0].mlp
    own = type(block.experts).forward

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        for error in raised:
            raise error
        found: Tensor = inspect.unwrap(own)(self, hidden_states, top_k_index, top_k_weights)
        return found

    block.experts.__class__ = type("Experts", (type(block.experts),), {"forward": forward})
    raised.append(MemoryError())
    assert isinstance(moe_block.probe(block), PassingRefusal)
    raised.clear()
    assert isinstance(moe_block.probe(block), moe_block.BlockSpec)
