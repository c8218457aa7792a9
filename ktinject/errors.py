"""Every refusal of ktinject is one of these; all are `ValueError`s.

A message says where, what was found, what is allowed and what to do, in that order.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import Any

LISTED, _LONG = 20, 1000

# A found value is shown in part: a name or a list may be as long as the file that it is from.
_repr = reprlib.Repr()
_repr.maxstring, _repr.maxlist, _repr.maxdict, _repr.maxlevel, _repr.maxlong = 200, 8, 4, 3, 40
shown = _repr.repr


class KTInjectError(ValueError):
    """Base of all refusals. A refusal leaves the model as it was, and the process can go on."""


class RuleError(KTInjectError):
    """A rule file or a list of rules cannot be read, or means nothing.

    where     "file:line", or "" where the message names no place; see `ktinject.rules.node.Where`
    parts     the refusals that this one is made of, if it is several
    """

    where: str = ""
    parts: tuple[RuleError, ...] = ()


class PlanError(KTInjectError):
    """The rules are well formed but do not fit this model, checkpoint, machine or budget."""


class CheckpointError(KTInjectError):
    """A checkpoint is damaged, incomplete, unsafe, or in a format that ktinject does not read."""


class OperatorError(KTInjectError):
    """An operator was asked for work that it cannot do."""


def few(items: Iterable[Any], show: Callable[[Any], str] = str, most: int = LISTED) -> list[str]:
    """What a refusal lists: the first 20, and how many more there are. Every list of problems goes through here.

    show    makes text of what is shown
    most    how many are shown
    Names are whatever a file says: one that a terminal would act on is shown with escapes, and of a long one a part.
    """
    found = list(items)
    texts = map(show, found[:most])
    safe = [text if text.isprintable() else repr(text) for text in texts]
    more = [f"and {len(found) - most:,} more"] if len(found) > most else []
    return [text if len(text) <= _LONG else f"{text[:_LONG]}…" for text in safe] + more


def listed(items: Iterable[Any], show: Callable[[Any], str] = str, most: int = LISTED) -> str:
    """`few` items as lines below a title."""
    return "".join(f"\n  {line}" for line in few(items, show, most))
