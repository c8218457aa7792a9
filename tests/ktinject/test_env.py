"""ktinject.env: every variable, its values and its refusals."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktinject import _native, env
from ktinject.errors import KTInjectError, OperatorError, PlanError

KERNELS = [
    {
        "name": "amx_bf16",
        "weights": "bf16",
        "isa": "amx",
        "available": False,
        "reason": "this CPU has no AMX",
    },
    {"name": "reference_bf16", "weights": "bf16", "isa": "reference", "available": True, "reason": ""},
]


def test_defaults():
    assert env.read({}, kernels=KERNELS) == env.Settings(cache=Path.home() / ".cache/ktinject")


def test_empty_means_unset():
    names = ("THREADS", "KERNEL", "NUMA", "CACHE", "VERBOSITY")
    assert env.read({f"KTINJECT_{name}": "" for name in names}, kernels=KERNELS) == env.read(
        {}, kernels=KERNELS
    )


def test_all_set(tmp_path):
    environ = {
        "KTINJECT_THREADS": "3",
        "KTINJECT_KERNEL": "reference_bf16",
        "KTINJECT_NUMA": "2",
        "KTINJECT_CACHE": str(tmp_path / "not there yet"),
        "KTINJECT_VERBOSITY": "debug",
    }
    assert env.read(environ, kernels=KERNELS) == env.Settings(
        3, "reference_bf16", 2, tmp_path / "not there yet", "debug"
    )


def test_cache_follows_xdg(tmp_path):
    assert env.read({"XDG_CACHE_HOME": str(tmp_path)}, kernels=KERNELS).cache == tmp_path / "ktinject"


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert env.read({}, kernels=KERNELS).cache.is_absolute()
    with pytest.raises(PlanError, match="KTINJECT_CACHE='~/c': allowed is the absolute path of a folder"):
        env.read({"KTINJECT_CACHE": "~/c"}, kernels=KERNELS)


def test_threads_and_verbosity_take_effect_once():
    code = """
import logging
from ktinject import _native, env
assert env.settings() is env.settings()
print(_native.threads(), len(_native.nodes()), logging.getLogger("ktinject").level)
"""
    environ = {**os.environ, "KTINJECT_THREADS": "1", "KTINJECT_NUMA": "3", "KTINJECT_VERBOSITY": "debug"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"1 3 {logging.DEBUG}\n"


def test_a_forced_kernel_serves_its_own_format_only():
    code = """
from ktinject import _native, env
env.settings()
sizes = {"out_features": 32, "in_features": 32, "group_size": 0, "has_bias": False}
for weights in ("bf16", "int8"):
    print(*_native.Linear(weights=weights, kernel="auto", **sizes).kernels)
_native.force_kernel("auto")
print(*_native.Linear(weights="bf16", kernel="auto", **sizes).kernels)
"""
    environ = {**os.environ, "KTINJECT_KERNEL": "reference_bf16"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    forced, other, best = (line.split() for line in found.stdout.splitlines())
    assert forced == ["reference_bf16"] * 2
    assert "reference_int8" not in other or not _native.cpu_features()["avx2"]
    assert "reference_bf16" not in best or not _native.cpu_features()["avx2"]


@pytest.mark.parametrize(
    ("name", "value", "error", "allowed"),
    [
        ("THREADS", "0", PlanError, "1 to 4096"),
        ("THREADS", "-1", PlanError, "1 to 4096"),
        ("THREADS", "4097", PlanError, "1 to 4096"),
        ("THREADS", "9" * 5000, PlanError, "1 to 4096"),
        ("THREADS", "two", PlanError, "1 to 4096"),
        ("THREADS", "²", PlanError, "1 to 4096"),
        ("NUMA", "0", PlanError, "1 to 64"),
        ("NUMA", "1.5", PlanError, "1 to 64"),
        ("KERNEL", "amx_bf17", OperatorError, "reference_bf16"),
        ("KERNEL", "amx_bf16", OperatorError, "this CPU has no AMX"),
        ("CACHE", "relative/folder", PlanError, "absolute"),
        ("CACHE", __file__, PlanError, "folder"),
        ("VERBOSITY", "loud", PlanError, "error, warning, info, debug"),
    ],
)
def test_refused(name, value, error, allowed):
    variable = f"KTINJECT_{name}"
    with pytest.raises(error) as caught:
        env.read({variable: value}, kernels=KERNELS)
    message = str(caught.value)
    assert isinstance(caught.value, KTInjectError)
    assert message.startswith(variable) and repr(value) in message and allowed in message
