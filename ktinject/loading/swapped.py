"""Methods that replace transformers' own in a swapped model.

transformers' and torch's methods look at parameters only, and the weights that operators hold are not parameters. So a
script that edits weights would miss what was swapped, and nothing would say so. Here the model's own `parameters()`,
`named_parameters()` and `state_dict()` give the weights in operators, too, as tensors that are unpacked where they are
read and packed where they are written (operators/held.py), in the unswapped model's order. `model_class.put_before`
gives a model these methods.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ktinject.errors import OperatorError
from ktinject.hf import adapters
from ktinject.model_class import Methods, put_before, stored_parameters
from ktinject.operators import Operator
from ktinject.operators.held import Held
from ktinject.operators.stand_in import outermost

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ktinject.planning.plan import Plan

logger = logging.getLogger("ktinject")


def install(model: PreTrainedModel) -> None:
    """Give a model with operators the methods of `_Swapped`."""
    put_before(model, _Swapped)


_Methods: Any = Methods  # `super()` reaches PreTrainedModel's methods; mypy cannot know that


class _Swapped(_Methods):
    """The methods that differ from the model's own class."""

    _said_frozen = False

    def train(self, mode: bool = True) -> Any:
        """`nn.Module.train`. Warns once if full training is about to begin: weights in operators are not trained."""
        super().train(mode)
        _refuse_lost(self)
        if mode and not self._said_frozen and _trains_all(self):
            self._said_frozen = True
            plan = self.ktinject
            frozen = {name: prod(shape) for name, shape in _held(plan).items()}
            left = [parameter.numel() for parameter in stored_parameters(self)]
            share = sum(frozen.values()) / max(1, sum(frozen.values()) + sum(left))
            logger.warning(
                "train(): %d of %d parameters, %.1f%% of the values, are in operators (%s), which keep them as they "
                "are: only the other %d are trained. Train an adapter (PEFT), or train the unswapped model and swap "
                "it afterwards.",
                len(frozen),
                len(frozen) + len(left),
                100 * share,
                ", ".join(
                    sorted(
                        {
                            replacement.operator
                            for replacement in plan.replacements
                            if replacement.parameter_shapes
                        }
                    )
                ),
                len(left),
            )
        return self

    @property
    def peft_config(self) -> Any:
        """What PEFT notes of its adapters when it has put them in. Raises AttributeError if it has not."""
        try:
            return vars(self)["peft_config"]
        except KeyError:
            raise AttributeError("peft_config: there is no adapter on this model") from None

    @peft_config.setter
    def peft_config(self: Any, configs: Any) -> None:
        """Raises OperatorError, without any adapter, if a part of one found its parameter in an operator."""
        vars(self)["peft_config"] = configs
        try:
            _refuse_lost(self)
        except OperatorError:
            if len(configs) == 1:  # else another one was there before
                adapters.take_off(self)
                del vars(self)["peft_config"]
            raise

    @peft_config.deleter
    def peft_config(self: Any) -> None:
        del vars(self)["peft_config"]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise OperatorError(
            "a swapped model cannot be copied, its weights live outside of PyTorch. Build a second model on meta and "
            "call ktinject.optimize on it."
        )

    def named_parameters(
        self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        """As in torch, with the weights in operators, in the order of the unswapped model; see operators/held.py.

        An operator's copy of a tied weight counts as a weight of its own, which it is.
        """
        if not recurse:
            yield from super().named_parameters(prefix, False, remove_duplicate)
            return
        seen: set[int] = set()
        held: dict[str, dict[str, Any]] = {}  # path of a module → name there → weight
        for path, module in self.named_modules(prefix=prefix, remove_duplicate=remove_duplicate):
            own = dict(module._parameters)
            order = [*own]
            if isinstance(module, Operator) and module.replaced is not None:
                for name, weight in module.held_parameters().items():
                    place, _, leaf = f"{path}.{name}".rpartition(".")
                    held.setdefault(place, {})[leaf] = weight
                order = [*module.replaced._parameters, *order]
            own |= held.get(path, {})
            for name in dict.fromkeys([*order, *own]):
                parameter = own.get(name)
                if parameter is None or (remove_duplicate and id(parameter) in seen):
                    continue
                seen.add(id(parameter))
                yield f"{path}.{name}".removeprefix("."), parameter

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in torch, with the weights in operators: tensors that take no memory until they are read."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for path, operator in outermost(self).items():
            found |= {f"{prefix}{path}.{name}": weight for name, weight in operator.held_parameters().items()}
        return found

    def load_state_dict(
        self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in torch, and what it has of weights in operators is packed anew.

        Raises OperatorError, before anything is loaded, for a shape or dtype that an operator does not take, or if one
        cannot be written any more
        """
        for path, operator in outermost(self).items():
            for name in operator.parameter_shapes():
                value = state_dict.get(f"{path}.{name}")
                if value is not None and not (isinstance(value, Held) and value.is_of(operator, name)):
                    with _named(path):
                        operator.check_write(name, value)
        return super().load_state_dict(state_dict, strict, assign)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whatever torch's default device is.

        Raises  OperatorError if a part of an adapter of PEFT would be missed
        """
        _refuse_lost(self)
        is_usual = torch.get_default_device().type == "cpu"
        with nullcontext() if is_usual else torch.device("cpu"):
            return super().generate(*args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers. Operators' copies of tied weights do not count, and none of theirs is trainable."""
        found: int = super().num_parameters(only_trainable, exclude_embeddings)
        return found if only_trainable else found - sum(map(prod, _copies(self.ktinject).values()))

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes, as in transformers, and the bytes that operators hold on all devices count, too."""
        kept = [*stored_parameters(self), *(self.buffers() if return_buffers else ())]
        return sum(tensor.nbytes for tensor in kept) + sum(
            sum(replacement.bytes.values()) for replacement in self.ktinject.replacements
        )

    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As in transformers. Raises OperatorError if an operator holds the weights that would be resized."""
        words = self.get_input_embeddings()
        held = [module for module in (words, self.get_output_embeddings()) if isinstance(module, Operator)]
        wanted = new_num_tokens or words.weight.shape[0]
        if pad_to_multiple_of:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if held and wanted != words.weight.shape[0]:
            paths = ", ".join(path for path, module in self.named_modules() if module in held)
            raise OperatorError(
                f"resize_token_embeddings: {paths} is {held[0].name}, whose weights cannot get another size. "
                "Resize and save the unswapped model and swap that, or keep the module by a rule with `replace: keep`."
            )
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **kwargs)


def _refuse_lost(model: Any) -> None:
    """Raises OperatorError if a part of an adapter found no parameter, since an operator holds it."""
    if not getattr(model, "peft_config", None):
        return
    if biases := next(adapters.trained_biases(model, _names_held(model)), None):
        adapter, said, name = biases
        raise OperatorError(
            f"adapter {adapter!r} of PEFT: bias={said!r} trains {name}, which an operator holds and does not train. "
            "Write bias='none', or keep that module by a rule with `replace: keep`. An adapter that was trained with "
            "biases can be loaded: PeftModel.from_pretrained(model, folder)."
        )
    holders = {
        f"{replacement.path}.{name}": replacement.operator
        for replacement in model.ktinject.replacements
        for name in replacement.parameter_shapes
    }
    found = next(adapters.lost(model, holders), None)
    if found is None:
        return
    adapter, name = found
    raise OperatorError(
        f"adapter {adapter!r} of PEFT: it adapts {name}, which {holders[name]} holds, and would be left out. Name "
        "target modules without it (linear layers may be adapted, swapped or not), keep that module by a rule with "
        "`replace: keep`, or merge the adapter into the checkpoint and swap that. If the adapter is on the model "
        f"already, take it off: delete_adapter({adapter!r})."
    )


def _names_held(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}"
        for path, operator in outermost(model).items()
        for name in operator.parameter_shapes()
    ]


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Within, what an operator refuses names the module."""
    try:
        yield
    except OperatorError as error:
        raise OperatorError(f"{path}: {error}") from None


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Full parameter name → shape, for the weights that operators hold."""
    return {
        f"{replacement.path}.{name}": shape
        for replacement in plan.replacements
        for name, shape in replacement.parameter_shapes.items()
    }


def _held(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The same. Copies of tied parameters do not count."""
    return {name: shape for name, shape in _shapes(plan).items() if name not in plan.tied}


def _copies(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The same, of copies of tied parameters alone."""
    return {name: shape for name, shape in _shapes(plan).items() if name in plan.tied}


def _trains_all(model: nn.Module) -> bool:
    """Whether a parameter outside of PEFT's adapters requires a gradient."""
    if any(parameter.requires_grad for parameter in model._parameters.values() if parameter is not None):
        return True
    children = (child for child in model.children() if not adapters.is_part(child))
    return any(map(_trains_all, children))
