"""`ktinject doctor`: what the machine has and what ktinject uses of it."""

from __future__ import annotations

from ktinject.cli import options


def command(as_json: options.AsJson = False) -> None:
    """Show what this machine has, what ktinject uses of it, and why it does not use the rest."""
    from ktinject.tools.doctor import doctor

    with options.answers(as_json):
        report = doctor()
    if as_json:
        options.show_json(report.to_dict())
    else:
        options.show(report)
