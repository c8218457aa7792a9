"""Tables on terminals of every width: nothing is lost, and no part of a name is broken."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from trained import trained_model
from transformers import AutoConfig, AutoModelForCausalLM

import ktinject
from ktinject.grid import Grid, Lines, fold


@pytest.mark.parametrize(
    "text, width, lines",
    [
        ("model.layers.0.self_attn.kv_a_proj", 40, ["model.layers.0.self_attn.kv_a_proj"]),
        ("model.layers.0.self_attn.kv_a_proj", 15, ["model.layers.0.", "self_attn.", "kv_a_proj"]),
        ("model.layers.0.self_attn.kv_a_proj", 8, ["model.", "layers.0.", "self_", "attn.kv_", "a_proj"]),
        ("10 × DeepseekV3TopkRouter", 22, ["10 ×", "DeepseekV3TopkRouter"]),
        ("amx_bf16, avx512_bf16 for few rows", 16, ["amx_bf16,", "avx512_bf16 for", "few rows"]),
        ("/sys/kernel/mm/transparent_hugepage", 16, ["/sys/kernel/mm/", "transparent_", "hugepage"]),
        ("0.25 or 12.5", 4, ["0.25", "or", "12.5"]),
        ("two\n\nparagraphs of it", 13, ["two", "", "paragraphs of", "it"]),
        ("", 5, [""]),
    ],
)
def test_where_lines_are_folded(text: str, width: int, lines: list[str]) -> None:
    assert fold(text, width) == lines


def shown(thing: Any, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(thing)
    return out.getvalue().splitlines()


def words(lines: list[str]) -> set[str]:
    return set(re.findall(r"[A-Za-z0-9]+", "\n".join(lines)))


@pytest.fixture(scope="module")
def plan() -> ktinject.Plan:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(trained_model("tiny-deepseek-v3"))
        )
    return ktinject.plan(model, "auto", devices=["cpu"])


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("what", ["plan", "doctor"])
def test_tables_on_a_terminal(what: str, width: int, plan: ktinject.Plan) -> None:
    thing: Any = plan if what == "plan" else ktinject.doctor()
    lines = shown(thing, width)
    assert max(map(len, lines)) <= width
    titles = words([*lines[:3], "operator kernel weights device"])  # which a narrow plan has in pairs
    assert words(lines) | titles == words(shown(thing, 1000)) | titles


def test_numbers_are_not_folded_and_brackets_are_not_markup() -> None:
    grid = Grid(
        ("name", "a long title"), [("x" * 30 + " [bold] " + "y" * 30, "100% (64 of 64)")], ["a long title"]
    )
    lines = grid.lines(50)
    assert lines[0].endswith("a long title") and lines[2].endswith("100% (64 of 64)")
    assert "[bold]" in "\n".join(shown(grid, 50)) and max(map(len, shown(grid, 50))) <= 50


def test_what_is_too_narrow_for_the_table_shows_the_other_one() -> None:
    grid = Grid(("a", "b"), [("x" * 30, "y" * 30)], narrow=Grid(("both",), [("x" * 30 + "\n" + "y" * 30,)]))
    assert "both" in grid.lines(40)[0] and "both" not in grid.lines(70)[0]
    # Where nothing fits, nothing is lost.
    assert words(grid.lines(10)) == {"both", "x" * 30, "y" * 30}


def test_no_rows() -> None:
    assert Grid(("a", "b"), []).lines(80) == [" a   b", " ─────"]


def test_lines() -> None:
    assert shown(Lines(["one two [three]", "model.layers.0.mlp"]), 12) == [
        "one two",
        "[three]",
        "model.",
        "layers.0.mlp",
    ]
