"""Why a module went to a rule: the rules in the order in which they were tried, and why each did not take it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ktinject.rules.assign import Module, outer_modules, owner
from ktinject.rules.language import Rule, RuleSet, holders
from ktinject.rules.roles import HasRole, no_roles
from ktinject.rules.wording import ranges


@dataclass(frozen=True)
class Step:
    """One rule that was tried for a module, and why it did not take it; "" if it did."""

    rule: Rule
    why_not: str


@dataclass(frozen=True)
class Explanation:
    """The rules that were tried for a module, up to the one that took it.

    taken    the rule that the module went to; None: none
    untried  how many rules come after that one
    """

    path: str
    class_name: str
    steps: tuple[Step, ...]
    taken: Rule | None
    untried: int


def explain(
    ruleset: RuleSet,
    modules: Iterable[Module],
    paths: Collection[str],
    *,
    keeps: Mapping[str, Collection[str]] | None = None,
    has_role: HasRole = no_roles,
) -> list[Explanation]:
    """Explain what `assign` decides about some modules, also where it refuses the rules for other reasons.

    Raises TimeoutError when a pattern backtracks for half a second
    """
    known = {module[0]: module for module in modules if module[0]}
    return [_explain(ruleset.rules, known, path, keeps or {}, has_role) for path in paths]


def _explain(
    rules: Sequence[Rule],
    modules: Mapping[str, Module],
    path: str,
    keeps: Mapping[str, Collection[str]],
    has_role: HasRole,
) -> Explanation:
    """Do what `assign` does, for the module and for those that it lies in: on no others does its rule depend."""
    around = [outer for outer in holders(path) if outer in modules]
    given: dict[str, Rule] = {}
    steps: list[Step] = []
    for rule in rules:
        for module in (path, *around):
            if module in given:
                continue
            why_not = _why_not(rule, modules[module], has_role)
            if not why_not and (other := owner(module, given, keeps, rule.match.by_role)):
                why_not = f"goes away with a module that rule {other.name!r} ({other.where}) replaces"
            if module == path:
                steps.append(Step(rule, why_not))
            if not why_not:
                given[module] = rule
    taken = given.get(path)
    untried = 0 if taken is None else len(rules) - len(steps)
    for parent, outer in outer_modules(path, given, keeps):
        if taken is not None:
            steps[-1] = Step(
                taken, f"goes away with {parent!r}, which rule {outer.name!r} ({outer.where}) replaces"
            )
            taken = None
    return Explanation(path, modules[path][1][0], tuple(steps), taken, untried)


def _why_not(rule: Rule, module: Module, has_role: HasRole) -> str:
    """Which condition the module does not meet; "" if it meets all of them."""
    path, class_names, layer = module
    match = rule.match
    if match.class_name is not None and match.class_name not in class_names:
        return f"its class is {class_names[0]}, not {match.class_name}"
    if match.layers is not None and layer not in match.layers:
        found = "no decoder layer" if layer is None else f"decoder layer {layer}"
        return f"it lies in {found}, not in {ranges(match.layers)}"
    if not match.matches(path, class_names, layer):
        return f"its path does not match '{match.path}'"
    if match.has_roles(path, has_role):
        return ""
    if match.inside is not None and not any(has_role(outer, match.inside) for outer in holders(path)):
        return f"it lies in no module of the role {match.inside}"
    return f"its role is not {match.role}: {has_role(path, match.role or '').reason}"
