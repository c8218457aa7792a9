"""The tokenizer in GGUF's metadata: its words, how they are joined, and the template of chats.

Source: docs/gguf.md of ggml, and `llama_vocab::impl::load` in llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Never

from ktinject.checkpoints.files import DOWNLOAD_AGAIN
from ktinject.checkpoints.reader import Header, Vocabulary
from ktinject.errors import CheckpointError, shown

_WORDS, _TYPES, _SCORES, _MERGES = (
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges")
)
ARRAYS = (_WORDS, _TYPES, _SCORES, _MERGES)
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")


def vocabulary(header: Header, path: Path) -> Vocabulary | None:
    """None if there is none. Raises CheckpointError for what does not fit together.

    header  with the whole of `ARRAYS`
    """
    said = header.metadata

    def refuse(key: str, found: str) -> Never:
        raise CheckpointError(f"{path}: {key} {found}. {DOWNLOAD_AGAIN}")

    kind = said.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        return None
    if _WORDS not in said:
        refuse(_WORDS, "is not there, but tokenizer.ggml.model is")
    words = said[_WORDS]
    if not isinstance(words, tuple) or not words or type(words[0]) is not str:
        refuse(_WORDS, "is not an array of strings")
    arrays: dict[str, tuple[Any, ...]] = {}
    for key, of in ((_TYPES, int), (_SCORES, float)):
        found = said.get(key, ())
        if not isinstance(found, tuple) or (found and type(found[0]) is not of):
            refuse(key, f"is not an array of {of.__name__}")
        if found and len(found) != len(words):
            refuse(key, f"has {len(found)} values, for {len(words)} words")
        arrays[key] = found
    if not all(map(math.isfinite, arrays[_SCORES])):
        refuse(_SCORES, "has a value that is not finite")
    merges = said.get(_MERGES, ())
    if not isinstance(merges, tuple) or (merges and type(merges[0]) is not str):
        refuse(_MERGES, "is not an array of strings")
    pairs = []
    for merge in merges:
        blank = merge.find(" ", 1)
        if not 0 < blank < len(merge) - 1:
            refuse(_MERGES, f"has {shown(merge)}; two words with a blank between them are needed")
        pairs.append((merge[:blank], merge[blank + 1 :]))
    tokens = {}
    for name, key in _TOKENS.items():
        number = said.get(f"tokenizer.ggml.{key}_token_id")
        if number is None:
            continue
        if type(number) is not int or not 0 <= number < len(words):
            refuse(f"tokenizer.ggml.{key}_token_id", f"is {shown(number)}, of {len(words)} words")
        tokens[name] = number
    flags = {name: said.get(f"tokenizer.ggml.{name}") for name in _FLAGS}
    for name, flag in flags.items():
        if flag is not None and type(flag) is not bool:
            refuse(f"tokenizer.ggml.{name}", f"is {shown(flag)}; a truth value is needed")
    split, template = said.get("tokenizer.ggml.pre", ""), said.get("tokenizer.chat_template")
    if type(kind) is not str or type(split) is not str or not (template is None or type(template) is str):
        refuse("tokenizer", "has a model, way to split or template that is no text")
    return Vocabulary(
        kind=kind,
        split=split,
        words=words,
        types=arrays[_TYPES],
        scores=arrays[_SCORES],
        merges=tuple(pairs),
        tokens=tokens,
        flags={name: flag for name, flag in flags.items() if flag is not None},
        template=template,
    )
