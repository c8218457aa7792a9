"""The short form of tests/fuzz/load_faults.py, which is for hundreds of loads."""

from __future__ import annotations

import re
from pathlib import Path

import prepared
import pytest

PROGRAM = Path(__file__).parents[3] / "tests/fuzz/load_faults.py"


@pytest.mark.slow
def test_a_load_that_is_disturbed_leaves_nothing_behind() -> None:
    done = prepared.run(PROGRAM, "--times", 1, "--seed", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(
        r"^(\w+), (packing, and writing|reading) the cache: 1 times", done.stdout, re.MULTILINE
    )
    assert len(found) == 8 and len({fault for fault, _ in found}) == 4
