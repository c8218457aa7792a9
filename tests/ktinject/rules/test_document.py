"""Bytes and YAML: what is read, and what is refused with its place, in little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rule_texts import DESIGN_EXAMPLE, MIB, quick, refused

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.rules import document

PARSERS = sorted({document.PARSER, yaml.SafeLoader}, key=str)  # libyaml's where it is there, and PyYAML's own


def test_a_bom_and_windows_line_ends_are_fine() -> None:
    data = b"\xef\xbb\xbf" + DESIGN_EXAMPLE.replace("\n", "\r\n").encode()
    assert rules.parse(data, "f.yaml").rules[1].where == "f.yaml:16"


def test_json_is_read_too() -> None:
    data = json.dumps({"version": 1, "rules": [{"name": "a", "match": {"class": "B"}, "replace": "keep"}]})
    assert rules.parse(data.encode(), "f").rules[0].match.class_name == "B"


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("3", 3), ("-1", -1), ("0.25", 0.25), (".5", 0.5), ("1e3", 1000.0), ("true", True), ("False", False),
        ("null", None), ("~", None), ("", None), ("'3'", "3"), ('"true"', "true"), ("yes", "yes"), ("off", "off"),
        ("0o17", "0o17"), ("0x1f", "0x1f"), ("1_000", "1_000"), ("1:30", "1:30"), ("2026-01-01", "2026-01-01"),
        ("010", "010"), (".inf", ".inf"), (".nan", ".nan"), ("[1, a]", [1, "a"]), ("{k: 1}", {"k": 1}),
    ],
)  # fmt: skip
def test_plain_scalars_have_the_types_of_yaml_1_2(written: str, value: object, parser: Any) -> None:
    found = document.from_bytes(f"a: {written}\n".encode(), "f", parser).plain()["a"]
    assert found == value and type(found) is type(value)


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
        (b"a: 1\nb: *x\n", "f:2: ", "the alias '*x' has no anchor before it"),
        (b"a: 1\nb: &x [*x]\n", "f:2: ", "'*x' refers to what it stands in"),
        (b"a: &x 1\nb: &x {c: *x}\n", "f:2: ", "'*x' refers to what it stands in"),
        (b"a: &x 1\n*x : 2\n", "f:2: ", "key 1 is not text"),
        (b"a: &x [1]\n*x : 2\n", "f:2: ", "the key a list or mapping is not text"),
        (b"a: &x [1]\nb: {<<: *x}\n", "f:2: ", "<< is a list; it merges a mapping"),
        (b"a: {<<: 1}\n", "f:1: ", "<< is 1; it merges a mapping"),
        (b"a: {<<: []}\n", "f:1: ", "<< is an empty list"),
        (b"a: {<<: {b: 1}, <<: {c: 1}}\n", "f:1: ", "the key '<<' is given twice"),
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
    ("written", "value"),
    [
        ("a: &x [1, b]\nc: *x", {"a": [1, "b"], "c": [1, "b"]}),
        ("a: &x 1\nb: *x\nc: &x 2\nd: *x", {"a": 1, "b": 1, "c": 2, "d": 2}),
        ("&k a: 1\nb: *k", {"a": 1, "b": "a"}),
        ("a: &x b\n*x : 1", {"a": "b", "b": 1}),
        ("a: &x {i: 1, j: 2}\nb: {j: 3, <<: *x, k: 4}", {"a": {"i": 1, "j": 2}, "b": {"j": 3, "k": 4, "i": 1}}),
        ("a: {<<: [{i: 1}, {i: 2, j: 3}]}", {"a": {"i": 1, "j": 3}}),
        ("a: &x {i: 1}\nb: &y {<<: *x, j: 2}\nc: {<<: *y, i: 3}", {"a": {"i": 1}, "b": {"j": 2, "i": 1},
                                                                  "c": {"i": 3, "j": 2}}),
        ("a: {'<<': {i: 1}}", {"a": {"<<": {"i": 1}}}),
        ("a: &x null\nb: *x", {"a": None, "b": None}),
    ],
)  # fmt: skip
def test_anchors_aliases_and_merge_keys(written: str, value: object, parser: Any) -> None:
    assert document.from_bytes(written.encode(), "f", parser).plain() == value


def test_all_that_is_wrong_with_keys_and_values_is_told_at_once() -> None:
    data = b"a: 1\na: 2\nb: !!str x\n3: c\nd: [!t 1, *x"
    with pytest.raises(RuleError) as error:
        document.from_bytes(data, "f")
    assert [part.where for part in error.value.parts] == ["f:2", "f:3", "f:4", "f:5", "f:5"]
    assert len(str(error.value).splitlines()) == 5


def test_nodes_know_their_columns() -> None:
    node = document.from_bytes("a: 1\n\u00e4\u4e16: {b: 'xy',\n  c: [1, z]}".encode(), "f")
    outer = node.value["\u00e4\u4e16"]
    inner = outer.value["b"]
    third = outer.value["c"].value[1]
    assert [(n.where, n.where.line, n.where.column, n.where.width) for n in (outer, inner, third)] == [
        ("f:2", 2, 5, 1), ("f:2", 2, 9, 4), ("f:3", 3, 10, 1)
    ]  # fmt: skip
    assert (inner.key.column, inner.key.width, inner.key.lines[1]) == (6, 1, "\u00e4\u4e16: {b: 'xy',")


BOMBS: list[tuple[bytes, str]] = [
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
        ), "more than 20,000 values, aliases written out"),
        (b"a: &a {y: 1}\n" + b"".join(
            b"%c: &%c {<<: [%s], x%d: 1}\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9), c) for c in range(98, 123)
        ), "more than 20,000 values, aliases written out"),
        (b"a: &a x\n" + b"b: [" + b"*a," * (MIB // 4) + b"]", "more than 20,000 values"),
        (b"a0: &a0 x\n" + b"".join(b"a%d: &a%d [*a%d]\n" % (n, n, n - 1) for n in range(1, 5000)),
         "nested deeper than 16"),
        (b"a: {<<: {b: 1}}\nc: {<<: *x}", "has no anchor"),
        (b":" * MIB, "malformed"),
        (b"[" + b"a " * (MIB // 2 - 1), "malformed"),
        (b"&a " * 300_000, "malformed"),
        (b"".join(b"&a%d x%d: 1\n" % (n, n) for n in range(9000)) + b"b: [", "malformed"),
        (b"#" * MIB, "empty"),
]  # fmt: skip
REFUSE = """
import json, resource, sys, time, yaml
from pathlib import Path
from ktinject import rules
from ktinject.errors import RuleError
from ktinject.rules.document import from_bytes

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

rules.read("mixtral")
before, said = peak(), []
for file in sys.argv[2:]:
    data, started = Path(file).read_bytes(), time.process_time()
    try:
        from_bytes(data, "f", getattr(yaml, sys.argv[1]))
        said.append(["it was not refused", 0])
    except RuleError as error:
        said.append([str(error), time.process_time() - started])
print(json.dumps([peak() - before, said]))
"""


@pytest.mark.parametrize(
    "parser",
    [
        pytest.param(found.__name__, marks=[] if found is document.PARSER else [pytest.mark.nightly])
        for found in PARSERS
    ],
)
def test_bombs_are_refused_in_a_second_and_50_mib(parser: str, tmp_path: Path) -> None:
    """libyaml's memory is not seen by tracemalloc, so a process of its own asks the system."""
    files = [tmp_path / str(number) for number in range(len(BOMBS))]
    for file, (data, _) in zip(files, BOMBS):
        file.write_bytes(data)
    command = [sys.executable, "-c", REFUSE, parser, *map(str, files)]
    mib, said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for (text, seconds), (_, word) in zip(said, BOMBS, strict=True):
        assert text.startswith("f") and word in text and "; " in text and text[-1] in ".?", text
        assert seconds < 5, "of processor time, for machines that do other things"
    assert mib < 50 or not sys.platform.startswith("linux"), "elsewhere it is counted otherwise"
