"""The documentation against the code: pages, links, commands, rules."""

from __future__ import annotations

import ast
import csv
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import prepared
import pytest
import torch
import typer
from trained import trained_model
from transformers import AutoConfig, AutoModelForCausalLM

import ktinject
from ktinject import RuleError, rules
from ktinject.cli import app
from ktinject.operators import REGISTRY

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/reference/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "operators.md", "python.md"])
def test_generated_page(generator, name):
    found = (ROOT / "docs/reference" / name).read_text()
    assert found == generator.page(name), "run `python docs/reference/generate.py`"


def test_the_schema_beside_the_bundled_rules_is_generated(generator):
    assert generator.SCHEMA.read_text() == generator.schema(), "run `python docs/reference/generate.py`"


def test_every_argument_of_an_operator_is_described(generator):
    assert not [line for line in generator.operators() if line.startswith("| `") and line.endswith("|  |")]


def test_every_variable_of_the_environment_is_described():
    read = set(re.findall(r"KTINJECT_[A-Z]+", (ROOT / "ktinject/env.py").read_text()))
    assert read == set(re.findall(r"KTINJECT_[A-Z]+", (ROOT / "docs/reference/environment.md").read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        if "://" not in link:
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "cli.md"], ids=lambda page: page.name
)
def test_commands_exist(page):
    """Every `ktinject …` in a block is a command, and its options are that command's."""
    text = "\n".join(blocks(page, "")).replace("\\\n", " ")
    for line in re.findall(r"^(?:\$ )?ktinject ([a-z].*)$", text, re.MULTILINE):
        command = typer.main.get_command(app)
        words = shlex.split(line, comments=True)
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        options = {
            name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]
        }
        assert {word for word in words if word.startswith("--")} <= options, line


@pytest.mark.parametrize("name", ["quickstart.py", "own_operator.py"])
def test_example_runs(name):
    assert "cpu_experts" in prepared.run(ROOT / "examples" / name, check=True).stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_rule_files_are_read(page):
    for text in blocks(page, "yaml"):
        if text.startswith("version:"):
            assert rules.parse(text.encode(), page.name).rules


def test_files_that_the_architecture_names_are_there():
    named = re.findall(r"`([a-z_]+/[\w/.]+)`", (ROOT / "ARCHITECTURE.md").read_text())
    assert len(named) > 15
    assert not [name for name in named if not any((ROOT / top / name).exists() for top in ("", "ktinject"))]


def test_the_plan_of_the_tutorial_is_the_one_that_comes():
    """Rules, modules and operators; kernels and bytes free are the machine's."""

    def columns(text):
        lines = (
            re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.search(r"\d+ × ", line)
        )
        return [line[:3] for line in lines]

    folder = trained_model("tiny-deepseek-v3")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    found = columns(str(ktinject.plan(model, "auto", devices=["cpu"])))
    command = "$ ktinject plan examples/models/tiny-deepseek-v3\n"
    (block,) = (text for text in blocks(ROOT / "docs/tutorial.md", "") if text.startswith(command))
    shown = columns(block)
    assert len(found) > 5 and found == shown


def test_the_refusal_of_the_tutorial_is_the_one_that_comes():
    page = ROOT / "docs/tutorial.md"
    (mine,) = (text for text in blocks(page, "yaml") if text.startswith("version:"))
    first = rules.parse(mine.replace("weights: bf16", "weigths: bf16").encode(), "mine.yaml").rules[0]
    with pytest.raises(RuleError) as refusal:
        rules.check_arguments(first, REGISTRY[first.operator].Config)
    assert f"ktinject: {refusal.value}\n" in page.read_text()


def test_the_table_of_deferral_is_what_was_measured(capsys):
    spec = importlib.util.spec_from_file_location("accuracy", ROOT / "benchmarks/deferral_accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with (ROOT / "benchmarks/deferral-accuracy.csv").open(newline="") as file:
        module.table(list(csv.DictReader(file)))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 18
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert "\n".join(lines) in page, "run `python benchmarks/deferral_accuracy.py --draw` and copy its table"


def said() -> list[str]:
    """All text in the sources, "\\0" for what is filled in."""

    def of(node):
        if isinstance(node, ast.JoinedStr):
            return "".join(of(part) for part in node.values)
        if isinstance(node, ast.Constant):
            return str(node.value)
        return "\0"

    found = [(ROOT / "Makefile").read_text(), (ROOT / "native/gemm/backends.cpp").read_text()]
    for folder in ("ktinject", "operators"):
        for file in (ROOT / folder).rglob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text()))
            found += [of(node) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return found


def test_every_message_of_the_troubleshooting_page_is_one_of_the_sources():
    text = (ROOT / "docs/how-to/troubleshoot.md").read_text()
    messages = re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)
    assert len(messages) > 40
    sources = said()
    patterns = {message: re.compile(".*".join(map(re.escape, message.split("…")))) for message in messages}
    assert not [text for text, pattern in patterns.items() if not any(map(pattern.search, sources))]


def test_the_snippet_of_the_readme_is_the_example():
    (snippet,) = blocks(ROOT / "README.md", "python")
    example = (ROOT / "examples/quickstart.py").read_text()
    lines = [line for line in snippet.splitlines() if line and not line.startswith("path = ")]
    assert len(lines) > 8 and not [line for line in lines if line not in example.splitlines()]


def test_the_picture_of_the_readme_is_drawn_from_the_results(monkeypatch):
    spec = importlib.util.spec_from_file_location("plot_peers", ROOT / "benchmarks/plot_peers.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    with module.RESULTS.open(newline="") as file:
        picture = module.draw(list(csv.DictReader(file)))
    assert picture == (ROOT / "docs/images/peers.svg").read_text(), "run `python benchmarks/plot_peers.py`"
