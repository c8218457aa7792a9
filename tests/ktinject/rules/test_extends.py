"""Rule files that extend others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rule_texts import refused, rule

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.rules import excerpt

MODULES: list[rules.Module] = [
    ("model", ("Model",), None),
    *(
        (f"model.layers.{layer}{tail}", (name, "Module"), layer)
        for layer in range(3)
        for tail, name in (
            ("", "Layer"),
            (".mlp", "Block"),
            (".mlp.gate", "Linear"),
            (".mlp.experts", "Experts"),
        )
    ),
]
HEAD = "version: 1\n"
BASE = HEAD + "variables: {w: bf16, n: 1}\nmodel_types: [m]\nrules:\n" + rule(
    "{class: Experts}", "{operator: hybrid_experts, weights: '${variables.w}'}", "experts"
) + rule("{class: Linear}", "keep", "routers")  # fmt: skip


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**texts: str) -> Path:
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / f"{next(iter(texts))}.yaml"

    return write


def test_a_files_own_rules_come_first_and_its_defaults_count(write: Callable[..., Path]) -> None:
    own = rule("{class: Experts, layers: 0}", "{operator: cpu_experts, weights: '${variables.x}'}", "first")
    file = write(mine=f"{HEAD}extends: base.yaml\nvariables: {{w: int8, x: int4}}\nrules:\n{own}", base=BASE)
    found = rules.read(file)
    assert [r.name for r in found.rules] == ["first", "experts", "routers"]
    assert [r.depth for r in found.rules] == [0, 1, 1]
    assert found.rules[1].where == f"{file.parent / 'base.yaml'}:5"
    assert [r.arguments.get("weights") for r in found.rules] == ["int4", "int8", None]
    assert found.variables == {"w": "int8", "n": 1, "x": "int4"} and found.model_types == ("m",)
    assert (found.source, found.bases) == (str(file), (str(file.parent / "base.yaml"),))
    assert rules.read(file, variables={"w": "fp8"}).rules[1].arguments == {"weights": "fp8"}
    matched = rules.assign(found, MODULES).matched
    assert matched["first"] == ("model.layers.0.mlp.experts",) and len(matched["experts"]) == 2


def test_a_file_may_have_nothing_but_a_base(write: Callable[..., Path]) -> None:
    found = rules.read(
        write(mine=f"{HEAD}extends: deepseek-v3\nmodel_types: [mine]\nvariables: {{experts: int4}}")
    )
    base = rules.read("deepseek-v3")
    assert [(r.name, r.where) for r in found.rules] == [(r.name, r.where) for r in base.rules]
    assert found.model_types == ("mine",) and found.rules[1].arguments["weights"] == "int4"
    from_python = rules.read({"version": 1, "extends": "mixtral"})
    assert from_python.model_types == ("mixtral",) and from_python.bases[0] == "mixtral.yaml"


def test_a_name_is_bundled_and_a_path_is_relative_to_the_file_that_names_it(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/middle.yaml").write_text(HEAD + "extends: ../base.yaml\n")
    file = write(mine=HEAD + "extends: inner/middle.yaml\n", base=BASE, mixtral="no rules")
    assert [r.depth for r in rules.read(file).rules] == [2, 2]
    monkeypatch.chdir(tmp_path)
    assert rules.read("mine.yaml").bases == ("inner/middle.yaml", "inner/../base.yaml")
    assert rules.read(write(own=HEAD + "extends: mixtral\n")).model_types == ("mixtral",)
    # A file named like the bundled one that it extends.
    assert rules.read(write(mixtral=HEAD + "extends: mixtral\n")).bases[0] == "mixtral.yaml"


def test_a_base_gives_way(write: Callable[..., Path]) -> None:
    """Its rules may lose all modules to the extending file's, and those inside what that one replaces."""

    def read(own: str) -> Any:
        return rules.assign(rules.read(write(mine=f"{HEAD}extends: base.yaml\nrules:\n{own}", base=BASE)), MODULES,
                            keeps={"deferred_moe": ("gate",)})  # fmt: skip

    assert read(rule("{class: Experts}", "keep", "all")).matched["experts"] == ()
    found = read(rule("{class: Block}", "{operator: deferred_moe}", "blocks"))
    assert found.matched["experts"] == () and len(found.matched["routers"]) == 3
    assert not any(path.endswith("experts") for path in found.rules)
    found = read(rule("{class: Layer}", "{operator: whole_layer}", "layers"))
    assert {rule.name for rule in found.rules.values()} == {"layers"}
    with refused("goes away with", "which rule 'blocks'"):  # of one file, as ever
        read(
            rule("{class: Block}", "{operator: o}", "blocks")
            + rule("{class: Linear}", "{operator: o}", "inner")
        )


@pytest.mark.parametrize(
    ("texts", "at", "words"),
    [
        ({"a": "extends: 3"}, "a.yaml:2: ", ("extends is 3", "the path of a rule file")),
        ({"a": "extends: [b.yaml]"}, "a.yaml:2: ", ("extends is a list",)),
        ({"a": "extends: ''"}, "a.yaml:2: ", ("extends is ''",)),
        ({"a": "variables: {b: b.yaml}\nextends: ${variables.b}"}, "a.yaml:3: ", ("extends is '${variables.b}'",)),
        ({"a": "extends: mixtrall"}, "a.yaml:2: ", ("is not there", "deepseek-v3", "Did you mean 'mixtral'?")),
        ({"a": "extends: bse.yaml", "base": BASE}, "a.yaml:2: ", ("is not there", "Did you mean 'base.yaml'?")),
        ({"a": "extends: ."}, "a.yaml:2: ", ("is not a file",)),
        ({"a": "extends: " + "x" * 5000}, "a.yaml:2: ", ("is not a path",)),
        ({"a": "extends: a.yaml"}, "a.yaml:2: ", ("which extends this file",)),
        ({"a": "extends: b.yaml", "b": HEAD + "extends: a.yaml"}, "b.yaml:2: ", ("which extends this file",)),
        ({"a": "extends: b.yaml", "b": HEAD}, "b.yaml:1: ", ("no rules",)),
        ({"a": "extends: b.yaml", "b": "rules:\n- a"}, "b.yaml:1: ", ("version",)),
        ({"a": "extends: b.yaml", "b": "- a"}, "a.yaml:2: ", ("is no rule file; one has a version and rules",)),
        ({"a": "extends: b.yaml\nvariables: {w: true}", "b": BASE}, "a.yaml:3: variable 'w': ", ("default is 'bf16'",)),
        ({"a": "extends: b.yaml\nrules:\n" + rule(name="experts"), "b": BASE}, "a.yaml:4: rule 'experts': ",
         ("b.yaml:5", "the extended file's rule gets what yours leaves")),
        ({"a": "extends: b0.yaml", **{f"b{n}": f"{HEAD}extends: b{n + 1}.yaml" for n in range(9)}, "b9": BASE},
         "b7.yaml:2: ", ("8 files extend each other already",)),
        ({"a": "extends: b.yaml\nrules:\n" + "".join(rule(name=f"n{n}") for n in range(499)), "b": BASE},
         "b.yaml:4: ", ("501 rules, with those before",)),
    ],
)  # fmt: skip
def test_refusals(write: Callable[..., Path], texts: dict[str, str], at: str, words: tuple[str, ...]) -> None:
    file = write(**{**texts, "a": HEAD + texts["a"]})
    with refused(*words, at=f"{file.parent}/{at}"):
        rules.read(file)


def test_nothing_is_shown_of_a_file_that_is_no_rule_file(write: Callable[..., Path]) -> None:
    """Whoever gets a file of rules from somebody else may show its refusal to others."""
    for secret in ("root:x:0:0:secret", "a: [secret", "secret:\n\tb: 1"):
        with pytest.raises(RuleError) as found:
            rules.read(write(a=HEAD + "extends: b.yaml", b=secret))
        assert "secret" not in str(found.value) + excerpt.pointed(found.value)


@pytest.mark.parametrize("path", ["/proc/kmsg", "/proc/self/environ", "/dev/zero"])
def test_files_that_the_system_makes_up_do_not_keep_a_reader(write: Callable[..., Path], path: str) -> None:
    """Some have no end, and some wait for what never comes."""
    for file in (write(a=f"{HEAD}extends: {path}"), path):
        with pytest.raises(RuleError):
            rules.read(file)


def test_what_is_read_from_bytes_extends_files_of_the_working_directory(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(base=BASE).parent)
    assert rules.parse(b"version: 1\nextends: base.yaml", "f").bases == ("base.yaml",)
    with refused("extends 'f'", at="f:2: "):
        rules.parse(b"version: 1\nextends: f", "f")
