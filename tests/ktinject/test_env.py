"""ktinject.env: every variable, its values and its refusals."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
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
LEVELS = [
    {"name": "reference", "isa": "", "available": True, "reason": ""},
    {"name": "amx", "isa": "amx_tile", "available": False, "reason": "this CPU has no AMX"},
    {"name": "avx2", "isa": "avx2", "available": True, "reason": ""},
]


def read(environ: dict[str, str]) -> env.Settings:
    return env.read(environ, kernels=KERNELS, levels=LEVELS)


def test_defaults():
    assert read({}) == env.Settings(cache=Path.home() / ".cache/ktinject")


def test_empty_means_unset():
    names = ("THREADS", "KERNEL", "NUMA", "CACHE", "VERBOSITY")
    assert read({f"KTINJECT_{name}": "" for name in names}) == read({})


def test_all_set(tmp_path):
    environ = {
        "KTINJECT_THREADS": "3",
        "KTINJECT_KERNEL": "reference_bf16",
        "KTINJECT_NUMA": "2",
        "KTINJECT_CACHE": str(tmp_path / "not there yet"),
        "KTINJECT_VERBOSITY": "debug",
    }
    assert read(environ) == env.Settings(3, "reference_bf16", 2, tmp_path / "not there yet", "debug")
    assert read(environ | {"KTINJECT_KERNEL": "avx2"}) == env.Settings(
        3, None, 2, tmp_path / "not there yet", "debug", "avx2"
    )


def test_cache_follows_xdg(tmp_path):
    assert read({"XDG_CACHE_HOME": str(tmp_path)}).cache == tmp_path / "ktinject"


def test_a_user_without_a_home_has_a_cache(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)

    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert read({}).cache.is_absolute()
    with pytest.raises(PlanError, match="KTINJECT_CACHE='~/c': allowed is the absolute path of a folder"):
        read({"KTINJECT_CACHE": "~/c"})


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
        (
            "KERNEL",
            "amx_bf17",
            OperatorError,
            "Did you mean 'amx_bf16'? Levels that can be had here: avx2, reference;",
        ),
        ("KERNEL", "axv2", OperatorError, "Did you mean 'avx2'?"),
        (
            "KERNEL",
            "amx",
            OperatorError,
            "this CPU has no AMX. Levels that can be had here: avx2, reference.",
        ),
        ("KERNEL", "amx_bf16", OperatorError, "this CPU has no AMX"),
        ("CACHE", "relative/folder", PlanError, "absolute"),
        ("CACHE", __file__, PlanError, "folder"),
        ("VERBOSITY", "loud", PlanError, "error, warning, info, debug"),
    ],
)
def test_refused(name, value, error, allowed):
    variable = f"KTINJECT_{name}"
    with pytest.raises(error) as caught:
        read({variable: value})
    message = str(caught.value)
    assert isinstance(caught.value, KTInjectError)
    assert message.startswith(variable) and repr(value) in message and allowed in message
    assert len(message) < 300 or len(value) > 300


LEVEL = """
import json
from ktinject import _native, env
from ktinject.operators.torch_ops import cpu_attention
from ktinject.tools import doctor
env.settings()
sizes = {"out_features": 32, "in_features": 32, "group_size": 0, "has_bias": False}
(row,) = [row for row in _native.kernels() if row["name"] == "avx512_bf16"]
try:
    _native.Linear(weights="bf16", kernel="avx512_bf16", **sizes)
    refusal = ""
except ValueError as error:
    refusal = str(error)
_native.force_kernel("auto")  # of a format; the level stands
print(json.dumps({
    "features": [name for name, there in _native.cpu_features().items() if there],
    "units": _native.multiply_units(),
    "kernels": _native.Linear(weights="bf16", kernel="auto", **sizes).kernels,
    "reason": row["reason"],
    "refusal": refusal,
    "attention": cpu_attention._has_products_only(),
    "doctor": {f.subject: f.reason for f in doctor.doctor().findings},
}))
"""
HAD = [row["name"] for row in _native.levels() if row["available"]]


def at_level(name: str) -> dict[str, Any]:
    done = prepared.run(LEVEL, env={**os.environ, "KTINJECT_KERNEL": name}, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("level", HAD)
def test_a_level_restricts_all_of_the_native_core(level):
    (isa,) = (row["isa"].split() for row in _native.levels() if row["name"] == level)
    found = at_level(level)
    assert found["features"] == isa
    prefix = level.partition("_vnni")[0]
    # AVX-VNNI multiplies integers alone, and AVX-512 has bf16 of its own or none.
    allowed = {"avxvnni": ["avx2_bf16"], "avx512_vnni": ["avx2_bf16"], "amx": ["amx_bf16", "avx512_bf16"]}
    assert {*found["kernels"]} == {*allowed.get(level, [f"{prefix}_bf16"])}
    sets = " ".join(isa).replace("avx_vnni", "avxvnni")
    assert all(unit.partition("_")[0] in sets for unit in found["units"])
    assert found["attention"] == (level in ("avx512", "avx512_vnni", "modelled_amx"))
    if "avx512_bf16" not in isa:
        left_out = f"level {level!r} has no"
        assert left_out in found["reason"] and "avx512_bf16" in found["reason"]
        assert left_out in found["refusal"]
    assert found["doctor"]["bf16 weights"] == f"KTINJECT_KERNEL={level}"
    assert f"KTINJECT_KERNEL={level} allows no others" in found["doctor"]["instructions"]


def test_levels_are_in_order_and_each_says_what_it_lacks():
    levels = _native.levels()
    assert [row["name"] for row in levels] == sorted(row["name"] for row in levels)
    assert "reference" in HAD
    assert all(row["available"] == (not row["reason"]) for row in levels)
    with pytest.raises(ValueError, match="no level has that name"):
        _native.restrict_to("axv2")
    for row in levels:
        if not row["available"]:
            with pytest.raises(ValueError, match="this CPU or system has no"):
                _native.restrict_to(row["name"])
