"""A model folder with packed weights: what `ktinject convert` and `save_pretrained` of rounded weights write.

    config.json            with "quantization_config": the rules, and the formats that they came to
    packed.safetensors     what operators hold; as metadata the parameters that this stands for
    model*.safetensors     everything else, as transformers writes it

For a plan such a folder has all parameters: those that are packed count as floats of the model's dtype. Only operators
that hold the same parameters in the same form can load them, which the rules in config.json say.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ktinject import _native
from ktinject.checkpoints.checkpoint import PACKED, Checkpoint
from ktinject.errors import CheckpointError, OperatorError, listed
from ktinject.hf.plugin import KTInjectConfig
from ktinject.loading.packed_cache import fill_from, held_by, tensors_of, write
from ktinject.loading.read_ahead import Pace
from ktinject.model_class import stored_state
from ktinject.operators import REGISTRY, Operator
from ktinject.planning.plan import Plan

# Arguments of operators that decide on the bytes.
_FORMS = ("weights", "group_size", "symmetric")


def save(
    model: PreTrainedModel,
    operators: Mapping[str, Operator],
    folder: Path,
    others: Mapping[str, Tensor],
    call: Callable[..., None],
    shown: bool = False,
) -> None:
    """Write a folder that `ktinject.load` and `from_pretrained` read.

    operators  module path → operator; those that can be kept in a file are
    others     parameter → value, of what other operators hold
    call       transformers' `save_pretrained`, which takes a state dict
    Raises     OperatorError if the rules are not known any more, or give modules of one rule different formats; OSError
    """
    plan: Plan = model.ktinject
    held = held_by(operators)
    config = KTInjectConfig(**_asked(plan, held))
    shapes = {r.path: r.parameter_shapes for r in plan.replacements if r.path in held}
    dtype = {"torch.bfloat16": "BF16", "torch.float16": "F16"}.get(str(model.dtype), "F32")
    metadata = {"layout": str(_native.packed_version())}
    for path, weights in held.items():
        stands_for = {f"{path}.{name}": [dtype, *shape] for name, shape in shapes[path].items()}
        metadata |= {f"form of {path}": weights.form, f"parameters of {path}": json.dumps(stands_for)}
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / PACKED, held, metadata, shown)
    there = getattr(model.config, "quantization_config", None)
    model.config.quantization_config = config
    try:
        call(state_dict={**stored_state(model), **others})
    finally:
        if there is None:
            del model.config.quantization_config
        else:
            model.config.quantization_config = there
    # safetensors writes files that their owner alone may read; the packed one has the mode that new files have here.
    mode = (folder / PACKED).stat().st_mode
    for file in folder.glob("*.safetensors"):
        file.chmod(mode & 0o777)


def _asked(plan: Plan, held: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the config: rules and variables as they were given, and the formats that they came to."""
    if plan.asked is None:
        raise OperatorError(
            "this model cannot be saved: its rules were given as a RuleSet. Give a path, a name, a dict or a list."
        )
    variables = dict(plan.asked.get("variables") or {})
    settled: dict[str, Any] = {}
    for replacement in plan.replacements:
        if replacement.path not in held:
            continue
        rule = next(rule for rule in plan.ruleset.rules if rule.name == replacement.rule)
        known = {field.name for field in dataclasses.fields(REGISTRY[rule.operator].Config)}
        for name in _FORMS:
            if name in known and hasattr(replacement.config, name):
                value = getattr(replacement.config, name)
                if settled.setdefault(f"{rule.name}.{name}", value) != value:
                    raise OperatorError(
                        f"this model cannot be saved: rule {rule.name!r} gives its modules different {name}. Write a "
                        "rule for each."
                    )
    return {**plan.asked, "variables": {**variables, **settled}}


def restore(
    checkpoint: Checkpoint, plan: Plan, operators: Mapping[str, Operator], shown: bool
) -> tuple[Pace, set[str]] | None:
    """Fill operators from the packed weights of a folder; None if it has none.

    Returns  how fast it went, and the paths of the operators that have their weights
    Raises   CheckpointError if what is packed there is not what the plan needs
    """
    file = checkpoint.packed
    if file is None:
        return None
    if file.metadata.get("layout") != str(_native.packed_version()):
        raise CheckpointError(
            f"{file.path}: packed by another version of ktinject. Convert the original checkpoint again."
        )
    held = held_by(operators)
    wanted = {
        name.removeprefix("form of "): form
        for name, form in file.metadata.items()
        if name.startswith("form of ")
    }
    faults = []
    for path, form in wanted.items():
        found = held[path].form if path in held else "nothing that is packed"
        if found != form:
            faults.append(f"{path}: packed as {form}; the plan has {found}")
    if faults:
        raise CheckpointError(
            f"{file.path}: the plan does not fit what is packed:{listed(faults)}\nLoad it without rules and variables, "
            "which config.json says, or use the original checkpoint."
        )
    theirs = {path: held[path] for path in wanted}
    file.check(tensors_of(theirs))
    return fill_from(file, theirs, operators, shown), {*theirs}
