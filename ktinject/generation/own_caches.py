"""Models whose caches, or layers of these, are of a class of their own: MiniMax-01's, which is no cache with states of
fixed size to others; and Unlimited-OCR's, whose layers keep the prompt beside a window.

    a request without a cache ──► the model's prefill makes one of its own ──► `as_dynamic`: the same as a DynamicCache,
                                                                               from which recorded steps go on
    a step ──► `bucket_class`: a `KVBucket` that the model takes for its own

What other requests leave in MiniMax-01's is up to transformers: a cache of the caller's, beams, candidates. So is one
of the caller's whose layers keep the prompt, and any such one on a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import DynamicCache, DynamicLayer, GenerationConfig, PreTrainedModel

from ktinject.generation.cache import KVBucket
from ktinject.generation.cache_layers import keeps_prompt, kind_of
from ktinject.hf import compat
from ktinject.hf.private import owner_of
from ktinject.support import SUPPORTED, Support


@functools.cache
def _classes() -> tuple[type[KVBucket], type[DynamicCache]]:
    """The class of a step's caches, and of a prefill's. Loaded for a model that needs them."""
    own: Any = importlib.import_module(compat.OWN_CACHE.partition(":")[0]).MiniMaxCache

    class Bucket(KVBucket, own):
        """What MiniMax-01 takes: linear caches are the states of layers, which a step writes where they lie."""

        def get_linear_cache(self, layer_idx: int) -> Tensor:
            found: Tensor = self.layers[layer_idx].recurrent_states[0]
            return found

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            self.layers[layer_idx].recurrent_states[0].copy_(linear_cache)

        def __len__(self) -> int:
            return len(self.layers)

    class Dynamic(DynamicCache):
        """The cache of a prefill, as others read it."""

        bucket_class = Bucket

    return Bucket, Dynamic


def is_for(model: Any) -> bool:
    """Whether a model makes caches of its own that are known here."""
    return any(owner_of(base) in compat.OWN_CACHES for base in type(model).__mro__)


def bucket_class(model: Any) -> type[KVBucket]:
    """What a model is given as the cache of a step."""
    return _classes()[0] if is_for(model) else KVBucket


def as_dynamic(model: Any, cache: Any) -> Any:
    """What a model's prefill left, as a DynamicCache; the same tensors. Of other models, the cache itself."""
    if not is_for(model):
        return cache
    _, dynamic = _classes()
    found: Any = dynamic(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(found.layers):
        if kind_of(layer).is_state:
            state = cache.get_linear_cache(index)
            layer.recurrent_states[0], layer.is_recurrent_states_initialized[0] = state, True
            layer.has_previous_state[0] = True
            layer.dtype, layer.device = state.dtype, state.device
            continue
        own = cache.layers[index]
        layer.keys, layer.values, layer.is_initialized = own.keys, own.values, True
        layer.dtype, layer.device = own.keys.dtype, own.keys.device
    return found


def request_support(model: PreTrainedModel, mask: Any, config: GenerationConfig) -> Support:
    """Whether recorded steps can serve a request of a model that makes its own cache."""
    if not (known := compat.support("own_caches")):
        return known
    if config.return_dict_in_generate or config.cache_implementation is not None:
        return Support.no("the cache is of the model's own kind, and returned, or of another implementation")
    first = DynamicCache(config=model.config.get_text_config(decoder=True)).layers[0]
    if kind_of(first).is_state and isinstance(mask, Tensor) and not bool((mask != 0).all()):
        # transformers counts tokens by the first layer, and makes masks of the wrong length.
        return Support.no("a row has padding, and the model's first layer keeps no tokens to count")
    return SUPPORTED


def keeps_prompts(cache: Any) -> bool:
    """Whether layers of a request's cache keep the prompt beside a window."""
    return any(map(keeps_prompt, getattr(cache, "layers", ())))


def prompt_support(model: PreTrainedModel, cache: Any, mask: Any, config: GenerationConfig) -> Support:
    """Whether recorded steps can serve a request whose cache's layers keep the prompt."""
    if not (known := compat.support("prompts")):
        return known
    kinds = {kind_of(layer) for layer in cache.layers if type(layer) is not DynamicLayer}
    if type(cache) is not DynamicCache or cache.offloading or len(kinds) > 1:
        names = ", ".join(sorted({type(layer).__name__ for layer in cache.layers}))
        return Support.no(f"the cache is a {type(cache).__name__} of {names}")
    if model.device.type != "cpu":
        return Support.no("its layers keep the prompt beside a window, which captured steps do not")
    if config.return_dict_in_generate or getattr(cache, "_is_user_defined", False):
        return Support.no("its layers keep the prompt beside a window, and the cache outlives the request")
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        # transformers looks for padding of the prompt at other places, once the window is full.
        return Support.no("a row has padding, and its layers keep the prompt beside a window")
    return SUPPORTED


def plain_support(model: Any, model_kwargs: Mapping[str, Any]) -> Support:
    """Whether other loops than our own can run on recorded steps."""
    if compat.cache_of(model_kwargs) is None and is_for(model):
        return Support.no(f"{type(model).__name__} makes a cache of its own kind")
    return SUPPORTED
