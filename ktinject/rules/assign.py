"""Which module gets which rule. Pure: modules are described by strings and numbers."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import regex

from ktinject.errors import LISTED, RuleError, few
from ktinject.rules.language import KEEP, Match, Rule, RuleSet, holders
from ktinject.rules.roles import ELSEWHERE, HasRole, no_roles
from ktinject.rules.wording import closest, listing, ranges, show

Module = tuple[str, Sequence[str], int | None]
"""A module's dotted path, the names of its class and the class's bases, and its decoder layer."""

_RULE_SECONDS, _ALL_SECONDS = 2.0, 5.0  # of this thread's CPU time
_DIGITS = regex.compile(r"\d+")


@dataclass(frozen=True)
class Assignment:
    """Both views of who got what, in the order of the model. `keep` is listed too."""

    rules: dict[str, Rule]
    matched: dict[str, tuple[str, ...]]


def assign(
    ruleset: RuleSet,
    modules: Iterable[Module],
    *,
    keeps: Mapping[str, Collection[str]] | None = None,
    has_role: HasRole = no_roles,
) -> Assignment:
    """Give each module the first rule that matches it. The root module, whose path is empty, gets none.

    keeps    operator → names of the direct children that it keeps of what it replaces; other rules may then
             replace these and what lies inside them
    has_role which module has which role. A rule that asks for one does not see what goes away with a module that an
             earlier rule replaces
    Raises   RuleError with all problems at once: rules that match nothing or are shadowed (unless optional),
             rules for modules that go away with a replaced parent, patterns that run out of time. An extended
             file's rule gives way to those of the files that extend it: they may take all its modules, and a
             module that goes away with one that they replace is nobody's
    """
    known = [module for module in modules if module[0]]
    rules: dict[str, Rule] = {}
    problems: list[str] = []
    layers = {layer for _, _, layer in known if layer is not None}
    end = time.thread_time() + _ALL_SECONDS
    for rule in ruleset.rules:
        try:
            hits = _hits(rule, rule.match, known, end)
        except RuleError as error:
            problems.append(str(error))
            break  # the next one could take as long
        by_role = rule.match.by_role
        if by_role:
            began = time.thread_time()
            hits = [path for path in hits if rule.match.has_roles(path, has_role)]
            end += time.thread_time() - began  # to run modules takes as long as it takes
        if hits and not rule.optional and (beyond := (rule.match.layers or frozenset()) - layers):
            problems.append(str(rule.place().refusal(_beyond(beyond, layers))))
        owners = {path: found for path in hits if (found := owner(path, rules, keeps or {}, by_role))}
        free = [path for path in hits if path not in owners]
        rules.update((path, rule) for path in free)
        if free or rule.optional or any(other.depth < rule.depth for other in owners.values()):
            continue
        # Reasons take time to find, and no more are shown.
        reason = "it matches nothing"
        if len(problems) < LISTED:
            reason = _shadowed(owners) if hits else _why_nothing(rule, known, layers, end, has_role)
        problems.append(str(rule.place().refusal(reason)))
    _give_way(rules, keeps or {})
    problems += _vanishing(rules, keeps or {})
    if problems:
        raise RuleError("\n".join(few(problems)))
    ordered = {path: rules[path] for path, _, _ in known if path in rules}
    matched: dict[str, list[str]] = {rule.name: [] for rule in ruleset.rules}
    for path, rule in ordered.items():
        matched[rule.name].append(path)
    return Assignment(ordered, {name: tuple(paths) for name, paths in matched.items()})


def _hits(rule: Rule, match: Match, modules: Sequence[Module], all_end: float) -> list[str]:
    """The paths that match. Raises RuleError if that takes too long, for this rule or from the first one on."""
    hits: list[str] = []
    end = min(time.thread_time() + _RULE_SECONDS, all_end)
    for path, class_names, layer in modules:
        try:
            if match.matches(path, class_names, layer):
                hits.append(path)
            late = time.thread_time() > end
        except TimeoutError:
            late = True
        if late:
            together = ", with all rules before it" if end == all_end else ""
            raise rule.place().refusal(
                f"the pattern {show(match.path)} takes too long at {show(path)}{together}; backtracking is limited. "
                "Write it without a repeat inside a repeat."
            )
    return hits


def owner(
    path: str, rules: Mapping[str, Rule], keeps: Mapping[str, Collection[str]], by_role: bool
) -> Rule | None:
    """The earlier rule that a module went to; for a rule by role, also one with whose module it goes away."""
    around = (rule for _, rule in outer_modules(path, rules, keeps)) if by_role else iter(())
    return rules.get(path) or next(around, None)


def _shadowed(owners: Mapping[str, Rule]) -> str:
    earlier = {other.name: other.where for other in owners.values()}
    names = listing((f"{name!r} ({where})" for name, where in earlier.items()), "and")
    return (
        f"all {len(owners)} modules that it matches, such as {next(iter(owners))!r}, go to earlier rules: {names}; "
        "the first rule that matches wins. Move it before them, narrow them, or mark it optional: true."
    )


def _beyond(beyond: Collection[int], layers: Collection[int]) -> str:
    return (
        f"layers names {ranges(beyond)}, which the model has not; its decoder layers are {ranges(layers)}. "
        "Correct the range, or mark the rule optional: true."
    )


def _why_nothing(
    rule: Rule, modules: Sequence[Module], layers: Collection[int], end: float, has_role: HasRole
) -> str:
    """Name the condition that fails, with what comes closest to it."""
    match, reasons = rule.match, []
    if match.path is not None and not _hits(rule, Match(path=match.path), modules, end):
        reasons.append(f"no path matches {show(match.path)}{_near_paths(match.path, modules)}")
    if match.class_name is not None and not any(match.class_name in names for _, names, _ in modules):
        near = closest(match.class_name, {name for _, names, _ in modules for name in names}, 3)
        hint = f" (closest: {listing(near)})" if near else ""
        reasons.append(f"no module is a {match.class_name}{hint}")
    if match.layers is not None and match.layers.isdisjoint(layers):
        reasons.append(f"the decoder layers are {ranges(layers)}" if layers else "no layers are numbered")
    reasons += [
        f"no module is {role}{_near_roles(role, modules, has_role)}"
        for role in filter(None, dict.fromkeys((match.inside, match.role)))
        if not any(has_role(path, role) for path, _, _ in modules)
    ]
    found = "; ".join(reasons) or "each condition is met, but by no module all of them"
    return f"it matches nothing: {found}; every rule must match. Correct it, or mark it optional: true."


def _near_paths(pattern: str, modules: Sequence[Module]) -> str:
    """The paths closest to a pattern, one for all layers."""
    shapes: dict[str, str] = {}
    for path, _, _ in modules:
        shapes.setdefault(_DIGITS.sub("N", path), path)
    wanted = pattern.replace(r"\d+", "N").replace("\\", "").replace(".*", "")
    near = [shapes[shape] for shape in closest(_DIGITS.sub("N", wanted), shapes, 3)]
    return f" (closest: {listing(map(repr, near))})" if near else ""


def _near_roles(role: str, modules: Sequence[Module], has_role: HasRole) -> str:
    """What stands where the role is looked for, and why it does not have it."""
    near = {found.reason: path for path, _, _ in modules if (found := has_role(path, role)) is not ELSEWHERE}
    return "".join(f" ({path!r}: {reason})" for reason, path in [*near.items()][:1])


def _give_way(rules: dict[str, Rule], keeps: Mapping[str, Collection[str]]) -> None:
    """Take from extended files' rules the modules inside those that an extending file's rule replaces."""
    for path in [
        path
        for path, rule in rules.items()
        if any(outer.depth < rule.depth for _, outer in outer_modules(path, rules, keeps))
    ]:
        del rules[path]


def _vanishing(rules: Mapping[str, Rule], keeps: Mapping[str, Collection[str]]) -> list[str]:
    """Rules whose modules lie inside modules that are replaced: nothing is left to replace or keep."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path, rule in rules.items():
        for parent, outer in outer_modules(path, rules, keeps):
            found.setdefault((rule.name, outer.name), []).append((path, parent))
    problems = []
    for pairs in found.values():
        path, parent = pairs[0]
        rule, outer = rules[path], rules[parent]
        others = f" (and {len(pairs) - 1} more)" if len(pairs) > 1 else ""
        by = f"rule {outer.name!r} ({outer.where})" if outer is not rule else "the same rule"
        problems.append(
            str(
                rule.place().refusal(
                    f"{path!r}{others} goes away with {parent!r}, which {by} replaces by "
                    f"{outer.operator}; rules for its inside mean nothing. Narrow one of the matches."
                )
            )
        )
    return problems


def outer_modules(
    path: str, rules: Mapping[str, Rule], keeps: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, Rule]]:
    """The modules around a path that are replaced by an operator that does not keep what lies there, and its rules."""
    for parent in holders(path):
        outer = rules.get(parent)
        child = path[len(parent) + 1 :].partition(".")[0]
        if outer and outer.operator != KEEP and child not in keeps.get(outer.operator, ()):
            yield parent, outer
