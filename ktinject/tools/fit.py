"""Finds the formats that fit a budget, and writes them as a rule file that extends the rules they were found with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from ktinject import rules
from ktinject.errors import PlanError
from ktinject.planning.plan import Plan
from ktinject.planning.replacements import Replacement

EXPERTS, GROUP_SIZE, ON_GPU = "experts", "group_size", "gpu_experts"
_GROUPS = (32, 64, 128)
_MADE = ("bf16", "int8", "fp8", "mxfp4", "int4")  # what auto may make of any weights, the most accurate first
_PLAIN = regex.compile(r"[A-Za-z][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


@dataclass(frozen=True)
class Fitted:
    """Rules that fit.

    variables  values of the variables of the rules that they extend
    plan       what they come to, with the same budget
    reason     what the format of the experts gives up and why; "" if nothing
    """

    variables: dict[str, Any]
    plan: Plan
    reason: str


def find(make: Callable[[Mapping[str, Any]], Plan], given: Mapping[str, Any]) -> Fitted:
    """The most accurate format of the experts that fits, as variables of the rules.

    make    makes the plan of the rules with these values of their variables
    given   values that are not to be chosen
    Raises  PlanError if nothing fits, or there is nothing to choose
    """
    for name in given:
        if "." in name:
            raise PlanError(
                f"--set {shlex.quote(name)}: the file that fit writes has values of variables. Write a rule file that "
                "extends the rules and has this argument, and give it by --rules."
            )
    chosen = dict(given)
    if EXPERTS not in chosen:
        declared = make(given).ruleset
        if EXPERTS not in declared.variables:
            raise PlanError(
                f"{declared.source} declares no variable {EXPERTS!r}, by which fit chooses a format. Declare it, and "
                f"let the rule of the experts have weights: ${{variables.{EXPERTS}}}."
            )
        chosen[EXPERTS] = "auto"
    plan = make(chosen)
    plan.check()
    prefix = ": weights: auto is "
    reasons = [note.partition(". Given up: ")[2] for note in plan.notes if prefix in note]
    for variables in _settled(plan, chosen):
        settled = make(variables)
        if not settled.problems:
            return Fitted(variables, settled, next(filter(None, reasons), ""))
    raise PlanError(
        "the formats that fit differ between the rules, and one variable has one value. Use weights: auto itself, with "
        "the same budget."
    )


def _settled(plan: Plan, chosen: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Values in place of auto, the most accurate first.

    The groups of int4 are one variable for all rules. So where others have int4, too, larger groups may be needed.
    """
    values = dict(chosen)
    if values.get(ON_GPU) == "auto" and (count := _on_gpu(plan)) is not None:
        values[ON_GPU] = count
    if chosen[EXPERTS] != "auto":
        yield values
        return
    declared = plan.ruleset.variables
    if any(_is_the_checkpoints_alone(replacement) for replacement in plan.replacements):
        yield {**values, EXPERTS: "kept"}
        return
    formats = {
        (replacement.config.weights, replacement.config.group_size)
        for replacement in plan.replacements
        if replacement.arguments.get("weights") == "auto"
    }
    for weights, group_size in sorted(formats, key=lambda found: (_MADE.index(found[0]), found[1])):
        if weights != "int4" or GROUP_SIZE not in declared:
            yield {**values, EXPERTS: weights}
            continue
        for size in _GROUPS:
            if size >= group_size and (GROUP_SIZE not in chosen or size == chosen[GROUP_SIZE]):
                yield {**values, EXPERTS: weights, GROUP_SIZE: size}


def _is_the_checkpoints_alone(replacement: Replacement) -> bool:
    """Whether auto has come to what only a checkpoint that has it can give: other formats, and zero points."""
    if replacement.arguments.get("weights") != "auto":
        return False
    has_zeros = replacement.arguments.get("symmetric", True) and not getattr(
        replacement.config, "symmetric", True
    )
    return bool(has_zeros) or replacement.config.weights not in _MADE


def _on_gpu(plan: Plan) -> int | None:
    """The number of experts of each layer on the GPU; None if layers differ."""
    counts = {
        len(getattr(one.placement, "resident", ()))
        for one in plan.replacements
        if hasattr(one.config, ON_GPU)
    }
    return counts.pop() if len(counts) == 1 else None


def rule_file(fitted: Fitted, base: str, command: Sequence[str]) -> str:
    """The rule file.

    base     bundled name or path of the rules that it extends
    command  the words of the command that has found it
    """
    name, plan = _extended(base), fitted.plan
    lines = [f"Found by: {shlex.join(command)}", "With the same budget it is this plan:"]
    lines += [f"  {line}" for line in plan.in_bytes()]
    found = [f"# {' '.join(line.splitlines())}" for line in lines]
    found += ["version: 1", f"extends: {_scalar(name)}"]
    if fitted.variables:
        found.append("variables:")
    for variable, value in fitted.variables.items():
        if variable == EXPERTS and fitted.reason:
            found.append(f"  # Given up: {' '.join(fitted.reason.splitlines())}")
        found.append(f"  {variable}: {_scalar(value)}")
    return "\n".join(found) + "\n"


def _extended(base: str) -> str:
    """What `extends` says: the bundled name, or the whole path, so that the file may lie anywhere."""
    path, _ = rules.locate(base)
    bundled = {file: name for name, file in rules.bundled().items()}
    return bundled.get(path, str(Path(path).resolve()))


def _scalar(value: Any) -> str:
    """A scalar of YAML that is read as the same value."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
