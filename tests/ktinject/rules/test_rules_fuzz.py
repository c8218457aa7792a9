"""A slice of the fuzzer, so that it keeps running; tests/fuzz/fuzz_rules.py runs as long as you like."""

from __future__ import annotations

from typing import Any

import fuzz_rules
import pytest
import yaml

from ktinject.rules import document


@pytest.mark.parametrize(("parser", "runs"), [(document.PARSER, 4000), (yaml.SafeLoader, 500)])
def test_only_refusals_come_out_of_mutated_documents(parser: Any, runs: int) -> None:
    for seed in fuzz_rules.SEEDS:
        assert fuzz_rules.run(seed, parser) in ("accepted", "refused by assign")
    outcomes = fuzz_rules.fuzz(runs, seed=20_240, parser=parser)
    assert sum(outcomes.values()) - outcomes["over a second"] == runs
    assert {"accepted", "refused by read", "refused by assign", "refused by arguments"} <= set(outcomes)
