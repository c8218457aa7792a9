"""What several commands take, and how they show what they found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ktinject.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", exists=True, help="A model folder: config.json and weights; or a .gguf file in one."
    ),
]
Rules = Annotated[
    str,
    typer.Option("--rules", metavar="RULES", help="A bundled name, a file, or auto: what suits the model."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a variable of the rules; may be repeated."),
]
Device = Annotated[
    list[str] | None,
    typer.Option(
        "--device", metavar="DEVICE", help="Use this device, such as cpu or cuda:0; may be repeated."
    ),
]
Budget = Annotated[
    list[str] | None,
    typer.Option(
        "--budget", metavar="DEVICE=SIZE", help="Use at most so much, such as cuda:0=24GiB; may be repeated."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Tp = Annotated[
    bool,
    typer.Option("--tp", help="Share the model with the other processes that torchrun started, one a GPU."),
]
NewTokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Write at most N tokens for a prompt.")
]
RestDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        metavar="auto|float32|bfloat16|float16",
        help="Of everything that is not swapped; auto: what the checkpoint says.",
    ),
]


def parse_budget(texts: list[str] | None) -> dict[str, int | str] | None:
    """`["cuda:0=24GiB"]` as `{"cuda:0": "24GiB"}`; the sizes are the planner's to read. Raises PlanError."""
    budget: dict[str, int | str] = {}
    for text in texts or []:
        device, equals, size = text.partition("=")
        if not (device and equals and size):
            raise PlanError(f"--budget {text!r}: allowed is DEVICE=SIZE, such as cuda:0=24GiB.")
        if device in budget:
            raise PlanError(f"--budget: {device!r} is given twice. Give each device once.")
        budget[device] = size
    return budget or None


def build_on_meta(folder: Path, dtype: str = "auto") -> PreTrainedModel:
    """The model of a folder, without weights. Raises CheckpointError or PlanError."""
    from ktinject import hf
    from ktinject.weights.checkpoint import Checkpoint

    with Checkpoint.open(folder) as checkpoint:
        return hf.meta_model(hf.read_config(folder, checkpoint), dtype, checkpoint)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model folder, or beside a file. Raises CheckpointError."""
    from transformers import AutoTokenizer

    folder = folder if folder.is_dir() else folder.parent
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be used: {str(error).rstrip('. ')}. "
            "Put the model's tokenizer files into the folder."
        ) from error
    # A folder without tokenizer files gives a tokenizer that knows no word.
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:
        raise CheckpointError(
            f"{folder}: there is no tokenizer. Put the model's tokenizer files into the folder."
        )
    return tokenizer


def read_text(file: Path) -> str:
    """A file in UTF-8. Raises PlanError."""
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{file}: it cannot be read as text: {error}. Name a file in UTF-8.") from error


def read_prompts(tokenizer: PreTrainedTokenizerBase, file: Path) -> list[Tensor]:
    """The prompts of a JSON-lines file as token ids, as a base model gets them."""
    import torch

    prompts = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if line.strip():
            try:
                prompt = json.loads(line)["prompt"]
            except (ValueError, KeyError, TypeError):
                prompt = None
            if not isinstance(prompt, str):
                raise PlanError(f'{file}:{number}: found {line[:60]!r}; allowed is {{"prompt": "…"}}.')
            prompts.append(torch.tensor(tokenizer(prompt)["input_ids"], dtype=torch.long))
    return prompts


@contextmanager
def one_voice(tp: bool) -> Iterator[bool]:
    """Of several processes, only the first prints. Yields whether this is the first. Raises PlanError."""
    from ktinject import team

    if not tp or team.place()[0] == 0:
        yield True
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        yield False


def show(thing: Any) -> None:
    """Print something that rich can: in colour and to the width of a terminal, else plain and unfolded."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console().print(thing)
        return
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(thing)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def show_json(value: object) -> None:
    """Print JSON."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
