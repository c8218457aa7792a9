"""Models of the Hugging Face Hub: the folder of the local cache in which their files are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from ktinject.errors import CheckpointError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# What loading reads: weights under transformers' own name, not those of other variants or programs.
_READ = ("*.json", "model.safetensors", "model-*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")


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
