"""Rows of a `FixedCache` that go on from one another, as the beams of a search do."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ktinject.generation.cache import FixedCache


def reorder(cache: FixedCache, order: Tensor, length: int) -> None:
    """Let each of the first rows go on from what another one holds.

    Masks and positions stay: beams of a text share them.

    order   [rows] int64: from which
    length  tokens in the cache, or more
    """
    for held in _held(cache, length):
        held[: len(order)].copy_(held.index_select(0, order.to(held.device)))


def move(cache: FixedCache, order: list[int], length: int) -> None:
    """The same for rows that are known on the host: those that stay are not touched."""
    moved = [row for row, source in enumerate(order) if row != source]
    sources = [order[row] for row in moved]
    for held in _held(cache, length):
        held[moved] = held[sources]


def _held(cache: FixedCache, length: int) -> Iterator[Tensor]:
    """All that so many tokens have left, [b, …] each."""
    for tensors, compressed, kind in zip(cache.layers, cache.compressed, cache.kinds):
        for tensor in tensors:
            yield tensor if kind.is_state or kind.window is not None else tensor[:, :, :length]
        if compressed is not None:
            yield from compressed.tensors(length)
