"""How a command is called in a test."""

from __future__ import annotations

import json
from collections.abc import Callable
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
def as_json(ktinject) -> Callable[..., Any]:
    """Call `ktinject … --json`: its answer."""
    return lambda *arguments: json.loads(ktinject(*arguments, "--json").stdout)
