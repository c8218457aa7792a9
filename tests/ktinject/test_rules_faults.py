"""What the rule language refuses: each with its line, in little time and memory, and with nothing but RuleError."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from ktinject import rules
from ktinject.errors import KTInjectError, RuleError
from ktinject.rules import document

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
PARSERS = sorted({document.PARSER, yaml.SafeLoader}, key=str)  # libyaml's where it is there, and PyYAML's own

HEAD = "version: 1\nvariables: {experts: int4, size: 128}\nrules:\n"  # rules begin at line 4


@contextmanager
def refused(*words: str, at: str = "") -> Iterator[None]:
    """RuleError that begins with the place, has the words, and ends with what to do as a sentence."""
    with pytest.raises(RuleError) as error:
        yield
    text = str(error.value)
    assert text.startswith(at), text
    for word in words:
        assert word in text, text
    assert "; " in text and text.rstrip()[-1] in ".?", text


@contextmanager
def quick(seconds: float = 1.0) -> Iterator[None]:
    """Twice the time is allowed, in processor time, for machines that do other things."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 2 * seconds


def rule(match: str = "{path: x}", replace: str = "keep", name: str = "r") -> str:
    return f"- name: {name}\n  match: {match}\n  replace: {replace}\n"


def parse(text: str | bytes) -> rules.RuleSet:
    return rules.parse(text if isinstance(text, bytes) else text.encode(), "f")


def read_rule(match: str = "{path: x}", replace: str = "keep") -> rules.Rule:
    return parse(HEAD + rule(match, replace)).rules[0]


# Bytes and YAML, with libyaml and with PyYAML's own parser


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("data", "at", "word"),
    [
        (b"version: 1\nrules:\n  - name: 'a\n", "f:4:1: ", "malformed"),
        (b"version: 1\nrules: [\n", "f:3:1: ", "malformed"),
        (b"version: 1\n\tx: 1\n", "f:2:1: ", "malformed"),
        (b"a: b: c\n", "f:1:5: ", "malformed"),
        (b"a: {w: ${variables.x}}\n", "f:1:", "in quotes"),
        (b"version: 1\nname: caf\xe9\n", "f:2:10: ", "byte 0xe9 is not UTF-8"),
        ("version: 1".encode("utf-16"), "f:1:1: ", "not UTF-8"),
        (b"a: 1\nb: \0\n", "f:2:4: ", "U+0000"),
        (b"a: \x1b[31m\n", "f:1:4: ", "U+001B"),
        ("a: \u2028\n".encode(), "f:1:4: ", "U+2028"),
        (b'a: 1\nb: "\\0"\n', "f:2: ", "U+0000"),
        (b'a: "\\ud800"\n', "f:1", ""),
        (b'a: "\\UFFFFFFFF"\n', "f:1:", "malformed"),
        (b"%YAML " + b"9" * 5000 + b".1\n---\na: b", "f:1:", "malformed"),
        (b"", "f:1: ", "empty"),
        (b"# nothing\n\n", "f:1: ", "empty"),
        (b"version: 1\n---\nversion: 1\n", "f:2: ", "second document"),
        (b"a: 1\nb: 2\na: 3\n", "f:3: ", "the key 'a' is given twice"),
        (b"a:\n  b: {c: 1, c: 2}\n", "f:2: ", "the key 'c' is given twice"),
        (b"a: 1\n2: 3\n", "f:2: ", "key 2 is not text"),
        (b"a: 1\ntrue: 3\n", "f:2: ", "key true is not text"),
        (b"a: 1\nnull: 3\n", "f:2: ", "key null is not text"),
        (b"? [a]\n: 1\n", "f:1: ", "a key that is a list or mapping"),
        (b"{? {a: b} : 1}\n", "f:1: ", "a key that is a list or mapping"),
        (b"a: &x [1]\nb: *x\n", "f:1: ", "'&x'; anchors and aliases"),
        (b"a: *x\n", "f:1", "'*x'; anchors and aliases"),
        (
            b"a: 1\nb: !!python/object/apply:os.system [ls]\n",
            "f:2: ",
            "the tag 'tag:yaml.org,2002:python/object",
        ),
        (b"a: 1\nb: !!python/name:os.system\n", "f:2: ", "nothing is constructed"),
        (b"a: 1\nb: !custom x\n", "f:2: ", "the tag '!custom'"),
        (b"a: 1\nb: !!str x\n", "f:2: ", "the tag"),
        (b"a: 1\nb: ! x\n", "f:2: ", "the tag '!'"),
        (b"!!map {a: 1}\n", "f:1: ", "the tag"),
        (b"a: 99999999999999999999\n", "f:1: ", "more than 18 digits"),
        (b"a: " + b"9" * 5000 + b"\n", "f:1: ", "more than 18 digits"),
        (b"a: 1e999\n", "f:1: ", "beyond the range"),
    ],
)
def test_yaml(data: bytes, at: str, word: str, parser: Any) -> None:
    with refused(word, at=at), quick():
        document.from_bytes(data, "f", parser)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"[" * 500, "nested deeper than 16"),
        (b"[" * MIB, "nested deeper than 16"),
        (b"{a: " * (MIB // 4), "nested deeper than 16"),
        (b"- " * (MIB // 2), "nested deeper than 16"),
        (b"? " * (MIB // 2), "a key that is a list or mapping"),
        (b"".join(b" " * i + b"a:\n" for i in range(1400)), "nested deeper than 16"),
        (b"[" + b"a," * (MIB // 2 - 1) + b"]", "more than 20,000 values"),
        (b"".join(b"k%d: 1\n" % i for i in range(60_000)), "more than 20,000 values"),
        (b"x" * (MIB + 1), "larger than 1 MiB"),
        (b"\n" * MIB, "empty"),
        (b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 107)
        ), "anchors and aliases"),
        (b"a: {<<: {b: 1}}\nc: {<<: *x}", "anchors and aliases"),
        (b":" * MIB, "malformed"),
        (b"[" + b"a " * (MIB // 2 - 1), "malformed"),
    ],
)  # fmt: skip
def test_bombs_are_refused_in_a_second(data: bytes, word: str, parser: Any) -> None:
    with refused(word, at="f"), quick():
        document.from_bytes(data, "f", parser)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("parser", [found.__name__ for found in PARSERS])
def test_bombs_take_less_than_50_mib(parser: str) -> None:
    """libyaml's memory is not seen by tracemalloc, so a process of its own asks the system."""
    code = (
        "import resource, sys, yaml\n"
        "from ktinject import rules\n"
        "from ktinject.errors import RuleError\n"
        "from ktinject.rules.document import from_bytes\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "rules.read('mixtral'); before = peak()\n"
        "for data in (b'[' * 2**20, b'- ' * 2**19, b'[' + b'a,' * (2**19 - 1) + b']', b'&a ' * 300000,\n"
        "             b':' * 2**20, b'#' * 2**20, b''.join(b'k%d: 1\\n' % i for i in range(60000))):\n"
        "    try: from_bytes(data, 'f', getattr(yaml, sys.argv[1]))\n"
        "    except RuleError: continue\n"
        "    raise SystemExit('not refused')\n"
        "print(peak() - before)\n"
    )
    found = subprocess.run([sys.executable, "-c", code, parser], check=True, capture_output=True, text=True)
    assert float(found.stdout) < 50


# Where rules come from


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    with refused("'auto' is for optimize", "deepseek-v3"):
        rules.read("auto")
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

    monkeypatch.setattr(Path, "open", denied)
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


# The document


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
        with refused("KTransformers 0.x", "version: 1", "docs/reference/rules.md", at=f"f:{line}: "):
            parse(text)
    with refused("document is a list"):
        parse(rule())


# Rules


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
        (rule("{}"), "f:5: rule 'r': ", ("no path and no class",)),
        (rule("{layers: 3}"), "f:5: rule 'r': ", ("no path and no class",)),
        (rule("{name: x}"), "f:5: rule 'r': ", ("unknown key 'name'", "path, class and layers")),
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
        (rule(replace="\n    operator: o\n    <<: {a: 1}"), "f:8: rule 'r': ", ("argument name '<<'",)),
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
def test_layers(layers: str) -> None:
    with refused("layers is", "3-60", "[3, 5, 7]", at="f:7: rule 'r': "), quick(0.1):
        read_rule(f"\n    path: x\n    layers: {layers}")


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
def test_overrides(variables: dict[Any, Any], words: tuple[str, ...]) -> None:
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


# Patterns


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("(", "not a regular expression"),
        ("[a", "not a regular expression"),
        ("*a", "not a regular expression"),
        ("a\\", "not a regular expression"),
        (r"\p{Nope}", "count"),
        (r"\N{NOPE}", "count"),
        ("x" * 1001, "1,001 characters"),
        ("(?R)", "extension"),
        ("(?:(?R)|m)*", "extension"),
        ("(a(?1)?b)", "extension"),
        ("(?P<a>x)", "extension"),
        ("(?b)x", "extension"),
        ("(?#comment)", "extension"),
        ("(?:foo){e<=3}", "count"),
        ("(?:foo){e}", "count"),
        ("a{99999999999999}", "count"),
        ("a{1001}", "repeats too much"),
        ("(?:(?:(?:.?){1000}){1000}){1000}", "repeats too much"),
        ("(?:(?:.?){0,100}){0,100}", "repeats too much"),
        ("(" * 21 + ")" * 21, "nests groups"),
        ("(" * 500 + ")" * 500, "nests groups"),
    ],
)
def test_patterns_outside_of_the_dialect(pattern: str, word: str) -> None:
    with refused(word, "path", at="f:5: rule 'r': "), quick(0.1):
        read_rule(f"{{path: '{pattern}'}}")


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(model\.|layers\.|\w+\.)+experts$",
        r"(?:\w|\w\w|\.|e|.)+[0-9]!?",
        "(?:(.)|(.)|(.)|(.))*[0-9]",
        "(?:.?|){1000}[0-9]",
    ],
)
def test_patterns_that_backtrack_without_end(pattern: str) -> None:
    """The first is fast in `regex`, the others are stopped."""
    path = "model.layers.3." + "mlp." * 22 + "expert"
    modules: list[rules.Module] = [(path, ("A",), 3)] * 50
    found = parse(HEAD + rule(f"{{path: '{pattern}'}}", name="slow"))
    with refused("rule 'slow'", at="f:4: "), quick(1.0):
        rules.assign(found, modules)


def test_a_slow_pattern_is_named_with_its_module() -> None:
    found = parse(HEAD + rule("{path: '(?:(.)|(.)|(.)|(.))*[0-9]'}", name="slow"))
    modules: list[rules.Module] = [("model.layers.0.mlp.experts", ("A",), 0)]
    with refused(
        "'(?:(.)|(.)|(.)|(.))*[0-9]' takes too long at 'model.layers.0.mlp.experts'", at="f:4: rule 'slow'"
    ):
        rules.assign(found, modules)
    with pytest.raises(TimeoutError):
        found.rules[0].match.matches(*modules[0])


# Assigning

MODULES: list[rules.Module] = [
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


def assign(*written: str) -> rules.Assignment:
    return rules.assign(parse(HEAD + "".join(written)), MODULES)


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
        assign(rule(match))


def test_layers_where_none_are_numbered() -> None:
    with refused("no layers are numbered"):
        rules.assign(parse(HEAD + rule("{class: A, layers: 3}")), [("a", ("A",), None)])


def test_a_shadowed_rule_names_the_earlier_ones() -> None:
    with refused("all 6 modules", "'first' (f:4) and 'second' (f:7)", at="f:10: rule 'third': "):
        assign(
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
            assign(block, rule("{class: DeepseekV3TopkRouter}", replace, "gate"))
    with refused("'model.layers.0.mlp.experts.act_fn' (and 5 more)", "the same rule", at="f:4: rule 'r': "):
        assign(rule(r"{path: '.*\.experts.*'}", "{operator: o}"))


def test_all_problems_come_at_once() -> None:
    with refused(
        "f:4: rule 'a': it matches nothing",
        "f:10: rule 'c': all 6 modules",
        "f:13: rule 'd': 'model.layers.0.mlp.gate'",
    ):
        assign(
            rule("{class: Nope}", name="a"),
            rule("{class: DeepseekV3MoE}", "{operator: block}", "b"),
            rule("{class: DeepseekV3MoE}", "{operator: other}", "c"),
            rule("{class: DeepseekV3TopkRouter}", "keep", "d"),
        )


# Arguments


@dataclass(frozen=True)
class Arguments:
    """One argument of each kind that a refusal words differently."""

    needed: str
    weights: Literal["bf16", "int8", "int4"] = "bf16"
    group_size: Literal[128, 64, 32] = 128
    threads: int = 1
    ratio: float = 0.5
    symmetric: bool = True
    numa: int | Literal["auto"] = "auto"
    per_layer: list[int] | None = None

    def __post_init__(self) -> None:
        if self.threads == 13:
            raise ValueError("threads is 13; any other number works. Take 12.")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("wieghts: int4", ("no argument 'wieghts'", "Did you mean 'weights'?")),
        ("Weights: int4", ("no argument 'Weights'", "Did you mean 'weights'?")),
        ("backend: llamafile", ("no argument 'backend'", "needed, weights, group_size")),
        ("weights: int44", ("weights is 'int44'", "bf16, int8 or int4", "Did you mean 'int4'?")),
        ("weights: 4", ("weights is 4",)),
        ("weights: null", ("weights is null",)),
        ("weights: [int4]", ("weights is 'int4'",)),
        ("group_size: 96", ("group_size is 96", "128, 64 or 32")),
        ("group_size: '128'", ("group_size is '128'",)),
        ("group_size: 128.0", ("group_size is 128.0",)),
        ("threads: true", ("threads is true", "a whole number")),
        ("threads: 1.5", ("threads is 1.5", "a whole number")),
        ("threads: 13", ("threads is 13; any other",)),
        ("ratio: true", ("ratio is true", "a number")),
        ("ratio: half", ("ratio is 'half'", "a number")),
        ("symmetric: 1", ("symmetric is 1", "true or false")),
        ("symmetric: yes", ("symmetric is 'yes'", "true or false")),
        ("numa: aut", ("a whole number or auto", "Did you mean 'auto'?")),
        ("per_layer: [1, x]", ("per_layer is 1 and 'x'", "a list, each a whole number or null")),
        ("per_layer: {a: 1}", ("per_layer is a mapping",)),
        ("needed: 3", ("needed is 3", "text")),
    ],
)
def test_arguments(argument: str, words: tuple[str, ...]) -> None:
    written = "\n    operator: o" + ("" if "needed" in argument else "\n    needed: x") + f"\n    {argument}"
    found = read_rule(replace=written)
    line = 4 if "13" in argument else 8 if "needed" in argument else 9
    with refused(*words, at=f"f:{line}: rule 'r': "):
        rules.check_arguments(found, Arguments)


def test_a_missing_argument() -> None:
    with refused("o needs needed", at="f:4: rule 'r': "):
        rules.check_arguments(read_rule(replace="{operator: o}"), Arguments)


def test_an_unknown_operator() -> None:
    error = rules.unknown_operator(
        read_rule(replace="{operator: cpu_expert}"), ["cpu_experts", "int4_linear"]
    )
    assert str(error).startswith(
        "f:4: rule 'r': unknown operator 'cpu_expert'; registered are cpu_experts, int4_linear and keep."
    )
    assert "Did you mean 'cpu_experts'?" in str(error)
