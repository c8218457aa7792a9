"""Prompts that are longer than a context are refused before they become tokens, as far as that can be known.

Tokenising takes microseconds a character and a hundred bytes a token. Megabytes of text, which cannot fit, would take
minutes and hundreds of megabytes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

_COMPOSED = 4  # characters that NFC makes one of, at most
_USUAL = 4  # characters of a token; of a text with more, tokens are counted before they are listed


def bounded(tokenizer: PreTrainedTokenizerBase, context: int) -> PreTrainedTokenizerBase:
    """The same tokenizer, which refuses with 400 a text of more tokens than `context`."""
    longest = longest_token(tokenizer)
    kind: Any = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(text, str) and len(text) > _USUAL * context:
            if longest is not None and len(text) > longest * context:
                raise _too_long(context)
            backend = tokenizer.backend_tokenizer
            # Unlike lists of millions of numbers, that leaves the interpreter to other threads.
            if len(backend.encode_batch([text], add_special_tokens=False)[0]) > context:
                raise _too_long(context)
        return kind.__call__(self, text, *args, **kwargs)

    found = copy.copy(tokenizer)
    found.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    return found


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Characters of a text that become one token at most; None: any number may, or it is not known."""
    made = json.loads(tokenizer.backend_tokenizer.to_str())
    model = made["model"]
    normal = [part["type"] for part in _parts(made["normalizer"], "normalizers")]
    before = _parts(made["pre_tokenizer"], "pretokenizers")
    kept = {"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"}
    has_bytes = any(part["type"] == "ByteLevel" for part in before)
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if has_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    )
    if (
        model["type"] != "BPE"
        or made["truncation"]
        or not (has_bytes or model["byte_fallback"])
        or any(letter not in model["vocab"] for letter in alphabet)  # else a character may be lost
        or model["continuing_subword_prefix"]
        or model["end_of_word_suffix"]
        or any(part["type"] not in kept or part.get("behavior") == "Removed" for part in before)
        or any(not _keeps_length(part) for part in _parts(made["normalizer"], "normalizers"))
        or any(token["lstrip"] or token["rstrip"] for token in made["added_tokens"])
    ):
        return None
    longest = max(
        len(word) for word in [*model["vocab"], *(token["content"] for token in made["added_tokens"])]
    )
    return longest * (_COMPOSED if "NFC" in normal else 1)


def _keeps_length(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return part["type"] in ("NFC", "Prepend")


def _parts(made: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    def walk(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if part["type"] == "Sequence":
            for each in part[inner]:
                yield from walk(each)
        else:
            yield part

    return [] if made is None else [*walk(made)]


def _too_long(context: int) -> Exception:
    from fastapi import HTTPException

    return HTTPException(
        status_code=400,
        detail=f"the prompt has more than {context} tokens; there is room for {context}, the answer included.",
    )
