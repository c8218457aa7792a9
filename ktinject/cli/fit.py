"""`ktinject fit`: the most accurate format of the experts that a budget allows, as a rule file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ktinject.cli import options
from ktinject.cli.plan import Machine
from ktinject.rules import parse_overrides

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Write the rule file here, and show the plan; default: print the file.",
    ),
]


def command(
    model: options.Model,
    rules: options.Rules = "auto",
    out: Out = None,
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    context: options.Context = None,
    ignore: options.Ignore = None,
    machine: Machine = None,
    dtype: options.RestDtype = "auto",
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """Find the most accurate format of the experts that fits, and write it as a rule file. Reads only headers.

    The file extends the rules and sets their variables: `experts`, and those of --set. With the same budget, it gives
    the same plan in `ktinject plan` and `ktinject run`.
    """
    import ktinject
    from ktinject.tools import fit

    with options.answers(as_json):
        if out is not None:
            options.check_writable(out, "--out")
        options.load_plugins(plugins)
        built = options.build_on_meta(model, dtype)
        arguments: dict[str, Any] = {
            "checkpoint": model,
            "devices": device,
            "budget": options.parse_sizes(budget, "--budget"),
            "machine": options.parse_sizes(machine, "--machine"),
            "context": context,
            "ignore": ignore or (),
        }
        found = fit.find(
            lambda values: ktinject.plan(built, rules, **arguments, variables=values),
            parse_overrides(variables or []),
        )
        words = _words(model, {"--rules": rules, "--context": context, "--dtype": dtype})
        for option, texts in {
            "--set": variables,
            "--device": device,
            "--budget": budget,
            "--machine": machine,
        }.items():
            words += [word for text in texts or [] for word in (option, text)]
        text = fit.rule_file(found, rules, words)
        if out is not None:
            out.write_text(text, "utf-8")
    if as_json:
        options.show_json({"rules": text, "variables": found.variables, "plan": found.plan.to_dict()})
    elif out is None:
        typer.echo(text, nl=False)
    else:
        options.show(found.plan)


def _words(model: Path, options_given: dict[str, Any]) -> list[str]:
    """The command that was called, without what is there by default."""
    given = {name: value for name, value in options_given.items() if value not in (None, "auto")}
    return ["ktinject", "fit", str(model), *(str(word) for pair in given.items() for word in pair)]
