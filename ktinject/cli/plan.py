"""`ktinject plan`: every decision about a model, with nothing done."""

from __future__ import annotations

from ktinject.cli import options
from ktinject.rules import parse_overrides


def command(
    model: options.Model,
    rules: options.Rules = "auto",
    variables: options.Set = None,
    device: options.Device = None,
    budget: options.Budget = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what would replace what, where, and in how many bytes. Reads headers only; loads nothing."""
    import ktinject

    plan = ktinject.plan(
        options.build_on_meta(model),
        rules,
        checkpoint=model,
        devices=device,
        budget=options.parse_budget(budget),
        variables=parse_overrides(variables or []),
    )
    if as_json:
        options.show_json(plan.to_dict())
    else:
        options.show(plan)
