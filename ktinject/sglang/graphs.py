"""Graphs that SGLang cuts into segments: between two of them, a function runs on the host at each replay.

Its graphs of prompts are cut at attention. With this, those of long prompts are also cut where experts pass through the
GPU, which no graph can hold. Nothing heavy is imported: the plug-in needs this in every process.

Source: sglang 0.5.11, 0.5.17 and 0.5.23, `breakable_cuda_graph.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_cut: Decorator | None = None
_is_cuttable: Callable[[], bool] | None = None


def cuts_by(cut: Decorator | None, is_cuttable: Callable[[], bool] | None) -> None:
    """How a graph is cut, and whether one that can be is captured now. None: there are no such graphs.

    cut  a function → the same, to be called within a capture with tensors and what never changes. It runs then and at
         each replay, on the same memory, and its result goes to where that of the first time was
    """
    global _cut, _is_cuttable
    _cut, _is_cuttable = cut, is_cuttable


def cut(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function as it is called within a capture; None where nothing is captured that can be cut."""
    if _cut is None or _is_cuttable is None or not _is_cuttable():
        return None
    return _cut(function)
