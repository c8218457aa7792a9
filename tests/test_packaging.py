"""What setup.py lists is what lies in the tree: an editable install would not notice a folder that a wheel lacks."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "ktinject": "ktinject",
    "operators": "ktinject.operators",
    "optimize_rules": "ktinject.optimize_rules",
}


def test_every_package_is_listed() -> None:
    call = next(
        node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.Call)
    )
    arguments = {keyword.arg: keyword.value for keyword in call.keywords}
    found = {
        ".".join([package, *file.parent.relative_to(ROOT / folder).parts])
        for folder, package in FOLDERS.items()
        for file in (ROOT / folder).rglob("__init__.py")
    }
    assert set(ast.literal_eval(arguments["packages"])) == found
    assert ast.literal_eval(arguments["package_dir"]) == {
        package: folder for folder, package in FOLDERS.items()
    }


def test_bundled_rules_are_package_data() -> None:
    assert '"ktinject.optimize_rules": ["*.yaml", "*.json"]' in (ROOT / "setup.py").read_text()
    assert {file.name for file in (ROOT / "optimize_rules").glob("*.yaml")} >= {
        "auto.yaml",
        "gpt-oss.yaml",
    }
