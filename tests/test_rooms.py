"""Imports run as ARCHITECTURE.md says: from a room to those before it, and in no circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The faces of packages hand names on; the command's own start runs what stands above it.
FACES = ("__init__.py", "__main__.py")


def files() -> dict[str, Path]:
    """Module below ktinject → its file."""
    found = {}
    for folder, package in (("ktinject", ()), ("operators", ("operators",))):
        for file in (ROOT / folder).rglob("*.py"):
            if file.name not in FACES:
                found[".".join([*package, *file.relative_to(ROOT / folder).with_suffix("").parts])] = file
    return found


def imports(source: str) -> Iterator[str]:
    """Names below ktinject that a file imports, those for types and within functions, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ktinject":
            base = (node.module or "").split(".")[1:]
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("ktinject.")
            )


def arrows() -> dict[str, set[str]]:
    """Module → the modules that it imports; a package's face stands for its file `base`, or for nothing."""
    known = files()
    found: dict[str, set[str]] = {}
    for module, file in known.items():
        found[module] = set()
        for name in imports(file.read_text()):
            parts = name.split(".")
            inside = (".".join(parts[:length]) for length in (len(parts), len(parts) - 1))
            faces = (f"{'.'.join(parts[:-1])}.base",)
            target = next((place for place in (*inside, *faces) if place in known), None)
            if target and target != module:
                found[module].add(target)
    return found


def rooms() -> list[str]:
    line = re.search(
        r"Rooms, from the ground up: (.*?)\.\n", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL
    )
    assert line is not None
    return re.findall(r"`([a-z]+)`", line[1])


def room_of(module: str) -> str:
    return module.partition(".")[0] if "." in module else {"optimize": "optimize"}.get(module, "ground")


def test_no_import_leads_to_a_room_above() -> None:
    order = rooms()
    assert {room_of(module) for module in files()} <= {*order}
    against = [
        f"{module} → {target}"
        for module, targets in arrows().items()
        for target in targets
        if order.index(room_of(target)) > order.index(room_of(module))
    ]
    assert not against


def test_one_face_of_checkpoints_is_seen() -> None:
    """Containers and source formats are known within their room; others see Checkpoint and what it hands on,
    and files of packed weights, which are no checkpoints."""
    seen = {"checkpoint", "formats.base", "beside", "json_text", "packed"}
    known = {
        f"{module} → {target}"
        for module, targets in arrows().items()
        for target in targets
        if room_of(target) == "checkpoints" != room_of(module)
        and target.removeprefix("checkpoints.") not in seen
    }
    assert not known


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = arrows()
    assert len(graph) > 80 and sum(map(len, graph.values())) > 200
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        raise AssertionError(" → ".join(circle.args[1])) from None
