"""Attention of packed requests: tokens of several texts in one row, each over the cache of its own text.

transformers' continuous batching gives a layer hidden states [1, tokens, hidden] and, beside them, where each text's
new tokens begin (`cu_seq_lens_q`), where its cached ones do (`cu_seq_lens_k`), and which places of a paged cache they
have. With its own "sdpa", every query meets the keys of all texts, and a mask hides those of others: for 16 texts,
15 of 16 products are for nothing. Here each text is computed by itself: on a GPU by torch's kernel for texts of
different lengths, on the CPU one after the other.

The two versions of the cache that are supported differ in names alone; `Packed` knows both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from ktinject.errors import OperatorError
from ktinject.hf import compat
from ktinject.operators.torch_ops import cpu_attention
from ktinject.support import SUPPORTED, Support

# As batching.py makes it known to transformers. A name with "flash" in it stands for attention that needs no masks.
NAME = "ktinject_flash"

# So many texts of one new token are attended together, if padding makes at most so many times as many keys of them.
_FEWEST, _MOST_PADDING = 3, 2
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers of a paged cache


class Text(NamedTuple):
    """One of the packed texts: its new tokens, and the keys that are in sight, each as a slice."""

    queries: slice
    keys: slice


class Singles(NamedTuple):
    """Texts of one new token each.

    queries  [n] int64: their places
    keys     [n, s] int64: places of the keys in sight; behind the last one, some other
    mask     [n, 1, 1, s] bool, True where a key is in sight
    """

    queries: Tensor
    keys: Tensor
    mask: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text], longest: int) -> Singles:
        bounds = torch.tensor(
            [[text.queries.start, text.keys.start, text.keys.stop - 1] for text in texts],
            dtype=torch.int64,
            device="cpu",
        )
        keys = bounds[:, 1:2] + torch.arange(longest, device="cpu")
        return cls(bounds[:, 0], keys.minimum(bounds[:, 2:]), (keys <= bounds[:, 2:])[:, None, None])

    def of_each(self, part: Tensor) -> Tensor:
        """Keys or values [1, h, all tokens, d] → [n, h, s, d]."""
        return part[0].transpose(0, 1)[self.keys].transpose(1, 2)


class Packed:
    """What a layer is given beside its hidden states when requests are packed.

    extra  the keyword arguments of the layer's forward
    """

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = dict(extra)
        self.cache = extra.get("cache")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Packed | None:
        """None where requests are not packed."""
        # Since transformers 5.24 every cache has this name.
        is_paged = not isinstance(extra.get("cache"), Cache | None)
        return cls(extra) if is_paged else None

    @classmethod
    def of_attention(cls, extra: Mapping[str, Any]) -> Packed | None:
        """As `of`, from what transformers' interface of attention gets.

        Since transformers 5.24 the layer writes to the cache by itself, and gives lengths and all keys on.
        """
        is_written = compat.CACHE == "cache" and "cu_seq_lens_q" in extra
        return cls(extra) if is_written else cls.of(extra)

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write new keys and values [1, h, tokens, d]; gives those of all texts [1, h, all their tokens, d]."""
        if self.cache is None:  # they are
            return keys, values
        if takes_kwargs(type(self.cache)):
            return self.cache.update(keys, values, layer, self._extra)
        found = self.cache.update(keys, values, layer, self._extra["read_index"], self._extra["write_index"])
        keys, values = (part.transpose(0, 1)[None] for part in found)
        return keys, values

    def lengths(self, window: int | None) -> tuple[Tensor, Tensor, int, int]:
        """Where texts begin and end among queries and keys [texts + 1] int32, and the most tokens of one text.

        Call it behind `update`.

        window  of the layer; None: it sees all
        """
        kind = FULL if window is None else SLIDING
        ends, longest = self._extra["cu_seq_lens_k"], self._longest("k")
        if isinstance(ends, Mapping):
            ends, longest = ends[kind], longest[kind]
        return self._extra["cu_seq_lens_q"], ends, self._longest("q"), longest

    def kind(self, layer: int) -> str | None:
        """What the cache takes a layer for; None where that is not said any more, and `update` has gone by it."""
        if self.cache is None:
            return None
        if takes_kwargs(type(self.cache)):
            return str(self.cache.layer_to_allocator[layer].layer_type)
        return SLIDING if self.cache.sliding_windows[layer] > 1 else FULL

    def _longest(self, of: str) -> Any:
        return self._extra[f"max_length_{of}" if f"max_length_{of}" in self._extra else f"max_seqlen_{of}"]

    def texts(self, window: int | None = None) -> tuple[Singles | None, list[Text]]:
        """The texts: those of one new token each together, if that is worth it, and the others.

        Not on a GPU, whose lengths the host does not know. Call it behind `update`.
        """
        ends, seen, _, _ = self.lengths(window)
        q, k = ends.tolist(), seen.tolist()
        found = [
            Text(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1) if q[i] < q[i + 1]
        ]
        singles = [text for text in found if text.queries.stop - text.queries.start == 1]
        longest = max((text.keys.stop - text.keys.start for text in singles), default=0)
        all_keys = sum(text.keys.stop - text.keys.start for text in singles)
        if len(singles) < _FEWEST or len(singles) * longest > _MOST_PADDING * all_keys:
            return None, found
        return Singles.of(singles, longest), [text for text in found if text not in singles]


@cast(Any, functools.cache)
def takes_kwargs(kind: Any) -> bool:
    """Whether `update` of a paged cache's class takes what a layer is given as it is, or the places alone."""
    return "kwargs" in inspect.signature(kind.update).parameters


def support(device: torch.device, dtype: torch.dtype, head_dim: int) -> Support:
    """Whether `forward` computes attention of such heads there."""
    if device.type == "cpu":
        return SUPPORTED
    if device.type != "cuda":
        return Support.no(f"there is no attention of packed requests on {device.type}")
    if _varlen() is None:
        return Support.no(f"torch {torch.__version__} has no attention of texts of different lengths")
    if dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return Support.no(
            f"torch's attention of texts of different lengths is not for heads of {head_dim} {dtype}"
        )
    return SUPPORTED


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    """torch's attention of texts of different lengths, with fewer keys' heads than queries' heads allowed."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn  # the version that had no such argument did not ask


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: query [1, h, tokens, d] → ([1, tokens, h, d], None).

    Raises  OperatorError for what it does not compute, or requests that are not packed
    """
    packed = Packed.of_attention(kwargs)
    if packed is None or query.shape[0] != 1:
        raise OperatorError(
            f"{NAME} is for packed requests alone, see generate_batch. Use attention 'sdpa' or 'eager'."
        )
    for name in ("s_aux", "softcap", "position_bias"):
        if kwargs.get(name) is not None:
            raise OperatorError(
                f"{NAME}: {type(module).__name__} has {name}, which it does not compute. Use attention 'eager'."
            )
    window = (getattr(module, "sliding_window", None) if sliding_window is None else sliding_window) or None
    layer: int = module.layer_idx  # type: ignore[assignment]
    if packed.kind(layer) not in (None, FULL if window is None else SLIDING):
        raise OperatorError(
            f"{NAME}: layer {layer} has a window of {window} tokens, and the paged cache takes it for "
            f"{packed.kind(layer)}."
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key, value = packed.update(key, value, layer)
    run = _on_gpu if query.is_cuda else _on_cpu
    return run(packed, query, key, value, scale, window), None


def _on_gpu(
    packed: Packed, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    varlen = _varlen()
    assert varlen is not None, "asked for by `support`"
    queries, keys, most_queries, most_keys = packed.lengths(window)
    out = varlen(
        *(part[0].transpose(0, 1).contiguous() for part in (query, key, value)),
        queries.to(torch.int32),
        keys.to(torch.int32).clone(),
        most_queries,
        most_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    # Rows behind the last text are padding of a graph, which no text's kernel has written.
    is_padding = torch.arange(len(out), device=out.device) >= queries[-1]
    return out.masked_fill(is_padding[:, None, None], 0)[None]


def _on_cpu(
    packed: Packed, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    singles, others = packed.texts(window)
    if singles is not None:
        out[0, singles.queries] = _of_singles(singles, query, key, value, scale)
    for text in others:
        q, k, v = query[:, :, text.queries], key[:, :, text.keys], value[:, :, text.keys]
        out[:, text.queries] = one_text(q, k, v, scale, window).transpose(1, 2)
    return out


def _of_singles(singles: Singles, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[n, h, d]; the heads that share keys are rows of one product."""
    n, h, kv = len(singles.queries), query.shape[1], key.shape[1]
    q = query[0, :, singles.queries].transpose(0, 1).reshape(n, kv, h // kv, -1)
    k, v = singles.of_each(key), singles.of_each(value)
    mask = singles.mask.expand(n, 1, h // kv, -1)
    return functional.scaled_dot_product_attention(q, k, v, mask, scale=scale).reshape(n, h, -1)


def one_text(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Causal attention of the last m of s tokens: q [1, h, m, d], k [1, kv, s, d], v [1, kv, s, dv] → [1, h, m, dv].

    window  tokens that a query sees, itself included; None: all
    """
    (_, h, m, d), (kv, s) = q.shape, k.shape[1:3]
    if m == 1 and window is None:
        # The heads that share keys are rows of one product.
        return functional.scaled_dot_product_attention(
            q.view(1, kv, h // kv, d), k, v, scale=scale, is_causal=False
        ).reshape(1, h, 1, -1)
    mask = causal_mask(m, s, q.device, window) if m < s or window is not None else None
    if cpu_attention.is_faster(q, k):
        k, v = (part.repeat_interleave(h // kv, 1) for part in (k, v))
        return cpu_attention.attend(q, k, v, mask, scale)
    return functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=h != kv
    )


def causal_mask(m: int, s: int, device: torch.device, window: int | None = None) -> Tensor:
    """[1, 1, m, s] bool, True to attend: the last m of s tokens."""
    mask = torch.ones(m, s, dtype=torch.bool, device=device).tril(s - m)
    if window is not None:
        mask &= ~torch.ones(m, s, dtype=torch.bool, device=device).tril(s - m - window)
    return mask[None, None]
