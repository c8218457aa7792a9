"""Variables: what is filled in, overridden and refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from rule_texts import HEAD, quick, read_rule, refused, rule

from ktinject import rules
from ktinject.rules import document
from ktinject.rules.variables import Variables
from ktinject.rules.wording import Place, Problems


def test_a_reference_alone_keeps_the_type_and_inside_text_becomes_text() -> None:
    head = "version: 1\nvariables: {i: 7, f: 0.5, b: true, s: a b}\nrules:\n"
    found = read_rule(
        r"{path: 'layers\.${variables.i}\.x'}",
        '{operator: o, i: "${variables.i}", f: "${variables.f}", b: "${variables.b}", s: "${variables.s}", '
        't: "<${variables.i}${variables.s}>", l: ["${variables.i}", 1]}',
        head,
    )
    assert found.match.path == r"layers\.7\.x"
    assert found.arguments == {"i": 7, "f": 0.5, "b": True, "s": "a b", "t": "<7a b>", "l": [7, 1]}
    assert type(found.arguments["b"]) is bool


def test_filling_in_is_plain_replacement() -> None:
    """OmegaConf has a grammar of its own; no text may come out otherwise than by replacing the reference."""
    random_ = random.Random(1)
    values = {"x": "int4", "y": 12, "z": "a'b\\c"}
    declared = Variables(Problems())
    declared.declare(document.from_python(values, "f", "variables"))
    for _ in range(400):
        pieces = [random_.choice(["${variables.x}", "${variables.y}", "${variables.z}", *r"\.d+ {}()[]'\":,$a\\%#"])
                  for _ in range(random_.randint(1, 8))]  # fmt: skip
        written = "".join(pieces)
        if "${" not in written or "\\${" in written or "${" in re.sub(r"\$\{variables\.[xyz]\}", "", written):
            continue
        found = declared.fill(document.Node(written, "f"), Place("f"))
        assert str(found) == re.sub(r"\$\{variables\.([xyz])\}", lambda m: str(values[m[1]]), written)


@pytest.mark.parametrize(
    ("default", "value"),
    [("a", "b"), ("auto", 16), ("auto", 0.25), (1, 2), (0, 0.25), (0.5, 1), (0, "auto"), (True, False)],
)
def test_overrides(default: object, value: object) -> None:
    source = {
        "version": 1,
        "variables": {"v": default},
        "rules": [{"name": "r", "match": {"path": "x"}, "replace": {"operator": "o", "a": "${variables.v}"}}],
    }
    found = rules.read(source, variables={"v": value})
    assert found.variables == {"v": value}
    assert found.rules[0].arguments == {"a": value}
    assert rules.read(source).rules[0].arguments == {"a": default}


def test_overrides_of_a_command_line() -> None:
    assert rules.parse_overrides(["a=int8", "b=64", "c=0.5", "d=true", "e=x=y", "f="]) == {
        "a": "int8", "b": 64, "c": 0.5, "d": True, "e": "x=y", "f": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("${oc.env:HOME}", ("interpolates something else", "${variables.name}")),
        ("x${oc.env:PATH,none}", ("something else",)),
        ("${oc.decode:1}", ("something else",)),
        ("${rules}", ("something else",)),
        ("${.operator}", ("something else",)),
        ("${variables}", ("something else",)),
        ("${variables.experts.x}", ("something else",)),
        ("${variables[experts]}", ("something else",)),
        ("${ variables.experts }", ("something else",)),
        ("${variables.${variables.experts}}", ("something else",)),
        ("${variables.experts", ("something else",)),
        ("${", ("something else",)),
        (r"\${variables.experts}", ("something else",)),
        (r"${variables.experts}\\${variables.experts}", ("something else",)),
        ("${variables.expert}", ("not declared", "experts and size", "Did you mean 'experts'?")),
        ("${variables.experts}" * 60, ("too much to fill in",)),
    ],
)
def test_interpolation(written: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/secret")
    for place, line in (("\n    operator: o\n    a: '{}'", 8), ("\n    operator: o\n    a: [1, '{}']", 8)):
        with refused(*words, at=f"f:{line}: rule 'r': "), quick(0.1):
            read_rule(replace=place.replace("{}", written))
    with refused(*words, at="f:5: rule 'r': "):
        read_rule(f"{{path: '{written}'}}")


def test_interpolation_is_bounded() -> None:
    arguments = "".join(f"\n    a{i}: ${{variables.size}}" for i in range(1001))
    with refused("too much to fill in", at="f:1008: rule 'r': "), quick():
        read_rule(replace="\n    operator: o" + arguments)
    with refused("too much to fill in"), quick(0.2):
        read_rule(replace="{operator: o, a: '" + "${variables.size}" * 60_000 + "'}")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"expert": "int8"}, ("no variable 'expert'", "experts and size", "Did you mean 'experts'?")),
        ({"size": True}, ("set to true", "default is 128")),
        ({"experts": True}, ("set to true",)),
        ({"experts": None}, ("null",)),
        ({"experts": ["a"]}, ("a list",)),
        ({"experts": "${oc.env:HOME}"}, ("refers to no other",)),
        ({"experts": object()}, ("object is not a value",)),
        ({"experts": "\0"}, ("U+0000",)),
        ({3: 4}, ("no variable 3",)),
    ],
)
def test_overrides_that_are_refused(variables: dict[Any, Any], words: tuple[str, ...]) -> None:
    with refused(*words, at="f"):
        rules.parse((HEAD + rule()).encode(), "f", variables=variables)


def test_overrides_where_nothing_is_declared() -> None:
    with refused("declares none"):
        rules.read([{"name": "r", "match": {"path": "x"}, "replace": "keep"}], variables={"a": 1})
    with refused("variables are given as list"):
        rules.read("mixtral", variables=["experts=int8"])
    with refused("read already"):
        rules.read(rules.read("mixtral"), variables={"experts": "int8"})
    with refused("not declared", "declares none"):
        rules.read([{"name": "r", "match": {"path": "${variables.a}"}, "replace": "keep"}])
    for text in ("a", "=1", "a b=1"):
        with refused("name=value"):
            rules.parse_overrides([text])
    with refused("set twice"):
        rules.parse_overrides(["a=1", "a=2"])
