"""What a step of several tokens of one text sees of a `FixedCache`, and how the last of them are taken back.

    tokens of one text ──► rows of a step ──► all of them read the one row of the cache, each up to itself

So whatever computes a step of several texts computes this one: modules see rows of one token each. A layer that keeps
all tokens has the new ones in their places, of which those that are taken back are written again. The others undo:

    rings    new tokens are in places of their own behind the ring, and those that are kept are moved into it
    states   go on from token to token, and what they were before each one is noted
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation.cache import FixedCache, KVBucket
from ktinject.generation.cache_layers import ConsecutiveLayer, States, kind_of
from ktinject.hf import compat
from ktinject.hf.layers import Layers
from ktinject.operators.probes import twin


class Past:
    """States of fixed size as they were before each token of a step, and behind all of them."""

    def __init__(self, cache: FixedCache, most: int) -> None:
        """Take the memory, for steps of up to so many tokens. Raises torch.OutOfMemoryError."""
        with torch.inference_mode(False):
            self._noted = {
                index: [(tensor, tensor.new_empty(most + 1, *tensor.shape[1:])) for tensor in held]
                for index, (kind, held) in enumerate(zip(cache.kinds, cache.layers))
                if kind.is_state
            }

    def note(self, index: int, at: int) -> None:
        """Note the states of a layer, before so many tokens of a step."""
        for state, noted in self._noted[index]:
            noted[at].copy_(state[0])

    def note_end(self, tokens: int) -> None:
        """Note the states of all layers, behind a step of so many tokens."""
        for index in self._noted:
            self.note(index, tokens)

    def put_back(self, tokens: Tensor) -> None:
        """Go back to before so many tokens of the step, [1] int64."""
        for held in self._noted.values():
            for state, noted in held:
                torch.index_select(noted, 0, tokens, out=state)


def view_of(cache: FixedCache, bucket: int, order: Tensor, past: Past | None) -> KVBucket:
    """What a step of n tokens behind those of the cache sees of its first places.

    order  [n] int64: 0, 1 … n - 1
    """
    position, count = cache.cache_position, len(order)
    places = position + order
    at = torch.arange(bucket, device=order.device)
    held = cache.mask[0, 0, 0, :bucket] & (at < position)
    new = (at >= position) & (at <= places[:, None])
    masks: dict[int | None, Tensor] = {None: (held | new)[:, None, None]}
    for window, ring in cache.rings.items():
        size = ring.shape[-1]
        # The greater, the later a place was written; 0 has the token before the window of the first new one.
        age = (torch.arange(size, device=order.device) - position) % window
        held = ring[0, 0, 0] & (age > order[:, None])
        new = torch.arange(cache.room, device=order.device) <= order[:, None]
        masks[window] = torch.cat([held, new], dim=1)[:, None, None]
    layers: list[Any] = []
    for index, (kind, tensors, states) in enumerate(zip(cache.kinds, cache.layers, cache.held_states)):
        if states is not None:
            layers.append(states[0].layer(states[1]))
        elif kind.window is None:
            keys, values = (tensor[:, :, :bucket] for tensor in tensors)
            layers.append(ConsecutiveLayer(keys, values, position, places, count))
        else:
            behind = order + tensors[0].shape[2]
            keys, values = cache.with_room(index)
            layers.append(ConsecutiveLayer(keys, values, position, behind, count, kind.window))
    view = KVBucket(layers, position, {}, masks, cache.held_states)
    view.past = past
    return view


def keep(cache: FixedCache, past: Past | None, order: Tensor, tokens: Tensor) -> None:
    """Leave in rings and states the first tokens of a step, before the cache has advanced.

    order   [n] int64, as `view_of` was given it
    tokens  [1] int64: how many; where there are states, less than n, or their end is noted
    """
    if past is not None:
        past.put_back(tokens)
    for index, kind in enumerate(cache.kinds):
        if kind.window is None:
            continue
        size = cache.layers[index][0].shape[2]
        there = (cache.cache_position + order) % kind.window
        # Those that are taken back stay where they are.
        places = torch.where(order < tokens, there, size + order)
        for whole in cache.with_room(index):
            whole.index_copy_(2, places, whole[:, :, size : size + len(order)].clone())


def modules_with_states(model: PreTrainedModel) -> dict[int, list[str]]:
    """Layer with states of fixed size → paths of the modules that may have them: its children that know its number."""
    layers = DynamicCache(config=model.config).layers
    paths = Layers(model).paths
    if len(paths) != len(layers):
        return {}
    found = {}
    for index, (path, layer) in enumerate(zip(paths, layers)):
        if kind_of(layer).is_state and States.of(layer).number:
            children = model.get_submodule(path).named_children()
            found[index] = [
                f"{path}.{name}" for name, child in children if getattr(child, "layer_idx", None) == index
            ]
    return found


class OneByOne:
    """A twin of a model whose modules with states take the tokens of a text one after the other.

    It shares all else with the model, which it does not keep alive.
    """

    def __init__(self, model: PreTrainedModel, paths: Mapping[int, Sequence[str]]) -> None:
        """paths  as `modules_with_states` has them"""
        head = head_of(model)
        wanted = {model.get_submodule(path) for found in paths.values() for path in found} | {*head}
        self._twin = twin.tree(model, wanted.__contains__, without=("ktinject_decoding",))
        self._modules = {i: [self._twin.get_submodule(path) for path in found] for i, found in paths.items()}
        self._head = head_of(self._twin)

    def __call__(self, **inputs: Any) -> Any:
        cache = compat.cache_of(inputs)
        with one_by_one(self._modules, cache), noted(self._head, cache):
            return self._twin(**inputs)


def head_of(model: nn.Module) -> list[nn.Module]:
    """What makes the logits of a model, if it says so."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return [] if head is None else [head]


@contextmanager
def noted(head: Sequence[nn.Module], cache: Any) -> Iterator[None]:
    """Within, what a twin's head is given is left in a cache that asks for it."""
    if not isinstance(cache, KVBucket) or not cache.asks_hidden:
        yield
        return
    before = [(module, vars(module).get("forward")) for module in head]

    def noting(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            cache.hidden = x
            return forward(x, *args, **kwargs)

        return run

    try:
        for module in head:
            vars(module)["forward"] = noting(module.forward)
        yield
    finally:
        for module, forward in before:
            _put_back(module, forward)


def _put_back(module: nn.Module, forward: Any) -> None:
    """forward  None: that of its class"""
    vars(module).pop("forward", None)
    if forward is not None:
        vars(module)["forward"] = forward


@contextmanager
def one_by_one(modules: Mapping[int, Sequence[nn.Module]], cache: Any) -> Iterator[None]:
    """Within, modules of a twin with the states of a layer take rows that are tokens of one text one after the other.

    cache  of the step; if its rows are texts, nothing is changed
    """
    if not is_of_one_text(cache):
        yield
        return
    before = [(module, vars(module).get("forward")) for found in modules.values() for module in found]
    try:
        for index, found in modules.items():
            for module in found:
                vars(module)["forward"] = alone(module.forward, cache, index)
        yield
    finally:
        for module, forward in before:
            _put_back(module, forward)


def is_of_one_text(cache: Any) -> bool:
    """Whether the rows of a step are tokens of one text."""
    return isinstance(cache, KVBucket) and cache.past is not None


def alone(forward: Callable[..., Any], cache: KVBucket, index: int) -> Callable[..., Any]:
    """A forward of a layer with states, for rows that are tokens of one text: it is called for one after the other."""

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = len(hidden_states)

        def row(at: int) -> Any:
            given = _row(args, at, count), {name: _row(value, at, count) for name, value in kwargs.items()}
            return forward(hidden_states[at : at + 1], *given[0], **given[1])

        return token_by_token(cache, index, count, row)

    return run


def _row(value: Any, at: int, count: int) -> Any:
    """One row of what is given for so many."""
    if isinstance(value, tuple):
        return tuple(_row(part, at, count) for part in value)
    has_rows = isinstance(value, Tensor) and value.dim() > 1 and len(value) == count
    return value[at : at + 1] if has_rows else value


def token_by_token(cache: KVBucket, index: int, count: int, row: Callable[[int], Any]) -> Any:
    """Compute rows one after the other which are tokens of one text, noting the states of a layer before each.

    row      row → what is computed of it: a tensor of one row, or a tuple of such
    Returns  the same of all rows
    """
    assert cache.past is not None
    found = []
    for at in range(count):
        cache.past.note(index, at)
        found.append(row(at))
        cache.keep_in_place(index)
    if isinstance(found[0], tuple):
        return tuple(torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in zip(*found))
    return torch.cat(found)


def in_rows(cache: KVBucket, index: int, count: int, compute: Callable[[slice], Any]) -> Any:
    """What a layer with states makes of so many rows: of all at once, or of tokens of one text one after the other.

    compute  rows → what is computed of them, on the layer's states
    """
    if not is_of_one_text(cache):
        return compute(slice(None))
    return token_by_token(cache, index, count, lambda at: compute(slice(at, at + 1)))
