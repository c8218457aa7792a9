"""Where rules come from: paths, bundled names, Python."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rule_texts import DESIGN_EXAMPLE, MIB, quick, refused

from ktinject import rules
from ktinject.errors import KTInjectError, RuleError


def test_dicts_say_where_by_path() -> None:
    written = [{"name": "a", "match": {"path": "x"}, "replace": {"operator": "o", "weights": "int4"}}]
    for source in (written, {"version": 1, "rules": written}):
        found = rules.read(source).rules[0]
        assert found.where == "<python>:rules[0]"
        assert found.argument_where == {"weights": "<python>:rules[0].replace.weights"}
        assert found.arguments == {"weights": "int4"}


def test_a_rule_set_is_returned_as_it_is() -> None:
    found = rules.read("mixtral")
    assert rules.read(found) is found


def test_files_by_path(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(DESIGN_EXAMPLE)
    for source in (file, str(file)):
        found = rules.read(source)
        assert found.source == str(file)
        assert found.rules[0].where == f"{file}:7"


@pytest.mark.parametrize(
    "source", ["rules/deepseek-v3.yaml", Path("nowhere/deepseek-v3"), "./deepseek-v3.yaml"]
)
def test_an_absent_path_with_a_bundled_name_says_what_it_uses(
    source: str | Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ktinject"):
        assert rules.read(source) == rules.read("deepseek-v3")
    assert [record.name for record in caplog.records] == ["ktinject"]
    assert str(source) in caplog.text and "bundled" in caplog.text


def test_a_bundled_name_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mixtral").write_text("not rules")
    (tmp_path / "qwen3-moe").mkdir()
    assert rules.read("mixtral").model_types == ("mixtral",)
    assert "qwen3_moe" in rules.read("qwen3-moe").model_types
    assert not caplog.records
    with pytest.raises(RuleError, match="a rule file is 'not rules'"):
        rules.read("./mixtral")


ROOT = Path(__file__).parents[3]


def test_reading_imports_no_torch() -> None:
    code = (
        "import sys, types\n"
        "package = types.ModuleType('ktinject'); package.__path__ = [sys.argv[1]]; sys.modules['ktinject'] = package\n"
        "import ktinject.rules\n"
        "ktinject.rules.parse(open(sys.argv[2], 'rb').read(), 'f')\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    arguments = [str(ROOT / "ktinject"), str(rules.bundled()["mixtral"])]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    with refused("is not there", "Did you mean 'deepseek-v3'?"):
        rules.read("deepseek_v3.yaml")
    with refused("is not a file"):
        rules.read(tmp_path)
    with refused("is not a file"):
        rules.read("")
    with refused("is not"):
        rules.read("a\0b")
    with refused("is not"):
        rules.read("x" * 5000)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with refused("is not a file"):
        rules.read(pipe)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MIB + 1))
    with refused("larger than 1 MiB", at=str(large)):
        rules.read(large)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("version: 1")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with refused("Permission denied", at=f"{file}: "):
        rules.read(file)


@pytest.mark.parametrize("source", [None, 3, {1, 2}, b"version: 1", object()])
def test_sources_of_other_types(source: Any) -> None:
    with refused("a path, a bundled name"):
        rules.read(source)


def test_python_values_that_are_no_rules() -> None:
    with refused("key 1 is not text", at="<python>:rules[0]: "):
        rules.read([{1: 2}])  # type: ignore[dict-item]
    with refused("complex is not a value", at="<python>:rules[0].replace.a: "):
        rules.read([{"name": "r", "match": {"path": "x"}, "replace": {"operator": "o", "a": 1j}}])
    with refused("U+0000", at="<python>:rules[0].name: "):
        rules.read([{"name": "\0"}])
    with refused("beyond the range", at="<python>:rules[0].a: "):
        rules.read([{"a": float("nan")}])
    with refused("more than 18 digits"):
        rules.read([{"a": 10**18}])
    with refused("nested deeper"):
        cycle: list[Any] = []
        cycle.append(cycle)
        rules.read(cycle)
    with refused("more than 20,000 values"), quick():
        wide: list[Any] = []
        for _ in range(8):
            wide = [wide] * 9
        rules.read(wide)
    with refused("rules is an empty list"):
        rules.read([])
    with refused("a rule is 'x'", at="<python>:rules[0]: rule 1: "):
        rules.read(["x"])  # type: ignore[list-item]


def test_all_refusals_are_one_family() -> None:
    assert issubclass(RuleError, KTInjectError) and issubclass(KTInjectError, ValueError)
