"""What setup.py lists is what lies in the tree: an editable install would not notice a folder that a wheel lacks."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

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


def test_what_is_not_python_is_package_data() -> None:
    text = (ROOT / "setup.py").read_text()
    assert '"ktinject.serving": ["page/*"]' in text and (ROOT / "ktinject/serving/page/index.html").exists()


@pytest.mark.parametrize("name", ["build_wheels", "try_wheel"])
def test_scripts_for_wheels(name: str) -> None:
    script = ROOT / "packaging" / name
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", script], check=True)


def test_a_container_and_a_release_build_what_the_script_builds() -> None:
    """Its architectures stand in one place."""
    assert "120" in (ROOT / "packaging/build_wheels").read_text()
    for user in ("Dockerfile", ".github/workflows/release.yml"):
        text = (ROOT / user).read_text()
        assert "packaging/build_wheels" in text and "CUDAARCHS" not in text and "py-limited-api" not in text
