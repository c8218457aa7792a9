"""`ktinject profile` on tiny models: what it counts, and that a rule can use it."""

from __future__ import annotations

import json

import pytest
import torch

import ktinject as library
from ktinject.cli.profile import coverage
from ktinject.operators.offload import gpu_experts


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("def f(", "class A:\n")))
    return file


@pytest.mark.parametrize("operator", ["hybrid_experts", "deferred_moe"])
def test_counts_are_those_of_the_router(as_json, tiny_qwen3_moe, tmp_path, prompts, operator):
    out = tmp_path / "routing.json"
    path = r".*\.experts" if operator == "hybrid_experts" else r".*\.mlp"
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        f"version: 1\nrules:\n  - {{name: e, match: {{path: '{path}'}}, replace: {{operator: {operator}}}}}\n"
    )
    arguments = [
        "--prompts",
        prompts,
        "--out",
        out,
        "--rules",
        rules,
        "--max-new-tokens",
        1,
        "--device",
        "cpu",
    ]
    answer = as_json("profile", tiny_qwen3_moe, *arguments)
    assert answer["tokens"] == len("def f(") + len("class A:\n")
    found = gpu_experts.read_profile(str(out))
    assert [*found] == [f"model.layers.{layer}.mlp.experts" for layer in range(3)]

    model = library.load(tiny_qwen3_moe, devices=["cpu"], progress=False)
    want = {path: [0] * 8 for path in found}
    for layer in range(3):
        experts = model.model.layers[layer].mlp.experts
        counts = want[f"model.layers.{layer}.mlp.experts"]

        def count(module, args, counts=counts):
            for expert in args[1].flatten().tolist():
                counts[expert] += 1

        experts.register_forward_pre_hook(count)
    with torch.inference_mode():
        for prompt in ("def f(", "class A:\n"):
            ids = library.cli.options.load_tokenizer(tiny_qwen3_moe)(prompt)["input_ids"]
            model(torch.tensor(ids)[None])
    assert found == want


def test_the_table_and_the_default_place(ktinject, tiny_deepseek_v3, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the model's folder may be the Hub's cache, or another's
    output = ktinject("profile", tiny_deepseek_v3, "--prompts", prompts, "--max-new-tokens", 4).stdout
    assert "tiny-deepseek-v3.profile.json" in output and "of the routing" in output
    # The first layer is dense; the model sees the prompts and three of the four tokens it writes, if none ends it.
    found = gpu_experts.read_profile(str(tmp_path / "tiny-deepseek-v3.profile.json"))
    assert [*found] == [f"model.layers.{layer}.mlp.experts" for layer in (1, 2)]


def test_coverage():
    experts = {"a": [8, 1, 1, 0], "b": [0, 0, 5, 5]}
    assert coverage(experts, 0.25) == (8 + 5) / 20
    assert coverage(experts, 0.5) == (9 + 10) / 20
    assert coverage(experts, 1.0) == 1


@pytest.mark.usefixtures("nothing_is_loaded")
def test_refusals(ktinject, tiny_qwen3_moe, tmp_path, prompts):
    norms = tmp_path / "norms.yaml"
    norms.write_text(
        "version: 1\nrules: [{name: n, match: {class: Qwen3MoeRMSNorm}, replace: {operator: rms_norm}}]\n"
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for arguments, match in [
        (["--prompts", empty], "there is no prompt in it"),
        (["--prompts", prompts, "--rules", norms], "there is nothing to count"),
        (["--prompts", tmp_path / "absent.jsonl"], "cannot be read"),
        (["--prompts", prompts, "--out", tmp_path / "profile.txt"], "end in .json"),
        (
            ["--prompts", prompts, "--max-new-tokens", 505],
            "prompts.jsonl:2: a prompt of 9 tokens and 505 new ones",
        ),
        (["--prompts", prompts, "--out", tmp_path / "no" / "profile.json"], "no file can be written there"),
    ]:
        answer = ktinject("profile", tiny_qwen3_moe, *arguments, "--device", "cpu", exit_code=2)
        assert match in answer.stderr
