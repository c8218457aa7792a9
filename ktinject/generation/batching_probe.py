"""Whether a model computes packed requests as it computes each alone, found by running it on a few tokens of two texts.

Continuous batching relies on what no model promises: that every layer takes positions, masks and caches from the
arguments of a step, and mixes no tokens otherwise. A layer that does not would write wrong texts, and say nothing. So
before the first batch, two short texts are read in three packed steps, with chunks and single tokens in one row, and
all logits are compared with the model's own on each text.

    step 1: A A A A A A B B B B B B      step 2: A B B B      step 3: A A B
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ktinject.generation import frequencies
from ktinject.hf import compat
from ktinject.operators.torch_ops.packed_attention import FULL, SLIDING, causal_mask, takes_kwargs
from ktinject.support import SUPPORTED, Support

_STEPS = ((6, 6), (1, 3), (2, 1))  # new tokens of each text
# The mean difference of logits, relative to their size, at which they are the same. A wrong mask, position or cache
# makes it about 1; rounding makes less, even where it leads to another expert.
_EXACT, _ROUNDED = 1e-2, 0.25


class _Misfit(Exception):
    """Why a layer's keys and values cannot be cached."""


def support(
    model: Any,
    kv_heads: int,
    head_dim: int,
    has_masks: bool,
    packed: Callable[[], AbstractContextManager[None]],
) -> Support:
    """Whether packed requests are computed right.

    kv_heads, head_dim  of keys and of values in the paged cache
    has_masks           whether attention of packed requests is given masks
    packed              within its context, the model computes packed requests
    """
    config = model.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(min(config.vocab_size, 1 << 15), (sum(counts),), generator=generator, device="cpu").to(
            model.device
        )
        for counts in zip(*_STEPS)
    ]
    with torch.no_grad(), frequencies.kept(model):
        want = [model(input_ids=text[None], use_cache=False).logits[0].float() for text in texts]
        try:
            with packed():
                found = _in_steps(model, texts, _cache(config, kv_heads, head_dim), has_masks)
        except _Misfit as misfit:
            return Support.no(str(misfit))
        except Exception as error:  # of any layer, given what it may not be made for
            return Support.no(f"a step of packed requests fails: {type(error).__name__}: {error}")
    difference = torch.stack([_difference(*pair) for pair in zip(found, want)]).max().item()
    if difference <= (_EXACT if model.dtype in (torch.float32, torch.float64) else _ROUNDED):  # NaN is not
        return SUPPORTED
    return Support.no(
        f"packed with another text, a text's logits differ by {difference:.2g} of their size from those that it has "
        "alone"
    )


def _difference(found: Tensor, want: Tensor) -> Tensor:
    want = want - want.mean(-1, keepdim=True)
    found = found - found.mean(-1, keepdim=True)
    return ((found - want).norm(dim=-1) / want.norm(dim=-1)).mean()


def _in_steps(model: Any, texts: Sequence[Tensor], cache: Any, has_masks: bool) -> list[Tensor]:
    """Logits [tokens, v] fp32 of each text, read in packed steps."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for counts in _STEPS:
        rows = cache.begin(counts)
        logits = model(**_inputs(model, texts, rows, cache, has_masks)).logits[0].float()
        for parts, part in zip(found, logits.split(list(counts))):
            parts.append(part)
    return [torch.cat(parts) for parts in found]


def _inputs(
    model: Any, texts: Sequence[Tensor], rows: Sequence[slice], cache: Any, has_masks: bool
) -> dict[str, Any]:
    """What continuous batching gives a model for some tokens of each text."""
    device = model.device
    counts = [row.stop - row.start for row in rows]
    ends = {kind: _ends(seen, device) for kind, seen in cache.seen.items()}
    longest = {kind: max(seen) for kind, seen in cache.seen.items()}
    masks: Any = None
    if has_masks:
        masks = {
            kind: _mask(counts, seen, cache.window if kind == SLIDING else None, model)
            for kind, seen in cache.seen.items()
        }
        masks = masks if len(masks) > 1 else next(iter(masks.values()))
    empty = torch.empty(0, dtype=torch.int64, device=device)
    inputs = {
        "input_ids": torch.cat([text[row] for text, row in zip(texts, rows)])[None],
        "position_ids": torch.cat([torch.arange(row.start, row.stop, device=device) for row in rows])[None],
        "attention_mask": masks,
        "cu_seq_lens_q": _ends(counts, device),
        "cu_seq_lens_k": ends,
        "read_index": [empty] * len(ends),
        "write_index": [empty] * len(ends),
        "cache": cache,
        "block_table": None,
        "use_cache": False,
    }
    if "max_length_q" in compat.PagedAttentionArgs.__annotations__:
        return {**inputs, "max_length_q": max(counts), "max_length_k": longest, "is_causal": not has_masks}
    if len(ends) == 1:
        inputs["cu_seq_lens_k"], longest = next(iter(ends.values())), next(iter(longest.values()))
    return {**inputs, "max_seqlen_q": max(counts), "max_seqlen_k": longest}


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def _mask(counts: Sequence[int], seen: Sequence[int], window: int | None, model: Any) -> Tensor:
    """[1, 1, new tokens, keys of all texts] to add: a text sees its own keys."""
    blocks = [causal_mask(m, s, model.device, window)[0, 0] for m, s in zip(counts, seen)]
    shown = torch.block_diag(*(block.to(torch.float32) for block in blocks)) > 0
    return torch.where(shown, 0.0, torch.finfo(model.dtype).min).to(model.dtype)[None, None]


class _Keys:
    """A paged cache without pages: keys and values of each text, one behind the other.

    seen  kind of layers → tokens in sight of each text, in this step
    """

    def __init__(self, config: Any, kv_heads: int, head_dim: int) -> None:
        count = config.num_hidden_layers
        self.window: Any = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or [FULL if self.window is None else SLIDING] * count
        self._shape = kv_heads, head_dim
        self._held: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._kinds = kinds
        self._counts: Sequence[int] = ()
        self._past = [0] * len(_STEPS[0])
        self.seen: dict[str, list[int]] = {kind: [] for kind in kinds}
        # As the two versions of transformers' cache say what kind a layer is.
        self.layer_to_allocator = {
            index: SimpleNamespace(layer_type=kind) for index, kind in enumerate(kinds)
        }
        self.sliding_windows = {
            index: self.window if kind == SLIDING else 1 for index, kind in enumerate(kinds)
        }

    def begin(self, counts: Sequence[int]) -> list[slice]:
        """Begin a step; gives each text's new tokens."""
        rows = [slice(past, past + count) for past, count in zip(self._past, counts)]
        self._counts, self._past = counts, [row.stop for row in rows]
        for kind in self.seen:
            most = self.window - 1 if kind == SLIDING else sys.maxsize
            self.seen[kind] = [row.stop - row.start + min(row.start, most) for row in rows]
        return rows

    def add(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Those in sight of all texts, [1, h, tokens, d]. Raises _Misfit."""
        for name, part in (("keys", keys), ("values", values)):
            if (part.shape[1], part.shape[3]) != self._shape:
                raise _Misfit(
                    f"layer {layer} has {part.shape[1]} heads of {part.shape[3]} {name}, and the paged cache "
                    f"{self._shape[0]} of {self._shape[1]}"
                )
        new = list(zip(*(part.split(list(self._counts), 2) for part in (keys, values))))
        before = self._held.get(layer)
        if before is not None:
            new = [tuple(torch.cat(both, 2) for both in zip(*pair)) for pair in zip(before, new)]
        self._held[layer] = new
        seen = self.seen[self._kinds[layer]]
        keys, values = (
            torch.cat([part[:, :, -most:] for part, most in zip(parts, seen)], 2) for parts in zip(*new)
        )
        return keys, values


def _cache(config: Any, kv_heads: int, head_dim: int) -> Any:
    """transformers' class with that in it, for the version that is installed."""

    class WithKwargs(_Keys, compat.PagedAttentionCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Any) -> Any:
            kind = self._kinds[layer_idx]
            for name in ("cu_seq_lens_k", "max_length_k"):
                kwargs[name] = kwargs[name][kind]
            return self.add(key_states, value_states, layer_idx)

    class WithIndices(_Keys, compat.PagedAttentionCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Any, write_index: Any
        ) -> Any:
            return tuple(part[0].transpose(0, 1) for part in self.add(key_states, value_states, layer_idx))

    has_kwargs = takes_kwargs(compat.PagedAttentionCache)
    return (WithKwargs if has_kwargs else WithIndices)(config, kv_heads, head_dim)
