"""`ktinject operators`: what rules can replace modules with."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any

import typer

from ktinject.cli import options
from ktinject.grid import Grid

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The operator to describe; without it, all are listed.")
]


def command(name: Name = None, plugins: options.Plugins = None, as_json: options.AsJson = False) -> None:
    """List the operators, or describe one: what it takes, and its arguments with what is allowed and the default."""
    from ktinject.operators import REGISTRY
    from ktinject.operators import plugins as installed
    from ktinject.tools import catalogue

    with options.answers(as_json):
        options.load_plugins(plugins)
        if name is None:
            installed.load_all()
        names = sorted(REGISTRY) if name is None else [catalogue.operator_named(name).name]
    if as_json:
        described = {name: _description(name) for name in names}
        options.show_json(described if name is None else described[name])
    elif name is None:
        rows = [(n, ", ".join(REGISTRY[n].device_types), catalogue.summary(REGISTRY[n])) for n in names]
        options.show(Grid(("operator", "computes on", "what it does"), rows))
    else:
        options.say(inspect.getdoc(REGISTRY[name]) or "", "")
        arguments = [
            (argument.name, argument.allowed, str(argument.default), argument.meaning)
            for argument in catalogue.arguments(REGISTRY[name])
        ]
        options.show(Grid(("argument", "allowed", "default", "meaning"), arguments))


def _description(name: str) -> dict[str, Any]:
    from ktinject.operators import REGISTRY
    from ktinject.tools import catalogue

    operator = REGISTRY[name]
    return {
        "summary": catalogue.summary(operator),
        "description": inspect.getdoc(operator),
        "computes_on": operator.device_types,
        "arguments": [dataclasses.asdict(argument) for argument in catalogue.arguments(operator)],
    }
