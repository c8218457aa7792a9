"""lm-eval-harness on a swapped model; where it is installed, for it brings much along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from byte_tokenizer import tokenizer
from test_native_decoder import doubled, swapped

from tests.models import tiny

lm_eval = pytest.importorskip("lm_eval")

CHOICE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
"""
WRITE = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_both_kinds_of_tasks(tmp_path: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    rows = [
        {"text": f"After {i} comes", "choices": [f" {i + 1}", f" {i + 7}"], "answer": 0} for i in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, text in (("choice", CHOICE), ("write", WRITE)):
        files = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        files += "test_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(f'task: tiny_{name}\n{files}doc_to_text: "{{{{text}}}}"{text}')
    words = tokenizer()
    model = swapped("qwen3_moe", vocab_size=len(words))
    found = {}
    for name, each in (
        ("swapped", model),
        ("plain", doubled(tiny("qwen3_moe", vocab_size=len(words)).bfloat16())),
    ):
        found[name] = lm_eval.simple_evaluate(
            model=HFLM(pretrained=each, tokenizer=words, batch_size=2, max_length=64),
            tasks=["tiny_choice", "tiny_write"],
            task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
            bootstrap_iters=0,
        )["results"]
    assert found["swapped"] == found["plain"] and len(found["plain"]) == 2
    assert model.ktinject_decoding.last == "native, stock loop: MultiTokenEOSCriteria"
