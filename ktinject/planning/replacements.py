"""Turns matched modules into planned replacements: each has an operator, what it runs and how many bytes it takes.

The planner tries several device maps, and modules, rules and arguments are the same for all of them. So an operator is
built only once for each module and device. Only its placement is planned anew for each device map, since that depends
on the other modules and on the memory that is left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ktinject import rules
from ktinject.distributed.first_process import ReceivedExperts
from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import OperatorError, PlanError, few
from ktinject.machine import Machine, device_of
from ktinject.operators import Operator, Placement
from ktinject.planning.devices import Devices
from ktinject.planning.modules import MatchedModule, blaming, some


@dataclass(frozen=True)
class Replacement:
    """One module that is replaced.

    module               name of its class
    rule                 name of the rule
    where                file and line of the rule
    operator             name of the operator
    arguments            as the rule gives them
    runs                 kernel and formats that will run: the operator's `describe()`
    device               where the operator computes
    bytes                device → bytes that the operator takes
    config               the checked arguments, with the device decided
    placement            the result of `Operator.plan_placement` for this module; None if it has none
    parameter_shapes     parameter name, relative to the module → shape
    workspace            (device, purpose) → (least, wanted) bytes of a shared buffer: the operator's `workspace()`
    kv_values_per_token  values that the operator caches for a token; None if the module's own cache counts
    elsewhere            True: only another rank holds it; nothing is read or allocated for it here
    """

    path: str
    module: str
    rule: str
    where: str
    operator: str
    arguments: dict[str, Any]
    runs: dict[str, Any]
    device: str
    bytes: dict[str, int]
    config: Any = field(repr=False)
    placement: Placement | None = field(repr=False)
    parameter_shapes: dict[str, tuple[int, ...]] = field(repr=False)
    workspace: dict[tuple[str, str], tuple[int, int]] = field(repr=False, default_factory=dict)
    kv_values_per_token: int | None = field(repr=False, default=None)
    elsewhere: bool = False


@dataclass(frozen=True)
class _Built:
    """The operator that was built for a module on one device.

    operator   the class that `Operator.resolve` named
    config     its arguments, with the device decided
    made       the operator, without memory; None if the module is refused
    refusal    why the module is refused
    """

    operator: type[Operator]
    config: Any
    made: Operator | None
    refusal: str = ""


class Replacer:
    """Plans the replacements of matched modules, for one device map after another.

    modules   the matched modules, in the order of the model
    where     the devices that the plan may use
    decoder   the module that owns the decoder layers
    group     the tensor-parallel process group, if there is one
    """

    def __init__(
        self,
        modules: Sequence[MatchedModule],
        where: Devices,
        machine: Machine,
        decoder: nn.Module,
        group: ProcessGroup | None,
    ) -> None:
        self._modules = modules
        self._where = where
        self._machine = machine
        self._decoder = decoder
        self.group = group
        self._built: dict[tuple[str, str], _Built | None] = {}
        self._planned: dict[tuple[str, str], Replacement] = {}  # of modules that need no placement
        self._inner = _inside([matched.path for matched in modules])

    def changed(self, modules: Sequence[MatchedModule]) -> Replacer:
        """A replacer for the same modules with other arguments. What was built for unchanged ones is kept."""
        other = Replacer(modules, self._where, self._machine, self._decoder, self.group)
        before = {matched.path: matched.config for matched in self._modules}
        same = {matched.path for matched in modules if matched.config == before.get(matched.path)}
        other._built = {key: built for key, built in self._built.items() if key[0] in same}
        other._planned = {key: planned for key, planned in self._planned.items() if key[0] in same}
        return other

    def replacements(
        self, device_map: Mapping[str, str], spare: Mapping[str, int] | None = None
    ) -> tuple[Replacement, ...]:
        """Plan the replacements for one device map.

        device_map  module path → device, for the modules that are not replaced
        spare       device → bytes that operators may take in addition; see `Operator.plan_placement`
        Raises      PlanError that lists the modules that operators refuse; OperatorError for a fault of an operator
        """
        configs = {matched.path: self._config(matched, device_map) for matched in self._modules}
        placements = self._placements(configs, spare or {})
        replacements, refusals = [], _Refusals()
        for matched in self._modules:
            placement = placements.get(matched.path)
            if isinstance(placement, str):
                refusals.add(matched, matched.operator, placement)
                continue
            built = self._build(matched, configs[matched.path])
            if built is None:
                continue
            if built.made is None:
                refusals.add(matched, built.operator, built.refusal)
                continue
            key = matched.path, built.config.device
            if placement is not None:
                replacements.append(self._replacement(matched, built, built.made, placement))
                continue
            if key not in self._planned:
                self._planned[key] = self._replacement(matched, built, built.made, None)
            replacements.append(self._planned[key])
        refusals.check()
        return tuple(replacements)

    def _config(self, matched: MatchedModule, device_map: Mapping[str, str]) -> Any:
        """The arguments of a module's rule, with the device on which the operator computes."""
        standing = device_of(device_map, matched.path)
        wanted, types = matched.config.device, matched.operator.device_types
        device = self._where.for_operator(matched.rule, wanted, types, standing)
        for other in matched.config.other_devices if device != "cpu" else ():
            self._where.for_operator(matched.rule, other, types, standing, "links")
        return dataclasses.replace(matched.config, device=device)

    def _placements(self, configs: Mapping[str, Any], spare: Mapping[str, int]) -> dict[str, Placement | str]:
        """Path → placement, or the reason why the module is refused. Modules that need no placement are absent."""
        by_operator: dict[type[Operator], list[MatchedModule]] = {}
        for matched in self._modules:
            by_operator.setdefault(matched.operator, []).append(matched)
        placements: dict[str, Placement | str] = {}
        for operator, theirs in by_operator.items():
            modules = {matched.path: (matched.module, configs[matched.path]) for matched in theirs}
            with blaming(theirs[0].rule, some([*modules]), operator.name):
                placements |= operator.plan_placement(self._decoder, modules, spare)
        return placements

    def _build(self, matched: MatchedModule, config: Any) -> _Built | None:
        """The operator for a module on the config's device, built at most once; None if the module is not replaced."""
        key = matched.path, config.device
        if key not in self._built:
            self._built[key] = self._build_anew(matched, config)
        return self._built[key]

    def _build_anew(self, matched: MatchedModule, config: Any) -> _Built | None:
        with blaming(matched.rule, matched.path, matched.operator.name):
            resolved = matched.operator.resolve(matched.module, config)
        if resolved is None:
            return None
        operator, config = resolved
        if operator is not matched.operator:
            config = matched.fitted(operator, config)
        with blaming(matched.rule, matched.path, operator.name):
            if refusal := operator.supports(matched.module, config, self._machine):
                return _Built(operator, config, None, refusal)
            made = operator.build(matched.module, config)
            if refusal := _misfit(made, matched):
                return _Built(operator, config, None, refusal)
            _check_contract(matched, made, self._inner.get(matched.path, ()))
        return _Built(operator, config, made)

    def _replacement(
        self, matched: MatchedModule, built: _Built, made: Operator, placement: Placement | None
    ) -> Replacement:
        group, operator = self.group, built.operator
        elsewhere = group is not None and group.rank > 0 and operator.on_ranks == "first"
        with blaming(matched.rule, matched.path, operator.name):
            if placement is not None:
                made.place(placement)
            runs, sizes = made.describe(), made.footprint()
            if values := _values(made, matched):
                runs = {**runs, "values": values}
            _check_answers(runs, sizes, self._where.allowed)
            return Replacement(
                path=matched.path,
                module=type(matched.module).__name__,
                rule=matched.rule.name,
                where=str(matched.rule.where),
                operator=operator.name,
                arguments=dict(matched.rule.arguments),
                runs=ReceivedExperts().describe() if elsewhere else runs,
                device=built.config.device,
                bytes={} if elsewhere else sizes,
                config=built.config,
                placement=placement,
                parameter_shapes=made.parameter_shapes(),
                workspace={} if elsewhere else made.workspace(),
                kv_values_per_token=made.kv_values_per_token,
                elsewhere=elsewhere,
            )


class _Refusals:
    """Collects the modules that operators refuse. Modules with one rule and one reason share a line."""

    def __init__(self) -> None:
        self._paths: dict[tuple[str, str], list[str]] = {}
        self._lines: dict[tuple[str, str], str] = {}

    def add(self, matched: MatchedModule, operator: type[Operator], reason: str) -> None:
        rule = matched.rule
        text = f"{operator.name} cannot replace a {type(matched.module).__name__}: {reason}"
        paths = self._paths.setdefault((rule.name, text), [])
        paths.append(matched.path)
        argument = rules.argument_of(reason, operator.Config)
        change = f"Change {argument}, narrow" if argument else "Narrow"
        refusal = rule.place().refusal(
            f"{text}; matched {some(paths)}. {change} the match, or replace: keep."
        )
        self._lines[rule.name, text] = str(refusal)

    def check(self) -> None:
        """Raise PlanError if there are any."""
        if self._lines:
            raise PlanError("\n".join(few([*self._lines.values()])))


def _inside(paths: Sequence[str]) -> dict[str, list[str]]:
    """Path → those of the paths that lie inside it; of paths with any."""
    known, found = {*paths}, dict[str, list[str]]()
    for path in paths:
        parts = path.split(".")
        for end in range(1, len(parts)):
            if (outer := ".".join(parts[:end])) in known:
                found.setdefault(outer, []).append(path)
    return found


def _misfit(made: Operator, matched: MatchedModule) -> str | None:
    """Why an operator cannot load a weight that the checkpoint stores in one of its native formats; None if it can."""
    sources = matched.sources() if made.native_formats else ()
    if made.takes_stored_only and not sources and not next(matched.module.parameters()).is_meta:
        return "weights of this format are kept from a checkpoint, and none is loaded; choose other weights"
    reasons = (
        made.misfit_of(*source)
        for source in sources
        if made.takes_stored_only or source[1].is_taken(made.native_formats)
    )
    return next((reason for reason in reasons if reason), None)


def _values(made: Operator, matched: MatchedModule) -> str:
    """What becomes of the quantised weights that the checkpoint has for a module; "" if it has none."""
    found: dict[str, dict[str, None]] = {}
    for name, form, _ in matched.sources():
        if made.takes_codes(name) and form.name != "float" and not form.is_plain:
            found.setdefault(made.keeping(form), {})[form.name] = None
    return "; ".join(f"{word} ({', '.join(names)})" for word, names in found.items())


def _broken(text: str) -> OperatorError:
    return OperatorError(f"{text}. Correct the operator.")


def _check_answers(runs: object, sizes: Mapping[str, int], devices: Collection[str]) -> None:
    """Raise OperatorError unless `describe()` and `footprint()` of an operator return what a plan can show."""
    if not isinstance(runs, dict):
        raise _broken(f"its describe() gave {runs!r}, which is no dict")
    if unknown := sizes.keys() - {*devices}:
        raise _broken(f"its footprint names {', '.join(sorted(unknown))}, which the plan may not use")


def _check_contract(matched: MatchedModule, made: Operator, inner: Sequence[str]) -> None:
    """Check that the operator loads or keeps every parameter and buffer of the module, and has no others.

    inner    paths of matched modules inside this one, which take their parameters themselves
    Raises   OperatorError
    """
    theirs = {**dict(matched.module.named_parameters()), **dict(matched.module.named_buffers())}
    kept = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    for name, tensor in kept.items():
        if theirs.get(name) is not tensor:
            raise _broken(
                f"it holds a parameter or buffer of its own, {name!r}; it may only keep the module's"
            )
    shapes = made.parameter_shapes()
    for name, shape in shapes.items():
        if name not in theirs or tuple(theirs[name].shape) != tuple(shape):
            had = list(theirs[name].shape) if name in theirs else "nothing"
            raise _broken(f"its parameter_shapes() has {name!r} of {list(shape)}; the module has {had}")
    prefixes = tuple(path[len(matched.path) + 1 :] + "." for path in inner)
    lost = [name for name in matched.module.state_dict() if name not in shapes and name not in kept]
    lost = [name for name in lost if not name.startswith(prefixes)]
    if lost:
        raise _broken(f"it neither loads nor keeps {', '.join(few(lost))}")
