"""Swapped models beside unswapped ones, by the way in which their steps run."""

from __future__ import annotations

import pytest
import torch
from answers import Pair, native_pair, pair
from test_generate import FAMILIES

_GRAPH = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# On a CPU each way with one family: the steps that another family has are compared elsewhere.
_CHOSEN = [
    ("qwen3_moe", "eager"),
    ("deepseek_v3", "fixed"),
    *(pytest.param((family, "graph"), marks=_GRAPH) for family in FAMILIES),
]


@pytest.fixture(scope="module", params=_CHOSEN)
def chosen(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, way = request.param
    return family, way


@pytest.fixture(scope="module")
def way(chosen: tuple[str, str]) -> str:
    return chosen[1]


@pytest.fixture(scope="module")
def models(chosen: tuple[str, str]) -> Pair:
    return pair(*chosen)


@pytest.fixture(scope="module", params=FAMILIES)
def native(request: pytest.FixtureRequest) -> Pair:
    return native_pair(request.param)
