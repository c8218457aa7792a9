"""The guards against a run that executes nothing, and against GPUs in tests that are not about them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("", False),
        ("gpu", True),
        ("gpu and not slow", True),
        ("not gpu", False),
        ("not slow", False),
        ("gpu or slow", True),
        ("slow", False),
        ("gpu and (", False),
    ],
)
def test_gpus_are_shown_only_to_a_run_of_gpu_tests(
    pytestconfig: pytest.Config, expression: str, shown: bool
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert conftest.selects_gpu_tests_alone(expression) == shown


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
