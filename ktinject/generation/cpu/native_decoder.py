"""Decode steps of a model on the CPU: all decoder layers in one call of the native core (native/decode/).

At one token, transformers runs some sixty tensor operations a layer, each microseconds of dispatch around nanoseconds
of work; beside experts and linears of the native core that is most of a step. Whether `NativeDecoder` computes what the
layers compute is not believed. Before the first step of the first request, `prove` runs both on that request's cache
until every layer has agreed with the model's own; if one does not, the model keeps transformers' steps. So all steps of
all requests run the same kernels.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktinject import _native
from ktinject.generation import block_index_spec, compressed, frequencies, loop
from ktinject.generation.cache import KVBucket
from ktinject.generation.cache_layers import LayerKind, tensors_of
from ktinject.generation.compressed import CompressedLayer
from ktinject.generation.cpu.native_layers import LAST_PLACE, NativeLayers
from ktinject.generation.cpu.native_parts import UnknownLayer
from ktinject.generation.cpu.native_rotation import Rotation
from ktinject.generation.cpu.native_streams import showing_begun
from ktinject.generation.masks import Masks
from ktinject.operators.offload import submits
from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

# Of what a layer adds to its input: intermediate results that a sum in another order rounds to the other side, which
# activations in int8 make larger.
_TOLERANCE = 3e-2
# Steps that a layer may differ in: of two experts that tie, both are right.
TRIES = 4


class _Call:
    """One step. cache_position: of its tokens."""

    def __init__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> None:
        self.ids, self.mask, self.positions, self.cache = ids, mask, positions, cache
        self.cache_position = int(cache.cache_position)

    def kept(self, index: int, kind: LayerKind) -> list[Tensor]:
        """What a layer has left in the cache: a copy."""
        layer = self.cache.layers[index]
        place = self.cache_position % (kind.window or self.cache_position + 1)
        if kind.keeps_prompt:
            place = int(layer.place)
        found = [tensor if kind.is_state else tensor[:, :, place] for tensor in tensors_of(layer)]
        if isinstance(layer, CompressedLayer):
            window, slot = divmod(self.cache_position, layer.rate)
            for part in layer.parts.values():
                found += [part.kv[:, slot], part.gate[:, slot], part.keys[:, window], *part.overlap]
        return [tensor.clone() for tensor in found]

    def states(self, index: int, kind: LayerKind) -> list[Tensor]:
        """What a step of a layer goes on from, and changes."""
        layer = self.cache.layers[index]
        if isinstance(layer, CompressedLayer):
            return [tensor for part in layer.parts.values() for tensor in part.overlap]
        return [*tensors_of(layer)] if kind.is_state else []


class Proof:
    """Whether something does what it has to do; None: that is not known yet."""

    support: Support | None = None

    def goes_on(self) -> bool:
        """Whether there is another way to do it, which it then takes."""
        return False


class NativeDecoder:
    """The model on one token a row, as `graph_runner.Forward`.

    is_proven  whether all layers have agreed, so that steps run natively
    support    whether they may: no, and why, once a layer is unknown or has disagreed
    proof      its `support`: whether `several` does what steps of one token do; None: that is not known yet

    Until it is proven, a step is the model's own, and layers are compared.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._caches: weakref.WeakKeyDictionary[KVBucket, Any] = weakref.WeakKeyDictionary()
        self._token_steps: weakref.WeakKeyDictionary[KVBucket, Any] = weakref.WeakKeyDictionary()
        self.is_proven, self.support = False, SUPPORTED
        self.proof = Proof()
        try:
            with frequencies.kept(model):  # parts of it are run
                self._layers = NativeLayers(model)
        except UnknownLayer as error:
            self.support = Support.no(str(error))
            return
        self._unproven = dict.fromkeys(range(len(self._layers)), TRIES)  # layer → tries left

    @property
    def embedded(self) -> int:
        """How many tokens the model embeds."""
        return int(self._layers.embed.weight.shape[0])

    @property
    def masks(self) -> Masks:
        """How the model is given those of a step; of a decoder that may run."""
        return self._layers.masks

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: KVBucket) -> Tensor:
        """ids [b, 1], mask [b, 1, 1, n] bool, positions [b, 1], a runner's `KVBucket` → logits [b, v]."""
        model: Any = self._model()
        assert model is not None
        if self.is_proven and (step := self._token_step(model, ids, mask, positions, cache)) is not None:
            place = int(cache.cache_position)
            if not step.run(place, cache.prompt):
                first = int(positions)
                step.turn(*self._layers.rotations.ahead(self._layers.embed.weight[:1, None], first), first)
                is_done = step.run(place, cache.prompt)
                assert is_done, "its rotation is there now"
            assert cache.logits is not None, "where the step leaves them"
            return cache.logits
        call = _Call(ids, mask, positions, cache)
        if self.is_proven:
            layers = self._layers
            x = layers.embedded(ids)
            rotation = layers.rotations(x, positions)
            out = self._run(call, layers.streamed(x)[:, 0], rotation, 0, len(layers), layers.norm)
            return layers.logits(model, out)
        model = self._comparing(model, call) if self.support else model
        return loop.logits_of(model, ids, self._layers.masks.of(cache, model), positions, cache)[:, -1]

    def several(
        self, ids: Tensor, mask: Tensor, positions: Tensor, cache: KVBucket, length: int
    ) -> tuple[Tensor, Tensor]:
        """Some tokens of one text, of which the last may be taken back; of a decoder that is proven.

        ids        [1, n], and positions
        mask       [≥ length + n] bool: what is no padding
        length     tokens in the cache
        Returns    logits [n, v], and what they are made of [n, hidden]
        """
        model: Any = self._model()
        assert model is not None and self.is_proven
        layers = self._layers
        x = layers.embedded(ids)
        cos, sin = layers.rotations.side_by_side(layers.rotations(x, positions), 0)
        out = torch.empty_like(x[0])
        layers.decoder.forward(
            x=layers.streamed(x)[0].flatten(1),
            cos=cos,
            sin=sin,
            mask=mask.expand(ids.shape[1], -1),
            position=length,
            cache=self._cache_of(cache),
            first=0,
            last=len(layers),
            final_norm=layers.norm,
            consecutive=True,
            positions=positions[0].contiguous(),
            tokens=ids[0].contiguous(),
            prompt=cache.prompt,
            head=layers.head,
            out=out,
        )
        return layers.logits(model, out), out

    def keep(self, cache: KVBucket, tokens: int) -> None:
        """Leave in the cache what the first of the tokens of `several` alone would have left, to the bit."""
        self._layers.decoder.keep(cache=self._cache_of(cache), kept=tokens)

    def prove(self, step: Callable[[], None], again: Callable[[], None], tokens: int) -> Support:
        """Settle whether steps run natively, if that is open. Returns whether those of this request do.

        step    makes a step on a request's cache, each time with other tokens
        again   puts the cache back to what it was before
        tokens  of the shortest text in the cache
        """
        if self.support and not self.is_proven and tokens < self._layers.least_compared:
            least = self._layers.least_compared
            return Support.no(
                f"{tokens} tokens show no choice of compressed or pooled keys; the first request takes {least}"
            )
        for _ in range(TRIES):
            if self.is_proven or not self.support:
                return self.support
            step()
            again()
        if not self.is_proven:
            self._refuse("its layers could not be compared")
        return self.support

    def refresh(self) -> None:
        """Read anew what the native layers hold a copy of; for each request."""
        if self.support:
            for copy, source in self._layers.copies:
                copy.copy_(source)
            self._token_steps.clear()  # with the rotations that they have

    def _token_step(self, model: Any, ids: Tensor, mask: Tensor, positions: Tensor, cache: KVBucket) -> Any:
        """A request's steps from a token to logits in one native call; None: torch makes what is around the layers."""
        if cache not in self._token_steps:
            found, layers = None, self._layers
            head = layers.plain_head(model)
            if head is not None and len(ids) == 1 and cache.logits is not None:
                found = _native.TokenStep(
                    decoder=layers.decoder,
                    cache=self._cache_of(cache),
                    norm=layers.norm,
                    head=head,
                    embeddings=layers.embed.weight.detach(),
                    ids=ids,
                    positions=positions,
                    mask=mask[0, 0, 0],
                    logits=cache.logits,
                    turns=layers.rotations.turns,
                )
            self._token_steps[cache] = found
        return self._token_steps[cache]

    def _run(
        self,
        call: _Call,
        x: Tensor,
        rotation: Rotation,
        first: int,
        last: int,
        norm: Any = None,
        most_chosen: int = 0,
    ) -> Tensor:
        """x [b, hidden], or [b, streams, hidden], through layers first to last - 1; behind the norm [b, hidden].

        most_chosen  of a step that is compared: indexers choose at most so many places
        """
        cos, sin = self._layers.rotations.side_by_side(rotation, (slice(None), 0))
        head = None if norm is None else self._layers.head
        out = torch.empty_like(x if head is None else x[:, 0])
        self._layers.decoder.forward(
            x=x.flatten(1),
            cos=cos,
            sin=sin,
            mask=call.mask[:, 0, 0],
            position=call.cache_position,
            cache=self._cache_of(call.cache),
            first=first,
            last=last,
            final_norm=norm,
            live=submits.live_rows(x),
            most_chosen=most_chosen,
            positions=call.positions[:, 0].contiguous(),
            tokens=call.ids[:, 0].contiguous(),
            prompt=call.cache.prompt,
            makes_all=most_chosen > 0,
            head=head,
            out=out.flatten(1),
        )
        return out

    def _cache_of(self, cache: KVBucket) -> Any:
        if cache not in self._caches:
            # Of a layer that keeps nothing, one that nobody reads. A convolution has its last inputs alone, and few
            # layers the keys of an index.
            tensors = [
                tensors_of(layer) or (torch.empty(1, 1, 1, dtype=torch.float32, device="cpu"),)
                for layer in cache.layers
            ]
            kinds = self._layers.kinds
            indexes = [one[2] if kind.indexed and len(one) > 2 else None for kind, one in zip(kinds, tensors)]
            parts = [_parts_of(layer) for layer in cache.layers]
            self._caches[cache] = _native.DecoderCache(
                [one[0] for one in tensors],
                [one[min(1, len(one) - 1)] for one in tensors],
                indexes,
                [tensor for held in parts for tensor in held],
                [*map(len, parts)],
            )
        return self._caches[cache]

    def _comparing(self, model: Any, call: _Call) -> nn.Module:
        """A twin of the model that computes the same; what each layer makes of its input is compared with ours."""
        layers = self._layers
        expected = layers.embedded(call.ids)
        rotation = layers.rotations(expected, call.positions)
        expected = layers.streamed(expected)

        def few(index: int) -> int:
            """So few places, or windows of them, that indexers have to choose, however short the text is."""
            return max(1, call.cache_position // (2 * (layers.kinds[index].rate or 1)))

        before: dict[int, list[Tensor]] = {}  # the states of layers that have one

        def before_layer(index: int, *_: Any) -> None:
            before[index] = [tensor.clone() for tensor in call.states(index, layers.kinds[index])]

        def after_layer(index: int, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal expected
            x = args[0] if args else kwargs["hidden_states"]
            given = layers.rotations.given(kwargs.get("position_embeddings"), index)
            if not torch.equal(x, expected):
                raise UnknownLayer("it is given something else than the layer before it gave")
            if not _are_equal(given, layers.rotations.of_layer(rotation, index)):
                raise UnknownLayer("it is given another rotation than the model's own")
            expected = output[0] if isinstance(output, tuple) else output
            kind = layers.kinds[index]
            if index in self._unproven or kind.indexed:  # a layer may go by the choice of one before it
                kept, states = call.kept(index, kind), call.states(index, kind)
                after = [tensor.clone() for tensor in states]
                _put_back(states, before[index])
                ours = self._run(call, x[:, 0], rotation, index, index + 1, most_chosen=few(index))
                agreement = _agreement(ours, expected[:, 0], x[:, 0])
                if agreement and layers.streams > 1:  # to whose sum the parts alone are added
                    agreement = _agreement(*(one.float().sum(1) for one in (ours, expected[:, 0], x[:, 0])))
                for a, b in zip(call.kept(index, kind), kept):
                    agreement = agreement and _agreement(a, b, torch.zeros_like(b))
                _put_back(states, after)
                self._note(index, agreement)

        def after_norm(args: Any, kwargs: Any, output: Any) -> None:
            nonlocal expected
            ours = self._run(call, expected[:, 0], rotation, len(layers), len(layers), layers.norm)
            expected = output.last_hidden_state
            agreement = _agreement(ours, expected[:, 0], torch.zeros_like(ours))
            if not agreement:
                raise UnknownLayer(agreement.reason)

        def after_head(args: Any, kwargs: Any, output: Any) -> None:
            if not torch.equal(output.logits, layers.logits(model, expected)):
                raise UnknownLayer("the model does more than lm_head")
            if not self._unproven:
                self.is_proven = True

        def hook(where: str, work: Any) -> Any:
            def run(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                try:
                    work(args, kwargs, output)
                except (UnknownLayer, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
                    self._refuse(f"{where}: {error}")

            return run

        twins = []
        for i, layer in enumerate(layers.layers):
            twins.append(_compared(layer, few(i)))
            compare = hook(f"layer {i}", functools.partial(after_layer, i))
            twins[i].register_forward_hook(compare, with_kwargs=True)
            twins[i].register_forward_pre_hook(functools.partial(before_layer, i))
        decoder_layers = twin.of(layers.layers, {str(i): layer for i, layer in enumerate(twins)})
        inner = twin.of(layers.module, {"layers": decoder_layers})
        inner.register_forward_hook(hook("the last norm", after_norm), with_kwargs=True)
        found = twin.around(model, layers.path, inner, without=("ktinject_decoding",))
        found.register_forward_hook(hook("logits", after_head), with_kwargs=True)
        return found

    def _note(self, index: int, agreement: Support) -> None:
        if index not in self._unproven:
            return
        if agreement:
            self._unproven.pop(index)
            return
        self._unproven[index] -= 1
        if not self._unproven[index]:
            raise UnknownLayer(agreement.reason)

    def _refuse(self, why: str) -> None:
        if self.support:
            self.is_proven, self.support = False, Support.no(why)
            logger.info("decode steps keep transformers' own operations: %s", why)


def _parts_of(layer: Any) -> list[Tensor]:
    """What the compressors of a cache's layer keep, in the order in which the native ones take it."""
    if not isinstance(layer, CompressedLayer):
        return []
    return [held for part in layer.parts.values() for held in (part.kv, part.gate, part.keys, *part.overlap)]


def _put_back(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)


def _compared(layer: nn.Module, few: int) -> nn.Module:
    """A twin of a layer whose indexer, if it has one, chooses so many places at most: also one that chooses blocks. Its
    compressor shows a window that is not complete.
    """

    def chooses(module: nn.Module) -> bool:
        return "index_topk" in vars(module) or block_index_spec.is_one(module)

    compressors = {*compressed.compressors_of(layer)}
    found = twin.tree(layer, lambda module: chooses(module) or module in compressors)
    for module in compressed.compressors_of(found):
        vars(module)["forward"] = showing_begun(module.forward)
    for module in filter(chooses, found.modules()):
        own = vars(module)
        if "index_topk" in own:
            own["index_topk"] = min(max(few, own.get("index_kpool", 1)), own["index_topk"])
        else:
            own["topk_blocks"] = min(max(few, own["local_blocks"]), own["topk_blocks"])
            own["block_size"] = 1
    return found


def _are_equal(given: Any, rotation: tuple[Tensor, Tensor] | None) -> bool:
    if rotation is None:
        return given is None
    return isinstance(given, tuple) and all(map(torch.equal, given, rotation))


def _agreement(ours: Tensor, theirs: Tensor, x: Tensor) -> Support:
    """Whether what was made of x is the same but for rounding."""
    wide = theirs.float()
    error = (ours.float() - wide).norm()
    allowed = _TOLERANCE * (wide - x.float()).norm() + LAST_PLACE[theirs.dtype] * wide.norm()
    if error <= allowed:
        return SUPPORTED
    return Support.no(f"relative difference {(error / wide.norm()).item():.2g}")
