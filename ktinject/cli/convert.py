"""`ktinject convert`: a model folder whose experts and linear layers are packed already."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ktinject.cli import loaded, options
from ktinject.errors import PlanError

Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", help="The folder to write; it must not exist.", autocompletion=options.files
    ),
]
# What stands beside weights and is written by `save_pretrained`, or holds weights.
_NOT_COPIED = ("config.json", "generation_config.json")
_COPIED = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".md", ".py")


def command(
    model: options.Model,
    out: Out,
    rules: options.Rules = None,
    variables: options.Set = None,
    budget: options.Budget = None,
    ignore: options.Ignore = None,
    dtype: options.RestDtype = "auto",
    plugins: options.Plugins = None,
) -> None:
    """Pack a model once and write it as a folder that loads at the speed of the disk, on any machine.

    It is packed for the CPU. `ktinject run OUT` and the others then need no --rules and no --set: config.json has them.
    """
    from ktinject.loading import inject

    if out.exists():
        raise PlanError(f"{out}: it exists. Name a folder that does not.")
    options.check_writable(out, "OUT")
    _, swapped, _ = loaded.load(model, rules, ["cpu"], budget, dtype, variables, plugins, ignore=ignore)
    try:
        inject.write_packed(swapped, out, shown=True)
        source = Path(swapped.ktinject.checkpoint)
        for file in (source if source.is_dir() else source.parent).iterdir():
            is_index = file.name.endswith(".index.json")
            if file.suffix in _COPIED and file.name not in _NOT_COPIED and file.is_file() and not is_index:
                shutil.copyfile(file, out / file.name)
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise
    size = sum(file.stat().st_size for file in out.iterdir())
    options.say(
        f"{out}: {size / 2**30:.1f} GiB. Load it by `ktinject run {out} …` or ktinject.load({str(out)!r})."
    )
