"""A captured pass over few new tokens of one text, behind any number of tokens that a runner's cache holds.

    tokens [1, n] ──► `TurnPass`: one replay writes keys and values to the runner's cache ──► logits of the last token

Read eagerly, few tokens cost what launching thousands of kernels costs, and each layer's keys and values are copied to
make them longer. A pass is captured for some numbers of tokens:

    padding     tokens behind the new ones, for which no expert is computed, and which no token attends to
    attention   to what is held, in equal parts of it that are computed at once, and to the new tokens, by torch's flash
                kernel. Parts are joined by the logarithms of their sums, as in Flash-Decoding (Dao, Haziza, Massa,
                Sizov: Flash-Decoding for long-context inference). Only the GPU knows how long they are

That a pass does what the model does is not believed: `TurnPass.prepare` compares the two before the first one.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from ktinject.errors import OperatorError
from ktinject.generation import continued, frequencies, loop
from ktinject.generation.cache import KVBucket
from ktinject.generation.cache_layers import ALL_TOKENS, BucketLayer
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.masks import Masks
from ktinject.generation.piecewise_graph import PiecewiseGraph, Stages
from ktinject.hf import compat
from ktinject.operators.offload import submits
from ktinject.operators.torch_ops.packed_attention import causal_mask
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

# Tokens of a pass that are captured; a pass of another number of tokens has the next size. For more than the last one,
# experts may be streamed to the GPU.
SIZES = (16, 48, 112)
# Tokens before the new ones, from which on there is a pass: each part of them has some.
FEWEST_HELD = 256
_MOST_PARTS = 32
# Parts are so many that the kernel has a thread block for each of a GPU's processors. A block has so many rows.
_BLOCKS, _BLOCK_ROWS = 128, 128
# Tokens before those on which a pass is compared: few, so that each counts. Texts that are tried: of two experts that
# tie, both are right.
_COMPARED_BEHIND, _TRIES = 48, 3
# By what logits, and keys and values of most tokens, may differ, relative to their norms: roundings of other kernels in
# many layers; and in the first two of them, where there are few roundings.
_TOLERANCE, _FIRST_TOLERANCE = 0.25, 5e-2
_EXACT = 5e-3  # of models in fp32, whose experts may round to bf16
_ATTENTION_TOLERANCE = 2e-2  # of bf16's roundings, relative to the largest output

# (ids [1, n], positions [1, n], cache, row [1] of the token whose logits are wanted) → logits [1, v]
Forward = Callable[[Tensor, Tensor, KVBucket, Tensor], Tensor]


class Parts:
    """What the new tokens of a pass attend to. The mask of a pass has it as an attribute, see continued.py.

    calls  of `attend`
    """

    def __init__(self, position: Tensor, places: Tensor) -> None:
        """
        position  [1] int64: tokens that the cache holds
        places    [n] int64: of the new ones
        """
        self._position, self._places, self.calls = position, places, 0
        self._ends: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention of the new tokens, q [1, h, n, d], to those before and themselves, k and v [1, kv, s, d].

        Returns  [1, h, n, d]
        """
        self.calls += 1
        (_, h, n, d), kv = q.shape, k.shape[1]
        rows = h // kv * n  # heads that share keys are rows of one product
        count = min(_MOST_PARTS, max(1, _BLOCKS // (kv * -(-rows // _BLOCK_ROWS))))
        queries, keys = self._ends_of(count, rows)
        repeated = q.reshape(kv, rows, d).transpose(0, 1).repeat(count, 1, 1)
        held, held_sums = flash(
            repeated, k[0].transpose(0, 1), v[0].transpose(0, 1), scale, (queries, keys, rows, k.shape[2])
        )
        new_k, new_v = (part.index_select(2, self._places).transpose(1, 2) for part in (k, v))
        new, new_sums = flash(q.transpose(1, 2), new_k, new_v, scale)
        outs = [held.view(count, rows, kv, d).transpose(1, 2), new.transpose(1, 2).reshape(1, kv, rows, d)]
        sums = [held_sums.view(kv, count, rows).transpose(0, 1), new_sums.reshape(1, kv, rows)]
        weights = torch.cat(sums).softmax(0)[..., None]
        return (torch.cat(outs) * weights).sum(0).view(1, h, n, d).to(q.dtype)

    def _ends_of(self, count: int, rows: int) -> tuple[Tensor, Tensor]:
        """Where parts begin and end among their queries and keys [count + 1] int32; made once, for all layers."""
        if (count, rows) not in self._ends:
            order = torch.arange(count + 1, device=self._position.device)
            keys = torch.div(order * self._position, count, rounding_mode="floor")
            self._ends[count, rows] = (order * rows).int(), keys.int()
        return self._ends[count, rows]


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    ends: tuple[Tensor, Tensor, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """torch's flash attention, and the logarithms of the sums of its exponentials.

    q, k, v  [b, n, h, d], which is causal; with ends, [all queries, h, d] and [all keys, h, d], of texts of which each
             query sees all keys
    ends     of the texts among queries and among keys, [texts + 1] int32 each, and the most that one may have of each
    Returns  of q's shape; fp32 [b, h, n], or [h, all queries]
    """
    queries, keys, most_queries, most_keys = ends or (None, None, q.shape[1], k.shape[1])
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, queries, keys, most_queries, most_keys, 0.0, ends is None, False, scale=scale
    )
    return out, sums


@functools.cache
def attention_support(device: torch.device, dtype: torch.dtype, d: int, kv: int, groups: int) -> Support:
    """Whether `Parts` computes attention of such heads: tried out on a few tokens."""
    held, new = 41, 5
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, d, generator=generator, dtype=torch.float32, device="cpu").to(
            device, dtype
        )
        for heads, tokens in ((kv * groups, new), (kv, held + new + 18), (kv, held + new + 18))
    )
    position = torch.tensor([held], device=device, dtype=torch.int64)
    parts = Parts(position, position + torch.arange(new, device=device))
    try:
        found = parts.attend(q, k, v, 0.1).float()  # a scale by which each key counts
    except (RuntimeError, AttributeError, TypeError) as error:
        return Support.no(f"torch's flash attention: {str(error).splitlines()[0]}")
    mask = causal_mask(new, held + new, device)
    k, v = (part[:, :, : held + new].float().repeat_interleave(groups, 1) for part in (k, v))
    want = functional.scaled_dot_product_attention(q.float(), k, v, mask, scale=0.1)
    if (found - want).abs().max() <= _ATTENTION_TOLERANCE * want.abs().max():
        return SUPPORTED
    return Support.no(f"torch's flash attention gives something else for heads of {d}")


class TurnPass:
    """The passes on a runner's cache.

    support  whether there are any, and why not
    sizes    that they may have
    """

    def __init__(self, forward: Forward, runner: GraphRunner, sizes: Sequence[int]) -> None:
        """Take the memory. Raises torch.OutOfMemoryError.

        forward  the model; must not keep it alive
        sizes    in ascending order
        """
        self._forward, self._runner, self.sizes = forward, runner, sizes
        self.support = _cache_support(runner)
        if self.support and not sizes:
            self.support = Support.no("experts are streamed for any number of tokens")
        device, most = runner.device, max(sizes, default=1)
        # Made outside of inference mode, whose tensors could not be written outside of it later.
        with torch.inference_mode(False):
            self._ids = torch.zeros(1, most, dtype=torch.int64, device=device)
            self._order = torch.arange(most, device=device)
            self._count = torch.ones(1, dtype=torch.int64, device=device)  # of these, without padding
            self._logits = torch.zeros(1, runner.logits.shape[1], dtype=torch.float32, device=device)
        self._graphs: dict[int, PiecewiseGraph | None] = {}
        self._proven: set[int] = set()
        self._attends = 0

    def takes(self, held: int, tokens: int) -> bool:
        """Whether there is a pass that is proven for so many tokens behind those that the cache holds."""
        size = self._size_of(tokens)
        is_proven = bool(self.support) and size in self._proven
        return is_proven and held >= FEWEST_HELD and held + size <= self._runner.cache.capacity

    def __call__(self, ids: Tensor) -> Tensor:
        """Read tokens [1, n] behind those of the cache, as many as it `takes`; logits [1, v] of the last one."""
        cache, count = self._runner.cache, ids.shape[1]
        size = self._size_of(count)
        cache.reserve(size)  # padding is written, too
        cache.give_back(size - count)
        self._ids.zero_()[:, :count].copy_(ids)
        self._count.fill_(count)
        work = functools.partial(self._compute, size)
        self._runner.replay(self._runner.graph_of(self._graphs, size, work), work)
        cache.advance_by(self._count, self._order[:size])
        return self._logits.clone()

    def prepare(self, model: PreTrainedModel, ids: Tensor) -> bool:
        """Capture the pass of one more size, and compare it with the model. Whatever the cache holds is lost.

        ids      [1, n]: tokens to compare on
        Returns  whether there was one left that so many tokens are enough for
        """
        for size in reversed(self.sizes):
            if not self.support or ids.shape[1] < FEWEST_HELD + size:
                return False
            if size not in self._proven:
                self.support = self._settle(model, ids, size)
                if not self.support:
                    self._graphs.clear()
                    logger.warning("next turns are read one kernel at a time: %s", self.support.reason)
                return True
        return False

    def _size_of(self, tokens: int) -> int:
        """0: there is none for so many."""
        return next((size for size in self.sizes if size >= tokens), 0)

    def _settle(self, model: PreTrainedModel, ids: Tensor, size: int) -> Support:
        held = min(_COMPARED_BEHIND, ids.shape[1] - size)
        count = size - 1  # and one of padding
        for turned in range(_TRIES):
            try:
                differs = self._error(model, ids.roll(turned, 1)[:, : held + count], held)
            except torch.OutOfMemoryError:
                return Support.no("there is no room for a pass")
            except (OperatorError, RuntimeError, ValueError, TypeError) as error:
                return Support.no(f"a pass of {size} tokens fails: {str(error).splitlines()[0]}")
            if self._runner.graphs and self._graphs.get(size) is None:
                return Support.no(f"a pass of {size} tokens cannot be captured")
            if self._attends != len(self._runner.cache.layers):
                return Support.no("its layers compute attention in another way")
            if differs <= 1:
                self._proven.add(size)
                return SUPPORTED
        return Support.no(f"a pass differs from the model: {differs:.2g} times what roundings do")

    def _error(self, model: Any, text: Tensor, held: int) -> float:
        """The relative error of logits, or of keys or values of most tokens if that is larger; 1 is what is allowed.

        text  [1, n], of which the cache is to hold so many tokens
        """
        is_exact = model.dtype == torch.float32
        first, others = (_EXACT, _EXACT) if is_exact else (_FIRST_TOLERANCE, _TOLERANCE)
        cache = DynamicCache(config=model.config)
        new = text[:, held:]
        asked = {compat.CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        with continued.unplanned(model, text.shape[1] ** 2), frequencies.kept(model):
            model(input_ids=text[:, :held], **asked)
            self._runner.begin(cache, held, None, None)
            wanted = model(input_ids=new, **asked).logits
        ours, wanted = self(new), wanted[:, -1]
        errors = [_relative(ours, wanted.float(), (1,)).max() / others]
        for index, (layer, tensors) in enumerate(zip(cache.layers, self._runner.cache.layers)):
            allowed = first if index < 2 else others
            for theirs, held_here in zip((layer.keys, layer.values), tensors):
                here = held_here[:, :, held : text.shape[1]].float()
                errors.append(_relative(here, theirs[:, :, held:].float(), (0, 1, 3)).median() / allowed)
        found = torch.stack(errors)
        return float(torch.where(found.isnan(), torch.inf, found).max())

    def _compute(self, size: int, stages: Stages) -> None:
        cache, position = self._runner.cache, self._runner.cache.cache_position
        places = position + self._order[:size]
        mask = (torch.arange(cache.capacity, device=position.device) <= places[:, None])[None, None]
        parts = Parts(position, places)
        setattr(mask, continued.PARTS, parts)
        layers = [BucketLayer(keys, values, position, places) for keys, values in cache.layers]
        view = KVBucket(layers, position, {}, {None: mask}, cache.held_states)
        view.stages = stages
        is_text = self._order[:size] < self._count
        with submits.only(is_text if position.is_cuda else None):
            logits = self._forward(self._ids[:, :size], places[None], view, self._count - 1)
        self._attends = parts.calls
        self._logits.copy_(logits)


def _relative(found: Tensor, wanted: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The relative error along some dimensions."""
    error, size = ((found - wanted).square().sum(dims), wanted.square().sum(dims))
    return (error / size.clamp(min=1e-30)).sqrt()


def _cache_support(runner: GraphRunner) -> Support:
    """Whether there can be passes on a runner's cache."""
    cache = runner.cache
    if any(kind != ALL_TOKENS for kind in cache.kinds):
        return Support.no("its caches are not of keys and values of all tokens alone")
    if len({tensor.shape for held in cache.layers for tensor in held}) > 1:
        return Support.no("its layers' keys and values are of several forms")
    if len(cache.devices) > 1:
        return Support.no("the model stands on several GPUs")
    if len(cache.positions) > 1:
        return Support.no("a pass is of one text")
    return SUPPORTED


def run_model(
    reference: weakref.ref[PreTrainedModel],
    how: Masks,
    ids: Tensor,
    positions: Tensor,
    cache: KVBucket,
    row: Tensor,
) -> Tensor:
    """The model on tokens of one text, as `Forward` says.

    reference  weak, for a runner must not keep its model alive
    how        the model is given masks
    Raises     OperatorError if the model's attention was changed within a request
    """
    model: Any = reference()
    assert model is not None
    mask = how.of(cache, model)
    with continued.recognised(model):
        return loop.logits_of(model, ids, mask, positions, cache)[0].index_select(0, row)
