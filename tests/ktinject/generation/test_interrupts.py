"""A few of the interrupts of `interrupts.py`, which counts hundreds."""

from __future__ import annotations

from pathlib import Path

import interrupts
import pytest


@pytest.mark.slow
def test_every_ctrl_c_arrives_once_and_the_next_request_is_right(tiny_qwen3_moe: Path) -> None:
    counts = {"start-up": 1, "load": 2, "first": 2, "prompt": 2, "decode": 6}
    found = interrupts.run(tiny_qwen3_moe, counts)
    assert {stage: row["faults"] for stage, row in found.items()} == {stage: [] for stage in counts}
    assert {stage: (row["sent"], row["arrived"]) for stage, row in found.items()} == {
        stage: (count, count) for stage, count in counts.items()
    }
