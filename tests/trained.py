"""The trained models of examples/models, which a checkout may lack."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples/models"


def trained_model(name: str) -> Path:
    """The path of a model's folder, or of a file beside the models.

    The test that asks is skipped where it is not there, and so is a file of tests that asks when it is imported.
    """
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"examples/models/{name} is not there", allow_module_level=True)
    return path
