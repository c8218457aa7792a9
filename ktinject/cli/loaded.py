"""What `chat` and `serve` begin with: a model that is loaded, from a folder or from the Hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktinject.cli import options
from ktinject.errors import CheckpointError
from ktinject.rules import parse_overrides

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelOrName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A folder with config.json and weights, a .gguf file, or a name whose files are in the Hub's cache.",
        autocompletion=options.files,
    ),
]


def load(
    model: str,
    rules: str | None,
    device: list[str] | None,
    budget: list[str] | None,
    dtype: str,
    variables: list[str] | None,
    plugins: list[str] | None,
    context: int | None = None,
    cache: str = "off",
    ignore: list[str] | None = None,
) -> tuple[str, PreTrainedModel, PreTrainedTokenizerBase]:
    """What the options ask for: how the model is called, the model, its tokenizer. Raises as `ktinject.load`."""
    import ktinject

    options.load_plugins(plugins)
    folder, name = _folder(model)
    tokenizer = options.load_tokenizer(folder)
    loaded = ktinject.load(
        folder,
        rules,
        devices=device,
        budget=options.parse_sizes(budget, "--budget"),
        dtype=dtype,
        variables=parse_overrides(variables or []),
        context=context,
        ignore=ignore or (),
        cache="auto" if cache == "auto" else None,
    )
    return name, loaded, tokenizer


def _folder(model: str) -> tuple[Path, str]:
    """Where a model is, and its name: of a snapshot in the cache, that of the repository."""
    from ktinject.hf import hub

    if Path(model).exists():
        return Path(model), Path(model).resolve().name
    if (folder := hub.cached(model)) is not None:
        return folder, model
    raise CheckpointError(
        f"{model}: no such folder or file here, and not in the Hub's cache. Download it with `hf download {model}`."
    )
