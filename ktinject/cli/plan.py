"""`ktinject plan`: every decision about a model, with nothing done."""

from __future__ import annotations

from typing import Annotated

import typer

from ktinject.cli import options
from ktinject.rules import parse_overrides

Machine = Annotated[
    list[str] | None,
    typer.Option(
        "--machine",
        metavar="DEVICE=SIZE,…",
        help="Plan for another machine with this memory, such as cpu=512GiB,cuda:0=24GiB.",
    ),
]


def command(
    model: options.Model,
    rules: options.Rules = "auto",
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    context: options.Context = None,
    machine: Machine = None,
    dtype: options.RestDtype = "auto",
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Show which modules would be replaced by what, on which device, in how many bytes. Reads only headers.

    A plan that does not fit into memory is shown, and the exit code is 2.
    """
    import ktinject

    with options.answers(as_json):
        options.load_plugins(plugins)
        plan = ktinject.plan(
            options.build_on_meta(model, dtype),
            rules,
            checkpoint=model,
            devices=device,
            budget=options.parse_sizes(budget, "--budget"),
            context=context,
            variables=parse_overrides(variables or []),
            machine=options.parse_sizes(machine, "--machine"),
        )
    if as_json:
        options.show_json(plan.to_dict())
    else:
        options.show(plan)
    plan.check()
