"""What is checked of a tokenizer that transformers has loaded, before it is given a text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("ktinject")

_MOST_GROWTH = 1000  # times that a text may grow; published normalizers put one letter for another


def check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that makes a text out of proportion; switch off what is for training alone.

    Raises  ValueError, which says the file and what to change in it
    """
    longest: Any = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ValueError(
            f"tokenizer_config.json: model_max_length is {longest!r}; it is a number of tokens, or left out"
        )
    made = getattr(tokenizer, "backend_tokenizer", None)
    if made is None:
        return
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(made, name)
        if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MOST_GROWTH:
            raise ValueError(
                f"tokenizer.json: its {name} makes a text up to {growth:,} times as long; at most {_MOST_GROWTH:,} are "
                "allowed"
            )
    if getattr(made.model, "dropout", None):
        logger.warning(
            "%s: tokenizer.json has dropout %g, which cuts texts at random and is for training; it is off here",
            tokenizer.name_or_path,
            made.model.dropout,
        )
        made.model.dropout = None


def _growth(part: Any) -> int:
    """How many times as long replacements one after another can make a text."""
    product = 1
    for length in _contents(part):
        product *= max(1, length)
    return product


def _contents(part: Any) -> Iterator[int]:
    """Letters that each replacement puts for one or more, also in lists of steps."""
    if isinstance(part, dict):
        if part.get("type") in ("Replace", "Prepend"):
            yield len(str(part.get("content", part.get("prepend", ""))))
        for value in part.values():
            yield from _contents(value)
    elif isinstance(part, list):
        for value in part:
            yield from _contents(value)
