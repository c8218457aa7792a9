"""Every operator that rules can name keeps the contract of `operators/base.py`, on one small case each.

What an operator computes in all its formats, sizes and modes is in its own tests; what all of them promise is in
ktinject/testing, where users' own operators are held to it, too.
"""

from __future__ import annotations

import pytest
from conformance_cases import CASES, NAMES, NEVER_BUILT

from ktinject import _native
from ktinject.operators import REGISTRY
from ktinject.testing import CHECKS, COMPUTING

BUILT = [name for name in NAMES if name in CASES]
# Here where the operator computes on the CPU, and with `-m gpu` where it needs a GPU.
FILLED = [
    pytest.param(name, marks=[pytest.mark.gpu] if CASES[name].device != "cpu" else []) for name in BUILT
]


def test_every_registered_operator_has_a_case() -> None:
    assert set(NAMES) == {*CASES, *NEVER_BUILT}
    assert all(REGISTRY[name].name == name for name in NAMES)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BUILT)
def test_what_a_plan_asks(name: str, check: str) -> None:
    if check == "refuses_misfits":
        skip_without_cuda(name)
    CHECKS[check](CASES[name])


@pytest.mark.parametrize("check", COMPUTING)
@pytest.mark.parametrize("name", FILLED)
def test_what_it_computes(name: str, check: str) -> None:
    skip_without_cuda(name)
    COMPUTING[check](CASES[name])


def skip_without_cuda(name: str) -> None:
    if CASES[name].device != "cpu" and not _native.cuda_built():
        pytest.skip("built without CUDA")
