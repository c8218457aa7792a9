"""The bundled rule files: which there are, and what they hold. tests/test_bundled_rules.py has what they find."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rule_texts import FAMILIES

from ktinject import rules
from ktinject.operators import REGISTRY

OPERATORS = ("hybrid_experts", "dense_linear", "absorbed_mla", "cpu_router", "rms_norm")


def test_bundled_files_are_the_promised_ones() -> None:
    assert set(rules.bundled()) == {*FAMILIES.values(), "auto", "moe-auto"}
    assert all(path.is_file() for path in rules.bundled().values())
    for model_type, name in FAMILIES.items():
        assert model_type in rules.read(name).model_types
    assert rules.read("auto").model_types == rules.read("moe-auto").model_types == ()


@pytest.mark.parametrize("name", rules.bundled())
def test_bundled_files_hold_no_device_number_and_only_known_arguments(name: str) -> None:
    assert not re.search(
        r"\b(cuda|cpu|xpu|npu)\b(?!_experts)|:\d+['\"]?$",
        rules.bundled()[name].read_text().replace("CPU", ""),
        re.M,
    )
    for weights in ("bf16", "int8", "int4"):
        values: dict[str, Any] = {"experts": weights, "dense": weights, "head": weights, "group_size": 32}
        for found in rules.read(name, variables=values).rules:
            config = rules.check_arguments(found, REGISTRY[found.operator].Config)
            assert found.operator in OPERATORS
            if found.operator in ("hybrid_experts", "dense_linear"):
                exact = found.name.endswith(", exact")
                assert (config.weights, config.group_size) == ("bf16" if exact else weights, 32)
