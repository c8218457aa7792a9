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
import itertools
import logging
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ktinject.generation.cache_layers import ALL_TOKENS, kind_of, kind_support
from ktinject.operators.offload import lent
from ktinject.serving.beginnings import Beginnings

logger = logging.getLogger("ktinject")

_FEWEST = 16  # tokens in common for which a beginning is copied
BLOCK = 8 << 20  # bytes of RAM that are page-locked at a time


class InRam:
    """Tensors of a text in page-locked blocks, one behind the other, by copies that no host waits for.

    Blocks are all of one size, so torch's allocator gives those of a text that is gone to the next one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self._devices = [tensor.device for tensor in tensors]
        total = sum(tensor.nbytes for tensor in tensors)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        self._blocks = [_block(on_gpu) for _ in range(-(-total // BLOCK))]
        self._copy(tensors, back=False)

    @property
    def bytes(self) -> int:
        return len(self._blocks) * BLOCK

    def back(self) -> list[Tensor]:
        """The tensors, where they were."""

        def empty() -> list[Tensor]:
            return [
                torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                for tensor, device in zip(self._tensors, self._devices)
            ]

        found = lent.retried(empty, {*self._devices})
        self._copy(found, back=True)
        return found

    def _copy(self, tensors: Sequence[Tensor], back: bool) -> None:
        place = 0
        for tensor in tensors:
            rest = tensor.contiguous().view(-1).view(torch.uint8)
            while len(rest):
                block = self._blocks[place // BLOCK][place % BLOCK :][: len(rest)]
                here, rest = rest[: len(block)], rest[len(block) :]
                to, of = (here, block) if back else (block, here)
                to.copy_(of, non_blocking=True)
                place += len(block)


def _block(is_pinned: bool) -> Tensor:
    if is_pinned:
        try:
            return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning("texts go to RAM that is not page-locked, which is slower: %s", error)
    return torch.empty(BLOCK, dtype=torch.uint8, device="cpu")


@dataclass(eq=False)
class _Kept:
    """A text.

    ids      the tokens that the cache holds
    in_ram   its tensors, which it has none of then
    used     when it was used, in counts of uses
    counted  its bytes, as its group has counted them
    """

    ids: list[int]
    cache: DynamicCache
    in_ram: InRam | None = None
    used: int = 0
    counted: int = 0

    @property
    def is_here(self) -> bool:
        """On the model's device."""
        return self.in_ram is None

    @property
    def bytes(self) -> int:
        if self.in_ram is not None:
            return self.in_ram.bytes
        return sum(part.nbytes for part in self._held())

    def leave(self) -> None:
        """Go to RAM. Others may hold the cache, and see no change."""
        self.cache = copy.copy(self.cache)
        self.cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        self.in_ram = InRam(self._held())
        self._put([torch.empty_like(part, device="meta") for part in self._held()])

    def come_back(self) -> None:
        if self.in_ram is not None:
            self._put(self.in_ram.back())
            self.in_ram = None

    def _held(self) -> list[Tensor]:
        return [part for layer in self.cache.layers for part in _tensors(layer)]

    def _put(self, tensors: Sequence[Tensor]) -> None:
        """As `_held` has them."""
        rest = iter(tensors)
        for layer in self.cache.layers:
            vars(layer).update(
                {
                    name: {key: _replaced(part, rest) for key, part in value.items()}
                    if isinstance(value, dict)
                    else _replaced(value, rest)
                    for name, value in vars(layer).items()
                }
            )


class _Group:
    """Texts in the order in which they were used, and how large they are together.

    tokens, bytes   of all; kept up to date, since a sum over thousands of texts and layers would take seconds
    """

    def __init__(self) -> None:
        self._texts: list[_Kept] = []
        self.tokens = self.bytes = 0

    def add(self, kept: _Kept) -> None:
        kept.counted = kept.bytes
        insort(self._texts, kept, key=_used)
        self.tokens += len(kept.ids)
        self.bytes += kept.counted

    def remove(self, kept: _Kept) -> None:
        del self._texts[bisect_left(self._texts, kept.used, key=_used)]
        self.tokens -= len(kept.ids)
        self.bytes -= kept.counted

    @property
    def oldest(self) -> _Kept:
        return self._texts[0]


class Prefixes:
    """Caches of texts. Not safe from several threads.

    here     tokens that may stay on the model's device
    ram      bytes that may be in RAM besides; on a CPU, all that may be kept
    """

    def __init__(self, model: Any, here: int, ram: int) -> None:
        self._model, self._here, self._ram = model, here, ram
        self._beginnings: Beginnings[_Kept] = Beginnings()
        self._clock = itertools.count()
        self._in_ram = _Group()
        self._on_device = self._in_ram if self._is_cpu else _Group()
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
    def _is_cpu(self) -> bool:
        return bool(self._model.device.type == "cpu")

    @property
    def on_device(self) -> int:
        """Tokens on the model's device."""
        return self._on_device.tokens

    @property
    def in_ram(self) -> int:
        """Bytes."""
        return self._in_ram.bytes

    def take(self, ids: list[int]) -> tuple[DynamicCache | None, int]:
        """A cache for a text, and how many of its tokens it holds; at least one is left to be read.

        None: the model's caches are not kept. Give the cache back by `keep`.
        """
        if not self._is_known or not (self._ram or self._here):
            return None, 0
        found = self._beginnings.find(ids[:-1])
        kept = found.whole[-1] if found.whole else None
        same = len(kept.ids) if kept is not None else 0
        if self._is_cut and found.text is not None and found.common >= max(same + 1, _FEWEST):
            self._use(found.text)
            return self._beginning(found.text, found.common), found.common
        if kept is None:
            return DynamicCache(config=self._config), 0
        self._remove(kept)
        kept.come_back()
        return kept.cache, same

    def keep(self, ids: list[int], cache: DynamicCache | None) -> None:
        """Keep a cache for texts that begin with these tokens, which it holds."""
        if cache is None or not ids or cache.get_seq_length() != len(ids):
            return
        for shorter in self._beginnings.find(ids).whole:
            self._remove(shorter)
        kept = _Kept(ids, cache, used=next(self._clock))
        self._beginnings.add(kept, ids)
        self._group(kept).add(kept)
        if self._is_cpu:
            self._make_room(0)
        else:
            while self.on_device > self._here:
                self._leave(self._on_device.oldest)

    def _group(self, kept: _Kept) -> _Group:
        return self._on_device if kept.is_here else self._in_ram

    def _use(self, kept: _Kept) -> None:
        """It was used just now."""
        self._group(kept).remove(kept)
        kept.used = next(self._clock)
        self._group(kept).add(kept)
        self._beginnings.use(kept)

    def _remove(self, kept: _Kept) -> None:
        self._group(kept).remove(kept)
        self._beginnings.remove(kept)

    def _leave(self, kept: _Kept) -> None:
        """From the device to RAM, or out."""
        if kept.bytes > self._ram:
            self._remove(kept)
            return
        self._make_room(kept.bytes)
        self._on_device.remove(kept)
        kept.leave()
        self._in_ram.add(kept)

    def _make_room(self, bytes: int) -> None:
        """Let the least recently used texts go until so many more may be in RAM."""
        while self.in_ram and self.in_ram + bytes > self._ram:
            self._remove(self._in_ram.oldest)

    def _beginning(self, kept: _Kept, tokens: int) -> DynamicCache:
        """A copy of the first tokens' keys and values."""
        whole = _Kept(kept.ids, copy.copy(kept.cache), kept.in_ram)  # from RAM: the other one stays there
        whole.cache.layers = [copy.copy(layer) for layer in kept.cache.layers]
        whole.come_back()
        cache = DynamicCache(config=self._config)
        for layer, other in zip(cache.layers, whole.cache.layers):
            layer.update(*(part[:, :, :tokens].clone() for part in (other.keys, other.values)))
        return cache


def _replaced(value: Any, tensors: Iterator[Tensor]) -> Any:
    return next(tensors) if isinstance(value, Tensor) else value


def _tensors(layer: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else [value]
        found.extend(part for part in parts if isinstance(part, Tensor))
    return found


def _used(kept: _Kept) -> int:
    return kept.used
