"""`ktinject cache`: the files of packed weights that loads keep with `cache="auto"`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from ktinject.cli import options
from ktinject.errors import CheckpointError, listed
from ktinject.grid import Grid

app = typer.Typer(help="List, check and delete files of packed weights.", no_args_is_help=True)

Stale = Annotated[bool, typer.Option("--stale", help="Delete only what will not be used again.")]
Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE",
        help="Files of packed weights; without one, all of the cache.",
        autocompletion=options.files,
    ),
]


@app.command("list")
def list_files(as_json: options.AsJson = False) -> None:
    """List the files, with the checkpoint that each is of, and whether it still fits that."""
    from ktinject.loading.packed_cache import folder_of_caches
    from ktinject.planning.devices import show_bytes
    from ktinject.tools import cached

    with options.answers(as_json):
        files = cached.found()
    if as_json:
        options.show_json([_plain(file) for file in files])
        return
    rows = [(f.path.name, show_bytes(f.bytes), f.weights, f.source, f.state) for f in files]
    options.show(Grid(("file", "bytes", "weights", "checkpoint", "state"), rows, ["bytes"]))
    total = show_bytes(sum(file.bytes for file in files))
    options.say(f"{len(files)} files, {total} in {folder_of_caches()}")


@app.command()
def clear(stale: Stale = False, as_json: options.AsJson = False) -> None:
    """Delete the files. The next load packs anew."""
    from ktinject.tools import cached

    with options.answers(as_json):
        gone = cached.remove(stale)
    if as_json:
        options.show_json([str(path) for path in gone])
        return
    for path in gone:
        options.say(f"deleted {path}")
    options.say(f"{len(gone)} files deleted")


@app.command()
def verify(files: Files = None, as_json: options.AsJson = False) -> None:
    """Read all of the files and compare them with their checksums, which no load does."""
    from ktinject.loading.progress import progress
    from ktinject.tools import cached

    with options.answers(as_json):
        paths = files or [file.path for file in cached.found()]
        faults = []
        for path in paths:
            if not path.is_file():
                raise CheckpointError(
                    f"{path}: there is no such file. `ktinject cache list` shows those that are."
                )
            with progress(path.stat().st_size, True, f"reading {path.name}") as advance:
                faults += [f"{path}: tensor {name}: damaged" for name in cached.wrong(path, advance)]
        if faults:
            raise CheckpointError(
                f"{len(faults)} tensors are not what was written:{listed(faults)}\n"
                "Delete the files; the next load packs anew."
            )
    if as_json:
        options.show_json({"ok": True, "files": [str(path) for path in paths]})
    else:
        options.say(f"{len(paths)} files are as they were written")


def _plain(file: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(file), "path": str(file.path)}
