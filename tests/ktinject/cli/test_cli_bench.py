"""`ktinject bench` on a tiny model, and beside a llama-bench."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from ktinject.cli.bench import llama_rows
from ktinject.errors import PlanError

FAST = ("-p", 8, "-p", 12, "-n", 4, "-r", 2)


def test_json_has_every_repetition(ktinject, tiny_qwen3_moe):
    found = json.loads(ktinject("bench", tiny_qwen3_moe, *FAST, "--breakdown", "-o", "json").stdout)
    assert [row["test"] for row in found["results"]] == ["pp8", "pp12", "tg4"]
    for row in found["results"]:
        assert len(row["repetitions"]) == 2 and all(rate > 0 for rate in row["repetitions"])
        assert sum(row["repetitions"]) / 2 == pytest.approx(row["tokens_per_second"])
        assert row["experts"] == "bf16" and row["bytes"] > 0
    where = found["breakdown"]
    assert len(where["layers"]) == 3
    assert 0 < where["cpu"] < where["step"] and where["gpu"] == 0
    for name in ("step", "gpu", "cpu", "handoff", "idle"):
        assert sum(layer[name] for layer in where["layers"].values()) == pytest.approx(where[name])


def test_csv_and_markdown_hold_the_same_tests(ktinject, tiny_qwen3_moe):
    rows = list(csv.DictReader(io.StringIO(ktinject("bench", tiny_qwen3_moe, *FAST, "-o", "csv").stdout)))
    assert [row["test"] for row in rows] == ["pp8", "pp12", "tg4"]
    lines = ktinject("bench", tiny_qwen3_moe, *FAST).stdout.splitlines()
    assert lines[0].startswith("| model") and len(lines) == 5 and " ± " in lines[-1]


def test_the_trace_holds_the_experts(ktinject, tiny_qwen3_moe, tmp_path):
    trace = tmp_path / "trace.json"
    ktinject("bench", tiny_qwen3_moe, "-n", 4, "-r", 1, "--trace", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    experts = [event for event in events if event.get("cat") == "cpu_experts"]
    steps = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    assert {event["name"] for event in experts} == {f"model.layers.{n}.mlp.experts" for n in range(3)}
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    assert all(begin <= event["ts"] and event["ts"] + event["dur"] <= end for event in experts), "one clock"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "found neither MODEL nor --shape"),
        (("--shape", "qwen3"), "allowed: qwen3-30b-a3b"),
        (("--shape", "qwen3-30b-a3b", "--llama-bench", sys.executable), "go together"),
    ],
)
def test_refusals(ktinject, arguments, message):
    assert message in ktinject("bench", *arguments, exit_code=2).stderr.replace("\n", " ")


def test_layers_belong_to_a_shape(ktinject, tiny_qwen3_moe):
    assert "--layers is for --shape" in ktinject("bench", tiny_qwen3_moe, "--layers", 2, exit_code=2).stderr


def test_llama_bench_is_run_and_read(tmp_path, monkeypatch):
    """A program that answers as llama-bench does, and one that fails."""
    program = tmp_path / "llama-bench"
    row = {
        "model_type": "qwen3moe", "build_commit": "abc", "backends": "CUDA", "model_size": 7, "n_threads": 16,
        "n_ubatch": 512, "n_prompt": 0, "n_gen": 128, "avg_ts": 134.0, "stddev_ts": 1.5, "samples_ts": [132.5, 135.5],
    }  # fmt: skip
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "assert ('-ncmoe' in sys.argv) == (os.environ.get('CUDA_VISIBLE_DEVICES') != '')\n"
        f"slower = {{**{row!r}, 'avg_ts': 120.0, 'n_threads': 15}}\n"
        f"print(json.dumps([{row!r}, slower, {{**{row!r}, 'n_prompt': 512, 'n_gen': 0, 'avg_ts': 900.0}}]))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for on_gpu, backend in ((True, "CUDA"), (False, "CPU")):
        rows = llama_rows(program, tmp_path / "a.gguf", [512], [128], 2, on_gpu, ["-t", "15,16"])
        assert [found["test"] for found in rows] == ["tg128", "pp512"]
        assert rows[0]["tokens_per_second"] == 134.0, "the better of two"
        assert rows[0]["backend"] == f"llama.cpp abc, {backend}" and "16 threads" in rows[0]["how"]
    program.write_text(f"#!{sys.executable}\nprint('usage: …')\n")
    with pytest.raises(PlanError, match=r"wrote 'usage: .*' where llama-bench writes JSON"):
        llama_rows(program, tmp_path / "a.gguf", [512], [128], 2)
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no such model')\n")
    with pytest.raises(PlanError, match="ended with code 1: no such model"):
        llama_rows(program, tmp_path / "a.gguf", [512], [128], 2)
