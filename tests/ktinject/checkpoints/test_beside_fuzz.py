"""A slice of the fuzzer, so that it keeps running; tests/fuzz/fuzz_beside.py runs as long as you like."""

from __future__ import annotations

import fuzz_beside


def test_only_our_errors_come_out() -> None:
    counts = fuzz_beside.fuzz(runs=4000, seed=7)
    assert counts.total() == 4000
    outcomes = ("config accepted", "config refused", "profile accepted", "profile refused")
    assert min(counts[outcome] for outcome in outcomes) > 40
