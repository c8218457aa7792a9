"""`ktinject chat`, in a pipe and in a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import prepared

COMMAND = "import sys; sys.argv[0] = 'ktinject'; from ktinject.__main__ import main; main()"


def test_lines_of_stdin_are_questions_and_commands(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("one\n```\ntwo\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff")
    saved, half = tmp_path / "talk.json", tmp_path / "half.json"
    half.write_text('[{"role": "user", "content": "\\ud83d"}]')
    lines = [
        "def f(", "and\\", "more", "/again", "/halp", f"/file {tmp_path / 'note.txt'}", "read it",
        f"/file {tmp_path / 'image.png'}", "/save " + str(saved), "/undo", f"/load {saved}",
        f"/load {tmp_path / 'note.txt'}", f"/load {half}", "/system Be brief.", "/system", "hello", "/clear",
        "/undo", "/help", "/exit", "not read",
    ]  # fmt: skip
    arguments = ["chat", tiny_qwen3_moe, "--max-new-tokens", 4, "--temperature", 0, "--device", "cpu"]
    done = prepared.run(COMMAND, *arguments, input="\n".join(lines) + "\n", check=True)
    notes = done.stderr
    assert notes.count("first after") == 5 and "This model has no chat template" in notes
    reads = [tuple(map(int, pair)) for pair in re.findall(r"read (\d+) of (\d+) tokens", notes)]
    assert reads[0][0] == reads[0][1] == len("def f(")
    assert reads[1] == (len("and\nmore") + 1, len("def f(") + 4 + len("and\nmore"))
    assert reads[2] == (1, reads[1][1]), "the same question again"
    assert "/halp: no such command; there are /help, " in notes and "Did you mean 'help'?" in notes
    assert re.search(r"image\.png: it cannot be read as text", notes)
    messages = json.loads(saved.read_text())
    assert [message["content"] for message in messages if message["role"] == "user"] == [
        "def f(",
        "and\nmore",
        "note.txt:\n````\none\n```\ntwo\n````\n\nread it",
    ]
    assert "6 messages from" in notes and re.search(r"note\.txt: it cannot be read: .*Name what /save", notes)
    assert re.search(r"half\.json: it cannot be read: .*surrogates not allowed", notes)
    assert "\nBe brief.\n" in notes and "/undo: nothing was asked yet." in notes
    assert "\n/file PATH  put a text file" in notes
    assert "first after" not in done.stdout and messages[1]["content"] in done.stdout


# The parent is who sits at the terminal; answers are slow until it has interrupted one.
TERMINAL = """
import os, pty, select, signal, sys, time
folder, flag = sys.argv[1:]
child, terminal = pty.fork()
if child == 0:
    os.environ |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from ktinject.serving import conversation
    put = conversation._Streamer.put
    def slow(self, value):
        if len(self.tokens) > 5 and not os.path.exists(flag):
            time.sleep(0.3)
        put(self, value)
    conversation._Streamer.put = slow
    sys.argv = ["ktinject", "chat", folder, "--max-new-tokens", "60", "--temperature", "0"]
    from ktinject.__main__ import main
    main()
    os._exit(0)
seen = ""
def until(text):
    global seen
    while text not in seen:
        if not select.select([terminal], [], [], 60)[0]:
            os.kill(child, signal.SIGKILL)
            sys.exit(f"a minute without {text!r} after: {seen}")
        try:
            read = os.read(terminal, 65536)
        except OSError:
            sys.exit("it ended: " + seen)
        seen += read.decode(errors="replace")
    found, _, seen = seen.partition(text)
    return found
def say(text):
    os.write(terminal, text.encode())
until("> ")
say("def f(\\n")
until("def f(")
time.sleep(4.0)  # the answer has begun by then, on busy cores, too; it goes on until the flag is there
say("\\x03")
until("interrupted")
open(flag, "w").close()
until("> ")
# What comes between the prompt and readline's wait for a key is seen with the next key only.
while "/exit leaves" not in seen:
    say("\\x03")
    if select.select([terminal], [], [], 1)[0]:
        seen += os.read(terminal, 65536).decode(errors="replace")
until("/exit leaves")
until("> ")
say("again\\n")
print(until("first after"))
until("> ")
say("\\x04")
_, status = os.waitpid(child, 0)
print("ended", os.waitstatus_to_exitcode(status))
"""


def test_in_a_terminal_an_interrupt_ends_the_answer_and_not_the_session(
    tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    # A process of its own from the start: what it inherits decides what Ctrl-C does to it.
    command = [sys.executable, "-c", TERMINAL, str(tiny_qwen3_moe), str(tmp_path / "interrupted")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "60 tokens" in done.stdout and done.stdout.endswith("ended 0\n")


def test_an_unknown_file_is_refused_before_the_session(ktinject, tiny_qwen3_moe: Path) -> None:
    result = ktinject("chat", tiny_qwen3_moe, "--file", "no/such", "--rules", "no-such-rules", exit_code=2)
    assert "no-such-rules" in result.stderr
    missing = ktinject("chat", "nobody/nothing", exit_code=2).stderr
    assert "nobody/nothing: no such folder or file here, and not in the Hub's cache" in missing
