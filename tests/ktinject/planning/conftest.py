"""The model that is planned for, on meta and as a folder."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
from double import on_meta, saved
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return on_meta(models.tiny("deepseek_v3"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(models.tiny("deepseek_v3"), tmp_path_factory.mktemp("plan") / "model")
