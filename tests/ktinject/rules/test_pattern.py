"""The dialect of patterns, and the time they may take."""

from __future__ import annotations

import pytest
from rule_texts import HEAD, parse, quick, read_rule, refused, rule

from ktinject import rules
from ktinject.rules.pattern import compiled


def test_patterns_of_the_dialect() -> None:
    for pattern in (
        r"(?i)a",
        r"(?i:a)|b",
        r"(?:a)(?=b)(?!c)(?<=a)(?<!b)b*",
        r"[(?{]\(\{",
        r"a{2}b{1,3}c{2,}",
        r"[]{]\\",
        "(a|b)+",
    ):
        assert compiled(pattern)


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


def test_large_patterns_of_many_rules_are_refused_together() -> None:
    """Compiling 500 of these would take two minutes and gigabytes."""
    large = f"(?:{'a?' * 400}){{1000}}"
    written = "".join(rule(f"{{path: '{large}{n}'}}", name=f"r{n}") for n in range(500))
    with quick(), refused("characters times counts may be at most 1,000,000", at="f:8: rule 'r1': "):
        parse(HEAD + written)
