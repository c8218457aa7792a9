"""The guards against a run that executes nothing, and against GPUs in tests that are not about them."""

from __future__ import annotations

import re
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


def test_numeric_tests_are_there_and_levels_are_named_rightly(pytestconfig: pytest.Config) -> None:
    from ktinject import _native

    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert all(list(Path(__file__).parent.glob(pattern)) for pattern in conftest.NUMERIC)
    assert {*conftest.TORCH_LEVELS} < {row["name"] for row in _native.levels()}


RUN_EACH = """
import sys
import pytest
for file in sys.argv[2:]:
    code = pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", sys.argv[1], file])
    print(f"exit code {code:d}", file=sys.stderr)
"""


def test_exit_codes(tmp_path: Path) -> None:
    for name in ("conftest.py", "prepared.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    tests = {
        "def test(): pass": 0,
        "def test(): assert False": 1,
        "import pytest\ndef test(): pytest.skip('no GPU')": 5,
        "": 5,
    }
    files = [tmp_path / f"test_{number}.py" for number in range(len(tests))]
    for file, text in zip(files, tests):
        file.write_text(text)
    command = [sys.executable, "-c", RUN_EACH, str(tmp_path), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    # Plugins that are installed may write there, too.
    found = re.findall(r"^exit code (\d+)$", done.stderr, re.MULTILINE)
    assert found == [str(code) for code in tests.values()], done.stderr
