"""The guard against a run that executes nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("test", "exit_code"),
    [
        ("def test(): pass", 0),
        ("def test(): assert False", 1),
        ("import pytest\ndef test(): pytest.skip('no GPU')", 5),
        ("", 5),
    ],
)
def test_exit_code(tmp_path, test, exit_code):
    for name in ("conftest.py", "byte_tokenizer.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    (tmp_path / "test_it.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    assert subprocess.run(command, capture_output=True, check=False, cwd=tmp_path).returncode == exit_code
