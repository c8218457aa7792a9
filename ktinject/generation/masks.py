"""The masks of a recorded step: which form a model takes them in, found by running it without its layers.

A step attends to what a `KVBucket` says: of a layer with a sliding window to the last tokens of the window, of one
with chunks to those of its own chunk, of another one to all, and to none that is padding; layers with states of fixed
size take no mask. Three calls show whether that is what the model means, and how its layers can be given these masks
instead of some that it makes itself:

    own masks     at a position beyond all windows: do they show the same, and are they of bool, or added to scores?
    one mask      does it reach every layer that attends, unchanged?
    named masks   else, does the model take a dict, and which name does each layer's mask have in it?

Where an index keeps which tokens are padding, layers are told that of a step's own tokens alone, and such a step is
given no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktinject.errors import OperatorError
from ktinject.generation import own_caches
from ktinject.generation.cache import KVBucket, begin_of_chunk, first_tokens
from ktinject.generation.cache_layers import BucketLayer, LayerKind, States, kinds_of
from ktinject.hf import compat
from ktinject.hf.layers import Layers
from ktinject.operators.probes import twin
from ktinject.support import Support

_ROWS = 3
# Tokens behind the longest window, so that what is before a window shows. Chunks of that length begin anew there.
_BEYOND = 5
_PROMPT = 2  # tokens of the prompt, of layers that keep it


@dataclass(frozen=True)
class Masks:
    """How a model is given the masks of a step.

    names      name in a dict → kind of the layers that take this mask; None: all layers that attend take the same one
    kind       of these layers
    attention  how transformers computed it when this was found
    added      the dtype of masks that are added to scores; None: they are of bool
    """

    names: dict[str, LayerKind] | None
    kind: LayerKind
    attention: str
    added: torch.dtype | None

    def of(self, cache: KVBucket, model: Any) -> Any:
        """What the model gets as attention_mask: [b, 1, 1, n], or a dict of such masks.

        Raises  OperatorError if its attention was changed since to one that takes other masks
        """
        attention = implementation_of(model)
        if attention not in (self.attention, *ATTENTION):
            both = " and ".join(map(repr, ATTENTION))
            raise OperatorError(
                f"generate: attention was changed to {attention!r} within a request, whose masks are for {both}. "
                "Change it between requests."
            )
        added = self.added
        if attention != self.attention:
            added = model.dtype if attention == "eager" else None
        made: dict[int | None, Tensor] = {}
        if self.names is None:
            return _mask(cache, self.kind, added, made)
        return {name: _mask(cache, kind, added, made) for name, kind in self.names.items()}


# How transformers computes attention in steps that can be recorded: both take a mask of all places, "sdpa" of bool, and
# "eager" one that is added to scores.
ATTENTION = ("sdpa", "eager")


def implementation_of(model: Any) -> str:
    """The name of the way in which a model computes attention."""
    return str(model.config.get_text_config()._attn_implementation)


def _mask(
    cache: KVBucket, kind: LayerKind, added: torch.dtype | None, made: dict[int | None, Tensor]
) -> Tensor | None:
    if kind.is_state:
        return None
    if kind.window not in made:
        mask = cache.masks[kind.window]
        if added is not None:
            # As transformers makes it: of a row without any token, all count the same.
            shown = torch.zeros((), dtype=added, device=mask.device)
            mask = torch.where(mask, shown, torch.finfo(added).min)
        made[kind.window] = mask
    return made[kind.window]


def of_model(model: PreTrainedModel, kinds: Sequence[LayerKind] | None = None) -> Masks | Support:
    """The form in which a model takes the masks of a step, or why they would not be what it means.

    kinds  of its layers; None: those of the cache that transformers makes for it
    """
    like = DynamicCache(config=model.config).layers
    kinds = kinds_of(model.config) if kinds is None else kinds
    # Compressed keys are seen beside those of a window, and hidden where they are made. What an index hides, it does.
    is_pooled = any(kind.is_pooled for kind in kinds)
    if is_pooled and model.device.type != "cpu":
        return Support.no("its index makes keys of pools of tokens in each step, as many as there are")
    kinds = [replace(kind, rate=None, indexed=False, is_pooled=False) for kind in kinds]
    chunks = {kind.window for kind in kinds if kind.is_chunked}
    if any(kind.window in chunks for kind in kinds if not kind.is_chunked):
        return Support.no("some layers have chunks, and others a window, of as many tokens")
    longest = max((kind.window for kind in kinds if kind.window is not None), default=8)
    failed = None
    for more in (0, 1):  # that a layer returns behind the hidden states
        try:
            probe = _Probe(model, like, kinds, longest + _BEYOND, more)
            with torch.no_grad():
                return probe.of_own_tokens() if is_pooled else probe.found()
        except Exception as error:  # transformers' own code, given what it may not be made for
            failed = failed or error
    return Support.no(f"its masks cannot be tried out: {type(failed).__name__}: {failed}")


class _Probed(BucketLayer):
    """A layer of a cache for no heads, which takes no memory. Of a window, it has the latest tokens in their order."""

    def __init__(
        self, like: Any, kind: LayerKind, position: int, places: int, cache_position: Tensor
    ) -> None:
        """like: a layer of transformers' caches, of this kind."""
        self._sizes = places, 0
        before = _PROMPT if kind.keeps_prompt else 0
        if kind.window is not None:
            length = min(position + 1 - before, kind.window)
            self._sizes = before + length, position + 1 - before - length
        if kind.keeps_prompt:  # what a model asks such a layer for
            self._layer_type, self.prefill_length = like._layer_type, before
        keys = torch.empty(_ROWS, 0, self._sizes[0], 1, device=cache_position.device, dtype=torch.float32)
        super().__init__(keys, keys, cache_position, cache_position, kind.window)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._sizes


class _Named(dict[str, Tensor]):
    """Masks by name, whatever the names are; each is made when the model asks for it."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self._shape, self._device = shape, device

    def __missing__(self, name: str) -> Tensor:
        self[name] = torch.ones(self._shape, dtype=torch.bool, device=self._device)
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


class _Probe:
    """A model whose layers only note the masks that they are given."""

    def __init__(
        self,
        model: PreTrainedModel,
        like: Sequence[Any],
        kinds: Sequence[LayerKind],
        position: int,
        more: int,
    ) -> None:
        self._kinds, self._position, self._more = kinds, position, more
        self._device = model.device
        self._places = position + 3  # some are empty
        self._given: list[Any] = []
        self._like = like
        self._bucket_class = own_caches.bucket_class(model)
        self._model = self._without_layers(model)

    def found(self) -> Masks | Support:
        added = self.own_masks()
        if isinstance(added, Support):
            return added
        names = self.names()
        if isinstance(names, Support):
            return names
        attends = next(kind for kind in self._kinds if not kind.is_state)
        return Masks(names, attends, implementation_of(self._model), added)

    def of_own_tokens(self) -> Masks | Support:
        """The same of layers that are told which of a step's own tokens are no padding, and keep that in an index."""
        mask = torch.ones(_ROWS, self._position + 1, dtype=torch.bool, device=self._device)
        mask[0, :7] = False
        for index, found in enumerate((*self._run(mask), *self._run(None))):
            is_one = isinstance(found, Tensor) and found.dtype == torch.bool and found.shape == (_ROWS, 1)
            if not is_one or not bool(found.all()):
                return Support.no(
                    f"layer {index % len(self._kinds)}: its mask is not of the step's tokens alone"
                )
        return Masks(None, LayerKind(is_state=True), implementation_of(self._model), None)

    def own_masks(self) -> torch.dtype | None | Support:
        """Whether the masks that the model makes show what a `KVBucket`'s do; and their dtype, if they are added."""
        position = self._position
        mask = torch.ones(_ROWS, self._places, dtype=torch.bool, device=self._device)
        mask[:, position + 1 :] = False
        # Of layers that keep the prompt, rows with padding stay with the model's own steps.
        if not any(kind.keeps_prompt for kind in self._kinds):
            # The latter in every window but one of a single token.
            mask[0, :7] = mask[0, position - 1] = False
        added: torch.dtype | None = None
        for index, (found, kind) in enumerate(zip(self._run(mask), self._kinds, strict=True)):
            if kind.is_state:
                if found is not None:
                    return Support.no(f"layer {index}: its linear attention has a mask")
                continue
            wanted, what = mask, "all tokens"
            if kind.window is not None:
                first = position + 1 - min(position + 1, kind.window)
                wanted, what = mask[:, first : position + 1], f"a window of {kind.window} tokens"
                if kind.keeps_prompt:
                    wanted, what = torch.cat([mask[:, :_PROMPT], wanted], 1), f"the prompt and {what}"
                if kind.is_chunked:
                    begins = begin_of_chunk(position, first_tokens(mask), kind.window)
                    at = torch.arange(first, position + 1, device=self._device)
                    wanted, what = wanted & (at >= begins[:, None]), f"a chunk of {kind.window} tokens"
            if not _shows(found, wanted):
                return Support.no(f"layer {index}: its mask shows something else than {what}")
            if found is not None and found.dtype != torch.bool:
                added = found.dtype
        return added

    def names(self) -> dict[str, LayerKind] | None | Support:
        """The name of each mask that the layers get, if the model takes a dict; None: it takes one for all layers."""
        shape = (_ROWS, 1, 1, self._places)
        attends = {kind for kind in self._kinds if not kind.is_state}
        one = torch.ones(shape, dtype=torch.bool, device=self._device)
        if len(attends) == 1:
            given = self._run(one)
            if all(found is (None if kind.is_state else one) for found, kind in zip(given, self._kinds)):
                return None
        masks = _Named(shape, self._device)
        given = self._run(masks)
        names: dict[str, LayerKind] = {}
        for index, (found, kind) in enumerate(zip(given, self._kinds, strict=True)):
            name = next((name for name, mask in masks.items() if mask is found), None)
            if name is None:
                if kind.is_state and found is None:
                    continue
                return Support.no(f"layer {index}: it is given another mask than the model is")
            if names.setdefault(name, kind) != kind:
                return Support.no(f"layer {index}: layers of several kinds share the mask {name!r}")
        # The model asks for some that it gives to no layer.
        others = {name: LayerKind(is_state=True) for name in masks if name not in names}
        return {**names, **others}

    def _run(self, mask: Any) -> list[Any]:
        """The masks that the layers get, for one that the model gets."""
        self._given.clear()
        cache_position = torch.tensor([self._position], device=self._device, dtype=torch.int64)
        layers: list[Any] = []
        for like, kind in zip(self._like, self._kinds, strict=True):
            if kind.is_state:
                states = States.of(like)
                layers.append(replace(states, previous=tuple(range(states.number))).layer(()))
            else:
                layers.append(_Probed(like, kind, self._position, self._places, cache_position))
        self._model(
            input_ids=torch.zeros(_ROWS, 1, dtype=torch.int64, device=self._device),
            attention_mask=mask,
            position_ids=torch.full((_ROWS, 1), self._position, device=self._device, dtype=torch.int64),
            use_cache=True,
            **{compat.CACHE: self._bucket_class(layers, cache_position, {}, {}, [None] * len(layers))},
        )
        return list(self._given)

    def _without_layers(self, model: PreTrainedModel) -> Any:
        """A twin of the model with layers that do nothing."""
        count = len(self._kinds)
        layers = Layers(model)
        if layers.count != count:
            raise ValueError(f"it has no list of {count} layers")
        path = layers.paths[0].rpartition(".")[0]
        held: Any = model.get_submodule(path)
        twins = {}
        for name, layer in held.named_children():
            twins[name] = alone = twin.of(layer, hooks=False)
            vars(alone)["forward"] = self._note
        # Nobody's hooks are to see these calls.
        return twin.around(model, path, twin.of(held, twins), without=("ktinject_decoding",), hooks=False)

    def _note(self, hidden_states: Tensor, *_: Any, **kwargs: Any) -> Any:
        self._given.append(kwargs["attention_mask"])
        return (hidden_states, *[None] * self._more) if self._more else hidden_states


def _shows(found: Any, wanted: Tensor) -> bool:
    """Whether a mask [b, 1, 1, n], of bool or to be added to scores, or None shows what [b, n] bool does."""
    if found is None:
        return bool(wanted.all())
    if not isinstance(found, Tensor) or found.shape != (len(wanted), 1, 1, wanted.shape[1]):
        return False
    shown = found if found.dtype == torch.bool else found == 0
    return bool(torch.equal(shown[:, 0, 0], wanted))
