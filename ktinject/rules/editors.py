"""The JSON Schema where editors look for it: beside the rule files, named in the first line of each.

yaml-language-server, which VS Code, Neovim, Helix, Emacs and others run, takes the schema that a comment of the file
names, with a path relative to the file. So no setting of an editor is needed, and none is touched.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ktinject.errors import PlanError

SCHEMA_FILE = "rules.schema.json"
MODELINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"

_HAS_MODELINE = re.compile(rb"^#\s*yaml-language-server:\s*\$schema=", re.MULTILINE)
_IS_RULES = re.compile(rb"\A(?s:.*)^version:(?s:.*)^(rules|extends):", re.MULTILINE)
_MAX_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


def as_text(schema: dict[str, Any]) -> str:
    """The schema as the text of a file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def install(schema: dict[str, Any], target: Path) -> list[str]:
    """Write the schema beside rule files, and its name into the first line of those that name none.

    target   a rule file, or a folder with rule files
    Returns  what was done, line by line
    Raises   PlanError for what is not there or cannot be written, and for a foreign file of the schema's name
    """
    if not target.exists():
        raise PlanError(f"--install {target}: is not there. Name a rule file, or a folder with rule files.")
    folder = target if target.is_dir() else target.parent
    file = folder / SCHEMA_FILE
    try:
        if file.exists() and not _is_ours(file):
            raise PlanError(f"--install {file}: there is a file that is no schema of rules. Move it away.")
        file.write_text(as_text(schema), "utf-8")
        said = [f"{file}: written"]
        if not target.is_dir():
            return [*said, _name_in(target)]
        candidates = sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")])
        return said + [
            _name_in(each) for each in candidates if each.is_file() and _IS_RULES.search(_start(each))
        ]
    except OSError as error:
        raise PlanError(
            f"--install {error.filename or target}: {error.strerror}. Name another place."
        ) from error


def _is_ours(file: Path) -> bool:
    try:
        return str(json.loads(file.read_text("utf-8"))["title"]).startswith("ktinject rules")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _start(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_MAX_BYTES)


def _name_in(file: Path) -> str:
    data = file.read_bytes()
    if _HAS_MODELINE.search(data):
        return f"{file}: names a schema already; left as it is"
    bom, rest = (_BOM, data.removeprefix(_BOM)) if data.startswith(_BOM) else (b"", data)
    end = b"\r\n" if rest.partition(b"\n")[0].endswith(b"\r") else b"\n"
    file.write_bytes(bom + MODELINE.encode() + end + rest)
    return f"{file}: its first line names the schema now"
