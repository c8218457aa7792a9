"""A cache that outlives its request: transformers' own object, which recorded steps do not write to.

prefill ──► its DynamicCache ──► copied into a `FixedCache`, on which recorded steps run
                                 └─ the request ends: `hand_back` copies all its tokens into the DynamicCache
"""

from __future__ import annotations

from transformers import DynamicCache

from ktinject.generation.cache import FixedCache


def hand_back(cache: DynamicCache, fixed: FixedCache, length: int) -> None:
    """Give a prefill's cache the keys and values that recorded steps left: tensors of its own, as transformers has.

    cache   of the batch's rows, whose order is that of the first rows of `fixed`
    length  tokens; what `fixed` holds after them is of a step whose token was thrown away
    """
    for layer, (keys, values) in zip(cache.layers, fixed.layers):
        rows = len(layer.keys)
        layer.keys, layer.values = keys[:rows, :, :length].clone(), values[:rows, :, :length].clone()
