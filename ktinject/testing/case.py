"""One small case for an operator: a module that it replaces, with inputs, and the operator as the engine builds it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.machine import Machine, detect
from ktinject.operators import Operator

# What a module's forward takes, by name; the first is the hidden states, [..., width].
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """How one operator is tried.

    operator          the class
    make              makes a module that it replaces, with weights
    inputs            the number of tokens → what the module's forward takes; first the hidden states [..., width]
    arguments         of its config
    device            where it computes
    tolerance         ‖operator - module‖ / ‖module‖
    weight_tolerance  ‖unpacked - weight‖ / ‖weight‖, the most for any weight
    against_unpacked  the module gets the weights that the operator unpacks before both are compared: for formats that
                      round coarsely
    lossless          what `is_lossless` says of a bf16 module
    delegate          name of an operator inside that answers for weights and inputs; its errors have that name
    kept_first        what the operator keeps of the module sees the inputs first, and refuses them
    takes_none        a call with no tokens is allowed
    """

    operator: type[Operator]
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    tolerance: float = 1e-2
    weight_tolerance: float = 4e-3
    against_unpacked: bool = False
    lossless: bool | None = None
    delegate: str = ""
    kept_first: bool = False
    takes_none: bool = True

    @property
    def name(self) -> str:
        return self.operator.name

    def config(self, module: nn.Module) -> tuple[type[Operator], Any]:
        """The operator that serves the module, with its config, as the planner settles them."""
        given: Any = self.operator.Config(**{"device": self.device, **self.arguments})
        resolved = self.operator.resolve(module, given)
        must(
            resolved is not None, "resolve leaves the module of the case as it is; there is nothing to check"
        )
        assert resolved is not None
        return resolved

    def built(self, module: nn.Module) -> Operator:
        """The operator for the module, without memory, as the engine builds it."""
        operator, config = self.config(module)
        reason = operator.supports(module, config, machine())
        must(reason is None, f"supports refuses the module of the case: {reason}")
        placement = operator.plan_placement(nn.Module(), {"it": (module, config)}, {}).get("it")
        must(not isinstance(placement, str), f"plan_placement refuses the module of the case: {placement}")
        made = operator.build(module, config)
        if placement is not None and not isinstance(placement, str):
            made.place(placement)
        return made.eval()

    def filled(self, module: nn.Module) -> Operator:
        """The operator with the module's weights."""
        operator = self.built(module)
        operator.allocate()
        for key, tensor in taken(operator, module).items():
            operator.load(key, tensor, None, None)
        operator.finish()
        operator.stand_for(module)
        return operator

    def arguments_of_call(self, tokens: int) -> Inputs:
        """The inputs, on the operator's device."""
        moved: Inputs = _on(self.device, self.inputs(tokens))
        return moved

    def reference(self, operator: Operator, module: nn.Module) -> nn.Module:
        """What the operator's results are compared with."""
        return (unpacked(operator, module) if self.against_unpacked else module).to(self.device)

    @staticmethod
    def unpacks(operator: Operator) -> bool:
        """Whether the operator gives its weights back; one that takes none has none to give."""
        return bool(operator.parameter_shapes()) and type(operator).unpack is not Operator.unpack

    def refused(self, what: str, call: Callable[..., Any], *arguments: Any) -> str:
        """The message of the OperatorError that a call raises, which names the operator."""
        try:
            call(*arguments)
        except OperatorError as error:
            message = str(error)
        else:
            raise AssertionError(f"{what} raised no OperatorError")
        spoken = [name for name in (self.name, self.delegate) if name]
        must(
            any(re.search(rf"\b{re.escape(name)}\b", message) for name in spoken),
            f"{what}: the message does not name the operator: {message!r}",
        )
        return message


def must(holds: object, sentence: str) -> None:
    """Raise AssertionError with the sentence, which says what is wrong, unless it holds; also under `python -O`."""
    if not holds:
        raise AssertionError(sentence)


def machine() -> Machine:
    """This one, with the CUDA parts whether the build has them or not: plans are made without."""
    return dataclasses.replace(detect(), cuda_built=True)


def taken(operator: Operator, module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters that the operator loads."""
    return {name: module.get_parameter(name).detach().cpu() for name in operator.parameter_shapes()}


def unpacked(operator: Operator, module: nn.Module) -> nn.Module:
    """The module with the weights that the operator has made of its own."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for key in operator.parameter_shapes():
            other.get_parameter(key).copy_(operator.unpack(key))
    return other


def outputs(found: Any) -> list[Tensor]:
    """The floating-point ones: ids of experts may turn over where two are nearly equal."""
    parts = [found] if isinstance(found, Tensor) else [part for part in found if isinstance(part, Tensor)]
    return [part for part in parts if part.is_floating_point()]


def call(module: nn.Module, arguments: Inputs) -> list[Tensor]:
    """By place for the first argument, whose name differs, and by name for the rest."""
    first, *others = arguments
    with torch.no_grad():
        return outputs(module(arguments[first], **{name: arguments[name] for name in others}))


def relative_error(found: Tensor, want: Tensor) -> float:
    """‖found - want‖ / ‖want‖ in fp64; 0 for two zeros, and infinity for another shape."""
    if found.shape != want.shape:
        return float("inf")
    difference = (found.double() - want.double()).norm().item()
    return difference / want.double().norm().item() if difference else 0.0


def _on(device: str, given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, dict):
        return {name: _on(device, value) for name, value in given.items()}
    return tuple(_on(device, value) for value in given) if isinstance(given, tuple) else given
