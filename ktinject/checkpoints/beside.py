"""Files beside the weights that transformers reads, such as config.json: checked before transformers reads them.

A few bytes there can cost gigabytes and hours: a number of layers, a text that nests without end, a pipe that nobody
writes to. Limits are far above what models have, and so low that a refusal takes little time and memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ktinject.checkpoints.files import open_file
from ktinject.checkpoints.json_text import out_of_proportion
from ktinject.errors import CheckpointError, listed, shown

MAX_CONFIG_BYTES = 4 << 20  # the largest have lists of the layers that are not quantised
MAX_TOKENIZER_BYTES = 64 << 20  # 262,000 words take 33 MB
MAX_VALUES = 100_000
_DEPTH = 32

# What a key of a config ends with → the most that its number may be. Each is that many modules, or items of a list.
_COUNTS = (
    (re.compile(r"(layers?|depths?)$"), 1_000),
    (re.compile(r"(experts?|blocks?|heads?|groups?|labels?|stages?|modules?|codebooks?)$"), 4_096),
)
_TOKENIZER = re.compile(
    r"(tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template.*|.*\.tiktoken)"
)
_IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
_WORDS = re.compile(r"tokenizer\.(json|model)|vocab\.(json|txt)|.*\.tiktoken|tekken\.json|.*\.model")


def read(path: Path, most: int) -> bytes:
    """The bytes of a file of ordinary kind and size. Raises CheckpointError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(
                f"{path}: {size} bytes; at most {most} are read. Put the model's own file there."
            )
        return os.pread(file.fileno(), size, 0)


def check_config(path: Path) -> None:
    """Refuse a config.json, or a file of its kind, that is out of proportion. Raises CheckpointError.

    What is no JSON, or no config, is left to transformers to say.
    """
    raw = read(path, MAX_CONFIG_BYTES)
    found = out_of_proportion(raw, _DEPTH)
    if found is None and raw.count(b",") > MAX_VALUES:
        found = f"it has {raw.count(b','):,} values; at most {MAX_VALUES:,} are read"
    if found:
        raise CheckpointError(f"{path} cannot be used: {found}. Put the model's own file there.")
    try:
        values = json.loads(raw)
    except ValueError:
        return
    check_counts(values, str(path))
    check_implementations(values, str(path))


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter of PEFT, which would be left out where the model alone is read.

    transformers puts an adapter on the model that lies with it. Raises CheckpointError.
    """
    path = folder / "adapter_config.json"
    if not os.path.lexists(path):
        return
    if os.path.lexists(folder / "config.json"):
        raise CheckpointError(
            f"{folder}: there is an adapter beside the model (adapter_config.json). Load the model from a folder of "
            "its own, then the adapter by model.load_adapter(folder)."
        )
    try:
        base = json.loads(read(path, MAX_CONFIG_BYTES)).get("base_model_name_or_path")
    except (ValueError, AttributeError, CheckpointError):
        base = None
    of = f" of {shown(base)}" if base else ""
    raise CheckpointError(
        f"{folder}: this is an adapter{of} (adapter_config.json), and no model. Load its model, then the adapter by "
        "model.load_adapter(folder)."
    )


def modelopt_config(folder: Path) -> dict[str, Any] | None:
    """What hf_quant_config.json, which NVIDIA ModelOpt writes, says of the weights; None if there is none.

    Returns   as a `quantization_config`
    Raises    CheckpointError
    """
    path = folder / "hf_quant_config.json"
    if not os.path.lexists(path):
        return None
    check_config(path)
    try:
        said = json.loads(read(path, MAX_CONFIG_BYTES))
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}. Put the model's own file there.") from None
    values = said.get("quantization") if isinstance(said, Mapping) else None
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"{path} cannot be used: it has no quantization. Put the model's own file there."
        )
    return {"quant_method": "modelopt", **values}


def check_counts(values: Any, where: str) -> None:
    """Refuse a config that asks for more layers, experts or heads than any model has. Raises CheckpointError."""
    wrong = [
        f"{name} is {shown(number)}; at most {most:,} are built"
        for name, number in _numbers(values)
        for ending, most in _COUNTS
        if ending.search(name) and not number <= most  # NaN is neither
    ]
    if wrong:
        raise CheckpointError(f"{where}: out of proportion:{listed(wrong)}\nPut the model's own file there.")


def check_implementations(values: Any, where: str) -> None:
    """Refuse a config that names a kernel of the Hub, which is native code that would be fetched and run.

    Raises   CheckpointError
    """
    named = [
        f"{key} is {shown(text)}"
        for key, value in _implementations(values)
        for text in (value.values() if isinstance(value, Mapping) else (value,))
        if isinstance(text, str) and "/" in text
    ]
    if named:
        raise CheckpointError(
            f"{where}: it asks for code of the Hub:{listed(named)}\nA checkpoint may name eager, sdpa and the like. "
            "Remove the line; whoever trusts that code passes its name to from_pretrained."
        )


def _implementations(values: Any) -> Iterator[tuple[str, Any]]:
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if _IMPLEMENTATION.fullmatch(key):
            yield key, value
        else:
            yield from _implementations(value)


def _numbers(values: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from _numbers(value, str(key))
    elif isinstance(values, list):
        for value in values:
            yield from _numbers(value, name)
    elif isinstance(values, int | float):
        yield name, values


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file of words; templates and configs alone make no tokenizer."""
    return any(_WORDS.fullmatch(name) for name in os.listdir(folder))


def check_tokenizer(folder: Path) -> None:
    """Refuse files of a tokenizer that are no files, or out of proportion. Raises CheckpointError."""
    for name in sorted(os.listdir(folder)):
        if name in ("config.json", "tokenizer_config.json"):
            check_config(folder / name)
        elif _TOKENIZER.fullmatch(name) and not os.path.isdir(folder / name):
            raw = read(folder / name, MAX_TOKENIZER_BYTES)
            most = MAX_TOKENIZER_BYTES // 16
            if name.endswith(".json") and max(raw.count(mark) for mark in (b",", b"[", b"{")) > most:
                raise CheckpointError(
                    f"{folder / name}: more than {most:,} values. Put the model's own file there."
                )
