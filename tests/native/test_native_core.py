"""The native core's own tests, without Python: those of the pool each time, the others, for which all of the core is
built, each night. CONTRIBUTING.md says how to run them by hand and under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODES = ["forward", "plan", "writes", "fuzz 5 1", "exit", "dispatcher", "sharing", "allocations", "churn 30"]

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake, or no C++ compiler"
)


def build(folder: Path, target: str) -> Path:
    options = ["-DKTINJECT_NATIVE_TESTS=ON", "-DKTINJECT_CUDA=OFF"]
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "-j", "2", "--target", target],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / target


def run(program: Path, *arguments: str) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_pool(tmp_path: Path) -> None:
    assert " checks, 0 failed" in run(build(tmp_path, "pool_test"), "2000")


@pytest.mark.nightly
def test_all_of_the_core(tmp_path: Path) -> None:
    built = os.environ.get("KTINJECT_NATIVE_TEST")
    program = Path(built) if built else build(tmp_path, "native_test")
    for mode in MODES:
        assert f"{mode.partition(' ')[0]}: " in run(program, *mode.split())
