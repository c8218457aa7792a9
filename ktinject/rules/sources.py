"""Where rules come from: files, the bundled folder, Python values."""

from __future__ import annotations

import importlib.resources
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ktinject.errors import RuleError
from ktinject.rules import document
from ktinject.rules.files import VERSION, Document
from ktinject.rules.language import Rule, RuleSet, rule_set
from ktinject.rules.node import Node
from ktinject.rules.wording import Place, Problems, did_you_mean, listing, show

logger = logging.getLogger("ktinject")

PYTHON = "<python>"
MAX_BASES = 8
_HAS_A_KEY = re.compile(rb"\b(version|extends|rules)[\"']?\s*:")


def read(
    source: str | Path | RuleSet | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any] | None = None,
    check: Callable[[Rule], None] | None = None,
) -> RuleSet:
    """Read rules.

    source     a path, a bundled name ("deepseek-v3"), a document as a dict, a list of rules as dicts, or a
               RuleSet, returned as it is. A path that is not there but whose file name is bundled means the
               bundled file, and the log says so
    variables  values in place of the document's own: for variables, and "rule.argument" → value for arguments of rules
    check      called for each rule; a RuleError that it raises is told with all others
    Raises     RuleError, with file and line, for everything that is not the rule language, version 1: all problems at
               once, each of which is in its `parts`
    """
    if isinstance(source, RuleSet):
        if variables:
            raise RuleError(
                f"{source.source}: variables for rules that are read already; they are filled in while "
                "reading. Pass them together with the file."
            )
        return source
    problems = Problems()
    if isinstance(source, str | Path):
        path, name = locate(source)
        root = document.from_file(path, name, problems)
        return rule_set(with_bases(Document(root, name), path), variables, check, problems)
    if isinstance(source, Mapping):
        root = document.from_python(source, PYTHON)
        return rule_set(with_bases(Document(root, PYTHON)), variables, check)
    if isinstance(source, list | tuple):
        rules = document.from_python(source, PYTHON, "rules")
        root = Node({"version": Node(VERSION, PYTHON), "rules": rules}, PYTHON)
        return rule_set([Document(root, PYTHON)], variables, check)
    raise RuleError(
        f"rules are given as {type(source).__name__}; a path, a bundled name, a RuleSet, a dict or a list "
        "of dicts is read. Pass one of these."
    )


def parse(
    data: bytes,
    source: str,
    *,
    variables: Mapping[str, Any] | None = None,
    check: Callable[[Rule], None] | None = None,
) -> RuleSet:
    """Read the bytes of a rule file, called `source` in refusals. Raises RuleError as `read` does.

    What it extends is looked for in the working directory.
    """
    problems = Problems()
    root = document.from_bytes(data, source, problems=problems)
    return rule_set(with_bases(Document(root, source)), variables, check, problems)


def with_bases(own: Document, path: Path | None = None) -> list[Document]:
    """The file, the file that it extends, the one that this extends, and so on.

    path    of the file; None: it is none
    Raises  RuleError, at the line of `extends`, for a base that is not there, a cycle, or too many
    """
    found = [own]
    chain = [] if path is None else [path.resolve()]
    while (wanted := found[-1].extends()) is not None:
        name, where = wanted
        place = Place(where)
        if len(found) > MAX_BASES:
            raise place.refusal(
                f"extends {show(name)}, and {MAX_BASES} files extend each other already; at most {MAX_BASES} do. "
                "Extend the last of them directly."
            )
        base, shown = _base(name, Path() if path is None else path.parent, place)
        if (real := base.resolve()) in chain:
            raise place.refusal(
                f"extends {show(name)}, which extends this file; a file may not extend itself. Remove one extends."
            )
        chain.append(real)
        data = document.bytes_of(base, shown)
        if not _HAS_A_KEY.search(data):
            # Of a file that is anything else, such as one of passwords, a refusal shows no line.
            raise place.refusal(
                f"extends {show(name)}: {show(str(base))} is no rule file; one has a version and rules. "
                "Correct it."
            )
        found.append(Document(document.from_bytes(data, shown), shown))
        path = base
    return found


def _base(name: str, folder: Path, place: Place) -> tuple[Path, str]:
    """The file that `extends` means, and its name in refusals: a bundled name, or a path relative to the folder."""
    files = bundled()
    if name in files:
        return files[name], files[name].name
    path = folder / name
    try:
        if path.is_file():
            return path, str(path)
        found = "is not a file" if path.exists() else "is not there"
        beside = [file.name for file in folder.glob("*.yaml")] if found == "is not there" else []
    except (OSError, ValueError):
        found, beside = "is not a path", []
    raise place.refusal(
        f"extends {show(name)}: {show(str(path))} {found}; a bundled name or a path relative to the file is read: "
        f"{listing(files)}. Correct it.{did_you_mean(name, [*files, *beside])}"
    )


def bundled() -> dict[str, Path]:
    """The bundled rule files by name, sorted."""
    folder = Path(str(importlib.resources.files("ktinject.optimize_rules")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def locate(source: str | Path) -> tuple[Path, str]:
    """The file that a path or bundled name means, and its name in refusals.

    Raises   RuleError for a path that is no file and whose name is not bundled
    """
    text, files = str(source), bundled()
    if text in files:  # a bare name does not depend on what lies in the working directory
        return files[text], files[text].name
    path = Path(source)
    try:
        if path.is_file():
            return path, text
        found = "is not a file" if path.exists() else "is not there"
    except (OSError, ValueError):
        found = "is not a path"
    name = path.name.removesuffix(".yaml")
    if name in files:
        logger.warning("%s %s: using the bundled rules %s", text, found, name)
        return files[name], files[name].name
    advice = f"Correct the path.{did_you_mean(name, files)}"
    raise RuleError(
        f"rules {show(text)}: {found}; a path or a bundled name is read: {listing(files)}. {advice}"
    )
