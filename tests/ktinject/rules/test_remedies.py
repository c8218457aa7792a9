"""Whatever a message advises to set can be set by the rule's name, without changing a file.

What messages advise is found in the sources, so a message with advice of its own fails here until somebody says how to
follow it.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.operators import REGISTRY

ROOT = Path(__file__).parents[3]
OF_RULES = ("optional", "replace", "operator")
INT4 = [{"name": "linears", "match": {"class": "Linear"}, "replace": {"operator": "int4_linear"}}]
# What is advised → rules to which the advice applies, what is set, and what is then true of the rule.
REMEDIES: dict[str, tuple[Any, str, tuple[str, Any]]] = {
    "optional: true": ("auto", "routed experts.optional=true", ("optional", True)),
    "replace: keep": ("auto", "routed experts.replace=keep", ("operator", rules.KEEP)),
    "prefill: cpu": ("auto", "routed experts.prefill=cpu", ("prefill", "cpu")),
    "prefill: auto": ("auto", "routed experts.prefill=auto", ("prefill", "auto")),
    "weights: auto": ("auto", "routed experts.weights=auto", ("weights", "auto")),
    "gpu_weights: same": ("auto", "routed experts.gpu_weights=same", ("gpu_weights", "same")),
    "dynamic: false": ("auto", "routed experts.dynamic=false", ("dynamic", False)),
    "ram_copy: true": ("auto", "routed experts.ram_copy=true", ("ram_copy", True)),
    "bf16_copy: false": ("auto", "attention.bf16_copy=false", ("bf16_copy", False)),
    "symmetric: false": (INT4, "linears.symmetric=false", ("symmetric", False)),
}


def arguments() -> set[str]:
    configs = (
        operator.Config for operator in REGISTRY.values() if operator.__module__.startswith("ktinject.")
    )
    return {field.name for config in configs for field in dataclasses.fields(config)}


def messages() -> list[str]:
    """All text in the sources but docstrings, "…" for what is filled in."""
    found = []
    for folder in ("ktinject", "operators"):
        for file in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                    found.append(node.value)
    return found


def advice() -> set[str]:
    """`argument: value` behind the first sentence of a message, or as the last thing that it offers."""
    names = "|".join(sorted({*arguments(), *OF_RULES}))
    found = set()
    for text in messages():
        sentences = re.split(r"(?<=[.;]) (?=[A-Z])", text)
        for sentence in sentences[1:] if len(sentences) > 1 else []:
            found |= set(re.findall(rf"\b((?:{names}): (?:[a-z]+|[0-9]+))\b", sentence))
    return found


def test_all_that_messages_advise_is_tried() -> None:
    assert advice() == set(REMEDIES), "say in REMEDIES how the advice is followed with --set"


@pytest.mark.parametrize("name", REMEDIES)
def test_advice_can_be_followed(name: str) -> None:
    source, setting, (key, value) = REMEDIES[name]
    changed = rules.read(source, variables=rules.parse_overrides([setting]))
    rule = next(rule for rule in changed.rules if setting.startswith(f"{rule.name}."))
    if key in OF_RULES:
        assert getattr(rule, key) == value
        return
    config = rules.check_arguments(rule, REGISTRY[rule.operator].Config)
    assert getattr(config, key) == value


def test_the_example_that_refusals_of_settings_give_is_one() -> None:
    with pytest.raises(RuleError) as error:
        rules.parse_overrides(["nothing"])
    examples = re.findall(r"Write (\S+) or '([^']+)'", str(error.value))
    assert examples
    rules.read("deepseek-v3", variables=rules.parse_overrides(examples[0]))
