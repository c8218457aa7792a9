"""Where rules come from: files, the bundled folder, Python values."""

from __future__ import annotations

import functools
import importlib.resources
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ktinject.errors import RuleError
from ktinject.rules import document
from ktinject.rules.document import Node
from ktinject.rules.language import VERSION, RuleSet, rule_set
from ktinject.rules.wording import did_you_mean, listing, show

logger = logging.getLogger("ktinject")

PYTHON = "<python>"


def read(
    source: str | Path | RuleSet | Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    variables: Mapping[str, Any] | None = None,
) -> RuleSet:
    """Read rules.

    source     a path, a bundled name ("deepseek-v3"), a document as a dict, a list of rules as dicts, or a
               RuleSet, returned as it is. A path that is not there but whose file name is bundled means the
               bundled file, and the log says so
    variables  values in place of the document's own
    Raises     RuleError, with file and line, for everything that is not the rule language, version 1
    """
    if isinstance(source, RuleSet):
        if variables:
            raise RuleError(
                f"{source.source}: variables for rules that are read already; they are filled in while "
                "reading. Pass them together with the file."
            )
        return source
    if isinstance(source, str | Path):
        path, name = locate(source)
        return rule_set(document.from_file(path, name), name, variables)
    if isinstance(source, Mapping):
        return rule_set(document.from_python(source, PYTHON), PYTHON, variables)
    if isinstance(source, list | tuple):
        rules = document.from_python(source, PYTHON, "rules")
        root = Node({"version": Node(VERSION, PYTHON), "rules": rules}, PYTHON)
        return rule_set(root, PYTHON, variables)
    raise RuleError(
        f"rules are given as {type(source).__name__}; a path, a bundled name, a RuleSet, a dict or a list "
        "of dicts is read. Pass one of these."
    )


def parse(data: bytes, source: str, *, variables: Mapping[str, Any] | None = None) -> RuleSet:
    """Read the bytes of a rule file, called `source` in refusals. Raises RuleError as `read` does."""
    return rule_set(document.from_bytes(data, source), source, variables)


def bundled() -> dict[str, Path]:
    """The bundled rule files by name, sorted."""
    folder = Path(str(importlib.resources.files("ktinject.optimize_rules")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def choose(model_type: str) -> str:
    """The bundled name that `rules="auto"` means: the file named like the type, else one that lists it."""
    serving = [name for name, model_types in _guards().items() if model_type in model_types]
    own = model_type.replace("_", "-")
    return own if own in serving else (serving or ["moe-auto"])[0]


@functools.cache
def _guards() -> dict[str, tuple[str, ...]]:
    return {name: read(name).model_types for name in bundled()}


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
    if text == "auto":
        advice = "Name one; 'auto' is for optimize, plan and load, which know the model."
    raise RuleError(
        f"rules {show(text)}: {found}; a path or a bundled name is read: {listing(files)}. {advice}"
    )
