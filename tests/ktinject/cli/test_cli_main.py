"""The `ktinject` command itself: version, help, exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version

import prepared
import pytest
import typer

import ktinject.tools.doctor
from ktinject.cli import app
from ktinject.errors import CheckpointError, KTInjectError, OperatorError, PlanError, RuleError

COMMANDS = ["plan", "run", "eval", "doctor", "rules"]


def test_version(ktinject):
    assert ktinject("--version").stdout == f"ktinject {version('ktinject')}\n"


def test_help_names_every_command(ktinject):
    text = ktinject("--help").stdout
    assert all(f"│ {command} " in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(ktinject, command):
    assert f"ktinject {command}" in ktinject(command, "--help").stdout
    assert ktinject(command, "-h").stdout == ktinject(command, "--help").stdout


def test_what_a_refusal_advises_is_an_option_of_each_command_that_loads():
    """A checkpoint with a tensor too many is refused with `--ignore`, whichever command it is given to."""
    commands = typer.main.get_command(app).commands
    options = {
        name: {option for one in command.params for option in one.opts} for name, command in commands.items()
    }
    loads = {name for name, found in options.items() if "--budget" in found}
    assert loads >= {"plan", "fit", "run", "convert", "chat", "serve", "eval", "profile", "bench"}
    assert all("--ignore" in options[name] for name in loads)


@pytest.mark.parametrize("module", ["ktinject", "ktinject.cli"])
def test_as_a_module(module):
    command = [sys.executable, "-m", module, "rules", "list", "--json"]
    assert "mixtral" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


COMPLETED = {
    "ktinject pl": ["plan"],
    "ktinject plan --rules deepseek": ["deepseek-v2", "deepseek-v3"],
    "ktinject rules check mi": ["mixtral"],
    "ktinject eval x --against mi": ["mixtral"],
    "ktinject run x --dtype b": ["bfloat16"],
    # Nothing, where bash then completes files by itself.
    "ktinject plan exampl": [],
    "ktinject plan x --rules ./mi": [],
    "ktinject plan x --plugin ./mi": [],
    "ktinject eval x --text ./mi": [],
}
BASH = """
source <(ktinject --show-completion)
while read -ra COMP_WORDS; do
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _ktinject_completion ktinject
  echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_in_bash(tmp_path, program):
    program("ktinject", "from ktinject.cli import main\n\nmain()\n")
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    lines = "".join(f"{line}\n" for line in COMPLETED)
    found = subprocess.run(
        ["bash", "-c", BASH], input=lines, env=environ, check=True, capture_output=True, text=True
    )
    assert dict(zip(COMPLETED, map(str.split, found.stdout.splitlines()), strict=True)) == COMPLETED


@pytest.fixture
def doctor_raises(monkeypatch):
    def raises(error: BaseException) -> None:
        def doctor():
            raise error

        monkeypatch.setattr(ktinject.tools.doctor, "doctor", doctor)

    return raises


@pytest.mark.parametrize("error", [KTInjectError, RuleError, PlanError, CheckpointError, OperatorError])
def test_a_refusal_is_a_message_and_exit_code_2(ktinject, doctor_raises, error):
    doctor_raises(error("what was found; what to do"))
    result = ktinject("doctor", exit_code=2)
    assert (result.stdout, result.stderr) == ("", "ktinject: what was found; what to do\n")
    result = ktinject("-v", "doctor", exit_code=2)
    assert result.stderr.startswith("Traceback") and result.stderr.endswith("what was found; what to do\n")


def test_a_failure_is_exit_code_1(ktinject, doctor_raises):
    doctor_raises(RuntimeError("lost"))
    result = ktinject("doctor", exit_code=1)
    assert result.stderr.startswith("ktinject: failed: RuntimeError: lost")
    assert "Traceback" not in result.stderr
    assert "Traceback" in ktinject("-v", "doctor", exit_code=1).stderr


def test_ctrl_c_is_exit_code_130(ktinject, doctor_raises):
    doctor_raises(KeyboardInterrupt())
    ktinject("doctor", exit_code=130)


# As extension modules and transformers' own imports do.
SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    list(map(len, [""] * 1000))
except BaseException:
    pass
print("went on", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("module", ["ktinject", "ktinject.cli"])
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_ctrl_c_during_an_import_ends_it_there(module, handler, tmp_path):
    """Unless the command was started with Ctrl-C ignored, in the background of a script."""
    (tmp_path / "torch.py").write_text(SWALLOWS)
    found = subprocess.run(
        [sys.executable, "-m", module, "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
        capture_output=True,
        text=True,
        check=False,
    )
    ended = (130, "", "ktinject: interrupted\n")
    assert (found.returncode, found.stdout, found.stderr) == (
        ended if handler == signal.SIG_DFL else (0, "went on\n", "")
    )


@pytest.mark.parametrize("arguments", [["nonsense"], ["plan"], ["run", "--nonsense"]])
def test_wrong_usage_is_exit_code_2(ktinject, arguments):
    assert "Usage:" in ktinject(*arguments, exit_code=2).stderr


def test_a_bad_variable_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("KTINJECT_THREADS", "many")
    process = prepared.run("from ktinject.cli import main; main()", "doctor")
    assert process.returncode == 2
    assert process.stderr.startswith("ktinject: KTINJECT_THREADS='many': allowed is")


def test_listing_rules_needs_no_torch():
    code = """import sys
from ktinject.cli import app
app(["rules", "list"], standalone_mode=False)
assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "command",
    [
        ["plan"],
        ["fit"],
        ["run", "--prompt", "x"],
        ["convert"],
        ["chat"],
        ["serve"],
        ["eval"],
        ["profile"],
        ["bench"],
    ],
    ids=lambda command: command[0],
)
def test_an_adapter_beside_the_model_is_refused_by_every_command(ktinject, command, tiny_qwen3_moe, tmp_path):
    """Where transformers would put it on the model."""
    folder = shutil.copytree(tiny_qwen3_moe, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    (text := tmp_path / "text.txt").write_text("some text\n")
    more = {
        "convert": [tmp_path / "out"],
        "eval": ["--text", text],
        "profile": ["--prompts", text],
    }.get(command[0], [])
    name, *options = command
    result = ktinject(name, folder, *more, *options, exit_code=2)
    assert "there is an adapter beside the model (adapter_config.json)" in " ".join(result.output.split())
