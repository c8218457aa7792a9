"""A slice of the fuzzer, so that it keeps running; tests/fuzz/fuzz_rules.py runs as long as you like."""

from __future__ import annotations

from typing import Any

import fuzz_rules
import pytest
import yaml

from ktinject.rules import document


@pytest.mark.parametrize(("parser", "runs"), [(document.PARSER, 4000), (yaml.SafeLoader, 500)])
def test_only_refusals_come_out_of_mutated_documents(parser: Any, runs: int) -> None:
    with fuzz_rules.files():
        outcomes = {fuzz_rules.run(seed, parser) for seed in fuzz_rules.SEEDS}
        assert outcomes == {"accepted", "refused by assign"}
        migrated = {fuzz_rules.run_legacy(seed, parser) for seed in fuzz_rules.LEGACY}
        assert migrated == {"migrated with mistakes", "migrated"}
    outcomes = fuzz_rules.fuzz(runs, seed=20_240, parser=parser)
    assert sum(outcomes.values()) - outcomes["over a second"] == runs
    assert {"accepted", "refused by read", "refused by assign", "refused by migrate", "migrated"} <= set(
        outcomes
    )
