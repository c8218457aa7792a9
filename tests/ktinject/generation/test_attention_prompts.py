"""Attention of prompts on the CPU: the native kernel, and where it takes the place of transformers' own."""

from __future__ import annotations

import inspect
from typing import Any

import models
import pytest
import torch
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_moe import modeling_qwen3_moe

import ktinject
from ktinject import _native
from ktinject.generation.cpu import attention_prompts, prompts

torch.set_num_threads(1)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
KERNELS = [row["name"] for row in _native.kernels() if row["weights"] == "bf16" and row["available"]]


def causal(m: int, s: int, window: int | None = None) -> Tensor:
    mask = torch.ones(m, s, dtype=torch.bool).tril(s - m)
    return mask if window is None else mask & ~torch.ones(m, s, dtype=torch.bool).tril(s - m - window)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """[b, m, h, dv] in fp64; of a token that sees nothing zeros."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(shared, 1), v.double().repeat_interleave(shared, 1)
    scores = q @ k.mT * 0.3
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].nan_to_num()
    return (weights @ v).transpose(1, 2)


# Heads, heads of keys, their sizes; 64 keys are taken at a time, and 256 rows.
@pytest.mark.parametrize("h, kv, d, dv", [(8, 2, 64, 64), (3, 3, 40, 24), (6, 1, 128, 72)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_attention(h: int, kv: int, d: int, dv: int, dtype: torch.dtype, kernel: str) -> None:
    torch.manual_seed(0)
    m, s = 137, 201
    q, k, v, sinks = (
        torch.randn(*shape).to(dtype) for shape in ((2, m, h, d), (2, kv, s, d), (2, kv, s, dv), (h,))
    )
    q = q.transpose(1, 2)  # as projections give it
    padded = causal(m, s).expand(2, 1, m, s).clone()
    padded[1, :, :, :90] = False
    bias = torch.where(causal(m, s, 70), torch.randn(m, s), torch.finfo(dtype).min).to(dtype)[None, None]
    _native.force_kernel(kernel)
    try:
        for mask in (causal(m, s, 9)[None, None], padded, bias):
            for given in (None, sinks):
                found = attention_prompts.attend(q, k, v, mask, 0.3, given)
                assert found is not None and found.dtype is dtype
                assert (found - exact(q, k, v, mask, given)).abs().max() <= TOLERANCE[dtype] * v.abs().max()
        found = attention_prompts.attend(q, k[:, :, :m], v[:, :, :m], None, 0.3)
        assert found is not None
        want = exact(q, k[:, :, :m], v[:, :, :m], causal(m, m), None)
        assert (found - want).abs().max() <= TOLERANCE[dtype] * v.abs().max()
    finally:
        _native.force_kernel("auto")


NOT_FINITE = [
    "query",
    "query, all",
    "key",
    "key of the last token",
    "all keys",
    "value",
    "score",
    "scores",
    "low bits",
]


@pytest.mark.parametrize("masked", ["causal", "mask", "bool mask"])
@pytest.mark.parametrize("case", NOT_FINITE)
@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_finite_is_seen(case: str, masked: str, kernel: str) -> None:
    """NaN and infinities of queries, keys, values and scores give NaN where torch's own attention does."""
    torch.manual_seed(0)
    m = 70  # more than are taken at a time
    q, k, v = (torch.randn(1, 2, m, 16) for _ in range(3))
    nan = torch.nan
    match case:
        case "query":
            q[0, 0, 66, 3] = nan
        case "query, all":
            q[:] = nan
        case "key":
            k[0, 1, 0, 5] = nan
        case "key of the last token":
            k[0, 1, m - 1, 5] = nan
        case "all keys":
            k[:] = nan
        case "value":
            v[0, 0, 0, 7] = nan
        case "score":
            q[0, 0, 68, 2], k[0, 0, 1, 2] = torch.inf, 1.0
        case "scores":
            q[0, 0, 68, 2], k[0, 0, :, 2] = torch.inf, 1.0
        case "low bits":
            q.view(torch.int32)[0, 0, 66, 3] = 0x7FFFFFFF
    mask = causal(m, m)[None, None] if masked == "bool mask" else None
    if masked == "mask":
        mask = torch.zeros(1, 1, m, m).masked_fill_(~causal(m, m), -torch.inf)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=0.3)
    _native.force_kernel(kernel)
    try:
        found = attention_prompts.attend(q, k, v, mask, 0.3)
    finally:
        _native.force_kernel("auto")
    want = want.transpose(1, 2)
    assert found is not None
    assert want.isnan().any()
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.allclose(found.nan_to_num(), want.nan_to_num(), atol=1e-5)


def test_what_it_is_not_for() -> None:
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 9, 8)
    mask = causal(5, 9)[None, None]
    assert attention_prompts.attend(q, k, k, mask, 1.0) is not None
    nothing: list[Any] = [
        (q, k, k, None, 1.0),  # which is causal for as many keys as queries alone
        (q, k, k, mask.expand(1, 4, 5, 9), 1.0),
        (q, k, k, mask.double(), 1.0),
        (q.bfloat16(), k, k, mask, 1.0),
        (q[:, :3], k, k, mask, 1.0),
        (q[:, :, :1], k, k, mask[:, :, :1], 1.0),
    ]
    assert [attention_prompts.attend(*given) for given in nothing] == [None] * len(nothing)
    # A token that an added mask hides everything from attends to all keys alike, in transformers.
    hidden = torch.full((1, 1, 5, 9), torch.finfo(torch.float32).min)
    assert attention_prompts.attend(q, k, k, hidden, 1.0) is None
    assert attention_prompts.attend(q, k, k, hidden, 1.0, torch.zeros(4)) is not None
    with pytest.raises(ValueError, match=r"sinks: found \[3\]; expected \[4\]"):
        attention_prompts.attend(q, k, k, mask, 1.0, torch.zeros(3))


def test_which_eager_attention_is_replaced() -> None:
    def of(function: Any) -> Any:
        return attention_prompts.eager(inspect.unwrap(function))

    own = inspect.unwrap(modeling_qwen3_moe.eager_attention_forward)
    assert of(own) is not None and of(modeling_gpt_oss.eager_attention_forward) is not None
    assert of(modeling_gemma2.eager_attention_forward) is None, "it may cap scores"

    def with_bias(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        dropout: float = 0,
        **more: Any,
    ) -> Any:
        return own(module, query, key, value, attention_mask + more.get("bias", 0), scaling, dropout)

    def scaled_twice(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        dropout: float = 0,
        **more: Any,
    ) -> Any:
        return own(module, query, key, value, attention_mask, 2 * scaling, dropout)

    assert of(with_bias) is None and of(scaled_twice) is None


@pytest.fixture(name="calls")
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls.append(name)
            return getattr(_native, name)

    monkeypatch.setattr(attention_prompts, "_native", Counting())
    return calls


def test_requests_read_prompts_with_sinks_natively(calls: list[str]) -> None:
    model: Any = models.tiny("gpt_oss")
    ids = torch.arange(3, 60).view(1, -1)
    with torch.no_grad():
        want = model(ids).logits[:, -1]
    ktinject.optimize(model, "auto", progress=False, devices="cpu", variables={"experts": "bf16"})
    request: dict[str, Any] = {
        "max_new_tokens": 2,
        "do_sample": False,
        "pad_token_id": 0,
        "output_logits": True,
    }
    model.generate(ids, max_new_tokens=2, pad_token_id=0)
    layers = len(model.model.layers)
    calls.clear()
    found = model.generate(ids, return_dict_in_generate=True, **request)
    assert calls == ["attend_prompt"] * layers
    torch.testing.assert_close(found.logits[0], want, rtol=0.05, atol=0.05)
    # Weights of attention are there for who asks for them, and for hooks.
    found = model.generate(ids, return_dict_in_generate=True, output_attentions=True, **request)
    assert found.attentions[0][0].shape[2:] == (57, 57) and calls == ["attend_prompt"] * layers
    seen: list[Any] = []
    with model.model.layers[0].self_attn.register_forward_hook(lambda *given: seen.append(given[2][1])):
        model.generate(ids, return_dict_in_generate=True, **request)
    assert seen[0] is not None and calls == ["attend_prompt"] * (2 * layers - 1)
    with torch.no_grad():
        model(ids)
    assert len(calls) == 2 * layers - 1, "outside of requests, attention is transformers' own"


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_requests_read_prompts_of_fused_attention_natively(
    family: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In fp32, where it is not faster, since a choice of experts may turn over with bf16's roundings.
    monkeypatch.setattr(attention_prompts, "is_for", lambda device, dtype, tokens: tokens > 1)
    model: Any = models.tiny(family)
    ktinject.optimize(model, "auto", progress=False, devices="cpu", variables={"experts": "bf16"})
    ids = torch.arange(3, 83).view(2, -1)
    request: dict[str, Any] = {"max_new_tokens": 1, "pad_token_id": 0, "output_logits": True}
    layers = len(model.model.layers)
    for mask in (
        torch.ones_like(ids),
        (torch.arange(80).view(2, -1) % 40 >= torch.tensor([[0], [7]])).long(),
    ):
        calls.clear()
        given = {"attention_mask": mask, "return_dict_in_generate": True, **request}
        found = model.generate(ids, **given).logits[0]
        assert calls == ["attend_prompt"] * layers
        with monkeypatch.context() as patch:
            patch.setattr(attention_prompts, "is_for", lambda *_: False)
            want = model.generate(ids, **given).logits[0]
        assert calls == ["attend_prompt"] * layers
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    assert prompts._in_request.get() is False
