"""`ktinject bench` on a tiny model, and beside a llama-bench."""

from __future__ import annotations

import csv
import io
import json
import sys

import pytest

from ktinject.cli import options
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
    "texts, counts",
    [
        (["32,64"], [32, 64]),
        (["512", "8, 16"], [512, 8, 16]),
        (["1-4"], [1, 2, 3, 4]),
        (["8-32+8,64-512*2"], [8, 16, 24, 32, 64, 128, 256, 512]),
        (["8-8"], [8]),
        (["0"], []),
        (None, None),
    ],
)
def test_numbers_as_llama_bench_takes_them(texts, counts):
    assert options.parse_counts(texts, "-p") == counts


@pytest.mark.parametrize(
    "text", ["-3", "", "8,", "many", "4-1", "8-64*1", "8-64*0", "0-8*2", "1-8+0", "1.5", "1-1001", "9" * 30]
)
def test_numbers_that_are_none(ktinject, tiny_qwen3_moe, text):
    found = ktinject("bench", tiny_qwen3_moe, "-p", text, exit_code=2)
    assert found.stderr.startswith("ktinject: -p") and not found.stdout


def test_lists_are_several_tests(ktinject, tiny_qwen3_moe):
    rows = json.loads(
        ktinject("bench", tiny_qwen3_moe, "-p", "4-8*2", "-n", "2,3", "-r", 1, "-o", "json").stdout
    )
    assert [row["test"] for row in rows["results"]] == ["pp4", "pp8", "tg2", "tg3"]
    rows = json.loads(ktinject("bench", tiny_qwen3_moe, "-p", "4", "-n", "0", "-r", 1, "-o", "json").stdout)
    assert [row["test"] for row in rows["results"]] == ["pp4"]
    rows = json.loads(
        ktinject("bench", tiny_qwen3_moe, "-p", "4", "-n", "2", "--depth", 40, "-r", 1, "-o", "json").stdout
    )
    assert [row["test"] for row in rows["results"]] == ["pp4", "tg2 @ d40"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("-p", 0, "-n", "0"), "no test is left"),
        (("--breakdown", "-o", "csv"), "-o csv prints one"),
        (
            ("--trace", "no/such/folder/trace.json"),
            "--trace no/such/folder/trace.json: no file can be written",
        ),
        (("--llama-bench", "FILE", "--gguf", "FILE"), "this is no program"),
        (("--plugin", "no_such_module"), "--plugin no_such_module"),
        (("--rules", "nope"), "nope"),
        (("-p", "8,99999999", "-n", 0), "pp99999999: the model was made for 512 tokens at once"),
        (("-n", 511), "tg511: the model was made for 512 tokens at once"),
        (("-n", 8, "-d", 503), "tg8 @ d503: the model was made for 512 tokens at once"),
        (("-d", 100), "--depth is for -n: give it numbers of tokens to write."),
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_refused_before_loading(ktinject, tiny_qwen3_moe, arguments, message):
    arguments = [tiny_qwen3_moe / "config.json" if word == "FILE" else word for word in arguments]
    found = ktinject("bench", tiny_qwen3_moe, *arguments, exit_code=2)
    assert message in found.stderr and not found.stdout
    if "-o" not in arguments:
        answer = json.loads(ktinject("bench", tiny_qwen3_moe, *arguments, "-o", "json", exit_code=2).stdout)
        assert message in answer["problems"][0]


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


def test_llama_bench_is_run_and_read(tmp_path, monkeypatch, program):
    """A program that answers as llama-bench does, and one that fails."""
    row = {
        "model_type": "qwen3moe", "build_commit": "abc", "backends": "CUDA", "model_size": 7, "n_threads": 16,
        "n_ubatch": 512, "n_prompt": 0, "n_gen": 128, "avg_ts": 134.0, "stddev_ts": 1.5, "samples_ts": [132.5, 135.5],
    }  # fmt: skip
    llama_bench = program(
        "llama-bench",
        "import json, os, sys\n"
        "assert '-d 64' in ' '.join(sys.argv) or '512' in sys.argv\n"
        "assert ('-ncmoe' in sys.argv) == (os.environ.get('CUDA_VISIBLE_DEVICES') != '')\n"
        f"slower = {{**{row!r}, 'avg_ts': 120.0, 'n_threads': 15}}\n"
        f"print(json.dumps([{row!r}, slower, {{**{row!r}, 'n_prompt': 512, 'n_gen': 0, 'avg_ts': 900.0}}]))\n",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for on_gpu, backend in ((True, "CUDA"), (False, "CPU")):
        rows = llama_rows(llama_bench, tmp_path / "a.gguf", [512], [128], 2, on_gpu, ["-t", "15,16"])
        assert [found["test"] for found in rows] == ["tg128", "pp512"]
        assert rows[0]["tokens_per_second"] == 134.0, "the better of two"
        assert rows[0]["backend"] == f"llama.cpp abc, {backend}" and "16 threads" in rows[0]["how"]
    found = llama_rows(llama_bench, tmp_path / "a.gguf", [], [128], 2, depth=64)
    assert found[0]["test"] == "tg128 @ d64"
    program("llama-bench", "print('usage: …')\n")
    with pytest.raises(PlanError, match=r"wrote 'usage: .*' where llama-bench writes JSON"):
        llama_rows(llama_bench, tmp_path / "a.gguf", [512], [128], 2)
    program("llama-bench", "import sys\nsys.exit('no such model')\n")
    with pytest.raises(PlanError, match="ended with code 1: no such model"):
        llama_rows(llama_bench, tmp_path / "a.gguf", [512], [128], 2)
