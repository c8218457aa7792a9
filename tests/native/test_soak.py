"""The short form of soak.py, which is for minutes and hours."""

from __future__ import annotations

import re
from pathlib import Path

import prepared
import pytest


@pytest.mark.slow
def test_two_models_in_two_threads_answer_as_alone(tiny_qwen3_moe: Path, tiny_deepseek_v3: Path) -> None:
    done = prepared.run(Path(__file__).with_name("soak.py"), 1, tiny_qwen3_moe, tiny_deepseek_v3)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r": [1-9]\d* answers of \d+ tokens, 0 different", done.stdout)) == 2
