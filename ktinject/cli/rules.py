"""`ktinject rules`: look at rule files and check them without a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ktinject import rules
from ktinject.errors import RuleError

app = typer.Typer(help="List, show and check rule files.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Set a variable.")]


@app.command("list")
def list_bundled(as_json: AsJson = False) -> None:
    """The bundled rule files and the models they serve."""
    sets = {name: rules.read(name) for name in rules.bundled()}
    if as_json:
        _print_json({name: _summary(found) for name, found in sets.items()})
        return
    table = Table("name", "model types", "variables")
    for name, found in sets.items():
        table.add_row(name, ", ".join(found.model_types) or "any", Text(_assignments(found.variables)))
    Console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A bundled name or a path.")],
    as_json: AsJson = False,
) -> None:
    """A rule file as it is written, or with --json as it is understood."""
    with _refusals(as_json):
        found = rules.read(name)
        if as_json:
            _print_json({**_summary(found), "rules": [_rule(rule) for rule in found.rules]})
        else:
            typer.echo(rules.locate(name)[0].read_text("utf-8-sig"), nl=False)


@app.command()
def check(
    file: Annotated[str, typer.Argument(help="A path or a bundled name.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Read a rule file and type its arguments; what needs a model is checked by `ktinject plan`."""
    with _refusals(as_json):
        found = rules.read(file, variables=rules.parse_overrides(overrides or []))
        configs = _operator_configs()
        problems = [problem for rule in found.rules if (problem := _problem(rule, configs))]
        if problems:
            raise RuleError("\n".join(problems))
        if as_json:
            _print_json({"ok": True, **_summary(found), "rules": [_rule(rule) for rule in found.rules]})
            return
        table = Table(*(Column(title, overflow="fold") for title in ("rule", "match", "replace", "at")))
        for rule in found.rules:
            cells = (rule.name, _conditions(rule.match), _replacement(rule), rule.where)
            table.add_row(*map(Text, cells))
        Console().print(table)
        served = ", ".join(found.model_types) or "any model"
        typer.echo(f"{found.source}: {len(found.rules)} rules for {served}; no problem found")


@app.command()
def schema() -> None:
    """The JSON Schema (draft-07) of rule files, for editors."""
    _print_json(rules.schema(_operator_configs()))


def _operator_configs() -> dict[str, type]:
    from ktinject.operators import REGISTRY  # brings torch, which list and show do without

    return {name: operator.Config for name, operator in REGISTRY.items()}


def _problem(rule: rules.Rule, configs: dict[str, type]) -> str | None:
    if rule.operator == rules.KEEP:
        return None
    if rule.operator not in configs:
        return str(rules.unknown_operator(rule, configs))
    try:
        rules.check_arguments(rule, configs[rule.operator])
    except RuleError as error:
        return str(error)
    return None


@contextmanager
def _refusals(as_json: bool) -> Iterator[None]:
    """A refusal goes to stderr, or to stdout as JSON, and the exit code is 2."""
    try:
        yield
    except RuleError as error:
        if as_json:
            _print_json({"ok": False, "problems": str(error).splitlines()})
        else:
            typer.echo(str(error), err=True)
        raise typer.Exit(2) from error


def _summary(found: rules.RuleSet) -> dict[str, Any]:
    return {"source": found.source, "model_types": found.model_types, "variables": found.variables}


def _rule(rule: rules.Rule) -> dict[str, Any]:
    layers = sorted(rule.match.layers) if rule.match.layers is not None else None
    match = {"path": rule.match.path, "class": rule.match.class_name, "layers": layers}
    return {
        "name": rule.name,
        "match": {key: value for key, value in match.items() if value is not None},
        "operator": rule.operator,
        "arguments": rule.arguments,
        "optional": rule.optional,
        "where": rule.where,
    }


def _conditions(match: rules.Match) -> str:
    lines = [match.path, match.class_name and f"class {match.class_name}"]
    if match.layers is not None:
        lines.append(f"layers {_ranges(sorted(match.layers))}")
    return "\n".join(line for line in lines if line)


def _replacement(rule: rules.Rule) -> str:
    return "\n".join(filter(None, (rule.operator, _assignments(rule.arguments), "optional" * rule.optional)))


def _assignments(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )


def _ranges(numbers: list[int]) -> str:
    """3, 4, 5, 9 → 3-5, 9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
