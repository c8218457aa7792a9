"""Prompts of linear attention on the CPU, by the kernels of native/attention/linear_prompt.hpp.

    modeling file of transformers          prompts.py
    causal_conv1d_fn                 ──►   _convolve
    torch_chunk_gated_delta_rule     ──►   _gated_delta

transformers' own forward takes those of other packages if they are installed; for the CPU there is none. In bf16,
torch's convolution of single channels runs one channel after the other, and the rule in chunks reads and writes each
intermediate result in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SILU = ("silu", "swish")


def _serves(*tensors: Tensor, **others: Any) -> bool:
    dtype = tensors[0].dtype
    fits = all(type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype is dtype for x in tensors)
    return fits and dtype in _DTYPES and all(value is None for value in others.values())


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Any = None,
    **kwargs: Any,
) -> Any:
    """hidden_states [b, channels, n], weight [channels, taps] → [b, channels, n], whose channels lie together."""
    given = [hidden_states, weight, *([] if bias is None else [bias])]
    if not _serves(*given, seq_idx=seq_idx, packed=kwargs.get("cu_seq_lens_q")):
        return NotImplemented
    if activation not in (None, *_SILU) or hidden_states.dim() != 3:
        return NotImplemented
    x = hidden_states.mT
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(x.shape)
    _native.convolve_prompt(
        x=x,
        weight=weight.mT.float().contiguous(),
        bias=None if bias is None else bias.float(),
        silu=activation is not None,
        out=out,
    )
    return out.mT


def _gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    **kwargs: Any,
) -> Any:
    """query and key [b, n, key heads, k], value [b, n, heads, v], g and beta [b, n, heads] → value's shape, and the
    states [b, heads, k, v] in fp32. The size of transformers' chunks changes nothing.
    """
    if not _serves(query, key, value, cu_seqlens=cu_seqlens) or value.dim() != 4:
        return NotImplemented
    b, _, heads, size = value.shape
    shape = (b, heads, query.shape[3], size)
    if initial_state is None:
        states = torch.zeros(shape, dtype=torch.float32, device="cpu")
    else:
        # What the cache holds stays as it is until it is given the new states.
        states = initial_state.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    out = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    _native.delta_prompt(
        q=_together(query),
        k=_together(key),
        v=_together(value),
        g=g.float().contiguous(),
        beta=beta.float().contiguous(),
        unit_length=use_qk_l2norm_in_kernel,
        scale=query.shape[3] ** -0.5,
        states=states,
        out=out,
    )
    return out, states if output_final_state else None


def _together(x: Tensor) -> Tensor:
    """x with values of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _convolves(theirs: Any, ours: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (_random(generator, *shape) for shape in ((2, 24, 9), (24, 4), (24,)))
    cases = ((x, weight, bias, "silu"), (x, weight, None, None))
    return all(torch.allclose(theirs(*case), ours(*case), rtol=1e-4, atol=1e-5) for case in cases)


def _computes_delta(theirs: Any, ours: Any) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, v, states = (
        _random(generator, *s) for s in ((1, 70, 2, 8), (1, 70, 2, 8), (1, 70, 2, 6), (1, 2, 8, 6))
    )
    g, beta = -_random(generator, 1, 70, 2).exp(), _random(generator, 1, 70, 2).sigmoid()
    given = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found, expected = (each(q, k, v, initial_state=states, **given) for each in (ours, theirs))
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, expected))


def convolution(own: Callable[..., Any]) -> Callable[..., Any] | None:
    """What takes the place of a modeling file's convolution; None: it computes something else."""
    return _convolve if _convolves(own, _convolve) else None


def delta_rule(own: Callable[..., Any]) -> Callable[..., Any] | None:
    """What takes the place of a modeling file's gated delta rule; None: it computes something else."""
    return _gated_delta if _computes_delta(own, _gated_delta) else None
