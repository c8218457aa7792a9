"""The smallest changes that make a plan fit that does not: each one is tried before it is named.

In the order of what they cost the user: a shorter request, fewer experts on the GPU, prompts that stay on the CPU, no
second copy of weights, a smaller format of the experts, then of other weights; all of them together if none is enough;
and more memory, with the smallest experts where nothing else is enough.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ktinject.errors import PlanError
from ktinject.generation.cache import bucket_of
from ktinject.planning import formats
from ktinject.planning.devices import Devices, show_bytes
from ktinject.planning.layout import Layout
from ktinject.planning.modules import MatchedModule
from ktinject.planning.plan import Remedy
from ktinject.planning.search import Search

_MIB = 2**20
_MANY = 1024  # more experts than a layer has


@dataclass(frozen=True)
class _Change:
    """Modules with other arguments, and the settings that give them these: `rule.argument` → value."""

    modules: tuple[MatchedModule, ...]
    settings: dict[str, Any] = field(default_factory=dict)


# Whether a plan with the change fits; None: an operator refuses its new arguments.
_Fits = Callable[[_Change], bool | None]


def find(
    search: Search, modules: Sequence[MatchedModule], where: Devices, context: int, layout: Layout
) -> list[Remedy]:
    """The remedies of a layout that does not fit.

    modules   with the formats that the layout has
    context   tokens of the request for which there has to be room
    """

    tried: dict[tuple[Any, ...], bool | None] = {}

    def fits(change: _Change, tokens: int = context) -> bool | None:
        key = (tokens, *sorted((name, str(value)) for name, value in change.settings.items()))
        if key not in tried:
            try:
                tried[key] = search.layout(change.modules, where, tokens).fits
            except PlanError:
                tried[key] = None
        return tried[key]

    plain = _Change(tuple(modules))
    found = []
    if context > 1 and fits(plain, 1):
        found.append(_remedy({}, _longest(lambda tokens: fits(plain, tokens), context)))
    for step in (_fewer_on_gpu, _prompts_on_cpu, _without_copies, _smaller):
        if change := step(plain, fits):
            found.append(_remedy(change.settings))
    if not found and (change := _together(plain, lambda other: fits(other, 1))):
        shorter = None if fits(change) else _longest(lambda tokens: fits(change, tokens), context)
        found.append(_remedy(change.settings, shorter))
    more = [*_more_memory(search, modules, where, context, layout)]
    if not found and more and (least := [*_steps(plain, formats.smaller_experts)]):
        smallest = search.layout(least[-1].modules, where, context)
        for remedy in _more_memory(search, least[-1].modules, where, context, smallest):
            both = _remedy(least[-1].settings)
            arguments = None if remedy.arguments is None else remedy.arguments | (both.arguments or {})
            more.insert(0, Remedy(arguments, f"{both.text} and {remedy.text}"))
    return [*found, *more]


def _longest(fits: Callable[[int], bool | None], context: int) -> int:
    """Tokens of the longest request that fits, shorter than one that does not; caches have a power of two of them."""
    shorter = bucket_of(context) // 2
    while shorter > bucket_of(1) and not fits(shorter):
        shorter //= 2
    return shorter


def _remedy(settings: Mapping[str, Any], context: int | None = None) -> Remedy:
    words = [f"--set {shlex.quote(f'{name}={value}')}" for name, value in settings.items()]
    arguments: dict[str, Any] = {"variables": dict(settings)} if settings else {}
    if context is not None:
        words.append(f"--context {context}")
        arguments["context"] = context
    return Remedy(arguments, " ".join(words))


def _changed(change: _Change, config_of: Callable[[MatchedModule], Any]) -> _Change | None:
    """The modules with the configs that are given for them; None if no config differs."""
    settings, modules = dict(change.settings), []
    for module in change.modules:
        config = config_of(module)
        for one in dataclasses.fields(config):
            value = getattr(config, one.name)
            if value != getattr(module.config, one.name):
                settings[f"{module.rule.name}.{one.name}"] = value
        modules.append(dataclasses.replace(module, config=config))
    return _Change(tuple(modules), settings) if settings != change.settings else None


def _fewer_on_gpu(change: _Change, fits: _Fits) -> _Change | None:
    """The greatest number of experts of each layer on the GPU, where rules ask for a number."""
    wanted = [getattr(module.config, "gpu_experts", 0) for module in change.modules]
    high = max((count if type(count) is int else _MANY for count in wanted if count != "auto"), default=0)
    best, low = None, 0
    if (none := _at_most(change, 0)) and fits(none):
        best = none
    while best is not None and low + 1 < high:
        middle = (low + high) // 2
        other = _at_most(change, middle)
        if other is not None and fits(other):
            best, low = other, middle
        else:
            high = middle
    return best


def _at_most(change: _Change, count: int) -> _Change | None:
    """With at most so many experts of each layer on the GPU."""

    def config_of(module: MatchedModule) -> Any:
        wanted = getattr(module.config, "gpu_experts", "auto")
        if isinstance(wanted, str) or (type(wanted) is int and wanted <= count):
            return module.config
        # Which experts go to the GPU, and whether they leave RAM, means nothing where none do.
        none = {} if count else {"profile": None, "ram_copy": True}
        return dataclasses.replace(module.config, gpu_experts=count, **none)

    return _changed(change, config_of)


def _prompts_on_cpu(change: _Change, fits: _Fits) -> _Change | None:
    """Prompts pass through the GPU only where there is room for their experts."""
    other = _changed(change, _auto_prefill)
    return other if other is not None and fits(other) else None


def _auto_prefill(module: MatchedModule) -> Any:
    streams = getattr(module.config, "streams_from", None) is not None
    return dataclasses.replace(module.config, prefill="auto") if streams else module.config


def _without_copies(change: _Change, fits: _Fits) -> _Change | None:
    """Linear layers have their int4 weights alone."""
    other = _changed(change, _int4_alone)
    return other if other is not None and fits(other) else None


def _int4_alone(module: MatchedModule) -> Any:
    has_copy = getattr(module.config, "bf16_copy", False)
    return dataclasses.replace(module.config, bf16_copy=False) if has_copy else module.config


def _smaller(change: _Change, fits: _Fits) -> _Change | None:
    """The most accurate smaller format: of the routed experts, or else of other weights."""
    for choices_of in (formats.smaller_experts, formats.smaller_others):
        if found := _first(list(_steps(change, choices_of)), fits):
            return found
    return None


def _first(changes: list[_Change], fits: _Fits) -> _Change | None:
    """The first change that fits, of some that get smaller and smaller: if the last does not fit, none does."""
    while changes and fits(changes[-1]) is None:
        changes.pop()
    return next(filter(fits, changes), None) if changes and fits(changes[-1]) else None


def _steps(
    change: _Change, choices_of: Callable[[MatchedModule], list[tuple[int, Any]]]
) -> Iterator[_Change]:
    """The changes to smaller formats, one rank after the other, of all modules that have a choice."""
    choices = {module.path: choices_of(module) for module in change.modules}
    for least in sorted({rank for found in choices.values() for rank, _ in found}):

        def config_of(module: MatchedModule, least: int = least) -> Any:
            found = choices[module.path]
            at = next((config for rank, config in found if rank >= least), None)
            return at or (found[-1][1] if found else module.config)

        if other := _changed(change, config_of):
            yield other


def _together(change: _Change, fits: _Fits) -> _Change | None:
    """Everything at once, with the formats as accurate as they then can be."""
    change = _at_most(change, 0) or change
    for config_of in (_auto_prefill, _int4_alone):
        change = _changed(change, config_of) or change
    for choices_of in (formats.smaller_experts, formats.smaller_others):
        steps = [change, *_steps(change, choices_of)]
        if found := _first(steps, fits):
            return found
        change = steps[-1] if steps else change
    return None


def _more_memory(
    search: Search, modules: Sequence[MatchedModule], where: Devices, context: int, layout: Layout
) -> Iterator[Remedy]:
    """A larger budget, where more is free; or else by how much the machine is too small."""
    # Rounded up, so that what is shown is enough.
    more = {
        device: -(-least // _MIB) * _MIB
        for device, least in layout.least.items()
        if least > where.limits[device]
    }
    if not more:
        return
    raised = dataclasses.replace(where, limits=where.limits | more)
    if not search.layout(modules, raised, context).fits:
        return
    if all(size <= where.free[device] for device, size in more.items()):
        sizes = ",".join(f"{device}={size // _MIB}MiB" for device, size in more.items())
        given = {device: limit for device, limit in where.limits.items() if limit < where.free[device]}
        yield Remedy({"budget": given | more}, f"--budget {sizes}")
    else:
        yield Remedy(
            None,
            "a machine with "
            + " and ".join(
                f"{show_bytes(size - where.limits[device])} more on {device}" for device, size in more.items()
            ),
        )
