"""The examples of docs/reference/rules.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktinject import rules
from ktinject.errors import RuleError
from ktinject.operators import REGISTRY

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "rules.md"

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def test_the_examples_of_the_reference() -> None:
    """Whole documents are read, lists of rules too, Python is run, and the refusals are those of the text."""
    blocks = BLOCK.findall(REFERENCE.read_text("utf-8"))
    kinds = [kind for kind, _ in blocks]
    assert kinds.count("yaml") >= 4 and kinds.count("python") >= 1
    refused = 0
    for number, (kind, body) in enumerate(blocks):
        if kind == "yaml":
            data = (
                body
                if body.lstrip().startswith(("version:", "# yaml-language-server"))
                else f"version: 1\nrules:\n{body}"
            )
            following = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
            if following[0] == "text" and following[1].startswith("rules.yaml:"):
                refused += 1
                with pytest.raises(RuleError) as error:
                    for found in rules.parse(data.encode(), "rules.yaml").rules:
                        rules.check_arguments(found, REGISTRY[found.operator].Config)
                assert str(error.value).split() == following[1].split()
            else:
                for found in rules.parse(data.encode(), "rules.yaml").rules:
                    if found.operator in REGISTRY:
                        rules.check_arguments(found, REGISTRY[found.operator].Config)
        elif kind == "python":
            exec(compile(body, "rules.md", "exec"), {})
    assert refused >= 1
