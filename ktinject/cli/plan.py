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
Explain = Annotated[
    str | None,
    typer.Option(
        "--explain",
        metavar="PATH",
        help="For this module, or those whose path matches a pattern: which rules were tried, why each did not match, "
        "and what became of it.",
    ),
]


def command(
    model: options.Model,
    rules: options.Rules = "auto",
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    context: options.Context = None,
    ignore: options.Ignore = None,
    machine: Machine = None,
    dtype: options.RestDtype = "auto",
    explain: Explain = None,
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Show which modules would be replaced by what, on which device, in how many bytes. Reads only headers.

    A plan that does not fit into memory is shown, and the exit code is 2.
    """
    import ktinject
    from ktinject.optimize import read_rules
    from ktinject.planning.explain import explain as explained

    with options.answers(as_json):
        options.load_plugins(plugins)
        on_meta = options.build_on_meta(model, dtype)
        ruleset = read_rules(on_meta, rules, parse_overrides(variables or []))
        made: ktinject.Plan | ktinject.KTInjectError
        try:
            made = ktinject.plan(
                on_meta,
                ruleset,
                checkpoint=model,
                devices=device,
                budget=options.parse_sizes(budget, "--budget"),
                context=context,
                ignore=ignore or (),
                machine=options.parse_sizes(machine, "--machine"),
            )
        except ktinject.KTInjectError as error:
            if explain is None:
                raise
            made = error
        told = None if explain is None else explained(on_meta, ruleset, explain, made)
    if told is not None:
        if as_json:
            options.show_json({"explained": [each.to_dict() for each in told]})
        else:
            options.say(*(line for each in told for line in each.lines()))
    if isinstance(made, ktinject.KTInjectError):
        raise made
    if told is None and as_json:
        options.show_json(made.to_dict())
    elif told is None:
        options.show(made)
    made.check()
