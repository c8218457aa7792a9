"""The session of `ktinject chat`: lines that are read, commands, answers and what they took."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ktinject import typed
from ktinject.errors import KTInjectError, PlanError
from ktinject.rules.wording import did_you_mean
from ktinject.serving.conversation import Answer, Conversation
from ktinject.serving.display import Display

MAX_FILE_BYTES = 4 << 20
_ROLES = ("system", "user", "assistant")


class Session:
    """Reads questions and commands from stdin until it ends.

    Answers go to stdout; where that is no terminal, everything else goes to stderr.
    """

    def __init__(self, conversation: Conversation, name: str, markdown: bool = True) -> None:
        self._chat, self._name = conversation, name
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Console(soft_wrap=not self._is_terminal)
        self._notes = self._console if self._is_terminal else Console(stderr=True, soft_wrap=True)
        self._markdown = markdown and self._is_terminal
        self._attached: list[str] = []
        self._images: list[str] = []

    def run(self) -> None:
        """Until the end of stdin, or /exit."""
        if self._is_terminal:
            with suppress(ImportError):
                import readline  # noqa: F401  arrows, and the lines before
            self._say(f"[bold]{escape(self._name)}[/bold]  [dim]/help lists commands, Ctrl-D leaves[/dim]")
        if not self._chat.has_template:
            self._say(
                "[yellow]This model has no chat template, so it was hardly made to answer: it goes on with the text."
                "[/yellow]"
            )
        while True:
            try:
                line = self._line()
            except KeyboardInterrupt:
                self._say("\n[dim]Ctrl-D or /exit leaves[/dim]")
                continue
            if line is None:
                break
            try:
                line = typed.text(line, "stdin")
                if line.startswith("/"):
                    if not self._command(line):
                        break
                elif line.strip():
                    self.ask(line)
            except KTInjectError as error:
                self._say(f"[red]{escape(str(error))}[/red]")
            except KeyboardInterrupt:  # before an answer began, or once more while it was ended
                self._say("\n[dim]interrupted[/dim]")

    def ask(self, text: str, images: Sequence[str] = ()) -> None:
        """One question, with the files and pictures that wait for it. Raises KTInjectError."""
        if self._attached:
            text = "\n\n".join([*self._attached, text])
        with Display(self._console, self._markdown) as display:
            answer = self._chat.ask(text, display.show, [*images, *self._images])
        self._attached, self._images = [], []
        self._say(f"[dim]{measured(answer)}[/dim]")
        if answer.ended == "length":
            self._say("[dim]The answer was cut: --max-new-tokens, or the end of the model's context.[/dim]")

    def attach(self, file: Path) -> None:
        """Put a file before the next question. Raises PlanError."""
        try:
            with file.open("rb") as opened:
                data = opened.read(MAX_FILE_BYTES + 1)
            text = data.decode("utf-8")
        except (OSError, ValueError) as error:
            raise PlanError(f"{file}: it cannot be read as text: {error}. Name a file in UTF-8.") from error
        if len(data) > MAX_FILE_BYTES:
            raise PlanError(
                f"{file}: more than {MAX_FILE_BYTES >> 20} MiB, which no model reads. Take a part of it."
            )
        fence = "```"
        while fence in text:
            fence += "`"
        self._attached.append(f"{file.name}:\n{fence}\n{text.rstrip()}\n{fence}")
        self._say(f"[dim]{escape(str(file))} goes before the next question[/dim]")

    def show(self, picture: Path) -> None:
        """Put a picture before the next question. Raises KTInjectError."""
        self._chat.check_picture(picture)
        self._images.append(str(picture.absolute()))
        self._say(f"[dim]{escape(str(picture))} goes before the next question[/dim]")

    def _line(self) -> str | None:
        """What was typed; a line that ends with a backslash goes on. None at the end."""
        lines: list[str] = []
        while True:
            try:
                line = input("… " if lines else "> ") if self._is_terminal else sys.stdin.readline()
            except EOFError:
                line = ""
                if self._is_terminal:
                    self._say("")
                    return None
            if not self._is_terminal and not line:
                return "\n".join(lines) if lines else None
            line = line.rstrip("\n")
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    # Commands

    def _command(self, line: str) -> bool:
        """Do what a command says. Returns False if it ends the session. Raises PlanError."""
        name, _, rest = line[1:].partition(" ")
        if name in ("exit", "quit"):
            return False
        found = COMMANDS.get(name)
        if found is None:
            raise PlanError(
                f"/{name}: no such command; there are {', '.join(f'/{known}' for known in COMMANDS)}, /exit. A "
                f"question that begins with a slash needs a space before it.{did_you_mean(name, COMMANDS)}"
            )
        found[1](self, rest.strip())
        return True

    def _help(self, _: str) -> None:
        for name, (what, _call) in COMMANDS.items():
            self._say(f"[bold]/{name}[/bold] {escape(what)}")
        self._say(
            "[bold]/exit[/bold] leave; so does Ctrl-D\nCtrl-C stops an answer. A line that ends with \\ goes on."
        )

    def _clear(self, _: str) -> None:
        self._chat.clear()
        self._attached, self._images = [], []
        self._say("[dim]The conversation is forgotten, but for the system message.[/dim]")

    def _system(self, text: str) -> None:
        if not text:
            self._say(f"[dim]{escape(self._chat.system or 'There is no system message.')}[/dim]")
            return
        self._chat.system = None if text == "-" else text
        self._say("[dim]The conversation begins anew.[/dim]")

    def _again(self, _: str) -> None:
        question = self._chat.question
        if question is None:
            raise PlanError("/again: nothing was asked yet.")
        self._chat.undo()
        self.ask(question["content"], question.get("images", ()))

    def _undo(self, _: str) -> None:
        if self._chat.undo() is None:
            raise PlanError("/undo: nothing was asked yet.")
        self._say("[dim]The last question and its answer are taken back.[/dim]")

    def _save(self, name: str) -> None:
        file = Path(name or "chat.json").expanduser()
        if file.exists() and not name:
            raise PlanError(f"/save: {file} is there already. Give another name: /save NAME.")
        try:
            file.write_text(json.dumps(self._chat.messages, indent=2, ensure_ascii=False) + "\n", "utf-8")
        except OSError as error:
            raise PlanError(f"/save {file}: {error.strerror}. Name another place.") from error
        self._say(f"[dim]saved to {escape(str(file))}[/dim]")

    def _load(self, name: str) -> None:
        file = Path(name or "chat.json").expanduser()
        try:
            messages = json.loads(file.read_text("utf-8"))
            json.dumps(messages, ensure_ascii=False).encode()  # JSON can name halves of characters
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(
                f"/load {file}: it cannot be read: {error}. Name what /save has written."
            ) from error
        if not _are_messages(messages):
            raise PlanError(
                f'/load {file}: it is no list of {{"role": …, "content": …}}. Name what /save has written.'
            )
        self._chat.restore(messages)
        self._say(f"[dim]{len(messages)} messages from {escape(str(file))}[/dim]")

    def _file(self, name: str) -> None:
        if not name:
            raise PlanError("/file: name a file.")
        self.attach(Path(name).expanduser())

    def _image(self, name: str) -> None:
        if not name:
            raise PlanError("/image: name a picture.")
        self.show(Path(name).expanduser())

    def _say(self, text: str) -> None:
        self._notes.print(text, highlight=False)


def _are_messages(found: Any) -> bool:
    return isinstance(found, list) and all(
        isinstance(one, dict)
        and one.get("role") in _ROLES
        and isinstance(one.get("content"), str)
        and isinstance(one.get("images", []), list)
        and all(isinstance(file, str) for file in one.get("images", ()))
        for one in found
    )


COMMANDS: dict[str, tuple[str, Callable[[Session, str], None]]] = {
    "help": ("what you can type", Session._help),
    "file": ("PATH  put a text file before the next question", Session._file),
    "image": ("PATH  put a picture before the next question", Session._image),
    "system": (
        "TEXT  set the system message and begin anew; - for none; without TEXT show it",
        Session._system,
    ),
    "again": ("answer the last question once more", Session._again),
    "undo": ("take the last question and its answer back", Session._undo),
    "clear": ("forget the conversation", Session._clear),
    "save": ("[PATH]  write the conversation as JSON", Session._save),
    "load": ("[PATH]  go on with a conversation that was saved", Session._load),
}


def measured(answer: Answer) -> str:
    """What an answer took, in a line."""
    parts = [f"{answer.tokens} tokens"]
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tokens/s")
    if answer.first is not None:
        parts.append(f"first after {answer.first:.2f} s")
    parts.append(f"read {answer.read} of {answer.prompt} tokens")
    if answer.ended == "interrupted":
        parts.append("interrupted")
    return ", ".join(parts)
