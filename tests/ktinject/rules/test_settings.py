"""What the command line and Python set: variables, and arguments of rules."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from rule_texts import HEAD, refused, rule

from ktinject import rules
from ktinject.operators import REGISTRY

OWN = {
    "dynamic": True,
    "device": "cuda:1",
    "kernel": "reference_int4",
    "gpu_experts": 0.25,
    "profile": "profile.json",
    "numa": 2,
}


def another(name: str, kind: Any, default: Any) -> Any:
    """A value that an argument may have and does not have by itself."""
    if name in OWN and kind != Literal["auto"]:
        return OWN[name]
    members = [member for member in (kind, *get_args(kind)) if get_origin(member) is Literal]
    options = [option for member in members for option in get_args(member)]
    other = [option for option in options if option != default]
    return other[0] if other else {bool: not default, int: 3}.get(type(default), default)


@pytest.mark.parametrize("name", rules.bundled())
def test_every_argument_of_every_bundled_rule_can_be_set(name: str) -> None:
    for number, found in enumerate(rules.read(name).rules):
        if found.operator == rules.KEEP:
            continue
        config_class = REGISTRY[found.operator].Config
        hints = get_type_hints(config_class)
        wanted = {field.name: another(field.name, hints[field.name], field.default)
                  for field in dataclasses.fields(config_class)}  # fmt: skip
        if "gpu_weights" in wanted:
            # which dynamic needs
            wanted |= {"weights": "int4", "gpu_weights": "int4", "symmetric": True, "ram_copy": True}
        if "bf16_copy" in wanted:
            wanted["weights"] = "int4"  # which it needs
        # All are others than the default, but for these, and for arguments that have one value only.
        same = {
            field.name for field in dataclasses.fields(config_class) if wanted[field.name] == field.default
        }
        assert same <= {"symmetric", "ram_copy"} | {
            key for key, kind in hints.items() if kind == Literal["auto"]
        }
        shown = {
            key: str(value).lower() if isinstance(value, bool) else value for key, value in wanted.items()
        }
        texts = [f"{found.name}.{key}={value}" for key, value in shown.items()]
        changed = rules.read(name, variables=rules.parse_overrides(texts)).rules[number]
        assert dataclasses.asdict(rules.check_arguments(changed, config_class)) == wanted
        assert changed.argument_where["device"] == f"override {f'{found.name}.device'!r}"
        if "symmetric" in wanted:  # alone, it may be false
            off = rules.read(name, variables={f"{found.name}.symmetric": False}).rules[number]
            assert rules.check_arguments(off, config_class).symmetric is False
        if "ram_copy" in wanted:
            alone = {f"{found.name}.ram_copy": False, f"{found.name}.gpu_experts": 0.25}
            gone = rules.read(name, variables=alone).rules[number]
            assert rules.check_arguments(gone, config_class).ram_copy is False


def read(**overrides: Any) -> tuple[rules.Rule, ...]:
    text = (
        HEAD
        + rule(replace="{operator: o, a: 1, b: '${variables.experts}'}", name="one. two")
        + rule(name="kept")
    )
    values = {key.replace("__", "."): value for key, value in overrides.items()}
    return rules.parse(text.encode(), "f", variables=values).rules


def test_settings_of_a_rule() -> None:
    assert read(**{"one. two.a": 2})[0].arguments == {"a": 2, "b": "int4"}
    assert read(**{"one. two.c": [1, "x"]})[0].arguments == {"a": 1, "b": "int4", "c": [1, "x"]}
    assert read(**{"one. two.a": "${variables.size}", "size": 7})[0].arguments["a"] == 7
    assert read(**{"one. two.optional": True})[0].optional
    for how in ("operator", "replace"):
        found = read(**{f"one. two.{how}": "keep"})[0]
        assert (found.operator, found.arguments) == (rules.KEEP, {})
    found = read(**{"one. two.operator": "p", "kept.operator": "q", "kept.x": 1})
    assert [(r.operator, r.arguments.get("a"), r.arguments.get("x")) for r in found] == [
        ("p", 1, None),
        ("q", None, 1),
    ]


def test_settings_reach_rules_of_an_extended_file() -> None:
    found = rules.read({"version": 1, "extends": "mixtral"}, variables={"routed experts.prefill": "cpu"})
    assert found.rules[1].arguments["prefill"] == "cpu"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("two.a", 1, ("override 'two.a': f has no rule 'two'", "its rules are 'one. two' and 'kept'")),
        ("one. tw.a", 1, ("Did you mean 'one. two'?",)),
        ("one. two.a", object(), ("override 'one. two.a': object is not a value",)),
        ("one. two.a", "None", ("override 'one. two.a': rule 'one. two': a is the text 'None'",)),
        ("one. two.optional", "yes", ("optional is 'yes'",)),
        ("one. two.operator", "a.b:C", ("operator is an import path",)),
        ("one. two.replace", "other", ("replace is 'other'",)),
        ("kept.a", 1, ("override 'kept.a': rule 'kept': keep has the argument 'a'",)),
        ("one. two.a b", 1, ("no variable 'one. two.a b' to set",)),
    ],
)
def test_settings_that_are_refused(name: str, value: Any, words: tuple[str, ...]) -> None:
    with refused(*words):
        read(**{name: value})


def test_settings_of_a_command_line() -> None:
    assert rules.parse_overrides(["r s, t.a=cpu", "x.y.b=1.5", "q.l=[1, b]", "v=w.x=y", "r.c="]) == {
        "r s, t.a": "cpu", "x.y.b": 1.5, "q.l": [1, "b"], "v": "w.x=y", "r.c": None,
    }  # fmt: skip
    for text in ("r s=1", "r.=1", "r.a b=1", ".a-b=1"):
        with refused("name=value, of a variable or of a rule's argument"):
            rules.parse_overrides([text])
    with refused("malformed", at="r.a=:2:1: "):
        rules.parse_overrides(["r.a=[1"])
