"""Explanations, beside what `assign` decides."""

from __future__ import annotations

import pytest
from rule_texts import HEAD, parse, rule

from ktinject import rules
from ktinject.rules.roles import ELSEWHERE
from ktinject.support import SUPPORTED, Support

MODULES: list[rules.Module] = [
    ("", ("Model",), None),
    *(
        (f"layers.{layer}{tail}", (name, "Module"), layer)
        for layer in range(2)
        for tail, name in (
            ("", "Layer"),
            (".mlp", "Block"),
            (".mlp.gate", "Linear"),
            (".mlp.experts", "Experts"),
        )
    ),
    ("norm", ("Norm", "Module"), None),
]
KEEPS = {"block": ("gate",)}
TEXTS = [
    rule("{class: Experts, layers: 1}", name="a") + rule("{path: .*gate}", name="b") + rule("{class: Norm}"),
    rule("{class: Block}", "{operator: block}", "a") + rule("{class: Linear}", name="b"),
    rule("{class: Block, layers: 0}", "{operator: block}", "a") + rule("{role: routed_experts}", "{operator: o}", "b"),
    rule("{role: norm}", name="a") + rule("{class: Experts, inside: moe_block}", name="b"),
]  # fmt: skip


def has_role(path: str, role: str) -> Support:
    wanted = {"routed_experts": "experts", "moe_block": "mlp", "norm": "nowhere"}[role]
    if path.endswith(wanted):
        return SUPPORTED
    return Support.no("it is something else") if path == "norm" else ELSEWHERE


@pytest.mark.parametrize("text", TEXTS)
def test_it_is_what_is_assigned(text: str) -> None:
    found = parse(HEAD + text.replace("replace: keep", "replace: keep\n  optional: true"))
    assigned = rules.assign(found, MODULES, keeps=KEEPS, has_role=has_role).rules
    paths = [path for path, _, _ in MODULES if path]
    for each in rules.explain(found, MODULES, paths, keeps=KEEPS, has_role=has_role):
        assert each.taken is assigned.get(each.path), each
        assert len(each.steps) + each.untried == len(found.rules)
        assert [step.why_not == "" for step in each.steps] == [False] * (len(each.steps) - 1) + [
            each.taken is not None
        ]


def test_reasons() -> None:
    text = "".join(
        rule(match, "keep", name)
        for name, match in {
            "class": "{class: Norm}", "layers": "{class: Experts, layers: 3-5}", "path": "{path: norm}",
            "role": "{role: norm}", "inside": "{path: .*, inside: routed_experts}",
        }.items()
    )  # fmt: skip
    (found,) = rules.explain(parse(HEAD + text), MODULES, ["layers.1.mlp.experts"], has_role=has_role)
    assert [step.why_not for step in found.steps] == [
        "its class is Experts, not Norm", "it lies in decoder layer 1, not in 3-5", "its path does not match 'norm'",
        f"its role is not norm: {ELSEWHERE.reason}", "it lies in no module of the role routed_experts",
    ]  # fmt: skip
    (found,) = rules.explain(parse(HEAD + rule("{path: .*, layers: 1}")), MODULES, ["norm"])
    assert found.steps[0].why_not == "it lies in no decoder layer, not in 1"


def test_what_goes_away() -> None:
    text = rule("{class: Block}", "{operator: block}", "a") + rule("{class: Experts}", name="b")
    (found,) = rules.explain(parse(HEAD + text), MODULES, ["layers.1.mlp.experts"], keeps=KEEPS)
    assert found.taken is None and found.untried == 0
    assert found.steps[1].why_not == "goes away with 'layers.1.mlp', which rule 'a' (f:4) replaces"
