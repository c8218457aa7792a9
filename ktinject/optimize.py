"""The three calls: `plan` decides, `optimize` decides and does it, `load` builds the model first.

rules ──► plan ──► build ──► fill ──► swap; transformers loads the rest ──► model
          └─ changes nothing ───────┘ └─ a transaction: wholly done or wholly undone
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ktinject import ending, machine
from ktinject import rules as language
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.distributed import layer_split, tensor_parallel
from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import CheckpointError, PlanError, shown
from ktinject.generation import generate
from ktinject.hf import hub, models
from ktinject.hf.layers import Layers
from ktinject.hf.plugin import KTInjectConfig
from ktinject.loading import fill, inject, save_packed, swapped
from ktinject.loading import progress as loading
from ktinject.loading.packed_cache import PackedCache
from ktinject.machine import Machine
from ktinject.operators.offload import lent
from ktinject.planning import narrow
from ktinject.planning.devices import Budget, one_budget, suppose
from ktinject.planning.plan import Plan
from ktinject.planning.planner import check_class, check_experts, make
from ktinject.rules import RuleSet

logger = logging.getLogger("ktinject")

Rules = str | Path | RuleSet | Mapping[str, Any] | Sequence[Mapping[str, Any]]


def plan(
    model: PreTrainedModel,
    rules: Rules,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    devices: str | Sequence[str] | None = None,
    budget: Budget | None = None,
    variables: Mapping[str, Any] | None = None,
    tp: bool = False,
    context: int | None = None,
    max_memory: Budget | None = None,
    machine: Budget | None = None,
    ignore: Sequence[str] = (),
) -> Plan:
    """Plan what `optimize` would do with the same arguments. The model stays as it is.

    machine  plan for another machine with this memory, such as {"cpu": "512GiB", "cuda:0": "24GiB"}, and no other GPUs.
             Without "cpu" it has this machine's memory. It has this machine's CPU, and its GPUs of the same number
    Returns  the plan; `plan.problems` says what does not fit into memory or budget, `plan.remedies` what makes it fit
    Raises   as `optimize`, but not if the plan does not fit
    """
    ruleset = read_rules(model, rules, variables)
    if machine is not None and tp:
        raise PlanError("machine: the processes of tp are on this machine. Leave one of the two out.")
    found = _machine(devices, budget, max_memory, memory=machine)
    group = ProcessGroup.join(found, devices) if tp else None
    with _sharing_errors(group), _DEVICE, _open(model, checkpoint) as source:
        limit = one_budget(budget, max_memory)
        decided = make(model, ruleset, source, found, devices, limit, group, context, ignore)
    if machine is not None:
        decided.notes.append(
            "planned for another machine; its CPU is taken for this one's, and a GPU that is not here for one of "
            "compute capability 8.0"
        )
    return decided


# What a plan does not place is made here, whatever the caller's default is: of `with torch.device("meta")`, for one.
_DEVICE = torch.device("cpu")

# Held while old objects are left alone: by `load` for the `optimize` in it, or by another thread's load.
_leaving_alone = threading.Lock()
# Python 3.12 keeps 375 objects of its own from searches: those that live for ever, which it keeps again by itself.
_KEPT_BY_PYTHON = 500


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Let garbage be looked for among what a load makes alone.

    A load makes as many objects as start a search of all that there are, and torch and transformers have made 400,000:
    0.2 s, in which nobody else has Python's lock. What is garbage by then waits for the next search; the plan counts it
    as memory in use. Nothing is done where the caller keeps objects from searches himself.
    """
    if not _leaving_alone.acquire(blocking=False):
        yield
        return
    try:
        if gc.get_freeze_count() > _KEPT_BY_PYTHON:
            yield
            return
        try:
            gc.freeze()
            yield
        finally:
            gc.unfreeze()
    finally:
        _leaving_alone.release()


@_old_objects_left_alone()
def optimize(
    model: PreTrainedModel,
    rules: Rules,
    *,
    checkpoint: str | os.PathLike[str] | Checkpoint | None = None,
    devices: str | Sequence[str] | None = None,
    budget: Budget | None = None,
    progress: bool = True,
    variables: Mapping[str, Any] | None = None,
    check_tensors: bool = False,
    tp: bool = False,
    context: int | None = None,
    max_memory: Budget | None = None,
    ignore: Sequence[str] = (),
    cache: Literal["auto"] | None = None,
) -> PreTrainedModel:
    """Replace modules of a model by operators, as rules say, and load all its weights. Works in place.

    model          a model on the meta device, or one with its weights. The weights of the latter are used unless a
                   checkpoint is given
    rules          a path, the name of bundled rules ("auto" serves any Mixture-of-Experts model), a RuleSet, a rule
                   document as a dict, or a list of rules
    checkpoint     a folder or file of safetensors or GGUF, or one that is open and stays so; by default where the
                   config was read from
    devices        the devices to use, such as "cpu" or ["cuda:0", "cuda:1"]; several GPUs share the decoder layers.
                   By default the first GPU if it has room, else all GPUs, else the CPU. Operators of the CPU compute
                   on the CPU in any case
    budget         device → the most bytes to use, such as {"cuda:0": "24GiB"}; a GPU may be a number: {0: "24GiB"}
    progress       show a progress bar on stderr
    variables      values for the variables of the rules, and for arguments of rules by the rule's name:
                   {"experts": "int8", "routed experts.prefill": "cpu"}
    check_tensors  refuse NaN and infinity in all weights, which costs some time; scales are always checked
    context        tokens of a request, prompt and answer, that the cache must have room for; by default a short one
    max_memory     accelerate's name for budget
    ignore         patterns, each of whole names of tensors that the checkpoint may have beside those of the model;
                   what does no harm is skipped without
    tp             share the model among the processes that torchrun started, one for each GPU: linear layers by
                   transformers' tp_plan, experts in process 0. All processes make the same calls; `devices` then names
                   one device for each process
    cache          "auto": read packed weights from the cache (KTINJECT_CACHE) where they are there for this checkpoint
                   and plan, else write them there; see docs/how-to/packed-weights.md
    Returns        the same model, in evaluation mode if it was on meta; `model.ktinject` is the plan
    Raises         RuleError, PlanError, CheckpointError or OperatorError; the model is then as it was. With tp, all
                   processes raise what one of them raises
    """
    _check_cache(cache, tp)
    ruleset = read_rules(model, rules, variables)
    found = _machine(devices, budget, max_memory)
    group = ProcessGroup.join(found, devices) if tp else None
    limit = one_budget(budget, max_memory)
    with _sharing_errors(group), _DEVICE:
        model = _optimize(
            model,
            ruleset,
            checkpoint,
            found,
            devices,
            limit,
            progress,
            check_tensors,
            group,
            context,
            ignore,
            cache,
        )
    model.ktinject.asked = _asked(rules, variables)
    return model


def _asked(rules: Rules, variables: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Rules and variables as config.json can say them."""
    if isinstance(rules, RuleSet):
        return None
    found = KTInjectConfig(rules=rules, variables=variables).whole().to_dict()
    return {name: found[name] for name in ("rules", "variables") if name in found}


def _check_cache(cache: object, tp: bool) -> None:
    if cache not in (None, "auto"):
        raise PlanError(f"cache: found {shown(cache)}; allowed are 'auto' and None. Write one of these.")
    if cache is not None and tp:
        raise PlanError(
            "cache: with tp each process has a part of the model, which is not kept. Leave one out."
        )


def _machine(
    devices: str | Sequence[str] | None, *limits: Budget | None, memory: Budget | None = None
) -> Machine:
    """This machine, or one with such memory; without a look at its GPUs where a call names the CPU alone."""
    listed = devices if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]
    named = {str(device) for device in listed}
    named |= {str(device) for limit in limits if isinstance(limit, Mapping) for device in limit}
    found = machine.detect(with_gpus=named != {"cpu"} or memory is not None)
    if memory is not None:
        return suppose(found, memory)
    # What other models would give back is free.
    gpus = [
        replace(gpu, free_bytes=gpu.free_bytes + lent.lent_bytes(torch.device("cuda", gpu.index)))
        for gpu in found.gpus
    ]
    return replace(found, gpus=tuple(gpus))


def _sharing_errors(group: ProcessGroup | None) -> AbstractContextManager[None]:
    return nullcontext() if group is None else group.sharing_errors()


def _optimize(
    model: PreTrainedModel,
    ruleset: RuleSet,
    checkpoint: str | os.PathLike[str] | Checkpoint | None,
    found: Machine,
    devices: str | Sequence[str] | None,
    budget: Budget | None,
    progress: bool,
    check_tensors: bool,
    group: ProcessGroup | None,
    context: int | None,
    ignore: Sequence[str],
    cache: Literal["auto"] | None,
) -> PreTrainedModel:
    ending.install()
    operators: dict[str, Any] = {}
    # Open until the very end: an interrupt may come between the last step and the return.
    transaction = inject.Transaction(model)
    try:
        with _open(model, checkpoint) as source:
            decided = make(model, ruleset, source, found, devices, budget, group, context, ignore)
            _check_ready(model, decided, source)
            if source is None and cache is not None:
                raise PlanError(
                    "cache: the model has its weights, and no checkpoint that packed ones could be kept for. "
                    "Give checkpoint=<folder>, or leave cache out."
                )
            narrow.routers(model, source, decided.mapping)
            if group is not None:
                tensor_parallel.apply(model, decided.styles, group.size)
            _make_room(decided)
            operators |= inject.build(decided, model)
            fill.allocate(decided, operators)
            if source is None:
                _fill_from_model(model, decided, operators, progress, check_tensors)
            else:
                bar = progress and (group is None or group.rank == 0)
                _fill_from_checkpoint(model, decided, operators, source, bar, check_tensors, group, cache)
        if group is not None:
            tensor_parallel.install(model, decided.styles, group)
        layer_split.install(model, Layers(model).paths, decided.device_map)
        generate.install(model, group)
        if operators:
            swapped.install(model)
        logger.info("swapped %d modules of %s", len(decided.replacements), decided.model)
        if found.huge_pages not in ("always", "madvise"):
            logger.info("packed weights lie in pages of 4 KiB; `ktinject doctor` says why not in huge ones")
    except BaseException as error:
        transaction.restore()
        operators.clear()
        _let_go(error)
        raise
    return model


def _make_room(decided: Plan) -> None:
    """Have experts of other models give back memory of GPUs that a plan counts as free."""
    for name in dict.fromkeys([*decided.to_load, *decided.runtime_memory]):
        device = torch.device(name)
        if device.type == "cpu" or not lent.is_lent({device}):
            continue
        running = decided.runtime_memory.get(name)
        wanted = decided.to_load.get(name, 0) + (0 if running is None else sum(running.workspace.values()))
        if wanted > lent.free_bytes(device):
            lent.give_back({device})


def load(
    path: str | os.PathLike[str],
    rules: Rules | None = None,
    *,
    devices: str | Sequence[str] | None = None,
    budget: Budget | None = None,
    dtype: str | torch.dtype = "auto",
    progress: bool = True,
    variables: Mapping[str, Any] | None = None,
    check_tensors: bool = False,
    tp: bool = False,
    context: int | None = None,
    max_memory: Budget | None = None,
    ignore: Sequence[str] = (),
    cache: Literal["auto"] | None = None,
) -> PreTrainedModel:
    """Build the model of a folder on the meta device, then `optimize` it.

    The model is of the class that config.json names: a causal language model, or one that also reads images. Of a model
    that speaks (Qwen3-Omni) it is the part that writes.

    path    a model folder with config.json and safetensors or GGUF, or a file in it; a .gguf file is enough by
            itself. Or the name of a model whose files are in the Hub's cache
    rules   as `optimize` takes them; None: what config.json states (see `KTInjectConfig`), with its devices, budget
            and context where the call gives none, and its variables where the call gives no other value; else "auto"
    dtype   the type of everything that is not replaced; "auto": the config's, else what most tensors have
    others  as `optimize` takes them
    Returns the model, in evaluation mode; `model.ktinject` is the plan
    Raises  as `optimize`
    """
    path, _ = hub.find(path)
    with _old_objects_left_alone(), _DEVICE, Checkpoint.open(path) as checkpoint:
        config = models.read_config(path, checkpoint)
        arguments = with_stated(
            config,
            rules,
            devices=devices,
            budget=one_budget(budget, max_memory),
            variables=variables,
            context=context,
            ignore=ignore,
        )
        model = models.meta_model(config, dtype, checkpoint)
        arguments["check_tensors"] |= check_tensors
        arguments["tp"] |= tp
        return optimize(model, checkpoint=checkpoint, progress=progress, cache=cache, **arguments)


def with_stated(
    config: PreTrainedConfig,
    rules: Rules | None = None,
    *,
    devices: str | Sequence[str] | None = None,
    budget: Budget | None = None,
    variables: Mapping[str, Any] | None = None,
    context: int | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """Arguments for `optimize`: those given, and for others what the model's config.json states.

    Variables that are given are set on top of those that it states. Rules that are given replace all that it states.

    Returns  rules, devices, budget, variables, check_tensors, tp, context, ignore
    Raises   PlanError for what config.json states wrongly
    """
    stated = (models.said_of_us(config) if rules is None else None) or KTInjectConfig()
    kept, given = dict(stated.variables or {}), dict(variables or {})
    if not all("." in name for name in given):
        # A stated argument of a rule would hide the variable that it was made of.
        kept = {name: value for name, value in kept.items() if "." not in name}
    return {
        "rules": stated.rules if rules is None else rules,
        "devices": stated.devices if devices is None else devices,
        "budget": stated.budget if budget is None else budget,
        "variables": {**kept, **given},
        "check_tensors": stated.check_tensors,
        "tp": stated.tp,
        "context": stated.context if context is None else context,
        "ignore": ignore or stated.ignore or (),
    }


def read_rules(model: PreTrainedModel, rules: Rules, variables: Mapping[str, Any] | None) -> RuleSet:
    """Read rules for a model; "auto" means the bundled rules for its type. Raises RuleError, PlanError."""
    check_class(model)
    if isinstance(rules, str) and rules == "auto":
        check_experts(model)
    return language.read(rules, variables=variables)


def _open(
    model: PreTrainedModel, checkpoint: str | os.PathLike[str] | Checkpoint | None
) -> AbstractContextManager[Checkpoint | None]:
    """The checkpoint to load from; None if there is none, or if the model has its weights."""
    if isinstance(checkpoint, Checkpoint):
        checkpoint.say_quantization(models.quantization(model.config))
        return nullcontext(checkpoint)
    path = checkpoint
    if path is None:
        name = model.config.name_or_path
        on_meta = any(tensor.is_meta for tensor in model.parameters())
        if not on_meta or not name or not (os.path.isdir(name) or name.endswith(".gguf")):
            return nullcontext(None)
        path = name
    return Checkpoint.open(hub.find(path)[0], models.quantization(model.config))


def _check_ready(model: PreTrainedModel, decided: Plan, source: Checkpoint | None) -> None:
    """Refuse what may be planned but not done."""
    if source is None and any(tensor.is_meta for tensor in model.parameters()):
        name = model.config.name_or_path
        raise CheckpointError(
            f"the model is on meta and there is no checkpoint to load; its config names {name or 'no folder'!r}. "
            "Give checkpoint=<folder>."
        )
    if source is not None and not source.complete:
        raise CheckpointError(f"{source.path}: only the index is there. Download the shards that it names.")
    decided.check()


def _fill_from_model(
    model: PreTrainedModel,
    decided: Plan,
    operators: Mapping[str, Any],
    progress: bool,
    check_tensors: bool,
) -> None:
    total = sum(model.get_parameter_or_buffer(name).nbytes for name in decided.swapped)
    with loading.progress(total, progress) as advance:
        fill.from_model(decided, operators, model, advance, check_tensors)
    inject.apply(model, decided, operators)


def _fill_from_checkpoint(
    model: PreTrainedModel,
    decided: Plan,
    operators: Mapping[str, Any],
    source: Checkpoint,
    progress: bool,
    check_tensors: bool,
    group: ProcessGroup | None,
    cache: Literal["auto"] | None,
) -> None:
    assert decided.mapping is not None
    folder = source.path if source.path.is_dir() else source.path.parent
    generation = models.generation_config(model, folder)
    kept = None
    if cache is not None and source.packed is None:  # else it is packed already
        kept = PackedCache.of(decided, operators, source)
    # Weights that are to be checked are read from the checkpoint.
    read_back = None if kept is None or check_tensors else kept.restore(operators, progress)
    filled = {*kept.held} if kept is not None and read_back is not None else set()
    if (packed := save_packed.restore(source, decided, operators, progress)) is not None:
        read_back, filled = packed
    taken = {
        f"{r.path}.{name}" for r in decided.replacements if r.path in filled for name in r.parameter_shapes
    }
    names = model.state_dict().keys() - decided.elsewhere - taken
    keys = {key for name in names for key in decided.mapping.keys(name)}
    with loading.progress(sum(source.bytes_of(key) for key in keys), progress) as advance:
        read = fill.WeightReader(source, advance, check_tensors, decided.cuts)
        pace = fill.from_checkpoint(decided, operators, model, source, read, filled)
        if kept is not None and read_back is None:
            kept.save(operators, progress)
        inject.apply(model, decided, operators, group)
        models.load_rest(model, decided.mapping, read, decided.device_map, str(source.path))
        models.drop_quantization(model.config)
        if generation is not None:
            model.generation_config = generation
        if operators:
            advance.say(str(read_back or pace))


def _let_go(error: BaseException | None) -> None:
    """Drop the local variables of the frames that an exception holds: they would keep gigabytes alive with it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
