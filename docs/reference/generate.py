"""Write what the code itself can tell: the reference pages cli.md, operators.md and python.md, and the JSON Schema.

    python docs/reference/generate.py

A test compares the pages with what this writes, so they cannot go stale.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import ktinject
from ktinject import rules
from ktinject.cli import app
from ktinject.operators import REGISTRY, Operator
from ktinject.rules import editors
from ktinject.tools import catalogue

HERE = Path(__file__).parent


def table(*rows: tuple[str, ...]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)
    yield ""


def cli() -> Iterator[str]:
    yield "# Command line\n"
    yield from table(
        ("exit code", "means"),
        ("0", "done"),
        ("1", "failed"),
        ("2", "refused, or wrong usage; the message is on stderr"),
        ("130", "interrupted"),
    )
    yield 'With `--json`, a refusal is also on stdout: `{"ok": false, "problems": ["…"]}`.\n'
    yield "`-h` is `--help`. `python -m ktinject` is `ktinject`. `ktinject --install-completion` lets your shell"
    yield "complete commands, options and the names of bundled rules. ktinject also reads"
    yield "[environment variables](environment.md).\n"
    yield from _command(typer.main.get_command(app), "ktinject")


def _command(command: Any, name: str) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{command.help}\n"
    commands = getattr(command, "commands", {})
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = [name, *(["[OPTIONS]"] if command.params else []), *map(_value, arguments)]
    yield f"```\n{' '.join(usage)}{' COMMAND …' if commands else ''}\n```\n"
    rows = [row for p in command.params if (row := _parameter(p))]
    if rows:
        yield from table(("", "", "default"), *rows)
    for key, child in commands.items():
        yield from _command(child, f"{name} {key}")


def _parameter(parameter: Any) -> tuple[str, str, str]:
    if parameter.param_type_name == "argument":
        return f"`{_value(parameter)}`", parameter.help or "", ""
    names = " / ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    if not parameter.is_flag:
        names += f" `{_value(parameter)}`"
    default = parameter.opts[0].strip("-") if parameter.default is True else parameter.default
    return names, parameter.help or "", f"`{default}`" if default and parameter.show_default else ""


def _value(parameter: Any) -> str:
    value = parameter.metavar or parameter.name.upper()
    is_optional = parameter.param_type_name == "argument" and not parameter.required
    return f"[{value}]" if is_optional else value


def operators() -> Iterator[str]:
    yield "# Operators\n"
    yield "What a rule can name under `replace`. `keep` takes no arguments and leaves the modules as they are."
    yield "Every other operator takes the arguments in its table.\n"
    for name, operator in sorted(REGISTRY.items()):
        if operator.replaces and operator.__module__.startswith("ktinject."):
            yield f"## {name}\n"
            yield f"{inspect.getdoc(operator)}\n"
            yield from table(("argument", "allowed", "default", ""), *_arguments(operator))


def _arguments(operator: type[Operator]) -> Iterator[tuple[str, ...]]:
    for argument in catalogue.arguments(operator):
        yield f"`{argument.name}`", f"`{argument.allowed}`", f"`{argument.default}`", argument.meaning


def python() -> Iterator[str]:
    yield "# Python\n"
    yield "Every refusal is a `ktinject.KTInjectError`, which is a `ValueError`. Its subclasses are `RuleError`,"
    yield "`PlanError`, `CheckpointError` and `OperatorError`. After a refusal the model is as it was.\n"
    public = [getattr(ktinject, name) for name in ktinject.__all__ if not name.startswith("_")]
    for function in filter(inspect.isfunction, public):
        yield from _described(f"ktinject.{function.__name__}", function)
    for kind in filter(inspect.isclass, public):
        yield from _class(f"ktinject.{kind.__name__}", kind)
    from ktinject import testing
    from ktinject.tools import evaluate

    yield "# ktinject.testing\n"
    yield f"```\n{inspect.getdoc(testing)}\n```\n"
    yield from _described("ktinject.testing.check_operator", testing.check_operator)
    yield from _class("ktinject.testing.Case", testing.Case)
    yield "# ktinject.tools.evaluate\n"
    yield f"```\n{inspect.getdoc(evaluate)}\n```\n"
    for name, value in vars(evaluate).items():
        if name.startswith("_") or getattr(value, "__module__", "") != evaluate.__name__:
            continue
        if inspect.isfunction(value):
            yield from _described(f"ktinject.tools.evaluate.{name}", value)
        elif inspect.isclass(value):
            yield from _class(f"ktinject.tools.evaluate.{name}", value)


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"```\n{inspect.getdoc(kind)}\n```\n"


def _described(name: str, function: Any) -> Iterator[str]:
    # Annotations are text, so `inspect` quotes them; one parameter a line.
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))
    signature = re.sub(r"(\(|, )(?=\w+: |\*, )", lambda found: found[1].rstrip() + "\n    ", signature)
    yield f"## {name}\n"
    yield f"```python\n{name}{signature.replace(') ->', chr(10) + ') ->')}\n```\n"
    yield f"```\n{inspect.getdoc(function)}\n```\n"


PAGES = {"cli.md": cli, "operators.md": operators, "python.md": python}


def page(name: str) -> str:
    return "\n".join(PAGES[name]()).rstrip() + "\n"


def schema() -> str:
    """The schema beside the bundled rules, which knows the operators that come with ktinject."""
    configs = {name: op.Config for name, op in REGISTRY.items() if op.__module__.startswith("ktinject.")}
    return editors.as_text(rules.schema(configs))


SCHEMA = HERE.parents[1] / "optimize_rules" / editors.SCHEMA_FILE

if __name__ == "__main__":
    SCHEMA.write_text(schema())
    for name in PAGES:
        (HERE / name).write_text(page(name))
