"""Layers with compressed keys: beside a window of tokens, they keep one key for each `rate` tokens (DeepSeek-V4).

transformers' cache layers grow with each step. Here, a layer's tensors stay where they are:

    tokens of the present window   in slots of their own, position p at p % rate, until it is complete
    its compressed key             computed in each step, at p // rate; it counts, and is seen, once it is complete
    the window before              of layers whose windows overlap: taken over when the present one is complete

A compressor's forward is transformers' own, on a layer of ours whose methods give it whole windows. But of one token,
`DeepseekV4HCACompressor` hides no key, for its caches hold none that is not complete. So in a step, twins of these
modules say which keys are there.

Windows are of tokens of the cache, those of padding included, as transformers counts them: all rows are at one place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktinject.generation.cache_layers import BucketLayer, empty, fill_rows, is_compressed
from ktinject.hf import compat
from ktinject.hf.private import owner_of
from ktinject.model_class import own_class
from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

# Frequencies of these do not depend on how long a text is.
_ROTATIONS = ("default", "linear", "llama3", "yarn")
# The gate of a token that is not there. Unlike -inf, it may be subtracted from itself.
_NO_WEIGHT = -1e9


@dataclass
class Part:
    """What a compressor, or the one of an index, keeps.

    kv, gate      [b, rate, n]: of the tokens of the present window
    keys          [b, windows, d]: of each window, its compressed key
    overlap_kv, overlap_gate
                  [b, rate, d]: of the window before, what the present one takes of it; None: nothing
    gate_dtype    of transformers' own overlap_gate; here it is of fp32 or wider
    """

    kv: Tensor
    gate: Tensor
    keys: Tensor
    overlap_kv: Tensor | None = None
    overlap_gate: Tensor | None = None
    gate_dtype: torch.dtype | None = None

    @property
    def overlap(self) -> list[Tensor]:
        return [held for held in (self.overlap_kv, self.overlap_gate) if held is not None]


class CompressedLayer(BucketLayer):
    """A bucket of such a layer, with the methods that transformers' compressors call in a step of one token a row.

    rate   tokens of a window
    parts  by the names that the compressors have for them
    """

    def __init__(
        self,
        keys: Tensor,
        cache_position: Tensor,
        place: Tensor,
        window: int | None,
        rate: int,
        parts: Mapping[str, Part],
    ) -> None:
        super().__init__(keys, keys, cache_position, place, window)
        self.rate, self.parts = rate, parts

    @property
    def written(self) -> tuple[Tensor, ...]:
        """What a step writes beside the ring; the host waits for the next token's place."""
        window = int(self.cache_position) // self.rate
        return tuple(
            held
            for part in self.parts.values()
            for held in (part.kv, part.gate, part.keys[:, window : window + 1], *part.overlap)
        )

    @property
    def is_complete(self) -> Tensor:
        """[1] bool: whether the next token is the last one of its window."""
        return (self.cache_position + 1) % self.rate == 0

    @property
    def hidden(self) -> Tensor:
        """[windows] bool: the windows that are not complete with the next token."""
        order = torch.arange(self.parts["compressor"].keys.shape[1], device=self.keys.device)
        return order >= (self.cache_position + 1) // self.rate

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys are values."""
        self.keys.index_copy_(2, self.place, key_states)
        return self.keys, self.keys

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take a token's, [b, 1, n] each. Returns those of its window [b, rate, n], and where it begins, [1] int64."""
        part, place = self.parts[name], self.cache_position % self.rate
        part.kv.index_copy_(1, place, kv)
        part.gate.index_copy_(1, place, gate)
        return part.kv, part.gate, self.cache_position - place

    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """What the present window, [b, 1, rate, n] each, takes of the one before; it goes there once it is complete."""
        part = self.parts[name]
        assert part.overlap_kv is not None and part.overlap_gate is not None
        part.gate_dtype = chunk_gate.dtype
        before = part.overlap_kv.clone(), part.overlap_gate.clone()
        for held, new in ((part.overlap_kv, chunk_kv), (part.overlap_gate, chunk_gate)):
            held.copy_(torch.where(self.is_complete, new[:, -1, :, :head_dim].to(held.dtype), held))
        return before

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Take the present window's key [b, 1, d]. Returns those of all windows [b, windows, d]."""
        keys = self.parts[name].keys
        return keys.index_copy_(1, self.cache_position // self.rate, compressed)


class Compressed:
    """What one layer of a `FixedCache` keeps beside its ring."""

    def __init__(self, like: Any, batch: int, capacity: int) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        like      the layer of a cache that a prefill left
        batch     rows
        capacity  tokens of the longest text
        """
        self.rate: int = like.compress_rate
        self.parts = {name: self._part(like, name, batch, capacity) for name in like.buffer_kv}

    def _part(self, like: Any, name: str, batch: int, capacity: int) -> Part:
        def slots(tensor: Tensor, places: int) -> Tensor:
            return empty(tensor, batch, places, dim=1)

        kv, gate, keys = like.buffer_kv[name], like.buffer_gate[name], like.compressed_kv[name]
        part = Part(slots(kv, self.rate), slots(gate, self.rate), slots(keys, self._windows(capacity)))
        if name in getattr(like, "overlap_kv", ()):
            # As wide as a key, whether there has been a window or not.
            part.overlap_kv = slots(kv[..., : keys.shape[-1]], self.rate)
            exact = torch.promote_types(gate.dtype, torch.float32)
            part.overlap_gate = slots(gate[..., : keys.shape[-1]].to(exact), self.rate)
        return part

    def _windows(self, tokens: int) -> int:
        """How many windows so many tokens have, the last one maybe begun."""
        return -(-tokens // self.rate)

    @property
    def states(self) -> tuple[Tensor, ...]:
        """What a step that is repeated must find as it was."""
        return tuple(held for part in self.parts.values() for held in part.overlap)

    def tensors(self, tokens: int) -> Iterator[Tensor]:
        """All that so many tokens have left, [b, …] each."""
        for part in self.parts.values():
            yield from (part.kv, part.gate, part.keys[:, : self._windows(tokens)], *part.overlap)

    def takes(self, layer: Any) -> bool:
        """Whether a layer that a prefill left is of the same kind and form."""
        return (layer.compress_rate, layer.buffer_kv.keys()) == (self.rate, self.parts.keys()) and all(
            (mine.dtype, mine.device, mine.shape[2]) == (theirs.dtype, theirs.device, theirs.shape[2])
            for name, part in self.parts.items()
            for mine, theirs in (
                (part.kv, layer.buffer_kv[name]),
                (part.gate, layer.buffer_gate[name]),
                (part.keys, layer.compressed_kv[name]),
            )
        )

    def begin(self, layer: Any, length: int, written: int) -> None:
        """Take over what a prefill left of so many tokens. Rows beyond those are copies of the first one.

        written  tokens that keys may have been written for
        """
        complete = length // self.rate
        for name, part in self.parts.items():
            # What a failed request left is not finite, which a mask does not hide.
            part.keys[:, complete : self._windows(written) + 1].zero_()
            fill_rows(part.keys[:, :complete], layer.compressed_kv[name])
            for to, held in ((part.kv, layer.buffer_kv[name]), (part.gate, layer.buffer_gate[name])):
                fill_rows(to.zero_()[:, : held.shape[1]], held)
            if part.overlap_kv is not None and part.overlap_gate is not None:
                kv, gate = layer.overlap_kv[name], layer.overlap_gate[name]
                if kv is None:  # before the first window
                    part.overlap_kv.zero_()
                    part.overlap_gate.fill_(_NO_WEIGHT)
                    continue
                part.gate_dtype = gate.dtype
                fill_rows(part.overlap_kv, kv)
                fill_rows(part.overlap_gate, gate)

    def layer(
        self, keys: Tensor, cache_position: Tensor, place: Tensor, window: int | None, size: int
    ) -> CompressedLayer:
        """What a step sees of it, of which so many tokens have room in its bucket.

        keys, cache_position, place, window  as `CompressedLayer` takes them
        """
        parts = {
            name: replace(part, keys=part.keys[:, : self._windows(size)]) for name, part in self.parts.items()
        }
        return CompressedLayer(keys, cache_position, place, window, self.rate, parts)

    def grow(self, capacity: int) -> None:
        """Make room for the windows of so many tokens."""
        for part in self.parts.values():
            longer = empty(part.keys, len(part.keys), self._windows(capacity), dim=1)
            longer[:, : part.keys.shape[1]].copy_(part.keys)
            part.keys = longer

    def hand_back(self, layer: Any, rows: int, length: int) -> None:
        """Give a prefill's layer what so many tokens have left, in tensors of its own."""
        complete, begun = divmod(length, self.rate)
        for name, part in self.parts.items():
            layer.buffer_kv[name] = part.kv[:rows, :begun].clone()
            layer.buffer_gate[name] = part.gate[:rows, :begun].clone()
            layer.compressed_kv[name] = part.keys[:rows, :complete].clone()
            layer.entry_count[name] = complete
            if part.overlap_kv is not None and part.overlap_gate is not None and complete:
                layer.overlap_kv[name] = part.overlap_kv[:rows].clone()
                gate = part.overlap_gate[:rows]
                layer.overlap_gate[name] = gate.to(part.gate_dtype or gate.dtype, copy=True)


def undo_of(layer: Any) -> dict[str, dict[str, Any]]:
    """What leaves such a layer's own states as they are now, if its attributes of these names become these values.

    transformers replaces its tensors, and never writes to them.
    """
    return {name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)}


def give_back(layer: Any) -> None:
    """Free the keys of a layer that was copied; nobody else holds it."""
    for name, keys in layer.compressed_kv.items():
        layer.compressed_kv[name] = keys[:, :0].clone()


def length_support(layers: Sequence[Any], tokens: int) -> Support:
    """Whether the layers of a cache have compressed as much as so many tokens leave."""
    for index, layer in enumerate(layers):
        if not is_compressed(layer):
            continue
        complete, begun = divmod(tokens, layer.compress_rate)
        for name, buffer in layer.buffer_kv.items():
            count, keys = layer.entry_count[name], layer.compressed_kv[name]
            if (
                buffer is None
                or keys is None
                or (count, keys.shape[1], buffer.shape[1]) != (complete, complete, begun)
            ):
                return Support.no(f"layer {index}: its compressed keys are not those of {tokens} tokens")
    return SUPPORTED


def positions_support(positions: Tensor | None, tokens: int) -> Support:
    """Whether no next token's position, [b or 1, 1], shows windows that the cache has no tokens of."""
    if positions is None or not bool((positions > tokens).any()):
        return SUPPORTED
    return Support.no(f"a token behind {tokens} has a greater position, by which compressed keys are chosen")


def class_of(model: nn.Module) -> Any:
    """The class of models with compressed keys that a model is of; None: it is of none that we know."""
    names = compat.COMPRESSED_MODELS
    # Not the one that swapping made of it, which has its name.
    classes = own_class(model).__mro__
    return next((base for base in classes if owner_of(base) in names), None)


def model_support(model: nn.Module) -> Support:
    """Whether we know steps of a model as free of host decisions of which transformers does not say so.

    It says so of no model with compressed keys, whose caches have no static form there.
    """
    if class_of(model) is None:
        return Support.no(f"transformers does not say that {type(model).__name__} is free of host decisions")
    if not (known := compat.support("compressed")):
        return known
    config: Any = model.config
    if config._attn_implementation != "eager":
        return Support.no(
            f"attention runs as {config._attn_implementation!r}, which hides no compressed keys"
        )
    kinds = {parameters["rope_type"] for parameters in config.rope_parameters.values()}
    if odd := kinds - {*_ROTATIONS}:
        return Support.no(f"positions turn by rope_type {odd.pop()!r}, which may depend on a text's length")
    return SUPPORTED


def compressors_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hide none of their keys from a single token."""
    return [m for m in model.modules() if owner_of(type(m)) in compat.COMPRESSORS]


@contextmanager
def hiding(compressors: Sequence[nn.Module]) -> Iterator[None]:
    """Within, compressors of a twin hide the keys of windows that are not complete."""
    before = [(module, vars(module).get("forward")) for module in compressors]
    try:
        for module in compressors:
            vars(module)["forward"] = with_hidden(module.forward)
        yield
    finally:
        for module, forward in before:
            vars(module).pop("forward", None)
            if forward is not None:
                vars(module)["forward"] = forward


def with_hidden(
    forward: Callable[..., tuple[Tensor, Tensor | None]],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A compressor's forward that says what is hidden of its keys in a step."""

    def run(
        hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor, cache: Any, layer_idx: int
    ) -> tuple[Tensor, Tensor | None]:
        keys, added = forward(hidden_states, q_residual, position_ids, cache, layer_idx)
        layer = cache.layers[layer_idx]
        if added is None and isinstance(layer, CompressedLayer):
            added = keys.new_zeros(len(keys), 1, 1, keys.shape[2]).masked_fill_(layer.hidden, float("-inf"))
        return keys, added

    return run


class Steps:
    """A twin of a model whose compressors hide what a step may not see. It shares all else with the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._twin = twin.tree(model, {*compressors_of(model)}.__contains__, without=("ktinject_decoding",))
        self._compressors = compressors_of(self._twin)

    def __call__(self, **inputs: Any) -> Any:
        with hiding(self._compressors):
            return self._twin(**inputs)
