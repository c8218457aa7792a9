"""A slice of the fuzzer, so that it keeps running; tests/fuzz/fuzz_safetensors.py runs as long as you like."""

from __future__ import annotations

import fuzz_safetensors


def test_only_checkpoint_errors_come_out() -> None:
    counts = fuzz_safetensors.fuzz(runs=4000, seed=7)
    assert counts.total() == 4000
    assert min(counts[outcome] for outcome in ("accepted", "refused by both", "index accepted")) > 20
