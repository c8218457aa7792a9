"""`ktinject doctor`."""

from __future__ import annotations

import os


def test_as_table(ktinject):
    text = ktinject("doctor").stdout
    assert "this machine has" in text
    for subject in ("CPU", "memory", "NUMA", "huge pages", "instructions", "bf16 weights", "GPU"):
        assert f"\n {subject} " in text or f"\n{subject} " in text


def test_as_json(as_json):
    report = as_json("doctor")
    assert set(report["machine"]["cpus"]) == os.sched_getaffinity(0)
    assert {finding["subject"] for finding in report["findings"]} >= {"CPU", "int4 weights", "versions"}
