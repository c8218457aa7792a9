"""Rule files that are refused, and files of KTransformers 0.x that are migrated, with what is expected of them.

A file in `files` holds cases: `=== name`, the document, a line that begins with `---`, and what is expected. An
ellipsis stands for any text, such as the names of all operators.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.operators import REGISTRY
from ktinject.rules.migrate import migrate_bytes

FILES = Path(__file__).parent / "files"


def cases(name: str) -> list[tuple[str, str, list[str]]]:
    """Name, document and expected lines of each case."""
    found = []
    for case in re.split(r"^=== ", (FILES / name).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, rest = case.partition("\n")
        text, _, expected = re.split(r"^(---) .*\n", rest, maxsplit=1, flags=re.MULTILINE)
        found.append((title, text, expected.splitlines()))
    return found


BROKEN, MIGRATED = cases("broken.txt"), cases("migrated.txt")


def told(error: RuleError) -> list[str]:
    """`line:column text` of each refusal, without the file's name."""
    lines = []
    for place in rules.places(error):
        at = f"{place['line']}:{place['column']} " if "line" in place else ""
        lines.append(at + re.sub(r"^[\w.-]+(:\d+)*: ?", "", place["text"]))
    return lines


def is_like(found: list[str], expected: list[str]) -> bool:
    patterns = [".*".join(map(re.escape, line.split("…"))) for line in expected]
    return len(found) == len(patterns) and all(map(re.fullmatch, patterns, found))


def check(rule: rules.Rule) -> None:
    if rule.operator == rules.KEEP:
        return
    if rule.operator not in REGISTRY:
        raise rules.unknown_operator(rule, REGISTRY)
    rules.check_arguments(rule, REGISTRY[rule.operator].Config)


def test_there_are_many() -> None:
    assert len(BROKEN) >= 60 and len(MIGRATED) >= 40
    for files in (BROKEN, MIGRATED):
        assert len({title for title, _, _ in files}) == len({text for _, text, _ in files}) == len(files)


@pytest.mark.parametrize(("title", "text", "expected"), BROKEN, ids=[title for title, _, _ in BROKEN])
def test_broken_files(title: str, text: str, expected: list[str]) -> None:
    with pytest.raises(RuleError) as error:
        rules.parse(text.encode(), "f", check=check)
    assert is_like(told(error.value), expected), told(error.value)
    # Every column is one of the line, so that the caret is below it.
    lines = text.split("\n")
    for place in rules.places(error.value):
        assert "line" not in place or 1 <= place["column"] <= len(lines[place["line"] - 1]) + 1
    assert rules.pointed(error.value).count("^") >= sum(
        "line" in place for place in rules.places(error.value)
    )


@pytest.mark.parametrize(("title", "text", "expected"), MIGRATED, ids=[title for title, _, _ in MIGRATED])
def test_migrations(title: str, text: str, expected: list[str]) -> None:
    mistakes = [line.removeprefix("! ") for line in expected if line.startswith("! ")]
    wanted = [line for line in expected if not line.startswith("! ")]
    name = "for-amx.yaml" if "AMX" in title else "f"
    if not wanted:
        with pytest.raises(RuleError) as error:
            migrate_bytes(text.encode(), name)
        assert is_like(told(error.value), mistakes), told(error.value)
        return
    found = migrate_bytes(text.encode(), name)
    devices = [f"# {', '.join(found.devices)}"] if found.devices else []
    head, _, body = found.text.partition("\nrules:\n")
    assert is_like([*devices, *body.splitlines()], wanted), found.text
    assert is_like([line for problem in found.problems for line in told(problem)], mistakes), found.problems
    # What the old file named by number is a budget now.
    numbered = [device for device in found.devices if device.startswith("cuda")]
    assert all(f"--device {device}" in head and f"{device}=" in head for device in numbered)
    rules.parse(found.text.encode(), "new", check=check)


def test_what_is_matched_stays_what_was_found() -> None:
    """Patterns are searched for there and match whole paths here."""
    from ktinject.rules.legacy import anchored
    from ktinject.rules.pattern import fullmatch

    paths = [
        "model.layers.3.mlp.experts",
        "model.layers.3.mlp.experts.7",
        "lm_head",
        "model.norm",
        "model",
        "a.lm_head$",
    ]
    names = ["experts", "experts$", "^model", "^model$", "^lm_head$|norm", "model.(norm|layers)", r"head\$", "^.*norm$",
             "experts.*", r"a\.", r"[$]$", "^(lm_head|model.norm)$", "", ".*", r"\.\d+$"]  # fmt: skip
    for name in names:
        for path in paths:
            assert fullmatch(anchored(name), path) == bool(re.search(name, path)), (name, path)


def test_a_migrated_file_means_the_same_modules() -> None:
    old = "".join(text for title, text, _ in MIGRATED if title in ("a router", "experts of llamafile"))
    new = rules.parse(migrate_bytes(old.encode(), "f").text.encode(), "new")
    modules: list[rules.Module] = [
        (f"model.layers.{layer}{tail}", ("Module",), layer)
        for layer in range(2)
        for tail in (".mlp", ".mlp.gate", ".mlp.experts", ".self_attn")
    ]
    from ktinject.support import SUPPORTED, Support

    def has_role(path: str, role: str) -> Support:
        ends = {"router": ".gate", "routed_experts": ".experts"}
        return SUPPORTED if path.endswith(ends[role]) else Support.no("another module")

    matched = rules.assign(new, modules, has_role=has_role).matched
    assert {name: len(paths) for name, paths in matched.items()} == {"router, exact": 2, "routed experts": 2}
