"""Grouped attention of the native core, as its tests make it."""

from __future__ import annotations

from typing import Any


def grouped(
    q: Any, k: Any, v: Any, o: Any, *, heads: int, groups: int, size: int, **changed: Any
) -> dict[str, Any]:
    """Arguments of GroupedAttention: scaled as transformers does, without norms, a window, sinks or a gate."""
    return {
        **{"q": q, "k": k, "v": v, "o": o, "q_norm": None, "k_norm": None},
        **{"heads": heads, "groups": groups, "size": size, "scale": size**-0.5},
        **{"window": 0, "sinks": None, "gated": False},
        **changed,
    }
