"""`ktinject fit`: the most accurate format of the experts that a budget allows, as a rule file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ktinject.cli import options
from ktinject.cli.plan import Machine
from ktinject.errors import CheckpointError, PlanError

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
    rules: options.Rules = None,
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
        folder = options.find_model(model)
        if options.is_packed(folder):
            raise CheckpointError(
                f"{folder}: its weights are packed in one format already. Give the model that it was converted from."
            )
        built = options.build_on_meta(folder, dtype)
        arguments = options.arguments(built.config, rules, variables, device, budget, context, ignore)
        del arguments["check_tensors"], arguments["tp"]  # of loading, and of several processes
        base, given = arguments.pop("rules"), arguments.pop("variables")
        if not isinstance(base, str):
            raise PlanError(
                f"{folder}/config.json states rules of its own, which no file can extend. Give --rules."
            )
        elsewhere = options.parse_sizes(machine, "--machine")
        found = fit.find(
            lambda values: ktinject.plan(
                built, base, checkpoint=folder, machine=elsewhere, variables=values, **arguments
            ),
            given,
        )
        words = _words(model, {"--rules": rules, "--context": context, "--dtype": dtype})
        for option, texts in {
            "--set": variables,
            "--device": device,
            "--budget": budget,
            "--machine": machine,
        }.items():
            words += [word for text in texts or [] for word in (option, text)]
        text = fit.rule_file(found, base, words)
        if out is not None:
            out.write_text(text, "utf-8")
    if as_json:
        options.show_json({"rules": text, "variables": found.variables, "plan": found.plan.to_dict()})
    elif out is None:
        typer.echo(text, nl=False)
        for note in found.plan.notes:
            typer.echo(f"ktinject: {note}", err=True)
    else:
        options.show(found.plan)


def _words(model: str, options_given: dict[str, Any]) -> list[str]:
    """The command that was called, without what is there by default."""
    given = {name: value for name, value in options_given.items() if value not in (None, "auto")}
    return ["ktinject", "fit", model, *(str(word) for pair in given.items() for word in pair)]
