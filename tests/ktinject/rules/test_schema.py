"""The JSON schema, beside what reading accepts and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rule_texts import Everything, Experts

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.operators import REGISTRY
from ktinject.rules import document

jsonschema = pytest.importorskip("jsonschema")


def valid(document_: object, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft7Validator(schema).is_valid(document_)


def test_the_schema_accepts_what_is_bundled_and_the_design_example() -> None:
    schema = rules.schema({"cpu_experts": Experts, "hybrid_experts": Everything})
    bundled = rules.schema(
        {name: operator.Config for name, operator in REGISTRY.items() if name != rules.KEEP}
    )
    jsonschema.Draft7Validator.check_schema(schema)
    json.dumps(schema)
    for path in rules.bundled().values():
        jsonschema.validate(document.from_file(path, path.name).plain(), bundled, jsonschema.Draft7Validator)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"rules": []}, {"extra": 1}, {"variables": {"a b": 1}}, {"variables": {"a": [1]}},
        {"rules": [{"name": "a", "match": {"path": "x"}}]},
        {"rules": [{"name": "a", "match": {"layers": 3}, "replace": "keep"}]},
        {"rules": [{"name": "a", "match": {"path": "x", "layers": "3-"}, "replace": "keep"}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": "default"}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "nope"}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "keep", "a": 1}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "weights": "int3"}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "group_size": 96}}]},
        {"rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "wieghts": "int4"}}]},
    ],
)  # fmt: skip
def test_the_schema_refuses_what_reading_refuses(change: dict[str, Any]) -> None:
    schema = rules.schema({"o": Experts})
    replace = {"operator": "o", "weights": "${variables.w}", "group_size": 64}
    good = {
        "version": 1,
        "variables": {"w": "int4"},
        "rules": [{"name": "a", "match": {"path": "x", "layers": "3-9, 12"}, "replace": replace}],
    }
    assert valid(good, schema)
    rules.check_arguments(rules.read(good).rules[0], Experts)
    assert not valid({**good, **change}, schema)
    with pytest.raises(RuleError):
        for found in rules.read({**good, **change}).rules:
            if found.operator != "o":
                raise rules.unknown_operator(found, ["o"])
            rules.check_arguments(found, Experts)


def test_every_registered_operator_has_a_schema() -> None:
    operators = pytest.importorskip("ktinject.operators")
    configs = {name: operator.Config for name, operator in operators.REGISTRY.items()}
    schema = rules.schema(configs)
    jsonschema.Draft7Validator.check_schema(schema)
    for name in configs:
        found = {
            "version": 1,
            "rules": [{"name": "a", "match": {"path": "x"}, "replace": {"operator": name}}],
        }
        assert valid(found, schema)


@pytest.mark.parametrize("name", rules.bundled())
def test_the_first_line_of_a_bundled_file_names_the_schema_beside_it(name: str) -> None:
    file = rules.bundled()[name]
    first = file.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=rules.schema.json"
    schema = json.loads((file.parent / first.partition("$schema=")[2]).read_text())
    jsonschema.validate(document.from_file(file, name).plain(), schema, jsonschema.Draft7Validator)


def test_the_schema_knows_bundled_names_roles_and_what_extends() -> None:
    schema = rules.schema({"o": Experts})
    assert set(rules.bundled()) == set(schema["properties"]["extends"]["anyOf"][0]["enum"])
    assert set(rules.ROLES) <= set(json.dumps(schema["definitions"]["match"]).replace('"', " ").split())
    assert valid({"version": 1, "extends": "mine/base.yaml"}, schema)
    assert not valid({"version": 1, "extends": ""}, schema) and not valid({"version": 1}, schema)
