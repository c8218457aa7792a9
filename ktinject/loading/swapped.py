"""Methods that replace transformers' own in a swapped model.

transformers' methods look at parameters only, and the weights that operators hold are not parameters.
`model_class.put_before` gives a model these methods.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktinject.errors import OperatorError
from ktinject.hf import adapters
from ktinject.model_class import Methods, put_before
from ktinject.operators import Operator

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
            left = [parameter.numel() for parameter in self.parameters()]
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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whatever torch's default device is.

        Raises  OperatorError if a part of an adapter of PEFT would be missed
        """
        _refuse_lost(self)
        is_usual = torch.get_default_device().type == "cpu"
        with nullcontext() if is_usual else torch.device("cpu"):
            return super().generate(*args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """As in transformers, and the weights in operators count, too. None of them is trainable."""
        found: int = super().num_parameters(only_trainable, exclude_embeddings)
        return found if only_trainable else found + sum(map(prod, _held(self.ktinject).values()))

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes, as in transformers, and the bytes that operators hold on all devices count, too."""
        found: int = super().get_memory_footprint(return_buffers)
        return found + sum(sum(replacement.bytes.values()) for replacement in self.ktinject.replacements)

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


def _held(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Full parameter name → shape, for the weights that operators hold. Copies of tied parameters do not count."""
    shapes = {
        f"{replacement.path}.{name}": shape
        for replacement in plan.replacements
        for name, shape in replacement.parameter_shapes.items()
    }
    return {name: shape for name, shape in shapes.items() if name not in plan.tied}


def _trains_all(model: nn.Module) -> bool:
    """Whether a parameter outside of PEFT's adapters requires a gradient."""
    if any(parameter.requires_grad for parameter in model._parameters.values() if parameter is not None):
        return True
    children = (child for child in model.children() if not adapters.is_part(child))
    return any(map(_trains_all, children))
