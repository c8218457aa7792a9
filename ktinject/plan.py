"""The plan: which operator replaces which module, what runs in it, where it stands and how many bytes it takes.

Every refusal lives here, before a byte of weight is read or a module touched. Only what does not fit into memory
is kept as a problem of the plan and not raised, so that the plan of a large model can be read on a small machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ktinject import hf, rules, shards, table, working
from ktinject.errors import OperatorError, PlanError
from ktinject.keys import KeyMap, key_map
from ktinject.machine import Machine
from ktinject.operators import REGISTRY, Operator
from ktinject.operators.first_process import Elsewhere
from ktinject.placement import Devices, device_of, show_bytes, spread
from ktinject.rules import Rule, RuleSet
from ktinject.shards import Cut, Style
from ktinject.team import Team
from ktinject.weights import formats, gguf_blocks, match
from ktinject.weights.checkpoint import Checkpoint
from ktinject.weights.stored import Format
from ktinject.working import Running

_SHOWN = 5


@dataclass(frozen=True)
class Entry:
    """One module that is replaced.

    module     its class
    arguments  as the rule gives them
    runs       what will run: the operator's `describe`
    device     where the operator computes
    bytes      device → bytes that it takes
    config     the checked arguments, device resolved
    wants      parameter name relative to the module → shape
    shares     buffers, as the operator says
    caches     values that it caches for a token, if it says
    elsewhere  another process has it; nothing is read or held for it here
    """

    path: str
    module: str
    rule: str
    operator: str
    arguments: dict[str, Any]
    runs: dict[str, Any]
    device: str
    bytes: dict[str, int]
    config: Any = field(repr=False)
    wants: dict[str, tuple[int, ...]] = field(repr=False)
    shares: dict[tuple[str, str], tuple[int, int]] = field(repr=False, default_factory=dict)
    caches: int | None = field(repr=False, default=None)
    elsewhere: bool = False


@dataclass
class Plan:
    """All decisions of one call. `str(plan)` is a table, `to_dict()` is ready for JSON.

    matched     rule → paths of its modules, in the order of the rules; those of `keep` too
    entries     the replaced modules, in the order of the model
    rest_bytes  device → bytes of everything that is not replaced
    device_map  where that stands, as transformers wants it
    limits      device → bytes the plan may use
    to_load     device → bytes that are not in memory yet
    running     device → what the model takes there while it runs, beside its weights
    problems    what does not fit
    notes       what else one should know
    mapping     of the checkpoint's keys; None if the model has its weights
    styles      path → how tensor parallelism cuts a linear layer
    cuts        checkpoint key → the part of it that this process has
    """

    model: str
    model_type: str
    ruleset: RuleSet
    checkpoint: str | None
    matched: dict[str, tuple[str, ...]]
    entries: tuple[Entry, ...]
    rest_bytes: dict[str, int]
    device_map: dict[str, str]
    limits: dict[str, int]
    to_load: dict[str, int]
    running: dict[str, Running] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mapping: KeyMap | None = field(default=None, repr=False)
    styles: dict[str, Style] = field(default_factory=dict, repr=False)
    cuts: dict[str, Cut] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> dict[str, int]:
        """Device → bytes of the swapped model."""
        return table.total([*(entry.bytes for entry in self.entries), self.rest_bytes])

    @property
    def swapped(self) -> set[str]:
        """Full names of the parameters that operators take."""
        return {f"{entry.path}.{name}" for entry in self.entries for name in entry.wants}

    @property
    def elsewhere(self) -> set[str]:
        """Those that another process takes."""
        return {f"{entry.path}.{name}" for entry in self.entries if entry.elsewhere for name in entry.wants}

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts, numbers and strings only."""
        fields = [f.name for f in dataclasses.fields(Entry) if f.repr]
        return {
            "model": self.model,
            "model_type": self.model_type,
            "rules": self.ruleset.source,
            "checkpoint": self.checkpoint,
            "matched": {name: list(paths) for name, paths in self.matched.items()},
            "modules": [{name: getattr(entry, name) for name in fields} for entry in self.entries],
            "rest": {"bytes": self.rest_bytes, "device_map": self.device_map},
            "bytes": self.bytes,
            "to_load": self.to_load,
            "running": {device: running.to_dict() for device, running in self.running.items()},
            "limits": self.limits,
            "problems": list(self.problems),
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        return table.rich(self)

    def __str__(self) -> str:
        return table.text(self)

    def _repr_html_(self) -> str:
        return table.as_html(self)


@dataclass(frozen=True)
class _Found:
    """A module that a rule replaces.

    source   how the checkpoint stores its weight, if it has one
    """

    path: str
    module: nn.Module
    rule: Rule
    operator: type[Operator]
    config: Any
    source: Format | None = None

    def adopt(self, operator: type[Operator], config: Any) -> Any:
        """The arguments that fit the checkpoint, if the operator takes its format as it is."""
        if self.source is None or self.source.name not in operator.takes:
            return config
        return operator.adopt(config, self.source)


def make(
    model: PreTrainedModel,
    ruleset: RuleSet,
    checkpoint: Checkpoint | None,
    machine: Machine,
    devices: str | Sequence[str] | None = None,
    budget: Mapping[str, int | str] | None = None,
    team: Team | None = None,
) -> Plan:
    """Decide everything, change nothing.

    model       on meta, or with weights: the checkpoint replaces them, without one they are taken
    checkpoint  open; only its names and headers are used
    devices     what may be used; None: the first GPU if what is not swapped fits it, else the CPU
    budget      device → bytes, or text like "24GiB"
    team        the processes that share the model; the plan is this one's
    Raises      RuleError, PlanError, CheckpointError or OperatorError for everything but lack of memory
    """
    _check_model(model, ruleset)
    where = Devices.choose(machine, devices if team is None else str(team.device), budget)
    found, matched = _find(model, ruleset)
    mapping = None
    if checkpoint is not None:
        mapping = _check_checkpoint(model, checkpoint)
        found = [_adopt(item, model, checkpoint, mapping) for item in found]
    has_weights = checkpoint is None and not next(model.parameters()).is_meta
    styles = {} if team is None else _cut(model, found, has_weights, team)
    standings = ((_stands_on(model, where, devices),),) if has_weights else where.candidates
    layouts = []
    cuts: dict[str, Cut] = {}
    with shards.applied(model, styles, 1 if team is None else team.size):
        if team is not None and mapping is not None:
            cuts = shards.key_cuts(model, styles, mapping, team)
        cached = shards.cached_values(working.cached_values(model), hf.Layers(model).of, styles, team)
        for standing in standings:
            layers = hf.Layers(model)
            stack, device_map = layers.stack, {"": standing[0]}
            with _one_thread():
                entries = _entries(found, where, device_map, machine, stack, {}, team)
                if len(standing) > 1:
                    device_map = _spread(model, entries, layers, standing, where)
                    entries = _entries(found, where, device_map, machine, stack, {}, team)
            rest = _rest_bytes(model, entries, device_map)
            to_load = table.total([*(entry.bytes for entry in entries), {} if has_weights else rest])
            if any(entry.config.fills for entry in entries):
                spare = {device: where.limits[device] - to_load.get(device, 0) for device in where.allowed}
                with _one_thread():
                    entries = _entries(found, where, device_map, machine, stack, spare, team)
                to_load = table.total([*(entry.bytes for entry in entries), {} if has_weights else rest])
            over = {device: size for device, size in to_load.items() if size > where.limits[device]}
            excess = sum(size - where.limits[device] for device, size in over.items())
            running, too_much = working.find(entries, model, device_map, to_load, where.limits, cached)
            layouts.append(
                ((excess, len(too_much)), device_map, entries, rest, to_load, running, over, too_much)
            )
            if not over and not too_much:
                break
    _, device_map, entries, rest, to_load, running, over, too_much = min(
        layouts, key=lambda layout: layout[0]
    )
    plan = Plan(
        model=type(model).__name__,
        model_type=model.config.model_type,
        ruleset=ruleset,
        checkpoint=None if checkpoint is None else str(checkpoint.path),
        matched=matched,
        entries=entries,
        rest_bytes=rest,
        device_map=device_map,
        limits=where.limits,
        to_load=to_load,
        running=running,
        problems=[*(_too_large(device, size, where) for device, size in over.items()), *too_much],
        mapping=mapping,
        styles=styles,
        cuts=cuts,
    )
    _check_shared(plan, model)
    wanted, standing = standings[0], tuple(dict.fromkeys(device_map.values()))
    if standing != wanted and len(standing) > 1:
        plan.notes.append(f"decoder layers stand on {', '.join(standing)}: they do not fit on {wanted[0]}")
    elif standing[0] not in wanted:
        plan.notes.append(f"everything else stands on {standing[0]}: it does not fit on {', '.join(wanted)}")
    unused = [device for device in where.free if device not in (*plan.bytes, "cpu")]
    if unused and devices is None and not has_weights and team is None:
        plan.notes.append(f"not used: {', '.join(unused)}; name several GPUs to spread the layers over them")
    if team is not None:
        plan.notes.append(
            f"process {team.rank} of {team.size}: has its part of {len(styles)} linear layers, and all of the others"
        )
    if checkpoint is not None and not checkpoint.metadata and (quantization := hf.quantization(model.config)):
        method = quantization["quant_method"]
        plan.notes.append(f"the checkpoint is quantised ({method}); it is decoded while it is read")
    if checkpoint is not None and (blocks := _block_formats(checkpoint)):
        plan.notes.append(
            f"the checkpoint is GGUF with {' and '.join(blocks)}; weights that do not run as stored are decoded, and "
            "quantised again where the operator's format says so"
        )
    if checkpoint is not None and not checkpoint.complete:
        plan.notes.append("only the checkpoint's index is there: shapes and formats could not be checked")
    return plan


def _cut(model: PreTrainedModel, found: list[_Found], has_weights: bool, team: Team) -> dict[str, Style]:
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
    return shards.choose(model, team.size, taken)


def _check_model(model: PreTrainedModel, ruleset: RuleSet) -> None:
    if not isinstance(model, PreTrainedModel):
        raise PlanError(
            f"found a {type(model).__name__}; models of transformers are served. "
            "Build one with AutoModelForCausalLM.from_config."
        )
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


def _find(model: PreTrainedModel, ruleset: RuleSet) -> tuple[list[_Found], dict[str, tuple[str, ...]]]:
    """The modules that rules replace, in the order of the model, and the paths of every rule."""
    configs: dict[str, Any] = {}
    for rule in ruleset.rules:
        if rule.operator not in REGISTRY:
            raise rules.unknown_operator(rule, REGISTRY)
        configs[rule.name] = rules.check_arguments(rule, REGISTRY[rule.operator].Config)
    layers, modules = hf.Layers(model), dict(model.named_modules())
    described = [(path, hf.class_names(module), layers.of(path)) for path, module in modules.items()]
    keeps = {name: operator.keeps for name, operator in REGISTRY.items()}
    assignment = rules.assign(ruleset, described, keeps=keeps)
    found = [
        _Found(path, modules[path], rule, REGISTRY[rule.operator], configs[rule.name])
        for path, rule in assignment.rules.items()
        if REGISTRY[rule.operator].replaces
    ]
    return found, assignment.matched


def _check_checkpoint(model: PreTrainedModel, checkpoint: Checkpoint) -> KeyMap:
    quantization = hf.quantization(model.config)
    method = (quantization or {}).get("quant_method")
    if quantization and not checkpoint.metadata and method not in formats.METHODS:
        raise PlanError(
            f"{checkpoint.path}: its config.json says quant_method {method!r}; read are checkpoints in bf16, "
            f"fp16, fp32 and {', '.join(formats.METHODS)}. Use one of these, such as the original this was made from."
        )
    mapping = key_map(model, formats.weight_names(checkpoint.names), formats.companions)
    match.check(checkpoint, model, mapping, quantization)
    return mapping


def _block_formats(checkpoint: Checkpoint) -> list[str]:
    """The quantised formats of GGUF that a checkpoint has."""
    return sorted({info.dtype for info in checkpoint.tensors.values()} & {*gguf_blocks.TYPES})


def _adopt(item: _Found, model: PreTrainedModel, checkpoint: Checkpoint, mapping: KeyMap) -> _Found:
    """With what the checkpoint has, and the arguments that fit it."""
    keys = [piece.key for piece in mapping.targets.get(f"{item.path}.weight", ())]
    if not keys:
        return item
    item = dataclasses.replace(
        item, source=formats.detect(checkpoint, keys[0], hf.quantization(model.config))
    )
    return dataclasses.replace(item, config=item.adopt(item.operator, item.config))


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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Operators try modules out on a few numbers; on a busy machine threads make that five times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _entries(
    found: list[_Found],
    where: Devices,
    device_map: Mapping[str, str],
    machine: Machine,
    stack: nn.Module,
    spare: Mapping[str, int],
    team: Team | None,
) -> tuple[Entry, ...]:
    entries = []
    refused: dict[tuple[str, str], list[str]] = {}
    arranged = _arrange(found, where, device_map, stack, spare)
    for item in found:
        rule, operator = item.rule, item.operator
        config = arranged[item.path]
        reason = config if isinstance(config, str) else None
        if reason is None:
            chosen = operator.instead(item.module, config)
            if chosen is None:
                continue
            if chosen[0] is not operator:
                chosen = chosen[0], item.adopt(*chosen)
            operator, config = chosen
            reason = operator.supports(item.module, config, machine)
        if reason is not None:
            text = f"{operator.name} cannot replace a {type(item.module).__name__}: {reason}"
            refused.setdefault((rule.name, text), []).append(item.path)
            continue
        try:
            built = operator.build(item.module, config)
        except OperatorError as error:
            raise OperatorError(str(rule.place().refusal(f"{item.path}: {error}"))) from error
        inner = [other.path for other in found if other.path.startswith(f"{item.path}.")]
        _check_contract(item, built, inner, {*where.allowed})
        elsewhere = team is not None and team.rank > 0 and operator.across == "first"
        entries.append(
            Entry(
                path=item.path,
                module=type(item.module).__name__,
                rule=rule.name,
                operator=operator.name,
                arguments=dict(rule.arguments),
                runs=Elsewhere().describe() if elsewhere else built.describe(),
                device=config.device,
                bytes={} if elsewhere else built.footprint(),
                config=config,
                wants=built.wants(),
                shares={} if elsewhere else built.shares(),
                caches=built.caches,
                elsewhere=elsewhere,
            )
        )
    if refused:
        places = {item.rule.name: item.rule.place() for item in found}
        lines = [
            str(places[rule].refusal(f"{text}; matched {_some(paths)}. Narrow the match, or replace: keep."))
            for (rule, text), paths in refused.items()
        ]
        raise PlanError("\n".join(lines))
    return tuple(entries)


def _arrange(
    found: list[_Found],
    where: Devices,
    device_map: Mapping[str, str],
    stack: nn.Module,
    spare: Mapping[str, int],
) -> dict[str, Any]:
    """Path → config with its device, or the reason why not."""
    modules: dict[type[Operator], dict[str, tuple[nn.Module, Any]]] = {}
    for item in found:
        standing = device_of(device_map, item.path)
        device = where.for_operator(item.rule, item.config.device, item.operator.device_types, standing)
        config = dataclasses.replace(item.config, device=device)
        modules.setdefault(item.operator, {})[item.path] = (item.module, config)
    arranged: dict[str, Any] = {}
    for operator, theirs in modules.items():
        arranged |= operator.arrange(stack, theirs, spare)
    return arranged


def _check_contract(item: _Found, built: Operator, inner: list[str], devices: set[str]) -> None:
    """Everything the module has must be taken or kept by the operator, which may have nothing else."""

    def refuse(text: str) -> OperatorError:
        return OperatorError(f"operator {item.rule.operator!r} at {item.path}: {text}. Correct the operator.")

    unknown = set(built.footprint()) - devices
    if unknown:
        raise refuse(f"its footprint names {', '.join(unknown)}, which the plan may not use")
    theirs = {**dict(item.module.named_parameters()), **dict(item.module.named_buffers())}
    kept = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    for name, tensor in kept.items():
        if theirs.get(name) is not tensor:
            raise refuse(
                f"it holds a parameter or buffer of its own, {name!r}; it may only keep the module's"
            )
    wants = built.wants()
    for name, shape in wants.items():
        if name not in theirs or tuple(theirs[name].shape) != tuple(shape):
            had = list(theirs[name].shape) if name in theirs else "nothing"
            raise refuse(f"it wants {name!r} of shape {list(shape)}; the module has {had}")
    prefixes = tuple(path[len(item.path) + 1 :] + "." for path in inner)
    lost = [name for name in item.module.state_dict() if name not in wants and name not in kept]
    lost = [name for name in lost if not name.startswith(prefixes)]
    if lost:
        raise refuse(f"it neither loads nor keeps {', '.join(lost)}")


def _rest_sizes(model: PreTrainedModel, entries: Sequence[Entry]) -> Iterator[tuple[str, int]]:
    """Name and bytes of all that operators do not take: parameters, buffers, tied ones once, in their final dtype."""
    swapped = {f"{entry.path}.{name}" for entry in entries for name in entry.wants}
    dtype_of = hf.final_dtype(model)
    for tensors in (model.named_parameters(), model.named_buffers()):
        for name, tensor in tensors:
            if name not in swapped:
                yield name, tensor.numel() * dtype_of(name, tensor).itemsize


def _rest_bytes(
    model: PreTrainedModel, entries: Sequence[Entry], device_map: Mapping[str, str]
) -> dict[str, int]:
    """Device → bytes of all that operators do not take."""
    sizes = dict.fromkeys(device_map.values(), 0)
    for name, size in _rest_sizes(model, entries):
        sizes[device_of(device_map, name)] += size
    return sizes


def _spread(
    model: PreTrainedModel, entries: Sequence[Entry], layers: hf.Layers, gpus: Sequence[str], where: Devices
) -> dict[str, str]:
    """A device map of several GPUs, from the bytes on the first one if all stood there."""
    outside, inside = 0, dict.fromkeys(layers.paths, 0)
    on_first = ((entry.path, entry.bytes.get(gpus[0], 0)) for entry in entries)
    for path, size in (*_rest_sizes(model, entries), *on_first):
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
    for conversion in (plan.mapping.conversions if plan.mapping else {}).values():
        taken = [name for name in conversion.targets if name in swapped]
        left = [name for name in conversion.targets if name not in swapped]
        if taken and left:
            raise PlanError(
                f"{_some(taken)} cannot be replaced alone: the checkpoint stores them together with "
                f"{_some(left)}. Replace or keep both."
            )


def _too_large(device: str, size: int, where: Devices) -> str:
    limit, free = where.limits[device], where.free[device]
    has = f"{show_bytes(free)} are free" if limit == free else f"the budget is {show_bytes(limit)}"
    other = "a larger budget" if limit < free else "a machine with more memory"
    return f"{device} needs {show_bytes(size)}, but {has}. Use smaller weights (int8, int4) or {other}."


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
