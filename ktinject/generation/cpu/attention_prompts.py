"""Attention of prompts on the CPU, by the kernel of native/attention/prompt.hpp.

    transformers' "eager"   the function of that name in each modeling file, replaced as prompts.py says
    transformers' "sdpa"    the form in which continued.py has prompts computed, where torch's own is slower

"eager" writes all scores to memory several times; for attention with sinks, transformers has nothing else on the CPU.
And on CPUs without AMX, torch multiplies in bf16 at a fraction of what they do in fp32.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ktinject import _native

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What an eager attention may be given; others would be something that it computes with.
_GIVEN = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout"}
# transformers' hooks, which note what a layer gives only where a request asks for it.
_CAPTURING = "transformers.utils.output_capturing"
# Fewer new tokens are too few tasks for many threads.
_WORTH_IT = 32
# Whether a prompt is read of whose attention no weights are asked for.
_is_free: ContextVar[bool] = ContextVar("is_free", default=False)


@contextmanager
def request(config: Any, model_config: Any) -> Iterator[None]:
    """Within, a prompt is read of a request with this generation config."""
    token = _is_free.set(not config.output_attentions and not model_config.output_attentions)
    try:
        yield
    finally:
        _is_free.reset(token)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, sinks: Tensor | None = None
) -> Tensor | None:
    """q [b, h, m, d], k [b, kv, s, d], v [b, kv, s, dv] of one dtype → [b, m, h, dv]; None: not what it is for.

    mask   [b or 1, 1, m, s]: bool, True to attend, or floats to add; None: causal, and m = s
    sinks  [h]: scores without a value
    """
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    if not all(type(x) is Tensor and x.is_cpu and x.dim() == 4 and x.stride(-1) == 1 for x in tensors):
        return None
    (b, h, m, d), (kv, s) = q.shape, k.shape[1:3]
    if q.dtype not in _DTYPES or {k.dtype, v.dtype} != {q.dtype} or h % kv or m < 2:
        return None
    if k.shape != (b, kv, s, d) or v.shape[:3] != (b, kv, s):
        return None
    if mask is None:
        if m != s:
            return None
    elif mask.shape not in ((b, 1, m, s), (1, 1, m, s)) or mask.dtype not in (torch.bool, q.dtype):
        return None
    is_added = mask is not None and mask.dtype != torch.bool
    out = torch.empty(b, m, h, v.shape[3], dtype=q.dtype, device="cpu")
    is_whole = _native.attend_prompt(
        q=q.transpose(1, 2),
        k=k.transpose(1, 2),
        v=v.transpose(1, 2),
        mask=mask,
        lowest=torch.finfo(q.dtype).min,
        sinks=None if sinks is None else sinks.detach().float(),
        scale=d**-0.5 if scaling is None else scaling,
        out=out,
    )
    # A token that an added mask hides all keys from attends to all of them alike. Without a mask each sees one, and
    # what NaN and infinities give is NaN in `out`, as in torch's.
    return out if is_whole or not is_added else None


def is_for(device: torch.device, dtype: torch.dtype, tokens: int) -> bool:
    """Whether `attend` may take less time than torch's fused attention of so many new tokens."""
    return device.type == "cpu" and dtype is not torch.float32 and tokens >= _WORTH_IT and not _has_tiles()


def is_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attend` takes less time than torch's fused attention of these, none of which needs gradients."""
    needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return not needs_graph and is_for(q.device, q.dtype, q.shape[2])


@functools.cache
def _has_tiles() -> bool:
    return bool(_native.cpu_features()["amx_bf16"])


def eager(own: Callable[..., Any]) -> Callable[..., Any] | None:
    """What takes the place of a modeling file's eager attention; None: it computes something else.

    The replacement answers NotImplemented for what it is not for.
    """
    if not _reads_only_what_is_known(own):
        return None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float32, device="cpu")
        for heads, tokens in ((4, 5), (2, 7), (2, 7))
    )
    mask = torch.zeros(1, 1, 5, 7, dtype=torch.float32, device="cpu").masked_fill_(
        torch.ones(5, 7, dtype=torch.float32, device="cpu").triu(3).bool(), torch.finfo(torch.float32).min
    )
    sinks = torch.randn(4, generator=generator, dtype=torch.float32, device="cpu")
    for given in (None, sinks):
        module = SimpleNamespace(num_key_value_groups=2, training=False)
        if given is not None:
            module.sinks = given
        try:
            want = own(module, q, k, v, mask, scaling=0.4, dropout=0.0)[0]
        except AttributeError:
            continue
        found = attend(q, k, v, mask, 0.4, given)
        if (
            found is not None
            and found.shape == want.shape
            and torch.allclose(found, want, rtol=1e-4, atol=1e-5)
        ):
            return functools.partial(_eager, given is not None)
        return None
    return None


def _reads_only_what_is_known(function: Callable[..., Any]) -> bool:
    """Whether a function uses no keyword argument that it does not name, and asks for no attribute by name."""
    try:
        parameters = inspect.signature(function).parameters.values()
        used = {instruction.argval for instruction in dis.get_instructions(function)}
    except (TypeError, ValueError):
        return False
    others = {parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
    named = {parameter.name for parameter in parameters} - others
    return named == _GIVEN and not others & used and not {"getattr", "hasattr"} & used


def _eager(
    has_sinks: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> Any:
    """query [b, h, m, d], key and value [b, kv, s, …] → ([b, m, h, dv], None)."""
    # Without a mask nothing is hidden, in this form. Who looks at the weights gets them.
    if attention_mask is None or scaling is None or dropout or not _is_free.get() or _is_watched(module):
        return NotImplemented
    if module.num_key_value_groups * key.shape[1] != query.shape[1]:
        return NotImplemented
    sinks = module.sinks if has_sinks else None
    out = attend(query, key, value, attention_mask, scaling, sinks)
    return NotImplemented if out is None else (out, None)


def _is_watched(module: Any) -> bool:
    return any(getattr(hook, "__module__", "") != _CAPTURING for hook in module._forward_hooks.values())
