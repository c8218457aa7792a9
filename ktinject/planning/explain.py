"""Tells for single modules which rules were tried, why each did not match, and what became of them in the plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ktinject import rules
from ktinject.errors import KTInjectError, PlanError
from ktinject.operators.probes.roles import Roles
from ktinject.planning.devices import show_bytes
from ktinject.planning.modules import described, keeps, some
from ktinject.planning.plan import Plan
from ktinject.planning.replacements import Replacement
from ktinject.rules import Explanation, RuleSet
from ktinject.rules.pattern import compiled, fullmatch
from ktinject.rules.wording import closest, listing, show

_MOST = 1000
_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class Explained:
    """Modules to which the same happened for the same reasons.

    paths    in the order of the model
    outcome  what became of them, as a sentence
    """

    paths: tuple[str, ...]
    explanation: Explanation
    outcome: str

    def lines(self) -> list[str]:
        """For people."""
        found = self.explanation
        lines = [f"{some(self.paths)}: {found.class_name}"]
        for number, step in enumerate(found.steps, 1):
            said = step.why_not or "matches"
            lines.append(f"  {number}. {step.rule.name!r} ({step.rule.where}): {said}")
        if found.untried:
            lines.append(f"  {found.untried} more rules come after it")
        return [*lines, f"  → {self.outcome}"]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = self.explanation
        return {
            "paths": list(self.paths),
            "class": found.class_name,
            "tried": [
                {"rule": s.rule.name, "where": s.rule.where, "why_not": s.why_not} for s in found.steps
            ],
            "taken_by": found.taken and found.taken.name,
            "untried": found.untried,
            "outcome": self.outcome,
        }


def explain(
    model: PreTrainedModel, ruleset: RuleSet, pattern: str, made: Plan | KTInjectError
) -> list[Explained]:
    """Explain what happens to the modules of a path, or whose whole path matches a pattern.

    made    the plan, or the refusal in place of one
    Raises  PlanError if there is no such module, or the pattern is none
    """
    modules = described(model)
    paths = _chosen([path for path, _, _ in modules if path], pattern)
    found = rules.explain(ruleset, modules, paths, keeps=keeps(), has_role=Roles(model).has)
    by_path = (
        {replacement.path: replacement for replacement in made.replacements} if isinstance(made, Plan) else {}
    )
    groups: dict[tuple[Any, ...], list[tuple[Explanation, str]]] = {}
    for each in found:
        outcome = _outcome(each, by_path.get(each.path), made)
        key = (_DIGITS.sub("N", each.path), each.class_name, tuple(s.why_not for s in each.steps), outcome)
        groups.setdefault(key, []).append((each, outcome))
    return [
        Explained(tuple(each.path for each, _ in group), group[0][0], group[0][1])
        for group in groups.values()
    ]


def _chosen(paths: Sequence[str], pattern: str) -> list[str]:
    if pattern in paths:
        return [pattern]
    try:
        compiled(pattern)
        found = [path for path in paths if fullmatch(pattern, path)]
    except ValueError as error:
        raise PlanError(f"--explain {show(pattern)} {error}. Name a module, or correct it.") from error
    except TimeoutError as error:
        raise PlanError(
            f"--explain {show(pattern)}: backtracking takes too long. Write a simpler pattern."
        ) from error
    if not found:
        near = closest(_DIGITS.sub("0", pattern), paths, 3)
        hint = f" The closest are {listing(near, 'and')}." if near else ""
        raise PlanError(
            f"--explain {show(pattern)}: no module has this path, and none matches it as a pattern.{hint}"
        )
    if len(found) > _MOST:
        raise PlanError(
            f"--explain {show(pattern)}: {len(found):,} modules match; at most {_MOST:,} are explained. Narrow it."
        )
    return found


def _outcome(found: Explanation, replacement: Replacement | None, made: Plan | KTInjectError) -> str:
    rule = found.taken
    if rule is None:
        gone = bool(found.steps) and found.steps[-1].why_not.startswith("goes away")
        return "it goes away with the module around it" if gone else "no rule takes it: it stays as it is"
    if rule.operator == rules.KEEP:
        return f"{rule.name!r} keeps it as it is"
    if replacement is not None:
        runs = ", ".join(
            str(replacement.runs[key]) for key in ("kernel", "weights") if replacement.runs.get(key)
        )
        named = "" if replacement.operator == rule.operator else f" as {replacement.operator}"
        where = f"on {replacement.device}, {show_bytes(sum(replacement.bytes.values()))}"
        return f"{rule.name!r} replaces it by {rule.operator}{named}: {runs or 'no kernel'} {where}"
    if isinstance(made, Plan):
        return f"{rule.name!r} leaves it as it is: {rule.operator} has nothing better on this device"
    named = f"rule {rule.name!r}: "
    said = [line.partition(named)[2] for line in str(made).splitlines() if named in line]
    return f"{rule.name!r} would replace it by {rule.operator}; refused: {' '.join(said) or 'see below'}"
