"""`ktinject.testing.check_operator`: users' operators are held to what ours keep, and each fault has a sentence."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators import REGISTRY, Operator, register_operator
from ktinject.testing import check_operator


class Scale(nn.Module):
    """x · weight · factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.factor = 1.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * self.weight * self.factor


class Kept(Operator):
    """The three methods that an operator without weights of its own needs."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight = module.weight

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Any) -> str | None:
        return None if isinstance(module, Scale) else "it is no Scale"

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls(module)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states * self.weight


class Held(Operator):
    """One that takes the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Tensor | None = None

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Any) -> str | None:
        return None if isinstance(module, Scale) else "it is no Scale"

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls()

    def describe(self) -> dict[str, Any]:
        return {"kernel": "torch", "weights": "fp32"}

    def footprint(self) -> dict[str, int]:
        return {"cpu": 32}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (8,)}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        if name != "weight" or tensor.shape != (8,) or not tensor.is_floating_point():
            raise OperatorError(f"{self.name}: {name}: found {tensor.dtype} {list(tensor.shape)}.")
        self.held = tensor.float().clone()

    def finish(self) -> None:
        if self.held is None:
            raise OperatorError(f"{self.name}: never loaded: weight.")

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        if name != "weight" or self.held is None:
            raise OperatorError(f"{self.name}: found parameter {name}; allowed: weight.")
        return self.held

    def forward(self, hidden_states: Tensor) -> Tensor:
        assert self.held is not None
        if hidden_states.shape[-1] != 8:
            raise OperatorError(f"{self.name}: found width {hidden_states.shape[-1]}; allowed: 8.")
        return (hidden_states * self.held).to(hidden_states.dtype)


@pytest.fixture(autouse=True)
def restored() -> Any:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def inputs(tokens: int) -> dict[str, Any]:
    return {"hidden_states": torch.randn(tokens, 8, generator=torch.Generator().manual_seed(tokens))}


@pytest.mark.parametrize("base", [Kept, Held])
def test_operators_that_keep_the_contract_pass(base: type[Operator]) -> None:
    check_operator(register_operator("changed")(base), Scale, inputs)


def test_an_operator_without_weights_needs_three_methods() -> None:
    for name in ("supports", "build", "forward"):
        left = {key: value for key, value in vars(Kept).items() if key not in (name, "name")}
        with pytest.raises(OperatorError, match=f"does not define {name}"):
            register_operator("changed")(type("Left", (Operator,), left))
    made = register_operator("changed")(Kept).build(Scale(), None)
    assert made.describe() == {"kernel": "changed", "weights": "kept"}
    assert made.footprint() == {} == made.parameter_shapes() and made.is_lossless()
    assert not made.takes_codes("weight")


def test_an_operator_with_weights_says_what_they_take() -> None:
    for names in (("footprint",), ("load", "describe")):
        left = {key: value for key, value in vars(Held).items() if key not in (*names, "name")}
        with pytest.raises(
            OperatorError, match=rf"\(parameter_shapes\) and does not define {', '.join(names)}"
        ):
            register_operator("changed")(type("Left", (Operator,), left))


def _raises(self: Any, hidden_states: Tensor) -> Tensor:
    raise ZeroDivisionError("at once")


def _writes(self: Any, hidden_states: Tensor) -> Tensor:
    return hidden_states.mul_(self.weight)


FAULTS: list[tuple[type[Operator], dict[str, Any], str]] = [
    (Kept, {"supports": classmethod(lambda *_: None)}, "supports takes a module that has nothing"),
    (Kept, {"supports": classmethod(lambda c, m, *_: None if type(m) is Scale else ".")}, "without its full stop"),
    (Kept, {"build": classmethod(lambda c, m, _: (m.weight.data.mul_(2), c(m))[1])}, "build changes a weight"),
    (Kept, {"forward": lambda self, hidden_states: hidden_states + 1}, "does: forward of 1"),
    (Kept, {"forward": _raises}, "ZeroDivisionError: at once"),
    (Kept, {"forward": _writes}, "changes its input hidden_states"),
    (Kept, {"forward": lambda self, hidden_states: (hidden_states * self.weight).detach()}, "require no grad"),
    (Kept, {"describe": lambda self: {"kernel": ""}}, "tells_the_plan: describe()"),
    (Kept, {"__init__": lambda self, _: Operator.__init__(self)}, "leaves weight to tr"),
    (Held, {"footprint": lambda self: {"cpu": 1}}, "less than 4 bits each"),
    (Held, {"footprint": lambda self: {"cuda:3": 32}}, "names cuda:3"),
    (Held, {"parameter_shapes": lambda self: {"weight": (9,)}}, "the module has {'weight': (8,)}"),
    (Held, {"load": lambda self, n, t, e, p: setattr(self, "held", t.float())}, "raised no OperatorError"),
    (Held, {"finish": lambda self: setattr(self, "_done", True)}, "before any load raised no"),
    (Held, {"unpack": lambda self, name, expert=None: self.held + 1}, "unpack('weight') is off by"),
    (Held, {"is_lossless": lambda self: True, "unpack": lambda self, n, e=None: self.held * 1.003}, "bit_by_bit"),
    (Held, {"forward": lambda self, hidden_states: hidden_states * self.held}, "keeps_the_dtype: forward of"),
    (Held, {"__getattr__": nn.Module.__getattr__}, "factor of the module cannot be read"),
    (Kept, {"factor": 2.0}, "factor is 2.0; the module has 1.0"),
    (Kept, {"__setattr__": nn.Module.__setattr__}, "factor was set to 0.6 without a word, and what it"),
    (Held, {"follow": lambda self, module, name: None}, "factor was set to 0.6 without a word, and what it"),
    (Held, {"load_whole": lambda self, name, tensor: None}, "weight was halved, and is 1 off that"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "says"), FAULTS, ids=[says for *_, says in FAULTS])
def test_each_fault_is_named(base: type[Operator], changes: dict[str, Any], says: str) -> None:
    cls = register_operator("changed")(type("Changed", (base,), dict(changes)))
    with pytest.raises(AssertionError) as caught:
        check_operator(cls, Scale, inputs)
    assert str(caught.value).startswith("changed does not keep the contract of an operator:\n  ")
    assert says in str(caught.value)


def test_what_is_not_registered_is_said() -> None:
    with pytest.raises(AssertionError, match="Held is not registered"):
        check_operator(type("Held", (Held,), {"name": "nothing"}), Scale, inputs)
