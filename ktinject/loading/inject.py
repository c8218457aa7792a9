"""Puts operators into the model, and restores the model if anything fails. Only this file replaces modules."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ktinject import _native, machine
from ktinject.distributed.first_process import BroadcastExperts, ReceivedExperts
from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import OperatorError
from ktinject.hf import models
from ktinject.hf.layers import Layers
from ktinject.loading import save_packed
from ktinject.model_class import stored_state
from ktinject.operators import REGISTRY, Operator
from ktinject.operators.cpu_experts import PASSES
from ktinject.planning.devices import show_bytes
from ktinject.planning.plan import Plan


def build(plan: Plan, model: PreTrainedModel) -> dict[str, Operator]:
    """Build the operators of a plan. They have no memory and no weights yet, and are not in the model.

    Returns  module path → operator
    Raises   OperatorError that names rule, module and operator
    """
    operators: dict[str, Operator] = {}
    for replacement in plan.replacements:
        kind = ReceivedExperts if replacement.elsewhere else REGISTRY[replacement.operator]
        with plan.blaming(replacement.path):
            module = model.get_submodule(replacement.path)
            operator = kind.build(module, replacement.config)
            operator.stood_for = type(module), type(module).forward
            if replacement.placement is not None and not replacement.elsewhere:
                operator.place(replacement.placement)
            operators[replacement.path] = operator
    return operators


def apply(
    model: PreTrainedModel, plan: Plan, operators: Mapping[str, Operator], group: ProcessGroup | None = None
) -> None:
    """Put the operators into the model. Call it inside a `Transaction`: after an exception the model is half swapped.

    operators  module path → operator, filled, in the order of the model. A parent comes before its children, so an
               operator that keeps a child module is in place before the child itself is replaced
    group      the tensor-parallel process group; all its ranks receive the results of operators that only rank 0 has
    Raises     OperatorError that names rule, modules and operator
    """
    models.untie(model, plan.swapped)
    for path, operator in operators.items():
        operator.train(model.training)
        operator.stand_for(model.get_submodule(path))
        model.set_submodule(path, operator, strict=True)
    decoder = Layers(model).decoder
    kinds: dict[type[Operator], None] = dict.fromkeys(type(operator) for operator in operators.values())
    for kind in kinds:
        theirs = {path: operator for path, operator in operators.items() if type(operator) is kind}
        with plan.blaming(*theirs):
            kind.connect(decoder, [*theirs.values()])
    if group is not None:
        for path, operator in operators.items():
            if isinstance(operator, ReceivedExperts):
                operator.group = group
            elif operator.on_ranks == "first":
                model.set_submodule(path, BroadcastExperts(operator, group), strict=True)
    model.ktinject = plan
    if "cpu" in plan.runtime_memory:
        _native.allow_workspace(plan.runtime_memory["cpu"].workspace.get(PASSES, 0))
    if operators:
        # A weak reference: a strong one would be a cycle, and a dropped model would stay until the next collection.
        model.save_pretrained = functools.partial(_save_pretrained, weakref.ref(model))


class Transaction:
    """Records the state of a model, so that `restore` can bring it back after any exception.

    It records the model's class, all attributes of all modules (these include parameters, buffers, children and hooks),
    the contents of dicts, sets and lists among the attributes, the attributes that transformers sets on tensors, and
    the attributes of the config. Values of tensors are not recorded.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        configs = _configs(model.config)
        tensors = [*model.parameters(), *model.buffers()]
        self._model, self._class = model, type(model)
        self._owners: list[Any] = [*model.modules(), *tensors, *configs]
        self._saved = [
            {name: (value, _content(value)) for name, value in vars(o).items()} for o in self._owners
        ]

    def restore(self) -> None:
        """Bring back the recorded state. May be called at any time, also if nothing has changed."""
        self._model.__class__ = self._class
        for owner, saved in zip(self._owners, self._saved):
            attributes = vars(owner)
            attributes.clear()
            for name, (value, content) in saved.items():
                attributes[name] = value
                if content is not None:
                    value.clear()
                    value.extend(content) if isinstance(value, list) else value.update(content)


def _content(value: object) -> list[Any] | set[Any] | dict[Any, Any] | None:
    """A shallow copy of a dict, set or list; None for any other value."""
    for kind in (dict, set, list):
        if isinstance(value, kind):
            return kind(value)
    return None


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(part for part in inner if isinstance(part, PreTrainedConfig))]


def _save_pretrained(
    reference: weakref.ref[PreTrainedModel], save_directory: Any, *args: Any, **kwargs: Any
) -> None:
    """`save_pretrained` of a swapped model: writes a checkpoint with the same weights.

    transformers' own method would leave out the weights that operators hold. So these are unpacked first, which
    temporarily takes their size in the model's dtype in RAM. Rounded weights are written as they are packed, see
    save_packed.py.

    Raises  OperatorError if a weight cannot be restored exactly, or memory is short
    """
    model = reference()
    assert model is not None, "the call comes through the model"
    # With PEFT, transformers saves nothing but the adapters.
    only_adapters = getattr(model, "_hf_peft_config_loaded", False)
    save = functools.partial(type(model).save_pretrained, model, save_directory, *args, **kwargs)
    if kwargs.get("state_dict") is not None or only_adapters:
        save()
    elif packed := _rounded_and_packed(model):
        write_packed(model, save_directory, packed, save)
    else:
        save(state_dict={**stored_state(model), **_unpacked(model)})


def write_packed(
    model: PreTrainedModel,
    folder: str | os.PathLike[str],
    operators: Mapping[str, Operator] | None = None,
    save: Callable[..., None] | None = None,
    shown: bool = False,
) -> None:
    """Write a swapped model with its packed weights; `ktinject.load` and `from_pretrained` read the folder.

    operators  those whose weights are written packed; None: all that can be
    save       transformers' own `save_pretrained` of the model, which takes a state dict
    shown      show a progress bar on stderr
    Raises     OperatorError as `save_packed.save`, or if another operator holds rounded weights; OSError
    """
    if operators is None:
        operators = _packed_operators(model)
    save = save or functools.partial(type(model).save_pretrained, model, folder)
    save_packed.save(model, operators, Path(folder), _unpacked(model, operators.keys()), save, shown)


def _packed_operators(model: PreTrainedModel) -> dict[str, Operator]:
    plan: Plan = model.ktinject
    if plan.styles:
        return {}
    found = _operators(model, plan)
    return {path: operator for path, operator in found.items() if operator.packed_weights() is not None}


def _rounded_and_packed(model: PreTrainedModel) -> dict[str, Operator]:
    """The operators whose weights can be kept packed, if some of them hold rounded ones: no checkpoint has those.

    A rounded copy of a tied parameter does not count: the original is saved.
    """
    plan: Plan = model.ktinject
    found = _packed_operators(model)
    state = stored_state(model)
    copies = {name for name, source in plan.tied.items() if source in state}
    rounded = any(
        not found[r.path].is_lossless() and not copies.issuperset(f"{r.path}.{n}" for n in r.parameter_shapes)
        for r in plan.replacements
        if r.path in found
    )
    return found if rounded else {}


def _operators(model: PreTrainedModel, plan: Plan) -> dict[str, Operator]:
    """Module path → operator, for the operators of a plan that are still in the model.

    Raises  OperatorError if another module has been put around an operator, as PEFT does
    """
    found = {}
    for replacement in plan.replacements:
        module = model.get_submodule(replacement.path)
        if isinstance(module, Operator):
            found[replacement.path] = module
        elif any(isinstance(inner, Operator) for inner in module.modules()):
            raise OperatorError(
                f"this model cannot be saved: {replacement.operator} is inside the {type(module).__name__} that "
                f"stands for {replacement.path} now. Save the adapter alone, with PEFT's save_pretrained, or take it "
                "off before."
            )
    return found


def _with_weights(operator: Operator) -> str:
    """The operator's name, with the format of its weights if it states one: `cpu_experts (int8)`."""
    weights = operator.describe().get("weights")
    return operator.name + (f" ({weights})" if weights else "")


def _unpacked(model: PreTrainedModel, but: Collection[str] = ()) -> dict[str, Tensor]:
    """Parameter name → value in the model's dtype, for all weights that operators hold, but for those of some paths.

    Raises  OperatorError
    """
    plan: Plan = model.ktinject
    if plan.styles:
        raise OperatorError(
            "this model cannot be saved: each process has a part of it. Copy the original checkpoint folder"
            f"{f' ({plan.checkpoint})' if plan.checkpoint else ''} instead."
        )
    operators = {path: operator for path, operator in _operators(model, plan).items() if path not in but}
    # A rounded copy of a tied parameter may be left out, since the original is in the model. An exact copy is saved
    # if the original has changed since it was copied.
    state = stored_state(model)
    copies = {name for name, source in plan.tied.items() if source in state}
    replacements = [
        replacement
        for replacement in plan.replacements
        if replacement.path in operators
        and (
            operators[replacement.path].is_lossless()
            or not copies.issuperset(f"{replacement.path}.{n}" for n in replacement.parameter_shapes)
        )
    ]
    held = [operators[replacement.path] for replacement in replacements]
    lossy = sorted({_with_weights(operator) for operator in held if not operator.is_lossless()})
    source = f" ({plan.checkpoint})" if plan.checkpoint else ""
    if lossy:
        raise OperatorError(
            f"this model cannot be saved: {', '.join(lossy)} holds rounded weights, not the checkpoint's. "
            f"Copy the original checkpoint folder{source} instead, and keep the rules beside it."
        )
    shapes = {
        f"{e.path}.{name}": torch.Size(shape)
        for e in replacements
        for name, shape in e.parameter_shapes.items()
    }
    needed = sum(shape.numel() for shape in shapes.values()) * model.dtype.itemsize
    free = machine.detect().memory_available_bytes
    if needed > free:
        raise OperatorError(
            f"saving needs {show_bytes(needed)} for unpacked weights, and {show_bytes(free)} are free. "
            f"Copy the original checkpoint folder{source} instead."
        )
    tensors = {}
    for replacement in replacements:
        operator = operators[replacement.path]
        for name, shape in replacement.parameter_shapes.items():
            tensors[f"{replacement.path}.{name}"] = tensor = torch.empty(
                shape, dtype=model.dtype, device="cpu"
            )
            for expert in range(shape[0]) if operator.per_expert else [None]:
                exact = operator.unpack(name, expert)
                part = tensor if expert is None else tensor[expert]
                part.copy_(exact)
                if not torch.equal(part.float(), exact):
                    raise OperatorError(
                        f"this model cannot be saved: {replacement.path}.{name} does not fit {model.dtype}. "
                        f"Copy the original checkpoint folder{source} instead."
                    )
    for name in copies & tensors.keys():
        if torch.equal(tensors[name], state[plan.tied[name]].to("cpu", model.dtype)):
            del tensors[name]  # still equal to its original, which is saved once for both
    return tensors
