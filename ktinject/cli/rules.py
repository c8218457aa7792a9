"""`ktinject rules`: look at rule files and check them without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ktinject import rules
from ktinject.cli import options
from ktinject.errors import PlanError, RuleError
from ktinject.grid import Grid
from ktinject.rules import editors
from ktinject.rules.wording import ranges

app = typer.Typer(help="List, show and check rule files.", no_args_is_help=True)

File = Annotated[
    str, typer.Argument(help="The name of bundled rules, or a path.", autocompletion=options.bundled_names)
]

Install = Annotated[
    Path | None,
    typer.Option(
        "--install",
        metavar="PATH",
        help="Write the schema beside this rule file, or into this folder, and its name into the first line of rule "
        "files, where yaml-language-server finds it.",
        autocompletion=options.files,
    ),
]


@app.command("list")
def list_bundled(as_json: options.AsJson = False) -> None:
    """List the bundled rule files and the models that they serve."""
    sets = {name: rules.read(name) for name in rules.bundled()}
    if as_json:
        options.show_json({name: _summary(found) for name, found in sets.items()})
        return
    rows = [
        (name, ", ".join(found.model_types) or "any", _assignments(found.variables))
        for name, found in sets.items()
    ]
    options.show(Grid(("name", "model types", "variables"), rows))


@app.command()
def show(
    name: File,
    as_json: options.AsJson = False,
) -> None:
    """Print a rule file as it is written, or with --json as ktinject understands it."""
    with options.answers(as_json):
        found = rules.read(name)
        if as_json:
            options.show_json({**_summary(found), "rules": [_rule(rule) for rule in found.rules]})
        else:
            typer.echo(rules.locate(name)[0].read_text("utf-8-sig"), nl=False)


@app.command()
def check(
    file: File,
    overrides: options.Set = None,
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a rule file and its arguments without a model, and show all problems. `ktinject plan` checks the rest.

    Files of KTransformers 0.x are checked, too.
    """
    try:
        options.load_plugins(plugins)
        if rules.read_legacy(file) is not None:
            _check_legacy(file, as_json)
            return
        overrides_ = rules.parse_overrides(overrides or [])
        found = rules.read(file, variables=overrides_, check=_checks_arguments())
    except RuleError as error:
        if as_json:
            said = [str(part) for part in error.parts or (error,)]
            options.show_json({"ok": False, "problems": said, "places": rules.places(error)})
        raise RuleError(rules.pointed(error)) from error
    if as_json:
        options.show_json({"ok": True, **_summary(found), "rules": [_rule(rule) for rule in found.rules]})
        return
    rows = [(rule.name, _conditions(rule.match), _replacement(rule), rule.where) for rule in found.rules]
    options.show(Grid(("rule", "match", "replace", "at"), rows))
    served = ", ".join(found.model_types) or "any model"
    options.say(f"{found.source}: {len(found.rules)} rules for {served}; no problem found")


@app.command()
def migrate(
    file: Annotated[
        str, typer.Argument(help="A rule file of KTransformers 0.x.", autocompletion=options.files)
    ],
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write the new file there; default: print it."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Turn a rule file of KTransformers 0.x into version 1, with a comment for each rule on what changed.

    Mistakes in the old file are reported on stderr.
    """
    with options.answers(as_json):
        if output is not None:
            options.check_writable(output, "--out")
            if output.exists() and output.samefile(file):
                raise PlanError(f"--out {output}: is the old file, which is kept. Name another one.")
        found = rules.migrate(file)
    if output is not None:
        output.write_text(found.text, "utf-8")
    if as_json:
        problems = [str(problem) for problem in found.problems]
        options.show_json({"text": found.text, "problems": problems, "devices": found.devices})
    elif output is None:
        typer.echo(found.text, nl=False)
    else:
        options.say(f"{output}: written")
    for problem in found.problems:
        typer.echo(f"ktinject: mistake in the old file: {problem}", err=True)


@app.command()
def schema(install: Install = None, plugins: options.Plugins = None) -> None:
    """Print the JSON Schema (draft-07) of rule files, or install it for editors."""
    options.load_plugins(plugins)
    made = rules.schema(_operator_configs())
    if install is None:
        options.show_json(made)
    else:
        options.say(*editors.install(made, install))


def _check_legacy(file: str, as_json: bool) -> None:
    """Show what becomes of each rule. Raises RuleError with the mistakes in the file."""
    found = rules.migrate(file)
    if found.problems:
        error = RuleError("\n".join(map(str, found.problems)))
        error.parts = found.problems
        raise error
    if as_json:
        keys = ("number", "was", "is")
        told = [dict(zip(keys, row, strict=True)) for row in found.rules]
        options.show_json({"ok": True, "legacy": True, "devices": found.devices, "rules": told})
        return
    options.show(
        Grid(("rule", "was", "becomes"), [(str(number), was, now) for number, was, now in found.rules])
    )
    options.say(
        f"{file}: {len(found.rules)} rules of KTransformers 0.x; no mistake found. "
        "`ktinject rules migrate` turns them into version 1."
    )


def _operator_configs() -> dict[str, type]:
    from ktinject.operators import REGISTRY, plugins  # brings torch, which list and show do without

    plugins.load_all()
    return {name: operator.Config for name, operator in REGISTRY.items()}


def _checks_arguments() -> Callable[[rules.Rule], None]:
    configs = _operator_configs()

    def check(rule: rules.Rule) -> None:
        if rule.operator == rules.KEEP:
            return
        if rule.operator not in configs:
            raise rules.unknown_operator(rule, configs)
        rules.check_arguments(rule, configs[rule.operator])

    return check


def _summary(found: rules.RuleSet) -> dict[str, Any]:
    return {"source": found.source, "model_types": found.model_types, "variables": found.variables}


def _rule(rule: rules.Rule) -> dict[str, Any]:
    layers = sorted(rule.match.layers) if rule.match.layers is not None else None
    found = rule.match
    match: dict[str, Any] = {"path": found.path, "class": found.class_name, "role": found.role}
    match |= {"inside": found.inside, "layers": layers}
    return {
        "name": rule.name,
        "match": {key: value for key, value in match.items() if value is not None},
        "operator": rule.operator,
        "arguments": rule.arguments,
        "optional": rule.optional,
        "where": rule.where,
    }


def _conditions(match: rules.Match) -> str:
    lines = [match.path]
    named = {"class": match.class_name, "role": match.role, "inside": match.inside}
    lines += [f"{key} {name}" for key, name in named.items() if name]
    if match.layers is not None:
        lines.append(f"layers {ranges(match.layers)}")
    return "\n".join(line for line in lines if line)


def _replacement(rule: rules.Rule) -> str:
    return "\n".join(filter(None, (rule.operator, _assignments(rule.arguments), "optional" * rule.optional)))


def _assignments(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items()
    )
