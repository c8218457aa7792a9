"""`ktinject rules`: list, show, check, schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rule_texts import DESIGN_EXAMPLE, HEAD, Experts, rule
from typer.testing import CliRunner

from ktinject import rules
from ktinject.rules import document


def cli(*arguments: str) -> tuple[int, str, str]:
    from ktinject.cli import app

    found = CliRunner().invoke(app, ["rules", *arguments])
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = pytest.importorskip("ktinject.operators")
    stand_in = type("CpuExperts", (), {"Config": Experts})
    monkeypatch.setitem(operators.REGISTRY, "cpu_experts", stand_in)


def test_cli_list() -> None:
    code, out, _ = cli("list")
    assert code == 0 and all(name in out for name in rules.bundled())
    code, out, _ = cli("list", "--json")
    assert code == 0 and set(json.loads(out)) == set(rules.bundled())


def test_cli_show(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(DESIGN_EXAMPLE)
    assert cli("show", "mixtral") == (0, rules.bundled()["mixtral"].read_text(), "")
    assert cli("show", str(file)) == (0, DESIGN_EXAMPLE, "")
    code, out, _ = cli("show", str(file), "--json")
    assert code == 0 and json.loads(out)["rules"][0]["match"]["layers"][0] == 3


def test_cli_show_refuses() -> None:
    code, out, err = cli("show", "mixtrall")
    assert (code, out) == (2, "") and "Did you mean 'mixtral'?" in err


@pytest.mark.usefixtures("registry")
def test_cli_check(tmp_path: Path) -> None:
    code, out, _ = cli("check", "deepseek-v3", "--set", "experts=int4")
    assert code == 0 and "weights=int4" in out and "10 rules for deepseek_v3, kimi_k2" in out
    code, out, _ = cli("check", "deepseek-v3", "--json")
    assert code == 0 and json.loads(out)["rules"][1]["arguments"] == {
        "weights": "kept",
        "group_size": 128,
        "gpu_experts": "auto",
    }
    file = tmp_path / "own.yaml"
    file.write_text(
        HEAD
        + rule(replace="{operator: cpu_expert}", name="a")
        + rule(replace="{operator: cpu_experts, x: 1}", name="b")
    )
    code, out, err = cli("check", str(file))
    assert (code, out) == (2, "")
    first = f"{file}:6:23: rule 'a': unknown operator 'cpu_expert'; "
    assert err.startswith(f"ktinject: {first}") and "Did you mean 'cpu_experts'?" in err
    assert "\n  6 |   replace: {operator: cpu_expert}\n    |                       ^^^^^^^^^^\n" in err
    assert f"\n{file}:9:39: rule 'b': cpu_experts has no argument 'x'" in err
    code, out, err = cli("check", str(file), "--json")
    found = json.loads(out)
    assert code == 2 and len(found["problems"]) == 2 and err.startswith("ktinject: ")
    place = found["places"][0]
    assert place["text"] == found["problems"][0] and (place["file"], place["line"], place["column"]) == (
        str(file),
        6,
        23,
    )


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("override", ["experts", "experts=[", "nope=1", "group_size=int4"])
def test_cli_check_refuses_overrides(override: str) -> None:
    code, out, err = cli("check", "deepseek-v3", "--set", override)
    assert (code, out) == (2, "") and err


@pytest.mark.usefixtures("registry")
def test_cli_schema() -> None:
    code, out, _ = cli("schema")
    schema = json.loads(out)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema)
    assert code == 0 and jsonschema.Draft7Validator(schema).is_valid(
        document.from_file(rules.bundled()["mixtral"], "f").plain()
    )


RULES = "version: 1\nrules:\n" + rule()
MODELINE = "# yaml-language-server: $schema=rules.schema.json\n"


def test_cli_schema_install(tmp_path: Path) -> None:
    named = "# mine\n# yaml-language-server: $schema=other.json\n" + RULES
    texts = {
        "plain.yaml": RULES,
        "windows.yml": RULES.replace("\n", "\r\n"),
        "named.yaml": named,
        "other.yaml": "a: 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text.encode())
    code, out, _ = cli("schema", "--install", str(tmp_path))
    assert code == 0 and f"{tmp_path / 'rules.schema.json'}: written" in out and "other.yaml" not in out
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(json.loads((tmp_path / "rules.schema.json").read_text()))
    found = {name: (tmp_path / name).read_bytes().decode() for name in texts}
    assert found == {
        **texts,
        "plain.yaml": MODELINE + RULES,
        "windows.yml": (MODELINE + RULES).replace("\n", "\r\n"),
    }
    assert rules.read(tmp_path / "plain.yaml").rules[0].where.endswith(":4")
    code, out, _ = cli("schema", "--install", str(tmp_path / "plain.yaml"))
    assert (
        code == 0
        and "names a schema already" in out
        and (tmp_path / "plain.yaml").read_text() == MODELINE + RULES
    )


def test_cli_schema_install_refuses(tmp_path: Path) -> None:
    code, _, err = cli("schema", "--install", str(tmp_path / "absent"))
    assert code == 2 and "is not there" in err
    (tmp_path / "rules.schema.json").write_text("[]")
    code, _, err = cli("schema", "--install", str(tmp_path))
    assert code == 2 and "no schema of rules" in err and (tmp_path / "rules.schema.json").read_text() == "[]"


OLD = """- match: {name: "experts$"}
  replace: {class: ktransformers.operators.experts.KTransformersExperts, kwargs: {generate_device: "cuda:1"}}
"""


def test_cli_migrate(tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(OLD)
    code, printed, err = cli("migrate", str(old))
    assert (
        (code, err) == (0, "") and "role: 'routed_experts'" in printed and "--budget cuda:1=24GiB" in printed
    )
    assert cli("migrate", str(old), "-o", str(new))[:2] == (0, f"{new}: written\n")
    assert new.read_text() == printed and rules.read(new).rules[0].operator == "hybrid_experts"
    code, out, _ = cli("migrate", str(old), "--json")
    assert code == 0 and json.loads(out) == {"text": printed, "problems": [], "devices": ["cuda:1"]}
    for arguments in ((str(old), "-o", str(old)), (str(new),), ("mixtral",), (str(tmp_path / "absent"),)):
        code, out, err = cli("migrate", *arguments)
        assert (code, out) == (2, "") and err
    assert old.read_text() == OLD


def test_cli_check_reads_both_kinds(tmp_path: Path) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(OLD)
    code, out, _ = cli("check", str(old))
    assert (
        code == 0 and "KTransformersExperts" in out and "hybrid_experts" in out and "no mistake found" in out
    )
    code, out, _ = cli("check", str(old), "--json")
    assert code == 0 and json.loads(out)["rules"][0]["number"] == 1
    old.write_text(OLD.replace("cuda:1", "gpu"))
    code, out, err = cli("check", str(old))
    assert (
        (code, out) == (2, "") and f"{old}:2:100: rule 1: generate_device is 'gpu'" in err and "^^^^^" in err
    )
    code, out, err = cli("migrate", str(old))
    assert code == 0 and out and err.startswith(f"ktinject: mistake in the old file: {old}:2: rule 1: ")
