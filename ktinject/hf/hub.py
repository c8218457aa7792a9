"""Models of the Hugging Face Hub: the folder of the local cache in which their files are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from ktinject.errors import CheckpointError
from ktinject.rules.wording import did_you_mean

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What loading reads: weights under transformers' own name, not those of other variants or programs.
_READ = ("*.json", "model.safetensors", "model-*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def find(model: str | os.PathLike[str]) -> tuple[Path, str]:
    """Where a model is, and its name: that of the folder or file, or of the repository whose files are in the cache.

    model   a folder, a file, or the name of a repository of the Hub
    Raises  CheckpointError; a name that cannot be a repository's is taken for a path that was mistyped
    """
    path, name = Path(model), os.fspath(model)
    if path.exists():
        return path, path.resolve().name
    if (folder := cached(name)) is not None:
        return folder, name
    if _NAME.fullmatch(name) and not path.parent.exists():
        raise CheckpointError(
            f"{name}: no such folder or file here, and not in the Hub's cache. Download it with `hf download {name}`."
        )
    # The nearest folder on the way that exists has what the name may stand for.
    there = next(parent for parent in path.parents if parent.exists())
    missing = path.relative_to(there).parts[0]
    near = [entry.name for entry in there.iterdir()] if there.is_dir() else []
    raise CheckpointError(
        f"{name}: no such folder or file; {there.resolve()} has no {missing!r}. Give a model folder, a .gguf file, or "
        f"the name of a model that `hf download` has put into the Hub's cache.{did_you_mean(missing, near)}"
    )


def cached(name: str) -> Path | None:
    """The folder of a model in the cache; None if it is not there, or if that is no model's name."""
    if not _NAME.fullmatch(name):
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def download(name: str, gguf_file: str | None = None, **arguments: Any) -> Path:
    """The folder of a model in the cache, after what is missing was downloaded.

    gguf_file  of its weights, only this file
    arguments  of `huggingface_hub.snapshot_download`
    Raises     CheckpointError
    """
    patterns = [pattern for pattern in _READ if gguf_file is None or "safetensors" not in pattern]
    patterns += [gguf_file] if gguf_file else []
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, **arguments))
    except Exception as error:  # of the network, of the disk, of the name
        raise CheckpointError(
            f"{name}: no such folder here, and not to be had from the Hub: {error} Check the name, or download it "
            "with `hf download <name>` where there is a network."
        ) from error
