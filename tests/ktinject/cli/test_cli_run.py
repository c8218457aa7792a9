"""`ktinject run` on tiny models."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import prepared
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ktinject.cli import measure, options, run
from ktinject.cli.measure import Measurement, measure_unswapped


@pytest.fixture
def prepared_process(monkeypatch):
    """The unswapped model's process begins with everything imported."""

    def start(command, *, input, capture_output, text, check):
        program, option, module = command
        assert (program, option, capture_output, text, check) == (sys.executable, "-m", True, True, False)
        return prepared.run(f"import runpy; runpy.run_module({module!r}, run_name='__main__')", input=input)

    monkeypatch.setattr(measure, "subprocess", SimpleNamespace(run=start))


def written(folder, prompt: str, new_tokens: int) -> str:
    """What stock transformers writes."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True)


@pytest.mark.usefixtures("prepared_process")
def test_plan_text_and_comparison(ktinject, tiny_qwen3_moe):
    result = ktinject("run", tiny_qwen3_moe, "--prompt", "def f(", "--max-new-tokens", 6)
    plan, text, table = re.split(r"\n(?=def f\()|\n\n +(?=unswapped)", result.stdout)
    assert "cpu_experts" in plan
    assert text.strip() == "def f(" + written(tiny_qwen3_moe, "def f(", 6).strip()
    assert re.search(r"tokens/s +\d+\.\d +\d+\.\d\n", table)
    assert re.search(r"resident memory +[\d,]+ MiB +[\d,]+ MiB\n", table)
    assert "100% (6 of 6)" in table


def test_without_comparison(ktinject, tiny_deepseek_v3):
    text = ktinject(
        "run", tiny_deepseek_v3, "--max-new-tokens", 3, "--no-compare", "--set", "experts=int8"
    ).stdout
    assert "int8" in text and "tokens/s" in text and "unswapped" not in text


def test_chat_template(tiny_qwen3_moe):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3_moe)
    assert run._encode(tokenizer, "hi") == ("hi", tokenizer("hi")["input_ids"])
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<answer>"
    text, ids = run._encode(tokenizer, "hi")
    assert text == "<user>hi<answer>" == tokenizer.decode(ids)


@pytest.mark.parametrize("option, command", [("--prompt", "run"), ("--system", "chat")])
def test_a_text_in_another_encoding_is_refused(ktinject, tiny_qwen3_moe, option, command):
    result = ktinject(command, tiny_qwen3_moe, option, "caf\udce9", exit_code=2)
    assert f"{option}: the text is not in UTF-8" in result.stderr


def test_a_text_of_a_shell_without_a_locale_is_kept(ktinject, tiny_qwen3_moe):
    arguments = ("run", tiny_qwen3_moe, "--max-new-tokens", 2, "--no-compare", "--prompt")
    assert "\ncafé" in ktinject(*arguments, "caf\udcc3\udca9").stdout


def test_a_chat_template_that_refuses_names_its_folder(ktinject, tiny_qwen3_moe, tmp_path):
    folder = shutil.copytree(tiny_qwen3_moe, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('Ask in Latin') }}")
    result = ktinject("run", folder, "--prompt", "hi", exit_code=2)
    assert f"{folder}: its chat template refuses these messages: Ask in Latin." in result.stderr


def test_the_table_has_a_dash_where_there_is_no_measurement():
    table = run._table({"unswapped": "MemoryError", "swapped": Measurement([1, 2], 0.5, 2**30, 2**20, 2**21)})
    columns = dict(zip(table.titles, zip(*table.rows)))
    assert columns["unswapped"] == ("–",) * 4
    assert columns["swapped"] == ("4.0", "1,024 MiB", "1 MiB", "2 MiB")


def test_the_output_says_why_there_is_no_measurement(ktinject, tiny_qwen3_moe, monkeypatch):
    monkeypatch.setattr(run, "measure_unswapped", lambda *_, **__: "MemoryError")
    text = ktinject("run", tiny_qwen3_moe, "--max-new-tokens", 2).stdout
    assert text.endswith("unswapped: not measured: MemoryError\n")


@pytest.mark.nightly
def test_unswapped_in_its_own_process(tiny_qwen3_moe):
    found = measure_unswapped(tiny_qwen3_moe, [1, 2, 3], 4, dtype="auto", device_map=None)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe)
    expected = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)[0, 3:]
    assert isinstance(found, Measurement)
    assert found.tokens == expected.tolist()
    assert 0 < found.model_bytes < found.resident_bytes


UNSWAPPED = """
import io, json, sys, time
import torch
from ktinject.cli import measure

torch.set_num_threads(2)
sys.stdin = io.StringIO(sys.argv[1])
measure._answer()
used = []
for _ in range(30):
    torch.zeros(1 << 20).add_(1)
    before = time.process_time()
    time.sleep(0.01)
    used.append(time.process_time() - before)
print("", sorted(used)[15], sep="\\n")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="needs as many CPUs as the script has threads")
def test_torch_s_threads_sleep_for_the_unswapped_model_too(tiny_qwen3_moe, spinning):
    """Else they spin through all the time between two operations, which on shared cores handicaps the model."""
    request = {
        "folder": str(tiny_qwen3_moe),
        "prompt": [1, 2],
        "new_tokens": 2,
        "dtype": "auto",
        "device_map": None,
    }
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = prepared.run(UNSWAPPED, json.dumps(request), env=environ, check=True, server=spinning)
    assert float(done.stdout.split()[-1]) < 0.5e-3


@pytest.mark.parametrize("teams, seconds", [(1, [2.0, 1.0]), (1, [1.0, 2.0]), (0, [1.0])])
def test_unswapped_has_the_better_of_both(tiny_qwen3_moe, monkeypatch, teams, seconds):
    """Threads that spin are faster on idle cores, threads that sleep on shared ones."""
    request = {
        "folder": str(tiny_qwen3_moe),
        "prompt": [1],
        "new_tokens": 1,
        "dtype": "auto",
        "device_map": None,
    }
    monkeypatch.setattr(measure.sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(measure.sys, "stdout", io.StringIO())
    monkeypatch.setattr("ktinject.generation.cpu.openmp.let_threads_sleep", lambda: teams)
    taken = iter(seconds)
    monkeypatch.setattr(measure, "measure", lambda *_: Measurement([7], next(taken), 0, 0, 0))
    measure._answer()
    assert Measurement(**json.loads(sys.stdout.getvalue())).seconds == 1.0
    assert next(taken, None) is None


@pytest.mark.usefixtures("prepared_process")
def test_unswapped_that_fails(tmp_path):
    found = measure_unswapped(tmp_path, [1], 1, dtype="auto", device_map=None)
    assert isinstance(found, str) and "config.json" in found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-new-tokens", 600], "at most 512"),
        (["--prompt", "x" * 500], "a prompt of 500 tokens and 64 new ones"),
        (["--max-new-tokens", -1], "--max-new-tokens"),
        (["--prompt", ""], "at least 1"),
        (["--budget", "cpu=1KiB"], "does not fit"),
        (["--rules", "nothing.yaml"], "nothing.yaml"),
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_refused(ktinject, tiny_qwen3_moe, arguments, says):
    assert says in ktinject("run", tiny_qwen3_moe, *arguments, exit_code=2).stderr


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_machine_is_not_for_running(ktinject, tiny_qwen3_moe):
    assert "--machine" in ktinject("run", tiny_qwen3_moe, "--machine", "cpu=1TiB", exit_code=2).stderr


def test_a_gguf_file_is_enough(ktinject, tmp_path):
    families = pytest.importorskip("gguf_families")
    made = families.model("qwen3_moe")
    file = families.write(made, tmp_path / "a.gguf", words=True)
    result = ktinject("run", file, "--prompt", "def f(", "--max-new-tokens", 4)
    assert "GGUF" not in result.stderr and "def f(" in result.stdout and "tokens/s" in result.stdout
    assert "unswapped: not measured: transformers alone loads a folder" in result.stdout


def test_no_tokenizer(ktinject, tiny_qwen3_moe, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(tiny_qwen3_moe / name, tmp_path / name)
    assert "there is no tokenizer" in ktinject("run", tmp_path, exit_code=2).stderr


def test_broken_tokenizer(ktinject, tiny_qwen3_moe, tmp_path, caplog):
    """The file at fault is named, and nothing runs for long or is drawn at random."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(tiny_qwen3_moe / name, tmp_path / name)
    words = json.loads((tiny_qwen3_moe / "tokenizer.json").read_text())
    settings = json.loads((tiny_qwen3_moe / "tokenizer_config.json").read_text())

    def told(tokenizer: Any = words, **others: Any) -> str:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer) if tokenizer else "{")
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | others))
        return ktinject("run", tmp_path, exit_code=2).stderr

    assert "tokenizer cannot be used" in told(None)
    step = {"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 2000}
    bomb = {"type": "Sequence", "normalizers": [step] * 3}
    assert "its normalizer makes a text up to 8,000,000,000 times as long" in told(
        words | {"normalizer": bomb}
    )
    assert "tokenizer_config.json: model_max_length is 'a'" in told(model_max_length="a")
    dropping = words | {"model": words["model"] | {"dropout": 0.9}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(dropping))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = options.load_tokenizer(tmp_path)
    text = "import unittest and a few more words"
    assert found(text)["input_ids"] == options.load_tokenizer(tiny_qwen3_moe)(text)["input_ids"]
    assert "has dropout 0.9, which cuts texts at random" in caplog.text


def test_a_wrong_value_of_the_config_is_not_the_tokenizer_s_fault(ktinject, tiny_qwen3_moe, tmp_path):
    assert "tokenizer" not in ktinject("run", tmp_path, exit_code=2).stderr
    for file in tiny_qwen3_moe.iterdir():
        if file.name != "config.json":
            shutil.copyfile(file, tmp_path / file.name)
    config = json.loads((tiny_qwen3_moe / "config.json").read_text()) | {"hidden_size": "many"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in ("run", "chat", "serve"):
        said = ktinject(command, tmp_path, exit_code=2).stderr
        assert "config.json" in said and "hidden_size" in said and "tokenizer" not in said


@pytest.fixture
def with_nan(tiny_qwen3_moe, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in tiny_qwen3_moe.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tiny_qwen3_moe / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_check_tensors(ktinject, with_nan):
    assert "model.norm.weight" in ktinject("run", with_nan, "--check-tensors", exit_code=2).stderr


WRITING = """
import os, runpy, signal, subprocess, sys

# A child writes into two pipes, as a shell's would.
(out, its_out), (said, its_said) = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    os.dup2(its_out, 1)
    os.dup2(its_said, 2)
    for end in (out, said, its_out, its_said):
        os.close(end)
    runpy.run_module("ktinject", run_name="__main__")
os.close(its_out)
os.close(its_said)
with os.fdopen(out, "rb") as written, os.fdopen(said, "rb") as errors:
    while b"def f(" not in (line := written.readline()):
        assert line, errors.read()
    os.kill(child, signal.SIGINT)
    assert b"tokens/s" not in written.read()
    text = errors.read()
assert text.endswith(b"\\nktinject: interrupted\\n") and b"Traceback" not in text, text
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 130, code
"""


def test_ctrl_c_while_writing(tiny_qwen3_moe):
    arguments = ["--prompt", "def f(\n", "--max-new-tokens", "500", "--no-compare"]
    prepared.run(WRITING, "run", tiny_qwen3_moe, *arguments, check=True)
