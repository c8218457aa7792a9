"""Attention of the new tokens of a text that goes on: a conversation's next turn, or a prompt's next chunk.

torch's fused attention has a causal form for whole texts alone. So transformers gives a text that goes on a mask of all
keys, and keys and values repeated for all heads that share them, which at 32,768 tokens before is a hundred times what
is new. Here a mask is recognised, when it is made, as one that hides nothing but later tokens:

    on a GPU   torch's flash kernel, which is causal up to the last key, and splits long rows of keys
    on a CPU   heads that share keys are rows of one product; with any mask, where torch's own attention is slow, the
               native core's, of whole prompts as well (cpu/attention_prompts.py)

Layers are given the same mask as before. So one that computes attention by itself, and one whose mask is another,
compute what they did.

The functions that transformers has under "sdpa" are given replacements, once a process. These ask whether this thread
reads a prompt of such a model, and call transformers' own otherwise. A config's `_attn_implementation` is never written
to: other models and other threads may share it, and a forked child would keep what a thread had written.

On recent GPUs, torch prefers cuDNN's attention. It is the fastest for long prompts, but has a plan made for each length
that it meets: of a prompt of some hundred tokens, that is most of its attention. So short prompts do without.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig, GenerationMixin

from ktinject.errors import OperatorError
from ktinject.generation.cache_layers import has_latents
from ktinject.generation.cpu import attention_prompts
from ktinject.hf import compat
from ktinject.operators.torch_ops.packed_attention import causal_mask
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

_STOCK = "sdpa"
# The text config of the model whose attention is that of this file, in what this thread runs.
_recognised: ContextVar[Any] = ContextVar("recognised", default=None)
# What transformers' own attention takes beside, and none of the forms here.
_OTHERS = ("cache", "position_bias", "s_aux", "softcap")
# An attribute of a mask that was recognised: its version, by which a change shows.
_MARK = "ktinject_is_causal"
# An attribute of the mask of a captured pass: what its tokens attend to, see turn_pass.py.
PARTS = "ktinject_parts"
# Scores of a head, new tokens by all tokens, from which on torch may choose cuDNN's attention. It plans each length
# anew, for 40 to 60 ms, and for up to a second where it has to compile.
_WORTH_A_PLAN = 1 << 24
# Elements of a mask whose rows are repeated for heads; beyond, torch shares keys among heads by itself.
_MOST_REPEATED = 1 << 26
_TOLERANCE = 2e-2  # of bf16's roundings, relative to the largest output


@contextmanager
def attention(model: Any, ids: Tensor, cache: Any, config: GenerationConfig) -> Iterator[None]:
    """Within, a prompt of a model is read, behind what the cache holds, maybe in chunks.

    ids     [b, n], with those that the cache holds
    Raises  OperatorError for chunks behind a cache where transformers would read what it holds again
    """
    held = 0 if cache is None else int(cache.get_seq_length())
    if held and config.prefill_chunk_size and not chunks_go_on():
        raise OperatorError(
            f"generate: prefill_chunk_size={config.prefill_chunk_size} with a cache that holds {held} tokens; "
            f"transformers {transformers.__version__} reads them once more then, and the text is wrong. Leave out "
            "prefill_chunk_size, or install a newer version."
        )
    new, tokens = max(1, ids.shape[1] - held), ids.shape[1]
    is_other = bool(held or config.prefill_chunk_size) or attention_prompts.is_for(
        model.device, model.dtype, new
    )
    ours = recognised(model) if is_other and support(model) else nullcontext()
    with unplanned(model, new * tokens), attention_prompts.request(config, model.config), ours:
        yield


@functools.cache
def chunks_go_on() -> bool:
    """Whether chunks of a prompt begin behind what a cache holds; in older versions of transformers they do not."""
    read: list[int] = []

    class Text:
        config = SimpleNamespace(is_encoder_decoder=False)

        def prepare_inputs_for_generation(self, ids: Tensor, **_: Any) -> dict[str, Tensor]:
            return {"input_ids": ids}

        def _valid_auto_compile_criteria(self, *_: Any) -> bool:
            return False

        def __call__(self, input_ids: Tensor, **_: Any) -> Any:
            read.append(input_ids.shape[1])
            return SimpleNamespace(**{compat.CACHE: cache})

    cache = SimpleNamespace(get_seq_length=lambda: 2, is_linear=[False])
    text: Any = Text()
    ids = torch.zeros(1, 5, dtype=torch.int64, device="cpu")
    inputs = {compat.CACHE: cache, "attention_mask": torch.ones_like(ids)}
    GenerationMixin._prefill(text, ids, GenerationConfig(prefill_chunk_size=2), inputs)
    return sum(read) == 3


@contextmanager
def unplanned(model: Any, scores: int) -> Iterator[None]:
    """Within, attention of so many scores a head is not computed by cuDNN, if planning would take longer than it."""
    cuda = torch.backends.cuda
    is_planned = model.device.type == "cuda" and cuda.cudnn_sdp_enabled()
    # Keys and values of other widths, which flash attention is not for.
    is_latent = has_latents(model.config.get_text_config())
    if not is_planned or is_latent or scores >= _WORTH_A_PLAN:
        yield
        return
    with model.ktinject_decoding.alone():
        cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            cuda.enable_cudnn_sdp(True)


@contextmanager
def recognised(model: Any) -> Iterator[None]:
    """Within, on this thread, attention of a model for which there is `support` is that of this file."""
    token = _recognised.set(model.config.get_text_config())
    try:
        yield
    finally:
        _recognised.reset(token)


def support(model: Any) -> Support:
    """Whether a model's attention can be of this form where a mask allows it."""
    if not (known := registered()):
        return known
    found = model.config.get_text_config()._attn_implementation
    if found != _STOCK:
        return Support.no(f"attention runs as {found!r}")
    if _there() != _replacements():
        return Support.no(f"another attention is registered as {_STOCK!r}")
    return SUPPORTED


@functools.cache
def registered() -> Support:
    """Whether transformers calls the attention of this file; before anything watches what it calls."""
    known = compat.support("continued")
    # What somebody else has put there stays.
    if known and _there() == (compat.sdpa_attention_forward, compat.sdpa_mask):
        attention, mask = _replacements()
        AttentionInterface.register(_STOCK, attention)
        AttentionMaskInterface.register(_STOCK, mask)
    return known


def _there() -> tuple[Any, Any]:
    return compat.ALL_ATTENTION_FUNCTIONS[_STOCK], compat.ALL_MASK_ATTENTION_FUNCTIONS[_STOCK]


@functools.cache
def _replacements() -> tuple[Any, Any]:
    """What takes the place of transformers' attention and of its mask."""
    own_attention, own_mask = compat.sdpa_attention_forward, compat.sdpa_mask

    def is_ours(config: Any) -> bool:
        # Compiled code is not for one request.
        return not torch.compiler.is_compiling() and config is not None and config is _recognised.get()

    @functools.wraps(own_attention)
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        chosen = forward if is_ours(getattr(module, "config", None)) else own_attention
        return chosen(module, *args, **kwargs)

    @functools.wraps(own_mask)
    def make_mask(*args: Any, **kwargs: Any) -> Any:
        return (mask if is_ours(kwargs.get("config")) else own_mask)(*args, **kwargs)

    return attention, make_mask


def mask(**arguments: Any) -> Tensor | None:
    """transformers' interface of masks: the one that it makes for its own attention."""
    made: Tensor | None = compat.sdpa_mask(**arguments)
    # The version of a tensor of inference mode is not counted.
    if made is not None and not made.is_inference() and _is_causal(**arguments):
        setattr(made, _MARK, made._version)
    return made


def _is_causal(
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> bool:
    """Whether the last tokens of a text attend to all before them."""
    is_whole = isinstance(q_offset, int) and kv_offset == 0 and kv_length == q_offset + q_length
    is_plain = mask_function is compat.causal_mask_function and local_size is None and not use_vmap
    return is_whole and is_plain and (attention_mask is None or bool(attention_mask.all()))


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of attention: query [b, h, m, d], key and value [b, kv, s, d] → ([b, m, h, d], None)."""
    is_plain = not dropout and all(kwargs.get(name) is None for name in _OTHERS)
    if is_plain and (parts := getattr(attention_mask, PARTS, None)) is not None:
        return parts.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None
    if (
        is_plain
        and _is_causal_by(module, attention_mask, kwargs)
        and attention_prompts.is_faster(query, key, value)
    ):
        out = attention_prompts.attend(query, key, value, attention_mask, scaling)
        if out is not None:
            return out, None
    if is_plain and getattr(attention_mask, _MARK, None) is not None:
        assert attention_mask is not None
        out = _attend(query, key, value, attention_mask, scaling)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None
    found: tuple[Tensor, None] = compat.sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return found


def _is_causal_by(module: nn.Module, mask: Tensor | None, given: dict[str, Any]) -> bool:
    """Whether attention without a mask is causal; with one, the mask says what is seen."""
    is_causal = given.get("is_causal")
    return mask is not None or bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> Tensor | None:
    """[b, h, m, d]; None: transformers' own attention is to compute it."""
    (b, h, m, d), (kv, s) = q.shape, k.shape[1:3]
    is_changed = getattr(seen, _MARK) != seen._version or seen.shape[2:] != (m, s)
    needs_graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if is_changed or needs_graph or h % kv or v.shape[-1] != d:
        return None
    if q.is_cuda:
        return _on_gpu(q, k, v, scale) if _is_right(q.device, q.dtype, d, h // kv) else None
    if h == kv or q.device.type != "cpu":
        return None
    groups = h // kv
    if seen.numel() * groups > _MOST_REPEATED:
        return functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    rows = q.reshape(b, kv, groups * m, d)
    out = functional.scaled_dot_product_attention(rows, k, v, _repeated(seen, groups), scale=scale)
    return out.reshape(b, h, m, d)


def _repeated(seen: Tensor, groups: int) -> Tensor:
    """[b or 1, 1, groups · m, s], made once a mask, for all layers."""
    name = f"{_MARK}_{groups}"
    found = getattr(seen, name, None)
    if found is None or found[0] != seen._version:
        found = seen._version, seen.repeat(1, 1, groups, 1)
        setattr(seen, name, found)
    repeated: Tensor = found[1]
    return repeated


def _on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    shape: Any = causal_lower_right(q.shape[2], k.shape[2])
    return functional.scaled_dot_product_attention(
        q, k, v, shape, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@functools.cache
def _is_right(device: torch.device, dtype: torch.dtype, head_dim: int, groups: int) -> bool:
    """Whether torch's flash kernel takes such heads, and hides what it should: tried out on a few tokens."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, head_dim, generator=generator, dtype=torch.float32, device="cpu").to(
            device, dtype
        )
        for heads, tokens in ((2 * groups, 3), (2, 17), (2, 17))
    )
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, False, groups > 1)
    if not torch.backends.cuda.can_use_flash_attention(parameters):
        return False
    try:
        found = _on_gpu(q, k, v, 0.1).float()  # a scale by which each key counts
    except RuntimeError as error:
        logger.warning("texts that go on are attended as transformers does: %s", error)
        return False
    q, k, v = q.float(), k.float().repeat_interleave(groups, 1), v.float().repeat_interleave(groups, 1)
    want = functional.scaled_dot_product_attention(q, k, v, causal_mask(3, 17, device), scale=0.1)
    return bool((found - want).abs().max() <= _TOLERANCE * want.abs().max())
