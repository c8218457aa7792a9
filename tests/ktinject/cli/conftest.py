"""How a command is called in a test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ktinject.cli import app


@pytest.fixture
def ktinject() -> Callable[..., Result]:
    """Call `ktinject …`; the exit code must be the one expected. The result has stdout and stderr apart."""

    def call(*arguments: Any, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == exit_code, result.output
        return result

    return call


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a program in Python. Its first line cannot name the interpreter, whose path may have spaces."""

    def write(name: str, code: str) -> Path:
        script, file = tmp_path / "scripts" / name, tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(code)
        file.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{script}' \"$@\"\n")
        file.chmod(0o755)
        return file

    return write


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that reads a weight fails, with exit code 1."""

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("ktinject.loading.fill.from_checkpoint", loaded)
    monkeypatch.setattr("ktinject.cli.eval._load_unswapped", loaded)


@pytest.fixture
def as_json(ktinject) -> Callable[..., Any]:
    """Call `ktinject … --json`: its answer."""
    return lambda *arguments: json.loads(ktinject(*arguments, "--json").stdout)
