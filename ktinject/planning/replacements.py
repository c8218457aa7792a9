"""Which operator takes which module, and what that makes of it: the replacements of a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ktinject import rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import Format
from ktinject.distributed.first_process import ReceivedExperts
from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import KTInjectError, OperatorError, PlanError, RuleError, few
from ktinject.hf.key_map import KeyMap
from ktinject.hf.layers import Layers, class_names, has_routed_experts
from ktinject.machine import Machine, device_of
from ktinject.operators import REGISTRY, Operator
from ktinject.planning.devices import Devices
from ktinject.rules import Rule, RuleSet

_SHOWN = 5


@dataclass(frozen=True)
class Replacement:
    """One module that is replaced.

    module     its class
    arguments  as the rule gives them
    runs       what will run: the operator's `describe`
    device     where the operator computes
    bytes      device → bytes that it takes
    config     the checked arguments, device resolved
    parameter_shapes     parameter name relative to the module → shape
    workspace            buffers, as the operator says
    kv_values_per_token  values that it caches for a token, if it says
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
    parameter_shapes: dict[str, tuple[int, ...]] = field(repr=False)
    workspace: dict[tuple[str, str], tuple[int, int]] = field(repr=False, default_factory=dict)
    kv_values_per_token: int | None = field(repr=False, default=None)
    elsewhere: bool = False


@dataclass(frozen=True)
class MatchedModule:
    """A module that a rule replaces.

    source   how the checkpoint stores its weight, if it has one
    sources  the ways in which it stores what fills the module: parameter, format, part of it
    """

    path: str
    module: nn.Module
    rule: Rule
    operator: type[Operator]
    config: Any
    source: Format | None = None
    sources: Callable[[], Collection[tuple[str, Format, int | None]]] = field(default=tuple, compare=False)

    def use_checkpoint_format(self, operator: type[Operator], config: Any) -> Any:
        """The arguments that fit the checkpoint, if the operator takes its format as it is."""
        if self.source is None or self.source.name not in operator.native_formats:
            return config
        return operator.use_checkpoint_format(config, self.source)


@contextmanager
def blaming(rule: Rule, where: str, operator: str) -> Iterator[None]:
    """Within, what an operator refuses is said with its rule and place; what its code raises else, as OperatorError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, KTInjectError) and not isinstance(error, OperatorError):
            raise
        text = str(error) if isinstance(error, OperatorError) else f"{type(error).__name__}: {error}"
        named = text if text.startswith(f"{operator}:") else f"{operator}: {text}"
        raise OperatorError(str(rule.place().refusal(f"{where}: {named}"))) from error


def find_modules(
    model: PreTrainedModel, ruleset: RuleSet
) -> tuple[list[MatchedModule], dict[str, tuple[str, ...]]]:
    """The modules that rules replace, in the order of the model, and the paths of every rule."""
    configs: dict[str, Any] = {}
    for rule in ruleset.rules:
        if rule.operator not in REGISTRY:
            raise rules.unknown_operator(rule, REGISTRY)
        configs[rule.name] = rules.check_arguments(rule, REGISTRY[rule.operator].Config)
    layers, modules = Layers(model), dict(model.named_modules())
    described = [(path, class_names(module), layers.of(path)) for path, module in modules.items()]
    keeps = {name: operator.keeps for name, operator in REGISTRY.items()}
    try:
        assignment = rules.assign(ruleset, described, keeps=keeps)
    except RuleError as error:
        if "matches nothing" not in str(error) or has_routed_experts(model):
            raise
        raise RuleError(f"{error}\n{without_experts(model)}, which may be why.") from error
    found = [
        MatchedModule(path, modules[path], rule, REGISTRY[rule.operator], configs[rule.name])
        for path, rule in assignment.rules.items()
        if REGISTRY[rule.operator].replaces
    ]
    return found, assignment.matched


def without_experts(model: PreTrainedModel) -> str:
    """Says that a model is none of those that all this is about."""
    return f"{type(model).__name__} (model type {model.config.model_type!r}) has no routed experts"


def adopt_format(
    item: MatchedModule, model: PreTrainedModel, checkpoint: Checkpoint, mapping: KeyMap
) -> MatchedModule:
    """With what the checkpoint has, and the arguments that fit it."""

    @functools.cache
    def sources() -> Collection[tuple[str, Format, int | None]]:
        names = [name for name, parameter in item.module.named_parameters() if parameter.is_floating_point()]
        pieces = ((name, piece) for name in names for piece in mapping.targets.get(f"{item.path}.{name}", ()))
        found = ((name, checkpoint.format_of(p.key), p.part) for name, p in pieces)
        return {(name, dataclasses.replace(form, companions=()), part): None for name, form, part in found}

    item = dataclasses.replace(item, sources=sources)
    keys = [piece.key for piece in mapping.targets.get(f"{item.path}.weight", ())]
    if not keys:
        return item
    item = dataclasses.replace(item, source=checkpoint.format_of(keys[0]))
    return dataclasses.replace(item, config=item.use_checkpoint_format(item.operator, item.config))


def find_replacements(
    found: list[MatchedModule],
    where: Devices,
    device_map: Mapping[str, str],
    machine: Machine,
    stack: nn.Module,
    spare: Mapping[str, int],
    group: ProcessGroup | None,
) -> tuple[Replacement, ...]:
    replacements = []
    refused: dict[tuple[str, str], list[str]] = {}
    remedies: dict[tuple[str, str], str] = {}
    arranged = _arrange(found, where, device_map, stack, spare)
    for item in found:
        rule, operator = item.rule, item.operator
        config = arranged[item.path]
        reason = config if isinstance(config, str) else None
        if reason is None:
            with blaming(rule, item.path, operator.name):
                chosen = operator.resolve(item.module, config)
            if chosen is None:
                continue
            if chosen[0] is not operator:
                chosen = chosen[0], item.use_checkpoint_format(*chosen)
            operator, config = chosen
            with blaming(rule, item.path, operator.name):
                reason = operator.supports(item.module, config, machine)
        if reason is None:
            with blaming(rule, item.path, operator.name):
                built = operator.build(item.module, config)
                reason = _misfit(built, item)
        if reason is not None:
            text = f"{operator.name} cannot replace a {type(item.module).__name__}: {reason}"
            refused.setdefault((rule.name, text), []).append(item.path)
            about = rules.argument_of(reason, operator.Config)
            change = f"Change {about}, narrow" if about else "Narrow"
            remedies[rule.name, text] = f"{change} the match, or replace: keep."
            continue
        inner = [other.path for other in found if other.path.startswith(f"{item.path}.")]
        elsewhere = group is not None and group.rank > 0 and operator.across == "first"
        with blaming(rule, item.path, operator.name):
            _check_contract(item, built, inner, {*where.allowed})
            replacements.append(
                Replacement(
                    path=item.path,
                    module=type(item.module).__name__,
                    rule=rule.name,
                    operator=operator.name,
                    arguments=dict(rule.arguments),
                    runs=ReceivedExperts().describe() if elsewhere else built.describe(),
                    device=config.device,
                    bytes={} if elsewhere else built.footprint(),
                    config=config,
                    parameter_shapes=built.parameter_shapes(),
                    workspace={} if elsewhere else built.workspace(),
                    kv_values_per_token=built.kv_values_per_token,
                    elsewhere=elsewhere,
                )
            )
    if refused:
        places = {item.rule.name: item.rule.place() for item in found}
        lines = [
            str(places[rule].refusal(f"{text}; matched {some(paths)}. {remedies[rule, text]}"))
            for (rule, text), paths in refused.items()
        ]
        raise PlanError("\n".join(few(lines)))
    return tuple(replacements)


def _arrange(
    found: list[MatchedModule],
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
        first = next(item for item in found if item.path in theirs)
        with blaming(first.rule, some([*theirs]), operator.name):
            arranged |= operator.plan_placement(stack, theirs, spare)
    return arranged


def _misfit(built: Operator, item: MatchedModule) -> str | None:
    """Why an operator cannot take what the checkpoint has in a format that it takes undecoded."""
    sources = item.sources() if built.native_formats else ()
    reasons = (built.misfit_of(*source) for source in sources if source[1].name in built.native_formats)
    return next((reason for reason in reasons if reason), None)


def _check_contract(item: MatchedModule, built: Operator, inner: list[str], devices: set[str]) -> None:
    """Everything the module has must be taken or kept by the operator, which may have nothing else."""

    def refuse(text: str) -> OperatorError:
        return OperatorError(f"{text}. Correct the operator.")

    if not isinstance(built.describe(), dict):
        raise refuse(f"its describe() gave {built.describe()!r}, which is no dict")

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
    parameter_shapes = built.parameter_shapes()
    for name, shape in parameter_shapes.items():
        if name not in theirs or tuple(theirs[name].shape) != tuple(shape):
            had = list(theirs[name].shape) if name in theirs else "nothing"
            raise refuse(f"its parameter_shapes() has {name!r} of {list(shape)}; the module has {had}")
    prefixes = tuple(path[len(item.path) + 1 :] + "." for path in inner)
    lost = [name for name in item.module.state_dict() if name not in parameter_shapes and name not in kept]
    lost = [name for name in lost if not name.startswith(prefixes)]
    if lost:
        raise refuse(f"it neither loads nor keeps {', '.join(few(lost))}")


def some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
