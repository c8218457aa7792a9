"""Documents and rules: their keys and values."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from rule_texts import DESIGN_EXAMPLE, HEAD, parse, quick, read_rule, refused, rule

from ktinject import rules


def test_the_design_example() -> None:
    found = rules.parse(DESIGN_EXAMPLE.encode(), "f.yaml")
    assert found.model_types == ("deepseek_v3", "kimi_k2")
    assert found.variables == {"experts": "int4", "deferred": 2}
    experts, router = found.rules
    assert (experts.name, experts.operator, experts.optional) == ("routed experts", "hybrid_experts", False)
    assert experts.arguments == {"weights": "int4", "gpu_experts": "auto"}
    assert experts.match == rules.Match(
        r"model\.layers\.\d+\.mlp\.experts", "DeepseekV3Experts", frozenset(range(3, 61))
    )
    assert experts.where == "f.yaml:7"
    assert experts.argument_where == {"weights": "f.yaml:14", "gpu_experts": "f.yaml:15"}
    assert (router.operator, router.arguments, router.optional, router.where) == (
        "keep",
        {},
        True,
        "f.yaml:16",
    )
    with pytest.raises(FrozenInstanceError):
        router.name = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ("3-6", {3, 4, 5, 6}), ("3", {3}), ("0", {0}), ("[3, 5, 7]", {3, 5, 7}), ("'3-4,9-10'", {3, 4, 9, 10}),
        ("1, 3", {1, 3}), ("7-7", {7}),
    ],
)  # fmt: skip
def test_layers(written: str, layers: set[int]) -> None:
    match = f"\n    path: x\n    layers: {written}"
    assert read_rule(match).match.layers == layers


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("just text", "f:1: ", ("a rule file is 'just text'", "mapping")),
        ("3", "f:1: ", ("mapping",)),
        ("- a\n- b", "f:1: ", ("the document is a list", "version: 1")),
        ("rules: []", "f:1: ", ("no version", "Write version: 1")),
        ("version: 2\nrules: []", "f:1: ", ("version is 2", "1")),
        ("version: '1'", "f:1: ", ("version is '1'",)),
        ("version: 1.0", "f:1: ", ("version is 1.0",)),
        ("version: true", "f:1: ", ("version is true",)),
        ("version: 1", "f:1: ", ("no rules",)),
        ("version: 1\nrules: {a: b}", "f:2: ", ("rules is a mapping", "list")),
        ("version: 1\nrules:", "f:2: ", ("rules is null", "list")),
        ("version: 1\nrules: []", "f:2: ", ("rules is an empty list",)),
        ("version: 1\n\nrule:\n- a", "f:3: ", ("unknown key 'rule'", "Did you mean 'rules'?")),
        ("version: 1\nvariabels: {}", "f:2: ", ("Did you mean 'variables'?",)),
        ("version: 1\nmodel_types: deepseek_v3", "f:2: ", ("model_types is 'deepseek_v3'", "[deepseek_v3]")),
        ("version: 1\nmodel_types: []", "f:2: ", ("model_types is an empty list",)),
        ("version: 1\nmodel_types: [a, 3]", "f:2: ", ("a list with 3",)),
        ("version: 1\nmodel_types: ['${variables.x}']", "f:2: ", ("model_types",)),
        ("version: 1\nvariables: [a]", "f:2: ", ("variables is a list",)),
        ("version: 1\nvariables:\n  a b: 1", "f:3: ", ("variable name 'a b'",)),
        ("version: 1\nvariables:\n  a: [1]", "f:3: variable 'a': ", ("a list",)),
        ("version: 1\nvariables:\n  a:", "f:3: variable 'a': ", ("null",)),
        (
            "version: 1\nvariables:\n  b: 1\n  a: ${variables.b}",
            "f:4: variable 'a': ",
            ("refers to no other",),
        ),
        ("version: 1\nvariables:\n  a: ${variables.a}", "f:3: variable 'a': ", ("refers to no other",)),
        ("version: 1\nvariables:\n  a: ${oc.env:HOME}", "f:3: variable 'a': ", ("refers to no other",)),
        ("version: 1\nvariables:\n  a: '???'", "f:3: variable 'a': ", ("'???'",)),
        ("version: 1\nvariables:\n  a: " + "x" * 1001, "f:3: variable 'a': ", ("1,001 characters",)),
        ("version: 1\nrules:\n" + "".join(rule(name=f"n{i}") for i in range(501)), "f:2: ", ("501 rules",)),
    ],
)
def test_documents(text: str, at: str, words: tuple[str, ...]) -> None:
    with refused(*words, at=at):
        parse(text)


LEGACY = r"""
- match:
    name: "^model\\.layers\\.(?!.*self_attn\\.kv_b_proj).*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cuda"
      prefill_op: "KLinearTorch"
- match:
    name: "^model.embed_tokens"
  replace:
    class: "default"
    kwargs: {generate_device: "cpu"}
"""


def test_legacy_files_are_recognised() -> None:
    short = "- match: {class: ktransformers.models.x.Y}\n  recursive: False\n"
    for text, line in ((LEGACY, 2), (short, 1)):
        with refused("KTransformers 0.x", "version: 1", "`ktinject rules migrate`", at=f"f:{line}: "):
            parse(text)
    with refused("document is a list"):
        parse(rule())


@pytest.mark.parametrize(
    ("text", "at", "words"),
    [
        ("- a", "f:4: rule 1: ", ("a rule is 'a'",)),
        ("- []", "f:4: rule 1: ", ("a rule is an empty list",)),
        ("- {match: {path: x}, replace: keep}", "f:4: rule 1: ", ("no name",)),
        ("- name:\n  match: {path: x}\n  replace: keep", "f:4: rule 1: ", ("name is null",)),
        ("- name: ''", "f:4: rule 1: ", ("name is ''",)),
        ("- match: {path: x}\n  name: 3", "f:5: rule 1: ", ("name is 3",)),
        ('- name: "a\\nb"', "f:4: rule 1: ", ("one line",)),
        ("- name: " + "x" * 201, "f:4: rule 1: ", ("at most 200",)),
        ("- name: ${variables.size}", "f:4: rule 1: ", ("name",)),
        ("- name: r\n  replace: keep", "f:4: rule 'r': ", ("no match",)),
        ("- name: r\n  match: {path: x}", "f:4: rule 'r': ", ("no replace",)),
        (
            rule() + "  optionl: true",
            "f:7: rule 'r': ",
            ("unknown key 'optionl'", "Did you mean 'optional'?"),
        ),
        (rule() + "  recursive: false", "f:7: rule 'r': ", ("unknown key 'recursive'",)),
        (rule() + "  optional: yes", "f:7: rule 'r': ", ("optional is 'yes'", "true or false")),
        (rule() + "  optional: 1", "f:7: rule 'r': ", ("optional is 1", "true or false")),
        (rule() + "\n" + rule(), "f:8: rule 'r': ", ("name is taken", "f:4")),
        (rule("x"), "f:5: rule 'r': ", ("match is 'x'", "mapping")),
        (rule("{}"), "f:5: rule 'r': ", ("no path, class or role",)),
        (rule("{layers: 3}"), "f:5: rule 'r': ", ("no path, class or role",)),
        (
            rule("{name: x}"),
            "f:5: rule 'r': ",
            ("unknown key 'name'", "path, class, role, inside and layers"),
        ),
        (
            rule("\n    path: x\n    clas: Y"),
            "f:7: rule 'r': ",
            ("unknown key 'clas'", "Did you mean 'class'?"),
        ),
        (rule("{path: }"), "f:5: rule 'r': ", ("path is null",)),
        (rule("{path: ''}"), "f:5: rule 'r': ", ("path is ''",)),
        (rule("{path: 3}"), "f:5: rule 'r': ", ("path is 3", "text")),
        (rule("{path: [a]}"), "f:5: rule 'r': ", ("path is a list",)),
        (rule("{class: true}"), "f:5: rule 'r': ", ("class is true",)),
        (rule("{class: torch.nn.Linear}"), "f:5: rule 'r': ", ("import path", "write 'Linear'")),
        (rule("{class: 'torch.nn:Linear'}"), "f:5: rule 'r': ", ("import path", "write 'Linear'")),
        (rule("{class: torch/nn/Linear}"), "f:5: rule 'r': ", ("import path", "write 'Linear'")),
        (rule("{class: '...'}"), "f:5: rule 'r': ", ("import path",)),
        (rule("{inside: attention}"), "f:5: rule 'r': ", ("no path, class or role",)),
        (rule("{role: 3}"), "f:5: rule 'r': ", ("role is 3", "text")),
        (
            rule("{role: routed_expert}"),
            "f:5: rule 'r': ",
            (
                "role 'routed_expert' is no role (closest: routed_experts); it is routed_experts, shared_experts,",
            ),
        ),
        (rule("{role: linear, inside: x}"), "f:5: rule 'r': ", ("inside 'x' is no role; it is",)),
        (rule("{class: Lin ear}"), "f:5: rule 'r': ", ("not the name of a class",)),
        (rule(replace="default"), "f:6: rule 'r': ", ("replace is 'default'", "Write keep")),
        (
            rule(replace="cpu_experts"),
            "f:6: rule 'r': ",
            ("replace is 'cpu_experts'", "{operator: cpu_experts}"),
        ),
        (rule(replace=""), "f:6: rule 'r': ", ("replace is null",)),
        (rule(replace="[keep]"), "f:6: rule 'r': ", ("replace is a list",)),
        (rule(replace="{}"), "f:6: rule 'r': ", ("no operator",)),
        (rule(replace="{operater: o}"), "f:6: rule 'r': ", ("no operator", "Did you mean 'operator'")),
        (rule(replace="{class: a.b.C}"), "f:6: rule 'r': ", ("no operator",)),
        (rule(replace="{operator: a.b.C}"), "f:6: rule 'r': ", ("import path, 'a.b.C'", "registry keys")),
        (rule(replace="{operator: 'a:b'}"), "f:6: rule 'r': ", ("import path", "registry keys")),
        (rule(replace="{operator: a/b.py}"), "f:6: rule 'r': ", ("import path", "registry keys")),
        (rule(replace="\n    operator: 3"), "f:7: rule 'r': ", ("operator is 3",)),
        (rule(replace="{operator: }"), "f:6: rule 'r': ", ("operator is null",)),
        (rule(replace="{operator: o p}"), "f:6: rule 'r': ", ("operator is 'o p'",)),
        (rule(replace="\n    operator: keep\n    a: 1"), "f:8: rule 'r': ", ("keep takes none",)),
        (rule(replace="\n    operator: o\n    a-b: 1"), "f:8: rule 'r': ", ("argument name 'a-b'",)),
        (rule(replace="\n    operator: o\n    '<<': {a: 1}"), "f:8: rule 'r': ", ("argument name '<<'",)),
        (rule(replace="\n    operator: o\n    prefill_op: None"), "f:8: rule 'r': ", ("'None'", "null")),
    ],
)
def test_rules(text: str, at: str, words: tuple[str, ...]) -> None:
    with refused(*words, at=at):
        parse(HEAD + text)


@pytest.mark.parametrize(
    "layers",
    ["-1", "3-", "60-3", "a", "''", "3:60", "[]", "[a]", "[3-5]", "[-1]", "[true]", "[1.5]", "[[1]]", "true", "1.5",
     "null", "{a: 1}", "3,,4", "1000", "0-99999999999999", "0-9999999", "3-5-7", "'3,3'", "'3-5,5-7'", "[3, 3]", "٣"],
)  # fmt: skip
def test_layers_that_are_none(layers: str) -> None:
    with refused("layers is", "3-60", "[3, 5, 7]", at="f:7: rule 'r': "), quick(0.1):
        read_rule(f"\n    path: x\n    layers: {layers}")
