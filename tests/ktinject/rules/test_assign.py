"""Which rule takes which module."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from rule_texts import HEAD, parse, refused, rule

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.support import SUPPORTED, Support

SMALL: list[rules.Module] = [
    ("", ("Model", "Module"), None),
    ("model.embed", ("Embedding", "Module"), None),
    *(
        (f"model.layers.{n}{tail}", names, n)
        for n in range(12)
        for tail, names in (
            (".mlp", ("MoE", "Module")),
            (".mlp.gate", ("Router", "Linear", "Module")),
            (".mlp.experts", ("Experts", "Module")),
            (".mlp.experts.act_fn", ("SiLU", "Module")),
            (".mlp.shared_experts.up_proj", ("Linear", "Module")),
        )
    ),
]


DEEPSEEK: list[rules.Module] = [
    ("", ("Model", "Module"), None),
    ("lm_head", ("Linear", "Module"), None),
    *(
        (f"model.layers.{n}{tail}", (name, "Module"), n)
        for n in range(6)
        for tail, name in (
            (".mlp", "DeepseekV3MoE"),
            (".mlp.gate", "DeepseekV3TopkRouter"),
            (".mlp.experts", "DeepseekV3Experts"),
            (".mlp.experts.act_fn", "SiLU"),
        )
    ),
]


def assign(*written: str, modules: Any = SMALL, **more: Any) -> rules.Assignment:
    return rules.assign(parse(HEAD + "".join(written)), modules, **more)


def assign_deepseek(*written: str) -> rules.Assignment:
    return assign(*written, modules=DEEPSEEK)


def test_the_first_rule_wins_and_both_views_agree() -> None:
    found = assign(
        rule(r"{path: '.*\.experts', layers: 0-3}", "{operator: a}", "first"),
        rule(r"{class: Experts}", "{operator: b}", "second"),
    )
    assert found.matched["first"] == tuple(f"model.layers.{n}.mlp.experts" for n in range(4))
    assert found.matched["second"] == tuple(f"model.layers.{n}.mlp.experts" for n in range(4, 12))
    assert {path: r.name for path, r in found.rules.items()} == {
        path: name for name, paths in found.matched.items() for path in paths
    }
    assert list(found.rules) == [path for path, _, _ in SMALL if path in found.rules]


def test_conditions_all_hold_and_bases_count() -> None:
    assert len(assign(rule("{class: Linear}")).rules) == 24
    assert len(assign(rule(r"{class: Linear, path: '.*\.gate'}")).rules) == 12
    assert set(assign(rule(r"{class: Linear, path: '.*\.gate', layers: [2, 11]}")).rules) == {
        "model.layers.2.mlp.gate",
        "model.layers.11.mlp.gate",
    }


def test_a_path_is_matched_whole_and_the_root_never() -> None:
    assert set(assign(rule(r"{path: 'model\.embed'}")).rules) == {"model.embed"}
    with pytest.raises(RuleError, match="matches nothing"):
        assign(rule("{path: 'model'}"))
    assert "" not in assign(rule("{path: '.*'}")).rules


def test_modules_outside_of_layers_have_no_number() -> None:
    assert not rules.Match(class_name="Embedding", layers=frozenset({0})).matches(
        "model.embed", ["Embedding"], None
    )


def test_optional_rules_may_match_nothing_or_be_shadowed() -> None:
    nothing = rule("{class: Nope}") + "  optional: true\n"
    shadowed = rule("{class: Router}", name="s") + "  optional: true\n"
    assert assign(rule("{class: Linear}", name="all"), nothing, shadowed).matched["s"] == ()


def test_an_operator_may_keep_children_that_other_rules_replace() -> None:
    block = rule("{class: MoE}", "{operator: block}", "block")
    inside = rule("{class: Linear}", "{operator: linear}", "inside")
    with pytest.raises(RuleError, match=r"goes away with 'model.layers.0.mlp'"):
        assign(block, inside)
    with pytest.raises(
        RuleError, match=r"'model.layers.0.mlp.shared_experts.up_proj' \(and 11 more\) goes away"
    ):
        assign(block, inside, keeps={"block": ("gate",)})
    found = assign(block, inside, keeps={"block": ("gate", "shared_experts")})
    assert len(found.matched["inside"]) == 24


def test_keep_does_not_hold_for_what_lies_inside() -> None:
    found = assign(
        rule("{class: MoE}", "keep", "block"), rule("{class: Experts}", "{operator: o}", "experts")
    )
    assert len(found.matched["experts"]) == 12


def test_a_large_model_is_assigned_in_no_time() -> None:
    modules = [
        (f"model.layers.{n}.mlp.{part}", ("Linear", "Module"), n) for n in range(61) for part in range(30)
    ]
    written = "".join(rule(rf"{{path: 'model\.layers\.\d+\.mlp\.{i}'}}", name=f"r{i}") for i in range(30))
    found = parse(HEAD + written)
    rules.assign(found, modules)

    started = time.process_time()
    rules.assign(found, modules)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("match", "words"),
    [
        (r"{path: 'model\.layers\.\d+\.mlp\.expert'}", ("no path matches", "'model.layers.0.mlp.experts'")),
        (r"{path: 'layers\.\d+\.mlp\.gate'}", ("no path matches", "'model.layers.0.mlp.gate'")),
        (r"{path: 'model\.layers\.([012])$\.mlp'}", ("no path matches",)),
        ("{class: DeepseekV3Expert}", ("no module is a DeepseekV3Expert", "closest: DeepseekV3Experts")),
        ("{class: MoEGate}", ("no module is a MoEGate",)),
        ("{class: DeepseekV3Experts, layers: 6-9}", ("decoder layers are 0-5",)),
        (r"{class: Linear, path: '.*\.gate'}", ("by no module all of them",)),
        (r"{path: zzzzzz, class: Qqqqqq}", ("no path matches 'zzzzzz'; no module is a Qqqqqq;",)),
    ],
)
def test_a_rule_that_matches_nothing(match: str, words: tuple[str, ...]) -> None:
    with refused("matches nothing", "optional: true", *words, at="f:4: rule 'r': "):
        assign_deepseek(rule(match))


@pytest.mark.parametrize(
    ("layers", "beyond"), [("0-3,90-95", "90-95"), ("2-200", "6-200"), ("[1, 7, 9, 10]", "7, 9-10")]
)
def test_layers_beyond_the_model_are_refused(layers: str, beyond: str) -> None:
    written = rule(f"{{class: DeepseekV3Experts, layers: {layers!r}}}".replace("'[", "[").replace("]'", "]"))
    with refused(
        f"layers names {beyond}, which the model has not; its decoder layers are 0-5", at="f:4: rule 'r': "
    ):
        assign_deepseek(written)
    assert assign_deepseek(written + "  optional: true\n").rules, "an optional rule may be for larger models"


def test_all_patterns_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 500 stays below the limit of one rule."""
    clock = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) / 100)
    written = "".join(rule("{class: Module}", name=f"r{n}") + "  optional: true\n" for n in range(500))
    with refused("with all rules before it; backtracking is limited", at="f:36: rule 'r8': "):
        assign(written)


def test_layers_where_none_are_numbered() -> None:
    with refused("no layers are numbered"):
        rules.assign(parse(HEAD + rule("{class: A, layers: 3}")), [("a", ("A",), None)])


def test_a_shadowed_rule_names_the_earlier_ones() -> None:
    with refused("all 6 modules", "'first' (f:4) and 'second' (f:7)", at="f:10: rule 'third': "):
        assign_deepseek(
            rule("{class: DeepseekV3Experts, layers: 0-2}", "{operator: a}", "first"),
            rule(r"{path: '.*\.experts'}", "{operator: b}", "second"),
            rule("{class: DeepseekV3Experts}", "{operator: c}", "third"),
        )


def test_rules_inside_of_what_is_replaced() -> None:
    block = rule("{class: DeepseekV3MoE}", "{operator: block}", "block")
    for replace in ("keep", "{operator: linear}"):
        with refused(
            "'model.layers.0.mlp.gate' (and 5 more) goes away with 'model.layers.0.mlp'",
            "rule 'block' (f:4) replaces by block",
            at="f:7: rule 'gate': ",
        ):
            assign_deepseek(block, rule("{class: DeepseekV3TopkRouter}", replace, "gate"))
    with refused("'model.layers.0.mlp.experts.act_fn' (and 5 more)", "the same rule", at="f:4: rule 'r': "):
        assign_deepseek(rule(r"{path: '.*\.experts.*'}", "{operator: o}"))


def test_all_problems_come_at_once() -> None:
    with refused(
        "f:4: rule 'a': it matches nothing",
        "f:10: rule 'c': all 6 modules",
        "f:13: rule 'd': 'model.layers.0.mlp.gate'",
    ):
        assign_deepseek(
            rule("{class: Nope}", name="a"),
            rule("{class: DeepseekV3MoE}", "{operator: block}", "b"),
            rule("{class: DeepseekV3MoE}", "{operator: other}", "c"),
            rule("{class: DeepseekV3TopkRouter}", "keep", "d"),
        )


ROLE_OF = {"MoE": "moe_block", "Router": "router", "Experts": "routed_experts", "Linear": "linear"}


def has_role(path: str, role: str) -> Support:
    """As a finder answers for SMALL; routers come near linear layers."""
    names = next((names for known, names, _ in SMALL if known == path), ())
    if role in [ROLE_OF.get(name) for name in names[:1]]:
        return SUPPORTED
    return Support.no("it routes") if (names[:1], role) == (("Router",), "linear") else rules.ELSEWHERE


def test_roles_are_asked_for_beside_the_other_conditions() -> None:
    found = assign(
        rule("{role: routed_experts, layers: 1-3}", "{operator: a}", "experts"),
        rule("{role: linear, inside: moe_block}", "{operator: b}", "linears"),
        rule(r"{role: linear, path: '.*gate'}", "{operator: c}", "none") + "  optional: true\n",
        has_role=has_role,
    )
    assert found.matched["experts"] == tuple(f"model.layers.{n}.mlp.experts" for n in (1, 2, 3))
    assert found.matched["linears"] == tuple(
        f"model.layers.{n}.mlp.shared_experts.up_proj" for n in range(12)
    )
    assert found.matched["none"] == ()


def test_a_rule_by_role_sees_nothing_that_goes_away_with_what_an_earlier_rule_replaces() -> None:
    written = [
        rule("{class: MoE, layers: 0-9}", "{operator: block}", "blocks"),
        rule("{role: routed_experts}", "{operator: a}", "experts"),
    ]
    found = assign(*written, has_role=has_role, keeps={"block": ["gate"]})
    assert found.matched["experts"] == tuple(f"model.layers.{n}.mlp.experts" for n in (10, 11))
    with pytest.raises(RuleError, match=r"'model.layers.0.mlp.experts' \(and 9 more\) goes away"):
        assign(*reversed(written), has_role=has_role)


def test_a_role_that_no_module_has_is_refused_with_what_comes_near() -> None:
    lonely = [module for module in SMALL if not module[0].endswith(("up_proj", "mlp"))]
    with pytest.raises(
        RuleError, match=r"nothing: no module is linear \('model.layers.11.mlp.gate': it routes\)"
    ):
        assign(rule("{role: linear}", "{operator: a}"), modules=lonely, has_role=has_role)
    with pytest.raises(RuleError, match="nothing: no module is embedding; every rule must match"):
        assign(rule("{role: linear, inside: embedding}", "{operator: a}"), has_role=has_role)
    with pytest.raises(RuleError, match="nothing: no module is router; "):
        assign(rule("{role: router}", "{operator: a}"))
