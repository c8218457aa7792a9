"""`ktinject eval` on tiny models."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ktinject.cli import eval
from ktinject.tools import evaluate

TEXT = "import os\n\n\ndef walk(top):\n    for name in os.listdir(top):\n        yield name\n" * 3


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n\n" for prompt in ("def f(", "class A:\n")))
    return file


def test_as_json(as_json, tiny_qwen3_moe, text, prompts):
    arguments = ["--text", text, "--prompts", prompts, "--tokens", 100, "--window", 40, "--max-new-tokens", 5]
    variants = ["--variant", "experts=bf16", "--variant", "experts=int4,group_size=32"]
    answer = as_json("eval", tiny_qwen3_moe, *arguments, *variants)
    bf16, int4 = answer["results"]
    assert int4["variables"] == {"experts": "int4", "group_size": 32}
    ids = torch.tensor(AutoTokenizer.from_pretrained(tiny_qwen3_moe)(TEXT)["input_ids"][:100])
    expected = evaluate.perplexity(AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe), ids, window=40)
    for result in (bf16, int4):
        # Windows of 40, 40 and 20 tokens; the first of each is not predicted.
        assert result["divergence"]["tokens"] == 97
        assert result["divergence"]["perplexity_a"] == pytest.approx(expected, rel=1e-6)
        assert (result["agreement"]["prompts"], result["agreement"]["tokens"]) == (2, 10)
    assert 0 < bf16["divergence"]["mean_nats"] < int4["divergence"]["mean_nats"]


def test_as_table(ktinject, tiny_deepseek_v3, text, prompts):
    arguments = ["--text", text, "--prompts", prompts, "--tokens", 60, "--max-new-tokens", 4]
    output = ktinject("eval", tiny_deepseek_v3, *arguments, "--set", "experts=int8").stdout
    assert "\n unswapped " in output and "\n experts=int8 " in output and "of 2" in output
    assert f"59 predictions on {text}, in windows of 512 tokens; 2 prompts" in output


def test_against_other_rules(as_json, tiny_qwen3_moe, text):
    """Rules against themselves differ in nothing; without prompts there is no agreement."""
    arguments = ["--text", text, "--tokens", 50, "--rules", "qwen3-moe", "--against", "qwen3-moe"]
    (result,) = as_json("eval", tiny_qwen3_moe, *arguments)["results"]
    assert result["divergence"]["mean_nats"] == 0.0
    assert result["agreement"] is None


DEFERRED = """
version: 1
variables: {deferred: 0}
rules:
  - name: experts
    match: {class: Qwen3MoeSparseMoeBlock}
    replace: {operator: deferred_moe, deferred: "${variables.deferred}"}
"""


def test_deferred_experts_are_read_token_by_token(ktinject, as_json, tiny_qwen3_moe, text, tmp_path):
    rules = tmp_path / "deferred.yaml"
    rules.write_text(DEFERRED)
    arguments = [tiny_qwen3_moe, "--text", text, "--tokens", 60, "--rules", rules, "--against", rules]
    variants = ["--variant", "deferred=0", "--variant", "deferred=2"]
    none, two = as_json("eval", *arguments, *variants)["results"]
    assert (none["decode"], two["decode"]) == (False, True)
    assert none["divergence"]["mean_nats"] == 0.0 < two["divergence"]["mean_nats"]
    (whole,) = as_json("eval", *arguments, "--set", "deferred=2", "--no-decode")["results"]
    assert whole["divergence"]["mean_nats"] == 0.0, "read at once, nothing is deferred"
    said = ktinject("eval", *arguments, *variants).stdout
    assert "the text was read token by token for deferred=2\n" in said


def test_files_at_the_model_and_beside_it(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    assert eval._beside(model, "heldout.txt") is None
    (tmp_path / "heldout.txt").touch()
    assert eval._beside(model, "heldout.txt") == tmp_path / "heldout.txt"
    (model / "heldout.txt").touch()
    assert eval._beside(model, "heldout.txt") == model / "heldout.txt"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--text FILE"),
        (["--text", "TEXT", "--rules", "nothing"], "nothing"),
        (["--text", "TEXT", "--variant", "experts=bf16", "--variant", "experts=int9"], "'int9'"),
        (["--text", "TEXT", "--budget", "cpu=1KiB"], "does not fit"),
        (
            ["--text", "TEXT", "--max-new-tokens", 510, "--prompts", "PROMPTS"],
            "prompts.jsonl:1: a prompt of 6 tokens",
        ),
        (["--text", "/no/such/file"], "cannot be read"),
        (["--text", "TEXT", "--window", 600], "2 to 512"),
        (["--text", "TEXT", "--variant", "experts"], "name=value"),
        (["--text", "TEXT", "--variant", "experts=int8", "--variant", "experts=int8"], "twice"),
        (["--text", "TEXT", "--against", "nothing"], "nothing"),
        (["--text", "TEXT", "--prompts", "TEXT"], "text.txt:1: found 'import os'"),
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_refused(ktinject, tiny_qwen3_moe, text, prompts, arguments, says):
    arguments = [{"TEXT": text, "PROMPTS": prompts}.get(argument, argument) for argument in arguments]
    assert says in ktinject("eval", tiny_qwen3_moe, *arguments, exit_code=2).stderr


def test_not_utf_8(ktinject, tiny_qwen3_moe, tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("é".encode("latin-1"))
    assert "in UTF-8" in ktinject("eval", tiny_qwen3_moe, "--text", file, exit_code=2).stderr
