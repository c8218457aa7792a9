"""A slice of the fuzzer, so that it keeps running; tests/fuzz/fuzz_gguf.py runs as long as you like."""

from __future__ import annotations

import fuzz_gguf


def test_only_checkpoint_errors_come_out() -> None:
    counts = fuzz_gguf.fuzz(runs=2000, seed=7)
    assert counts.total() == 2000
    outcomes = ("made a config", "accepted", "values refused", "refused", "names refused")
    assert min(counts[outcome] for outcome in outcomes) > 10
