"""The command line: one file a command. Torch is imported when a command needs it, not before."""

from __future__ import annotations

import logging
import sys
import traceback
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ktinject import machine
from ktinject.cli import (
    bench,
    cache,
    chat,
    convert,
    doctor,
    eval,
    fit,
    modules,
    operators,
    plan,
    profile,
    rules,
    run,
    serve,
)
from ktinject.errors import KTInjectError

FAILED, REFUSED = 1, 2
logger = logging.getLogger("ktinject")


class _Group(TyperGroup):
    """Turns what a command raises into a message on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except KTInjectError as error:
            _end(str(error), REFUSED)
        except MemoryError as error:
            _end(machine.no_memory(error), FAILED)
        except Exception as error:
            _end(f"failed: {type(error).__name__}: {error} (`ktinject -v …` shows where)", FAILED)


def _end(message: str, code: int) -> NoReturn:
    if logger.isEnabledFor(logging.INFO):
        traceback.print_exc()
    typer.echo(f"ktinject: {message}", err=True)
    sys.exit(code)


app = typer.Typer(
    name="ktinject",
    cls=_Group,
    help="Run Mixture-of-Experts models on stock transformers, with their experts on the CPU.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ktinject {version('ktinject')}")
        raise typer.Exit()


@app.callback()
def _options(
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log every decision; show the traceback of a refusal.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    logging.basicConfig(format="%(name)s: %(message)s")
    logger.setLevel(logging.INFO if verbose else logging.NOTSET)


app.command("plan")(plan.command)
app.command("fit")(fit.command)
app.command("run")(run.command)
app.command("convert")(convert.command)
app.command("chat")(chat.command)
app.command("serve")(serve.command)
app.command("eval")(eval.command)
app.command("profile")(profile.command)
app.command("bench")(bench.command)
app.command("doctor")(doctor.command)
app.command("modules")(modules.command)
app.command("operators")(operators.command)
app.add_typer(rules.app, name="rules")
app.add_typer(cache.app, name="cache")


def main() -> None:
    """The `ktinject` command."""
    app()
