"""Which of the tokens before a decoder layer lets a token attend to, found by running the model without its layers.

The native decoder takes the masks that transformers makes for granted: of a layer with a sliding window the last
tokens of the window, of another one all, and none that is padding; of linear attention there is no mask. How long the
window is, a cache's layers say. That is compared with the masks that the model hands to its layers, at a position
beyond all windows: the steps that are compared later (native_decoder.py) may be of requests that reach none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktinject.generation.cache import KVBucket, LayerKind, cache_layer
from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

_ROWS = 2
# Tokens behind the longest window, so that what is before a window shows. Chunks of that length begin anew there.
_BEYOND = 5


def mask_support(module: Any, kinds: Sequence[LayerKind]) -> Support:
    """Whether a model masks as the native decoder does.

    module  the model without its output layer
    kinds   of its layers
    """
    position = max((kind.window for kind in kinds if kind.window is not None), default=8) + _BEYOND
    places = position + 3  # some are empty
    mask = torch.ones(_ROWS, places, dtype=torch.bool)
    mask[:, position + 1 :] = False
    mask[0, :7] = mask[0, position - 1] = False  # the latter in every window but one of a single token
    try:
        given = _given(module, kinds, mask, position)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return Support.no(f"its masks cannot be tried out: {type(error).__name__}: {error}")
    for index, (found, kind) in enumerate(zip(given, kinds, strict=True)):
        if kind.is_state:
            if found is not None:
                return Support.no(f"layer {index}: its linear attention has a mask")
            continue
        first = 0 if kind.window is None else position + 1 - min(position + 1, kind.window)
        if not _shows(found, mask[:, first : None if kind.window is None else position + 1]):
            what = "all tokens" if kind.window is None else f"a window of {kind.window} tokens"
            return Support.no(f"layer {index}: its mask shows something else than {what}")
    return SUPPORTED


def _given(module: Any, kinds: Sequence[LayerKind], mask: Tensor, position: int) -> list[Any]:
    """The masks that the layers get at a position."""
    cache_position = torch.tensor([position])

    def empty(kind: LayerKind) -> Any:
        """A layer of a cache for no heads, which takes no memory."""
        keys = torch.empty(_ROWS, 0, kind.window or mask.shape[1], 1)
        return cache_layer(kind, (keys, keys), cache_position)

    given: list[Any] = []
    layers = {}
    for index, layer in enumerate(module.layers):
        alone: Any = twin.of(layer)
        vars(alone)["forward"] = _recording(given)
        layers[str(index)] = alone
    inner = twin.of(module, {"layers": twin.of(module.layers, layers)})
    with torch.no_grad():
        type(inner).forward(
            inner,
            input_ids=torch.zeros(_ROWS, 1, dtype=torch.int64),
            attention_mask=mask,
            position_ids=torch.full((_ROWS, 1), position),
            past_key_values=KVBucket([empty(kind) for kind in kinds], cache_position),
            use_cache=True,
        )
    return given


def _recording(given: list[Any]) -> Any:
    def forward(hidden_states: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        given.append(kwargs["attention_mask"])
        return hidden_states

    return forward


def _shows(found: Any, wanted: Tensor) -> bool:
    """Whether a mask [b, 1, 1, n], of bool or to be added to scores, or None shows what [b, n] bool does."""
    if found is None:
        return bool(wanted.all())
    if not isinstance(found, Tensor) or found.shape != (len(wanted), 1, 1, wanted.shape[1]):
        return False
    shown = found if found.dtype == torch.bool else found == 0
    return bool(torch.equal(shown[:, 0, 0], wanted))
