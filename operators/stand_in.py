"""How an operator answers for the module that it replaced, to who reads and sets attributes and weights of it.

Scripts that edit a model find under the module's name an operator of another class. So each public attribute of the
module can be read, and is what the module had. To set one is followed, where the operator can compute what the module
would; else it is refused by name. A weight that the operator holds is a tensor (held.py): edits of it are packed.

The operator keeps the module for that without its values: a twin on meta, with which a probe finds anew what it
computes when an attribute was set.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError, shown
from ktinject.operators.held import Held
from ktinject.operators.probes import twin

_OF_ALL = frozenset(vars(nn.Module()))
_TENSORS = ("_parameters", "_buffers", "_modules")
_REMEDY = "Set it on the model before ktinject.optimize, or keep the module by a rule with `replace: keep`."


class StandIn(nn.Module):
    """What all operators have of that."""

    # Outside of the instance's dict: it decides nothing that is computed, and tells no two operators apart.
    __slots__ = ("_replaced",)

    _writes = 0

    name: ClassVar[Any]
    changing: ClassVar[Any]

    def stand_for(self, module: nn.Module) -> None:
        """From now on, answer for a module. Called when the operator is filled and takes the module's place."""
        object.__setattr__(self, "_replaced", twin.on_meta(module))
        for name in module._modules:  # in the module's order, which that of parameters follows
            if name in self._modules:
                self._modules[name] = self._modules.pop(name)

    @property
    def replaced(self) -> nn.Module | None:
        """The module that the operator stands for, without its values; None before it does."""
        try:
            found: nn.Module = object.__getattribute__(self, "_replaced")
        except AttributeError:
            return None
        return found

    def follow(self, module: nn.Module, name: str) -> str | None:
        """Compute from now on what `module` does, of which the public attribute `name` was set.

        module   what the operator stands for, without values; nothing else of it is new
        Returns  why it cannot, as `supports` words it; None: it does so
        """
        return "what it computes was settled when the model was swapped"

    def answers_for(self) -> frozenset[str]:
        """Names of the module's public attributes, weights and children that are not here as they were there."""
        module = self.replaced
        if module is None:
            return frozenset()
        found = {name for name in vars(module) if name not in _OF_ALL and not name.startswith("_")}
        found |= {name for kind in _TENSORS for name in vars(module)[kind]}
        own = {name for kind in _TENSORS for name in vars(self)[kind]}
        # A held weight that the operator keeps under its name is set by itself.
        own |= {name for name in module._parameters if name in vars(self)}
        return frozenset(found - own - self.changing)

    # Weights

    def held_parameters(self) -> dict[str, Held]:
        """The weights that it holds of the module, by their names there."""
        module = self.replaced
        if module is None:
            return {}
        return {name: self.held_weight(name) for name in self.parameter_shapes()}

    def held_weight(self, name: str) -> Held:
        """The weight `name` as a tensor. Nothing is unpacked."""
        module = self.replaced
        assert module is not None
        parameter = module.get_parameter(name)
        return Held.of(self, name, parameter.shape, parameter.dtype, "cpu")

    def unpacked(self, name: str) -> Tensor:
        """A copy of the weight `name` in the module's dtype, on its device."""
        held = self.held_weight(name)
        whole = torch.empty(held.shape, dtype=held.dtype, device=held.device)
        if not self.per_expert:
            return whole.copy_(self.unpack(name))
        for expert in range(len(whole)):
            whole[expert].copy_(self.unpack(name, expert))
        return whole

    def unwritable(self) -> str | None:
        """Why the weights cannot be written any more, as `supports` words it; None: they can."""
        return None

    def write(self, name: str, tensor: Tensor) -> None:
        """Replace the weight `name`. Raises OperatorError for another shape or dtype, or if it cannot be written."""
        self.check_write(name, tensor)
        weights = self.describe()["weights"]
        if not weights.startswith("bf16") and not name.endswith("bias"):
            _warn_rounded(self.name, weights)
        self._writes += 1  # what was recorded may have a copy
        with torch.no_grad():
            self.load_whole(name, (tensor.plain() if isinstance(tensor, Held) else tensor).detach())

    def load_whole(self, name: str, tensor: Tensor) -> None:
        """Load a whole weight anew."""
        if self.per_expert:
            rounded = not self.describe()["weights"].startswith("bf16")
            if rounded and not bool(
                torch.isfinite(tensor).all()
            ):  # else those before it would be new already
                raise OperatorError(
                    f"{self.name}: {name}: a value is not finite; it cannot be quantised. {_EDIT}"
                )
            for expert in range(len(tensor)):
                self.load(name, tensor[expert].cpu(), expert, None)
        else:
            self.load(name, tensor.cpu(), None, None)

    def check_write(self, name: str, tensor: Any) -> None:
        """Raises OperatorError if `write` would, but for values that no format has, such as NaN."""
        expected = self.parameter_shapes().get(name)
        if expected is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else shown(tensor)
            allowed = "nothing" if expected is None else f"a float tensor {list(expected)}"
            raise OperatorError(f"{self.name}: {name}: found {found}; allowed: {allowed}. {_EDIT}")
        if tensor.is_meta:
            raise OperatorError(f"{self.name}: {name}: found a tensor on meta, which has no values. {_EDIT}")
        if tuple(tensor.shape) != tuple(expected):
            raise OperatorError(
                f"{self.name}: {name}: found shape {list(tensor.shape)}; expected {list(expected)}. {_EDIT}"
            )
        if why := self.unwritable():
            raise OperatorError(f"{self.name}: {name} cannot be written: {why}. {_EDIT}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Of half(), float(), to(dtype): weights that it holds count as of the new dtype; what holds them stays."""
        found = super()._apply(fn, recurse)
        module = self.replaced
        for part in () if module is None else module.modules():
            for name, parameter in part._parameters.items():
                dtype = (
                    None
                    if parameter is None
                    else fn(torch.empty(0, dtype=parameter.dtype, device="cpu")).dtype
                )
                if parameter is not None and dtype != parameter.dtype:
                    empty = torch.empty(parameter.shape, dtype=dtype, device="meta")
                    part._parameters[name] = nn.Parameter(empty, False)
        return found

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """The module that it stands for, with its weights as parameters, as PEFT needs it to train one by itself."""
        module = self.replaced
        if module is None:
            raise OperatorError(
                f"{self.name}: it is not in a model, and cannot be copied; its weights live outside of PyTorch. "
                "Build a second model on meta and call ktinject.optimize on it."
            )
        found = self._copied(module, self, "", memo)
        memo[id(self)] = found
        return found.train(self.training)

    def _copied(self, module: nn.Module, own: Any, prefix: str, memo: dict[int, Any]) -> nn.Module:
        """own: what the operator keeps of the module, or None."""
        found = twin.of(module, hooks=False)
        shapes = self.parameter_shapes()
        for name, parameter in module._parameters.items():
            if prefix + name in shapes:
                found._parameters[name] = nn.Parameter(self.unpacked(prefix + name))
            elif parameter is not None:
                found._parameters[name] = copy.deepcopy(own._parameters[name], memo)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                found._buffers[name] = copy.deepcopy(own._buffers[name], memo)
        for name, child in module._modules.items():
            kept = None if own is None else own._modules.get(name)
            inside = f"{prefix}{name}."
            if child is not None and (kept is None or any(key.startswith(inside) for key in shapes)):
                found._modules[name] = self._copied(child, None, inside, memo)
            else:
                found._modules[name] = copy.deepcopy(kept, memo)
        return found

    # Attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = None if name.startswith("_") else self.replaced
            if module is None:
                raise
            if name in module._parameters:
                shapes = self.parameter_shapes()
                return self.held_weight(name) if name in shapes else module._parameters[name]
            for kind in ("_buffers", "_modules"):
                if name in vars(module)[kind]:
                    return vars(module)[kind][name]
            if name in vars(module):
                return vars(module)[name]
            found = getattr(type(module), name, None)
            if found is None or callable(found):
                raise
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or self.replaced is None or name not in self.answers_for():
            super().__setattr__(name, value)
        else:
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        module = self.replaced
        assert module is not None
        if name in self.parameter_shapes():
            if not (isinstance(value, Held) and value.is_of(self, name)):
                self.write(name, value)
            return
        kind = next((kind for kind in _TENSORS if name in vars(module)[kind]), None)
        values: dict[str, Any] = vars(module) if kind is None else vars(module)[kind]
        before = values[name]
        if value is before or _are_same(value, before):
            return
        if kind == "_modules" and not isinstance(value, nn.Module):
            why: str | None = f"a module takes its place, found {shown(value)}"
        elif kind == "_parameters" or kind == "_buffers":
            why = "it is a tensor that the operator does not have"
        else:
            values[name] = value
            try:
                why = self.follow(module, name)
            except BaseException:
                values[name] = before
                raise
            if why is not None:
                values[name] = before
        if why is not None:
            raise OperatorError(
                f"{self.name}: {name} cannot be set to {shown(value)} after the swap: {why}. {_REMEDY}"
            )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self.replaced is not None and name not in self._parameters:
            raise OperatorError(
                f"{self.name}: {name} cannot become a parameter of it: it holds weights packed, and none of torch's "
                "(pruning and parametrisations need them). Prune or parametrise the unswapped model, make that "
                "permanent, and swap it then; or keep the module by a rule with `replace: keep`."
            )
        super().register_parameter(name, param)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        """Writes what a state dict has of the held weights; these count as missing where it does not have them."""
        missing = lists[0]
        for name in self.parameter_shapes() if self.replaced is not None else ():
            # Taken out: children of this name, as some operators have them, are not to look for it.
            value = state_dict.pop(prefix + name, None)
            if value is None:
                missing.append(prefix + name)
            elif not (isinstance(value, Held) and value.is_of(self, name)):
                self.write(name, value)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


_EDIT = "Edit the unswapped model, save it and swap that, or keep the module by a rule with `replace: keep`."


def outermost(model: nn.Module, prefix: str = "") -> Mapping[str, StandIn]:
    """Path → operator, for the operators of a model that stand for modules of it."""
    return {
        path: module
        for path, module in model.named_modules(prefix=prefix)
        if isinstance(module, StandIn) and module.replaced is not None
    }


def _are_same(value: Any, before: Any) -> bool:
    return type(value) is type(before) and isinstance(value, (int, float, str, bool)) and value == before


# Operator and weights → when they were last written to. An edit of all layers is said once, the next one again.
_written: dict[tuple[str, str], float] = {}
_PAUSE = 10.0  # seconds


def _warn_rounded(operator: str, weights: str) -> None:
    now = time.monotonic()
    before, _written[operator, weights] = _written.get((operator, weights), -_PAUSE), now
    if now - before < _PAUSE:
        return
    logging.getLogger("ktinject").warning(
        "%s: a weight is written to, and rounded to %s anew; each time that an adapter is merged and taken out again "
        "rounds twice, and does not give back what was there. Merge adapters into the checkpoint to round once.",
        operator,
        weights,
    )
