"""`ktinject serve` as a process: it says where it listens, answers, and ends when it is told to."""

from __future__ import annotations

from pathlib import Path

import prepared
import pytest

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason="pip install 'ktinject[serve]'")

# The child serves; the parent asks, interrupts it and waits.
CODE = """
import json, os, re, signal, sys, urllib.request
folder, key = sys.argv[1:]
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.dup2(writing, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["ktinject", "serve", folder, "--port", "0", "--name", "small", "--api-key-file", key]
    from ktinject.__main__ import main
    main()
    os._exit(0)
os.close(writing)
said = os.read(reading, 4096).decode()
print(said)
address = re.search(r"http://[\\d.:]+", said)[0]
asked = urllib.request.Request(
    address + "/v1/completions",
    json.dumps({"model": "small", "prompt": "def f(", "max_tokens": 3}).encode(),
    {"Authorization": "Bearer 0123456789", "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(asked))["usage"])
os.kill(child, signal.SIGINT)
_, status = os.waitpid(child, 0)
print("ended", os.waitstatus_to_exitcode(status))
"""


def test_it_serves_until_it_is_interrupted(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("0123456789\n")
    done = prepared.run(CODE, tiny_qwen3_moe, tmp_path / "key", check=True)
    assert done.stdout.startswith("small at http://127.0.0.1:")
    assert "'completion_tokens': 3" in done.stdout
    assert done.stdout.endswith(("ended 130\n", "ended -2\n")), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_refusals_come_before_the_model_is_loaded(ktinject, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short")
    result = ktinject("serve", tiny_qwen3_moe, "--api-key-file", tmp_path / "key", exit_code=2)
    assert "a key has at least 8 ASCII characters" in result.stderr


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/page", ""])
def test_a_page_that_is_no_origin_is_refused_before_the_model_is_loaded(
    origin: str, ktinject, tiny_qwen3_moe: Path
) -> None:
    result = ktinject("serve", tiny_qwen3_moe, "--allow-origin", origin, exit_code=2)
    assert f"--allow-origin: {origin!r} is no origin; it is what a browser calls" in result.stderr
