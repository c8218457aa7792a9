"""Chat templates: messages become the text of a prompt, within limits of time, memory and length.

    messages, tools ──► template_process.py, a process of its own ──► text
                             1 s of computing, 256 MB, ten times the input and 1 MB; a second more for each MB of input

A template is a program in somebody's files. One that has no end, or fills the memory, is refused by name.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ktinject.errors import CheckpointError, PlanError
from ktinject.hf import compat, template_process

SECONDS, BYTES, CHARACTERS = 1.0, 256 << 20, 1_000_000
_PER_BYTE = 10  # characters of output for each byte of input; memory for each is several times that
_STARTS_IN = 120.0  # seconds until the process has imported what it needs, on a machine that is busy
_PROGRAM = str(Path(template_process.__file__).resolve())
_MEND = "Mend the template, which is in chat_template.jinja, tokenizer_config.json or the .gguf file, or take it out."
# Given by whoever renders, or part of every template's surroundings: none of them is a client's to choose.
_NOT_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception"})


class TemplateError(CheckpointError):
    """A chat template that gives no text.

    said      what it does, without the name of the model's folder
    is_limit  it asks for more time, memory or output than it may
    """

    def __init__(self, where: str, said: str, remedy: str, is_limit: bool = False) -> None:
        super().__init__(f"{where}: its chat template {said} {remedy}")
        self.said, self.is_limit = said, is_limit


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a conversation that is to be answered, as the tokenizer's chat template has it.

    messages   of JSON values
    variables  of the template, beside those that transformers gives it
    Raises     TemplateError; PlanError if no process can be started, or another transformers is there
    """
    values = {**tokenizer.special_tokens_map, **(variables or {})}
    asked = {
        "messages": [{name: value for name, value in one.items() if value is not None} for one in messages],
        "tools": tools,
        "variables": values,
    }
    text: str = _asked(tokenizer, asked, tools)["text"]
    return text


def variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Names that the tokenizer's chat template reads, and that whoever renders it may choose. Raises as `render`."""
    found = _asked(tokenizer, {"messages": None}, None)["names"]
    return frozenset(found) - _NOT_VARIABLES - {*tokenizer.special_tokens_map}


def check_ends(processor: Any, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the chat template of a processor that has no end, before the processor itself renders it.

    messages   as the processor gets them, without the pictures themselves
    Raises     TemplateError for one that goes beyond a limit; what else is wrong, the processor says
    """
    tokenizer = copy.copy(processor.tokenizer)
    tokenizer.chat_template = processor.chat_template
    try:
        render(tokenizer, messages)
    except TemplateError as error:
        if error.is_limit:
            raise


def _asked(tokenizer: PreTrainedTokenizerBase, asked: dict[str, Any], tools: Any) -> dict[str, Any]:
    compat.require("templates")
    where = tokenizer.name_or_path or "the tokenizer"
    try:
        template = tokenizer.get_chat_template(None, tools)
    except ValueError as error:
        raise TemplateError(where, f"cannot be found: {error}", "Put one into the model's folder.") from error
    asked["template"] = template
    size = len(json.dumps(asked, default=str))
    asked["seconds"] = seconds = SECONDS + size / 1e6
    asked["bytes"] = BYTES + 8 * _PER_BYTE * size
    asked["characters"] = CHARACTERS + _PER_BYTE * size
    found = _process.ask(asked)
    if "kind" not in found:
        return found
    kind, said = found["kind"], found["said"].strip().rstrip(".")
    what = {
        "refused": f"refuses these messages: {said}.",
        "failed": f"fails: {said}.",
        "time": f"did not end within {seconds:.1f} s of computing.",
        "memory": f"asks for more than {asked['bytes'] >> 20} MiB of memory.",
        "long": f"gives more than {asked['characters']:,} characters for {size:,} bytes of messages.",
    }[kind]
    remedy = "Change the messages." if kind == "refused" else _MEND
    raise TemplateError(where, what, remedy, is_limit=kind in ("time", "memory", "long"))


class _Process:
    """The process that renders, started when it is needed first, and anew when a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """One at a time. Raises PlanError if none can be started."""
        with self._lock:
            try:
                found = self._answer(asked)
            except BaseException:
                self.end()  # else the next one might read this one's answer
                raise
            if "kind" in found and found["kind"] in ("time", "memory"):
                self.end()
            return found

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            running = self._sent(asked)
        except BrokenPipeError:  # somebody has ended it
            self.end()
            running = self._sent(asked)
        assert running.stdout is not None
        wait = select.poll()
        wait.register(running.stdout, select.POLLIN)
        # By the clock, where others compute, it may take long; that it computes no longer is the kernel's business.
        patience = _STARTS_IN + 20 * asked["seconds"]
        found = template_process.read(running.stdout) if wait.poll(1000 * patience) else None
        if found is not None:
            return dict(found)
        running.kill()
        if running.wait() in (-signal.SIGPROF, -signal.SIGKILL):
            return {"kind": "time", "said": ""}
        raise PlanError(
            f"the process that renders chat templates ended with code {running.returncode}. Run {sys.executable} "
            f"{_PROGRAM} '[]' to see why."
        )

    def _sent(self, asked: dict[str, Any]) -> subprocess.Popen[bytes]:
        running = self._running or self._started()
        assert running.stdin is not None
        template_process.write(running.stdin, asked)
        return running

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", _PROGRAM, json.dumps([one for one in sys.path if one])]
        try:
            self._running = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise PlanError(
                f"no process can be started to render chat templates: {error}. Free memory, or allow more processes."
            ) from error
        return self._running

    def end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.kill()
            running.communicate()


_process = _Process()
atexit.register(_process.end)


def _forget() -> None:
    """A forked process starts one of its own: the answers of this one are its parent's."""
    _process.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)
