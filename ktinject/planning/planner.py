"""Makes a plan: decides which operator replaces which module, which kernel it runs, and its device and bytes.

    find_modules ──► formats of the checkpoint ──► tensor-parallel parts ──► layout ──► plan, with its notes

All refusals come before a weight is read or a module is changed. Lack of memory is not raised but kept as a problem of
the plan, so that the plan of a large model can be read on a small machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.distributed import tensor_parallel
from ktinject.distributed.process_group import ProcessGroup
from ktinject.distributed.tensor_parallel import Cut, Style
from ktinject.errors import PlanError
from ktinject.generation.cache import bucket_of
from ktinject.generation.cpu import openmp
from ktinject.hf import adapters, compat, config_values, dtypes, models
from ktinject.hf.extras import check_patterns
from ktinject.hf.key_map import KeyMap, key_map
from ktinject.hf.layers import Layers, has_routed_experts
from ktinject.machine import Machine
from ktinject.planning import match, memory, narrow
from ktinject.planning.devices import Budget, Devices
from ktinject.planning.layout import Layout
from ktinject.planning.match import grouped
from ktinject.planning.modules import (
    MatchedModule,
    find_modules,
    for_ranks,
    some,
    with_checkpoint_format,
    without_experts,
)
from ktinject.planning.plan import Plan
from ktinject.planning.remedies import find as find_remedies
from ktinject.planning.search import Search
from ktinject.rules import RuleSet

_MOST_TOKENS = 1 << 30


# Probes run modules on a few tokens, where waking more threads costs more than they save.
@openmp.one_thread()
def make(
    model: PreTrainedModel,
    ruleset: RuleSet,
    checkpoint: Checkpoint | None,
    machine: Machine,
    devices: str | Sequence[str] | None = None,
    budget: Budget | None = None,
    group: ProcessGroup | None = None,
    context: int | None = None,
    ignore: Sequence[str] = (),
) -> Plan:
    """Decide everything, change nothing.

    model       on the meta device, or with weights. A checkpoint replaces its weights; without a checkpoint, operators
                take them
    checkpoint  open; only its names and headers are used
    devices     devices that may be used; None: the first GPU if the plan fits it, else all GPUs, else the CPU
    budget      device → bytes, or text like "24GiB"
    group       the tensor-parallel process group; the plan is that of this rank
    context     tokens of a request that the cache must have room for, prompt and answer; None: a short one
    ignore      patterns of tensors that the checkpoint may have beside those of the model
    Raises      RuleError, PlanError, CheckpointError or OperatorError for everything but lack of memory
    """
    compat.require("swapping")
    tokens = _check_context(context)
    if checkpoint is not None:
        compat.require("loading")
    _check_model(model, ruleset)
    where = Devices.choose(machine, devices if group is None else str(group.device), budget)
    modules, matched = find_modules(model, ruleset)
    mapping = None
    if checkpoint is not None:
        mapping = _check_checkpoint(model, checkpoint, check_patterns(ignore))
        modules = [with_checkpoint_format(module, checkpoint, mapping) for module in modules]
    with narrow.narrowed(model, checkpoint, mapping):
        has_weights = checkpoint is None and not next(model.parameters()).is_meta
        styles = {} if group is None else _cut(model, modules, has_weights, group)
        if group is not None:
            modules = [for_ranks(module, styles.get(module.path), group.size) for module in modules]
        candidates = ((_stands_on(model, where, devices),),) if has_weights else where.candidates
        cuts: dict[str, Cut] = {}
        with tensor_parallel.applied(model, styles, 1 if group is None else group.size):
            if group is not None and mapping is not None:
                cuts = tensor_parallel.key_cuts(model, styles, mapping, group)
            layers = Layers(model)
            kept = memory.cached_values(model)
            if kept is not None:
                counts = tensor_parallel.cached_values([one.values for one in kept], layers.of, styles, group)
                kept = [one._replace(values=count) for one, count in zip(kept, counts)]
            search = Search(model, machine, layers.decoder, group, candidates, has_weights, kept)
            found = search.run(modules, where, tokens)
            chosen = found.layout
            remedies = (
                [] if chosen.fits else find_remedies(search, found.level.modules, where, tokens, chosen)
            )
    plan = Plan(
        model=type(model).__name__,
        model_type=model.config.model_type,
        ruleset=ruleset,
        checkpoint=None if checkpoint is None else str(checkpoint.path),
        matched=matched,
        replacements=chosen.replacements,
        rest_bytes=chosen.rest_bytes,
        device_map=chosen.device_map,
        limits=where.limits,
        to_load=chosen.to_load,
        runtime_memory=chosen.runtime_memory,
        problems=chosen.problems,
        remedies=remedies,
        mapping=mapping,
        styles=styles,
        cuts=cuts,
    )
    _check_shared(plan, model)
    plan.notes += [*where.notes, *found.notes(), *_notes_on_room(chosen)]
    may_spread = devices is None and not has_weights and group is None
    plan.notes += _notes_on_devices(plan, candidates[0], where.allowed if may_spread else ())
    plan.notes += _notes_on_model(model, styles, group)
    plan.notes += _notes_on_checkpoint(checkpoint, mapping)
    return plan


def _check_context(context: int | None) -> int:
    if context is None:
        return 1
    if not isinstance(context, int) or isinstance(context, bool) or not 1 <= context <= _MOST_TOKENS:
        raise PlanError(
            f"context: found {context!r}; it is the number of tokens of a request, from 1 to {_MOST_TOKENS:,}. "
            "Give one, or leave it out."
        )
    return context


def _notes_on_room(chosen: Layout) -> Iterator[str]:
    """For whom operators leave room that take what is left of a GPU."""
    devices = {one.device for one in chosen.replacements if one.config.auto_sized}
    if devices and chosen.beside is not None and chosen.fits:
        on, tokens = ", ".join(sorted(devices)), bucket_of(chosen.beside)
        yield (
            f"gpu_experts: what is left on {on} beside a request of {tokens:,} tokens, all rows together, and a "
            "reserve; what more is needed later, experts give back"
        )


def _notes_on_devices(plan: Plan, wanted: Sequence[str], allowed: Sequence[str]) -> Iterator[str]:
    """Notes if the model is not on the devices of first choice, and on GPUs that it does not use.

    wanted    the devices of first choice
    allowed   devices that the plan could have used; empty if the user has named devices
    """
    standing = tuple(dict.fromkeys(plan.device_map.values()))
    if standing != wanted and len(standing) > 1:
        yield f"decoder layers stand on {', '.join(standing)}: they do not fit on {wanted[0]}"
    elif standing[0] not in wanted:
        yield f"everything else stands on {standing[0]}: it does not fit on {', '.join(wanted)}"
    unused = [device for device in allowed if device not in (*plan.bytes, *plan.runtime_memory, "cpu")]
    if unused:
        yield f"not used: {', '.join(unused)}; name several GPUs to spread the layers over them"


def _notes_on_model(
    model: PreTrainedModel, styles: Mapping[str, Style], group: ProcessGroup | None
) -> Iterator[str]:
    if not (known := compat.support("generation")):
        yield f"generate runs transformers' own loop: {known.reason}"
    if not has_routed_experts(model):
        yield f"{without_experts(model)}: what is swapped are its other modules alone"
    if group is not None:
        yield (
            f"process {group.rank} of {group.size}: has its part of {len(styles)} linear layers, and all of the others"
        )


def _notes_on_checkpoint(checkpoint: Checkpoint | None, mapping: KeyMap | None) -> Iterator[str]:
    if checkpoint is None or mapping is None:
        return
    if checkpoint.quantization:
        method = checkpoint.quantization["quant_method"]
        yield f"the checkpoint is quantised ({method}); what is not kept is decoded while it is read"
    if blocks := checkpoint.block_dtypes:
        yield (
            f"the checkpoint is {checkpoint.container} with {' and '.join(blocks)}; weights that do not run as "
            "stored are decoded, and quantised again where the operator's format says so"
        )
    if checkpoint.skipped:
        yield f"the checkpoint has {some(checkpoint.skipped)}, which the model does not need; skipped"
    if mapping.skipped:
        names = grouped(mapping.skipped, at_once=1)
        yield f"the checkpoint has {some(names)}, which the model does not need; skipped"
    if not checkpoint.complete:
        yield "only the checkpoint's index is there: shapes and formats could not be checked"


def _cut(
    model: PreTrainedModel, modules: list[MatchedModule], has_weights: bool, group: ProcessGroup
) -> dict[str, Style]:
    """Path → style of the linear layers that tensor parallelism cuts. Raises PlanError."""
    if has_weights:
        raise PlanError(
            "tp: the model has its weights already; each process reads its own part of a checkpoint. "
            "Build the model on meta and give checkpoint=<folder>."
        )
    for matched in modules:
        if matched.operator.on_ranks == "none":
            text = f"{matched.rule.operator} does not run with tp (tensor parallelism over processes)"
            raise PlanError(
                str(matched.rule.place().refusal(f"{text}. Use another operator, or leave tp out."))
            )
    taken = [matched.path for matched in modules if not isinstance(matched.module, nn.Linear)]
    return tensor_parallel.choose(model, group.size, taken)


def check_class(model: object) -> None:
    """Raise PlanError unless `model` is a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        raise PlanError(
            f"found a {type(model).__name__}; models of transformers are served. "
            "Build one with AutoModelForCausalLM.from_config, or give its folder to ktinject.load."
        )


def check_experts(model: PreTrainedModel) -> None:
    """Raise PlanError unless a model has routed experts, for which the bundled rules are."""
    check_class(model)
    if not has_routed_experts(model):
        raise PlanError(
            f"{without_experts(model)}: it is a dense model, and the bundled rules put routed experts on the CPU. "
            "Run it with transformers as it is, or write rules for its other modules, with dense_linear for example."
        )


def model_types(model: PreTrainedModel) -> tuple[str, str]:
    """The type of a model, and that of its language part, which is the same where the model is nothing else."""
    config = model.config
    return config.model_type, config.get_text_config(decoder=True).model_type


def _check_model(model: PreTrainedModel, ruleset: RuleSet) -> None:
    check_class(model)
    if hasattr(model, "ktinject"):
        raise PlanError("this model is swapped already (see model.ktinject). Build a new one on meta.")
    if part := next((path for path, module in model.named_modules() if adapters.is_part(module)), None):
        raise PlanError(
            f"this model has an adapter of PEFT ({part}). Swap it without one, and put the adapter on the swapped "
            "model: get_peft_model(model, …), or model.load_adapter(folder)."
        )
    config_values.check(model.config)
    types = model_types(model)
    if ruleset.model_types and not {*types} & {*ruleset.model_types}:
        raise PlanError(
            f"{ruleset.source}: these rules are for {', '.join(ruleset.model_types)}; "
            f'the model is a {types[0]}. Take other rules, or rules="auto".'
        )
    if model.dtype != torch.float32 and (fault := compat.narrow_fault(types[1])):
        raise PlanError(f"a model of type {types[1]} in {str(model.dtype).removeprefix('torch.')}: {fault}")
    on_meta = {tensor.is_meta for tensor in model.parameters()}
    if len(on_meta) > 1:
        raise PlanError(
            "the model is partly on the meta device; it must be wholly there or not at all. "
            "Build it inside torch.device('meta')."
        )
    if not on_meta:
        raise PlanError("the model has no parameters; there is nothing to plan.")
    if on_meta == {True} and (fault := dtypes.fault(model)):
        raise PlanError(
            f"parameters of the model have other dtypes than the config gives them: {fault}. This comes of another "
            "thread that builds a model, or sets torch's default dtype, meanwhile. Build it once more, by "
            "AutoModelForCausalLM.from_config or ktinject.load, which wait for their turn. If you cast them, do so "
            "after ktinject.optimize."
        )


def _check_checkpoint(model: PreTrainedModel, checkpoint: Checkpoint, ignore: Sequence[str]) -> KeyMap:
    quantization = {} if checkpoint.states_formats else models.quantization(model.config) or {}
    assert checkpoint.quantization == quantization, "the checkpoint was opened for another model"
    method = quantization.get("quant_method")
    if quantization and method not in checkpoint.methods:
        if method is None and {"bits", "group_size"} <= quantization.keys():
            method = "mlx"  # which names none
        raise PlanError(
            f"{checkpoint.path}: its config.json says quant_method {method!r}; read are checkpoints in bf16, "
            f"fp16, fp32 and {', '.join(checkpoint.methods)}. Use one of these, such as the original that it was "
            "made from."
        )
    mapping = key_map(model, checkpoint.weights)
    match.check(checkpoint, model, mapping, ignore)
    return mapping


def _stands_on(model: PreTrainedModel, where: Devices, devices: object) -> str:
    """The device of a model that has its weights already. Planning does not move it. Raises PlanError."""
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


def _check_shared(plan: Plan, model: PreTrainedModel) -> None:
    """Refuse to replace only some of the parameters that are tied, or that the checkpoint stores together."""
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
