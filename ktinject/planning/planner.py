"""Makes a plan: decides which operator replaces which module, what runs in it, where it stands and its bytes.

Every refusal lives here, before a byte of weight is read or a module touched. Only what does not fit into memory
is kept as a problem of the plan and not raised, so that the plan of a large model can be read on a small machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from ktinject import rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.distributed import tensor_parallel
from ktinject.distributed.process_group import ProcessGroup
from ktinject.distributed.tensor_parallel import Cut, Style
from ktinject.errors import PlanError
from ktinject.generation.cpu import openmp
from ktinject.hf import compat, models
from ktinject.hf.key_map import KeyMap, key_map
from ktinject.hf.layers import Layers, has_routed_experts
from ktinject.machine import Machine, device_of
from ktinject.planning import match, memory
from ktinject.planning.devices import Devices, show_bytes, spread
from ktinject.planning.plan import Plan, total
from ktinject.planning.replacements import (
    MatchedModule,
    Replacement,
    adopt_format,
    find_modules,
    find_replacements,
    some,
    without_experts,
)
from ktinject.rules import RuleSet


def make(
    model: PreTrainedModel,
    ruleset: RuleSet,
    checkpoint: Checkpoint | None,
    machine: Machine,
    devices: str | Sequence[str] | None = None,
    budget: Mapping[str, int | str] | None = None,
    group: ProcessGroup | None = None,
) -> Plan:
    """Decide everything, change nothing.

    model       on meta, or with weights: the checkpoint replaces them, without one they are taken
    checkpoint  open; only its names and headers are used
    devices     what may be used; None: the first GPU if what is not swapped fits it, else the CPU
    budget      device → bytes, or text like "24GiB"
    group       the processes that share the model; the plan is this one's
    Raises      RuleError, PlanError, CheckpointError or OperatorError for everything but lack of memory
    """
    compat.require("swapping")
    if checkpoint is not None:
        compat.require("loading")
    _check_model(model, ruleset)
    where = Devices.choose(machine, devices if group is None else str(group.device), budget)
    found, matched = find_modules(model, ruleset)
    mapping = None
    if checkpoint is not None:
        mapping = _check_checkpoint(model, checkpoint)
        found = [adopt_format(item, model, checkpoint, mapping) for item in found]
    has_weights = checkpoint is None and not next(model.parameters()).is_meta
    styles = {} if group is None else _cut(model, found, has_weights, group)
    standings = ((_stands_on(model, where, devices),),) if has_weights else where.candidates
    layouts = []
    cuts: dict[str, Cut] = {}
    with tensor_parallel.applied(model, styles, 1 if group is None else group.size):
        if group is not None and mapping is not None:
            cuts = tensor_parallel.key_cuts(model, styles, mapping, group)
        cached = tensor_parallel.cached_values(memory.cached_values(model), Layers(model).of, styles, group)
        for standing in standings:
            layers = Layers(model)
            stack, device_map = layers.stack, {"": standing[0]}
            with openmp.one_thread():
                replacements = find_replacements(found, where, device_map, machine, stack, {}, group)
                if len(standing) > 1:
                    device_map = _spread(model, replacements, layers, standing, where)
                    replacements = find_replacements(found, where, device_map, machine, stack, {}, group)
            rest = _rest_bytes(model, replacements, device_map)
            to_load = total(
                [*(replacement.bytes for replacement in replacements), {} if has_weights else rest]
            )
            if any(replacement.config.auto_sized for replacement in replacements):
                spare = {device: where.limits[device] - to_load.get(device, 0) for device in where.allowed}
                with openmp.one_thread():
                    replacements = find_replacements(found, where, device_map, machine, stack, spare, group)
                to_load = total(
                    [*(replacement.bytes for replacement in replacements), {} if has_weights else rest]
                )
            over = {device: size for device, size in to_load.items() if size > where.limits[device]}
            excess = sum(size - where.limits[device] for device, size in over.items())
            runtime_memory, too_much = memory.find(
                replacements, model, device_map, to_load, where.limits, cached
            )
            layouts.append(
                (
                    (excess, len(too_much)),
                    device_map,
                    replacements,
                    rest,
                    to_load,
                    runtime_memory,
                    over,
                    too_much,
                )
            )
            if not over and not too_much:
                break
    _, device_map, replacements, rest, to_load, runtime_memory, over, too_much = min(
        layouts, key=lambda layout: layout[0]
    )
    plan = Plan(
        model=type(model).__name__,
        model_type=model.config.model_type,
        ruleset=ruleset,
        checkpoint=None if checkpoint is None else str(checkpoint.path),
        matched=matched,
        replacements=replacements,
        rest_bytes=rest,
        device_map=device_map,
        limits=where.limits,
        to_load=to_load,
        runtime_memory=runtime_memory,
        problems=[*(_too_large(device, size, where) for device, size in over.items()), *too_much],
        mapping=mapping,
        styles=styles,
        cuts=cuts,
    )
    _check_shared(plan, model)
    plan.notes += where.notes
    wanted, standing = standings[0], tuple(dict.fromkeys(device_map.values()))
    if standing != wanted and len(standing) > 1:
        plan.notes.append(f"decoder layers stand on {', '.join(standing)}: they do not fit on {wanted[0]}")
    elif standing[0] not in wanted:
        plan.notes.append(f"everything else stands on {standing[0]}: it does not fit on {', '.join(wanted)}")
    unused = [device for device in where.allowed if device not in (*plan.bytes, "cpu")]
    if unused and devices is None and not has_weights and group is None:
        plan.notes.append(f"not used: {', '.join(unused)}; name several GPUs to spread the layers over them")
    if not (known := compat.support("generation")):
        plan.notes.append(f"generate runs transformers' own loop: {known.reason}")
    if not has_routed_experts(model):
        plan.notes.append(f"{without_experts(model)}: what is swapped are its other modules alone")
    if group is not None:
        plan.notes.append(
            f"process {group.rank} of {group.size}: has its part of {len(styles)} linear layers, and all of the others"
        )
    if checkpoint is not None and checkpoint.quantization:
        method = checkpoint.quantization["quant_method"]
        plan.notes.append(f"the checkpoint is quantised ({method}); it is decoded while it is read")
    if checkpoint is not None and (blocks := checkpoint.block_dtypes):
        plan.notes.append(
            f"the checkpoint is {checkpoint.container} with {' and '.join(blocks)}; weights that do not run as "
            "stored are decoded, and quantised again where the operator's format says so"
        )
    if checkpoint is not None and not checkpoint.complete:
        plan.notes.append("only the checkpoint's index is there: shapes and formats could not be checked")
    return plan


def _cut(
    model: PreTrainedModel, found: list[MatchedModule], has_weights: bool, group: ProcessGroup
) -> dict[str, Style]:
    """The linear layers that the processes share. Raises PlanError."""
    if has_weights:
        raise PlanError(
            "tp: the model has its weights already; each process reads its own part of a checkpoint. "
            "Build the model on meta and give checkpoint=<folder>."
        )
    for item in found:
        if item.operator.across == "none":
            text = f"{item.rule.operator} does not run with tp (tensor parallelism over processes)"
            raise PlanError(str(item.rule.place().refusal(f"{text}. Use another operator, or leave tp out.")))
    taken = [item.path for item in found if not isinstance(item.module, nn.Linear)]
    return tensor_parallel.choose(model, group.size, taken)


def check_class(model: object) -> None:
    """Raises PlanError for something else than a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise PlanError(
            f"found a {type(model).__name__}; models of transformers are served. "
            "Build one with AutoModelForCausalLM.from_config, or give its folder to ktinject.load."
        )


def auto_rules(model: PreTrainedModel) -> str:
    """The bundled rules for a model. Raises PlanError for one that bundled rules have nothing for."""
    check_class(model)
    if not has_routed_experts(model):
        raise PlanError(
            f"{without_experts(model)}: it is a dense model, and the bundled rules put routed experts on the CPU. "
            "Run it with transformers as it is, or write rules for its other modules, with dense_linear for example."
        )
    return rules.choose(model.config.model_type)


def _check_model(model: PreTrainedModel, ruleset: RuleSet) -> None:
    check_class(model)
    if hasattr(model, "ktinject"):
        raise PlanError("this model is swapped already (see model.ktinject). Build a new one on meta.")
    model_type = model.config.model_type
    if ruleset.model_types and model_type not in ruleset.model_types:
        raise PlanError(
            f"{ruleset.source}: these rules are for {', '.join(ruleset.model_types)}; "
            f'the model is a {model_type}. Take other rules, or rules="auto".'
        )
    on_meta = {tensor.is_meta for tensor in model.parameters()}
    if len(on_meta) > 1:
        raise PlanError(
            "the model is partly on the meta device; it must be wholly there or not at all. "
            "Build it inside torch.device('meta')."
        )
    if not on_meta:
        raise PlanError("the model has no parameters; there is nothing to plan.")


def _check_checkpoint(model: PreTrainedModel, checkpoint: Checkpoint) -> KeyMap:
    quantization = {} if checkpoint.states_formats else models.quantization(model.config) or {}
    assert checkpoint.quantization == quantization, "the checkpoint was opened for another model"
    method = quantization.get("quant_method")
    if quantization and method not in checkpoint.methods:
        raise PlanError(
            f"{checkpoint.path}: its config.json says quant_method {method!r}; read are checkpoints in bf16, "
            f"fp16, fp32 and {', '.join(checkpoint.methods)}. Use one of these, such as the original that it was "
            "made from."
        )
    mapping = key_map(model, checkpoint.weights, checkpoint.companions_of)
    match.check(checkpoint, model, mapping)
    return mapping


def _stands_on(model: PreTrainedModel, where: Devices, devices: object) -> str:
    """The device of a model that has its weights; it is not moved."""
    standing = sorted({str(tensor.device) for tensor in model.parameters()})
    if len(standing) > 1:
        raise PlanError(
            f"the model is spread over {', '.join(standing)}; one device is needed. Move it there."
        )
    candidates = [device for group in where.candidates for device in group]
    if standing[0] not in where.free or (devices is not None and standing[0] not in candidates):
        raise PlanError(
            f"the model is on {standing[0]}; allowed are {', '.join(candidates)}. "
            "Move it with model.to() before, or load it from its checkpoint."
        )
    return standing[0]


def _rest_sizes(model: PreTrainedModel, replacements: Sequence[Replacement]) -> Iterator[tuple[str, int]]:
    """Name and bytes of all that operators do not take: parameters, buffers, tied ones once, in their final dtype."""
    swapped = {
        f"{replacement.path}.{name}" for replacement in replacements for name in replacement.parameter_shapes
    }
    dtype_of = models.final_dtype(model)
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if name not in swapped:
                yield name, tensor.numel() * dtype_of(name, tensor).itemsize


def _rest_bytes(
    model: PreTrainedModel, replacements: Sequence[Replacement], device_map: Mapping[str, str]
) -> dict[str, int]:
    """Device → bytes of all that operators do not take."""
    sizes = dict.fromkeys(device_map.values(), 0)
    for name, size in _rest_sizes(model, replacements):
        sizes[device_of(device_map, name)] += size
    return sizes


def _spread(
    model: PreTrainedModel,
    replacements: Sequence[Replacement],
    layers: Layers,
    gpus: Sequence[str],
    where: Devices,
) -> dict[str, str]:
    """A device map of several GPUs, from the bytes on the first one if all stood there."""
    outside, inside = 0, dict.fromkeys(layers.paths, 0)
    on_first = ((replacement.path, replacement.bytes.get(gpus[0], 0)) for replacement in replacements)
    for path, size in (*_rest_sizes(model, replacements), *on_first):
        if (number := layers.of(path)) is None:
            outside += size
        else:
            inside[layers.paths[number]] += size
    return spread(outside, inside, gpus, where.limits)


def _check_shared(plan: Plan, model: PreTrainedModel) -> None:
    """Refuse to swap a part of what can only be loaded together."""
    swapped = plan.swapped
    for name, source in model.all_tied_weights_keys.items():
        if source in swapped and name not in swapped:
            raise PlanError(
                f"{name} is tied to {source}, which a rule replaces; no operator shares its weights. "
                f"Keep {source.rpartition('.')[0]}, or replace both."
            )
        if name in swapped:
            plan.tied[name] = source
            plan.notes.append(
                f"{name} is tied to {source}: the operator has a copy of it, which does not follow later changes"
            )
    for conversion in (plan.mapping.conversions if plan.mapping else {}).values():
        taken = [name for name in conversion.targets if name in swapped]
        left = [name for name in conversion.targets if name not in swapped]
        if taken and left:
            raise PlanError(
                f"{some(taken)} cannot be replaced alone: the checkpoint stores them together with "
                f"{some(left)}. Replace or keep both."
            )


def _too_large(device: str, size: int, where: Devices) -> str:
    limit, free = where.limits[device], where.free[device]
    has = f"{show_bytes(free)} are free" if limit == free else f"the budget is {show_bytes(limit)}"
    other = "a larger budget" if limit < free else "a machine with more memory"
    return f"{device} needs {show_bytes(size)}, but {has}. Use smaller weights (int8, int4) or {other}."
