"""A slice of the fuzzer, so that it keeps running; tests/fuzz/fuzz_formats.py runs as long as you like."""

from __future__ import annotations

import fuzz_formats


def test_only_checkpoint_errors_come_out() -> None:
    counts = fuzz_formats.fuzz(runs=400, seed=7)
    assert counts.total() == 400
    assert counts["refused"] > 100 and len(counts) > 8, counts
