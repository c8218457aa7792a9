"""What was read of earlier texts, so that a next one that begins with it reads only what is new.

A request gives its cache back when it is written: keys and values, and states, of its prompt and answer. The next turn
of a conversation goes on from there. A text that parts from it earlier gets a copy of the common beginning, where all
layers keep all tokens; windows and states of fixed size have passed that place, so such models go on from whole texts
alone.

    on the model's device, as many tokens as it has room for ──► least recently used: RAM ──► least recently used: gone

What the paged cache of a batch holds is its own, see batches.py.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ktinject.generation.cache_layers import ALL_TOKENS, kind_of, kind_support

_FEWEST = 16  # tokens in common for which a beginning is copied


@dataclass(eq=False)
class _Kept:
    """ids: the tokens that the cache holds; is_here: on the model's device."""

    ids: list[int]
    cache: DynamicCache
    is_here: bool = True

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.cache.layers for tensor in _tensors(layer).values())


class Prefixes:
    """Caches of texts. Not safe from several threads.

    here     tokens that may stay on the model's device
    ram      bytes that may be in RAM besides; on a CPU, all that may be kept
    """

    def __init__(self, model: Any, here: int, ram: int) -> None:
        self._model, self._here, self._ram = model, here, ram
        self._kept: list[_Kept] = []  # the least recently used one first
        like = DynamicCache(config=self._config)
        # Of other kinds of caches nobody knows how many tokens they hold.
        self._is_known = bool(kind_support(like)) and not all(
            kind_of(layer).is_state for layer in like.layers
        )
        self._is_cut = self._is_known and all(kind_of(layer) == ALL_TOKENS for layer in like.layers)

    @property
    def _config(self) -> Any:
        return self._model.config.get_text_config(decoder=True)

    @property
    def on_device(self) -> int:
        """Tokens on the model's device."""
        return sum(len(kept.ids) for kept in self._kept if kept.is_here)

    @property
    def in_ram(self) -> int:
        """Bytes."""
        is_cpu = self._model.device.type == "cpu"
        return sum(kept.bytes for kept in self._kept if is_cpu or not kept.is_here)

    def take(self, ids: list[int]) -> tuple[DynamicCache | None, int]:
        """A cache for a text, and how many of its tokens it holds; at least one is left to be read.

        None: the model's caches are not kept. Give the cache back by `keep`.
        """
        if not self._is_known or not (self._ram or self._here):
            return None, 0
        found = [(_common(kept.ids, ids[:-1]), kept) for kept in self._kept]
        whole = [(same, kept) for same, kept in found if same == len(kept.ids)]
        same, kept = max(whole, key=lambda pair: pair[0], default=(0, None))
        if self._is_cut:
            longest, other = max(found, key=lambda pair: pair[0], default=(0, None))
            if other is not None and longest >= max(same + 1, _FEWEST):
                self._kept.remove(other)
                self._kept.append(other)  # used just now
                return self._beginning(other, longest), longest
        if kept is None:
            return DynamicCache(config=self._config), 0
        self._kept.remove(kept)
        self._move(kept, self._model.device)
        return kept.cache, same

    def keep(self, ids: list[int], cache: DynamicCache | None) -> None:
        """Keep a cache for texts that begin with these tokens, which it holds."""
        if cache is None or not ids or cache.get_seq_length() != len(ids):
            return
        self._kept = [kept for kept in self._kept if _common(kept.ids, ids) < len(kept.ids)]
        self._kept.append(_Kept(ids, cache))
        if self._model.device.type != "cpu":
            for kept in self._kept:
                if self.on_device <= self._here:
                    break
                if kept.is_here:
                    self._move(kept, torch.device("cpu"))
        while self._kept and self.in_ram > self._ram:
            self._kept.remove(next(kept for kept in self._kept if self._counts(kept)))

    def _counts(self, kept: _Kept) -> bool:
        """Whether it takes RAM."""
        return not kept.is_here or self._model.device.type == "cpu"

    def _beginning(self, kept: _Kept, tokens: int) -> DynamicCache:
        """A copy of the first tokens' keys and values."""
        cache = DynamicCache(config=self._config)
        for layer, other in zip(cache.layers, kept.cache.layers):
            keys, values = (
                part[:, :, :tokens].to(self._model.device, copy=True) for part in (other.keys, other.values)
            )
            layer.update(keys, values)
        return cache

    def _move(self, kept: _Kept, device: torch.device) -> None:
        is_here = device == self._model.device
        if is_here == kept.is_here:
            return
        moved = copy.copy(kept.cache)
        moved.layers = [copy.copy(layer) for layer in kept.cache.layers]
        for layer in moved.layers:
            vars(layer).update(
                {
                    name: {key: _to(part, device) for key, part in value.items()}
                    if isinstance(value, dict)
                    else _to(value, device)
                    for name, value in vars(layer).items()
                }
            )
        kept.cache, kept.is_here = moved, is_here


def _to(value: Any, device: torch.device) -> Any:
    return (
        value.to(device)
        if isinstance(value, Tensor)
        else device
        if isinstance(value, torch.device)
        else value
    )


def _tensors(layer: Any) -> dict[str, Tensor]:
    found = {}
    for name, value in vars(layer).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        found.update({f"{name}.{key}": part for key, part in parts if isinstance(part, Tensor)})
    return found


def _common(some: list[int], others: list[int]) -> int:
    """How many tokens both begin with."""
    count = min(len(some), len(others))
    if some[:count] == others[:count]:
        return count
    return next(at for at in range(count) if some[at] != others[at])
