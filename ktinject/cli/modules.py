"""`ktinject modules`: what a model has that rules can replace."""

from __future__ import annotations

import dataclasses

from ktinject.cli import options
from ktinject.grid import Grid


def command(
    model: options.Model,
    dtype: options.RestDtype = "auto",
    plugins: options.Plugins = None,
    as_json: options.AsJson = False,
) -> None:
    """List the modules of a model: path, class, roles, number, bytes, and the operators that take them.

    Paths that differ in the numbers of layers share a line. Bytes include what lies inside the modules. Reads only
    headers.
    """
    from ktinject.planning import narrow
    from ktinject.planning.devices import show_bytes
    from ktinject.tools import catalogue

    with options.answers(as_json):
        options.load_plugins(plugins)
        on_meta = options.build_on_meta(options.find_model(model), dtype)
        narrow.routers(on_meta, None, None)
        found = catalogue.modules(on_meta)
    if as_json:
        options.show_json([dataclasses.asdict(kind) for kind in found])
        return
    rows = [
        (
            kind.path,
            kind.class_name,
            ", ".join(kind.roles),
            str(kind.count),
            show_bytes(kind.bytes),
            ", ".join(kind.operators),
        )
        for kind in found
    ]
    options.show(Grid(("path", "class", "roles", "number", "bytes", "operators"), rows, ["number", "bytes"]))
