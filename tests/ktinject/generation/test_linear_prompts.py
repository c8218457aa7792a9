"""Prompts of linear attention on the CPU: the native kernels against transformers' own functions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from test_native_delta import FAMILIES, model_of
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as modeling

from ktinject import _native
from ktinject.generation.cpu import linear_prompts, prompts

torch.set_num_threads(1)
OWN_DELTA = inspect.unwrap(modeling.torch_chunk_gated_delta_rule)
OWN_CONVOLUTION = inspect.unwrap(modeling.causal_conv1d_fn)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


# Heads of keys, heads of values, their sizes; 64 columns are taken at a time, and 128 tokens.
@pytest.mark.parametrize("key_heads, heads, keys, values", [(2, 2, 16, 64), (1, 3, 12, 72), (2, 4, 32, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_delta_rule(key_heads: int, heads: int, keys: int, values: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    n = 150
    # As the model gives them: parts of one tensor, whose tokens lie apart.
    mixed = random(2, n, 2 * key_heads * keys + heads * values, dtype=dtype)
    q, k, v = mixed.split([key_heads * keys, key_heads * keys, heads * values], -1)
    q, k, v = (x.unflatten(-1, (-1, size)) for x, size in ((q, keys), (k, keys), (v, values)))
    g, beta = -random(2, n, heads).exp(), random(2, n, heads, dtype=dtype).sigmoid()
    states = random(2, heads, keys, values)
    held = states.clone()

    def of(function: Any, first: int, last: int, initial: Tensor | None) -> Any:
        part = slice(first, last)
        shared = heads // key_heads if function is OWN_DELTA else 1
        return function(
            q[:, part].repeat_interleave(shared, 2),
            k[:, part].repeat_interleave(shared, 2),
            v[:, part],
            g=g[:, part],
            beta=beta[:, part],
            initial_state=initial,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    for initial in (None, states):
        expected, after = of(OWN_DELTA, 0, n, initial)
        found, found_after = of(linear_prompts._gated_delta, 0, n, initial)
        assert found.dtype is dtype and found_after.dtype is torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 if dtype is torch.bfloat16 else 1e-4)
        torch.testing.assert_close(found_after, after, rtol=1e-3, atol=1e-4)
    assert torch.equal(states, held)
    first, between = of(linear_prompts._gated_delta, 0, 37, states)
    last, end = of(linear_prompts._gated_delta, 37, n, between)
    assert torch.equal(torch.cat([first, last], 1), found) and torch.equal(end, found_after)


@pytest.mark.parametrize("lie", ["channels", "tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_convolution(lie: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    x = random(2, 300, 150, dtype=dtype).mT if lie == "channels" else random(2, 150, 300, dtype=dtype)
    weight, bias = random(150, 4, dtype=dtype), random(150, dtype=dtype)
    for given in ((weight, None, "silu"), (weight, bias, None), (weight[:, :1], None, None)):
        found = linear_prompts._convolve(x, *given)
        taps, added, activation = given
        wide = functional.conv1d(
            x.float(), taps.float()[:, None], None if added is None else added.float(), padding=3, groups=150
        )
        wide = wide[..., 4 - taps.shape[1] :][..., :300].to(dtype).float()
        wide = functional.silu(wide) if activation else wide
        exact = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(found, wide.to(dtype), **exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_compute_prompts_natively(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    ids = torch.arange(1, 40)[None]
    model.generate(ids, max_new_tokens=2)  # the first request compares the functions
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(_native, name)

    monkeypatch.setattr(linear_prompts, "_native", Counting())
    layers = sum(hasattr(layer, "linear_attn") for layer in model.model.layers)
    with prompts.native(model), torch.no_grad():
        natively = model(ids).logits
    assert sorted(calls) == ["convolve_prompt"] * layers + ["delta_prompt"] * layers
    with torch.no_grad():
        outside = model(ids).logits
    with prompts.native(model):
        model(ids)  # gradients may be asked for
    assert len(calls) == 2 * layers
    torch.testing.assert_close(natively, outside, rtol=0.1, atol=0.1)
    model.generate(ids, max_new_tokens=2)
    assert len(calls) == 4 * layers


def test_what_is_not_known_stays_transformers_own() -> None:
    x, weight = random(1, 8, 5), random(8, 4)
    others: list[dict[str, Any]] = [{"activation": "gelu"}, {"seq_idx": torch.zeros(1, 5)}]
    for changed in others:
        assert linear_prompts._convolve(x, weight, **changed) is NotImplemented
    assert linear_prompts._convolve(x, weight.bfloat16()) is NotImplemented
    q = random(1, 5, 2, 8)
    given = {"g": -random(1, 5, 2).exp(), "beta": random(1, 5, 2)}
    packed = linear_prompts._gated_delta(q, q, q, **given, cu_seqlens=torch.tensor([0, 2, 5]))
    assert packed is NotImplemented
    with pytest.raises(ValueError, match=r"g: found \[1, 5, 2\]; expected \[1, 5, 3\]"):
        linear_prompts._gated_delta(q[:, :, :1], q[:, :, :1], random(1, 5, 3, 8), **given)


def test_a_function_that_computes_something_else_is_not_replaced() -> None:
    def reversed_taps(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Any:
        return OWN_CONVOLUTION(hidden_states, weight.flip(1), bias, activation)

    either = prompts.either(reversed_taps, linear_prompts.convolution, "somewhere")
    x, weight = random(1, 8, 5), random(8, 4)
    with prompts.native(torch.nn.Linear(1, 1)), torch.no_grad():
        found = either(x, weight)
    assert torch.equal(found, reversed_taps(x, weight))
    assert linear_prompts.convolution(OWN_CONVOLUTION) is linear_prompts._convolve
