"""Attention in parts beside torch's fused attention, and beside the same in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ktinject.operators.torch_ops import cpu_attention
from tests.reference import relative_error

# How much further from the truth than torch's fused attention in bf16: weights are rounded after the division by their
# sum and not before. Seen: 1.3.
BF16 = 1.6


def inputs(b: int, h: int, m: int, s: int, d: int, dv: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(b, h, n, size).mul(2).bfloat16() for n, size in ((m, d), (s, d), (s, dv))]


def masks(b: int, m: int, s: int) -> dict[str, Tensor | None]:
    """Padding before, and a window; the last queries of all places."""
    seen = torch.ones(m, s, dtype=torch.bool).tril(s - m).triu(-70).repeat(b, 1, 1, 1)
    seen[0, :, :, : s // 2] = False
    seen[0, :, :, 0] |= ~seen[0].any(-1)
    return {"bool": seen, "float": torch.zeros(seen.shape).masked_fill(~seen, -1e9).bfloat16()}


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype),
        is_causal=mask is None, scale=scaling,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
@pytest.mark.parametrize("b, h, m, d, dv", [(2, 3, 300, 24, 16), (1, 4, 128, 192, 128), (1, 2, 7, 64, 64)])
def test_is_as_exact_as_torch_s_fused(b: int, h: int, m: int, d: int, dv: int, kind: str) -> None:
    s = m if kind == "causal" else m + 60
    q, k, v = inputs(b, h, m, s, d, dv)
    mask = None if kind == "causal" else masks(b, m, s)[kind]
    want = reference(q.double(), k.double(), v.double(), mask, 0.1)
    theirs = reference(q, k, functional.pad(v, (0, d - dv)), mask, 0.1)[..., :dv]
    found = cpu_attention.attend(q, k, v, mask, 0.1)
    assert found.dtype == torch.bfloat16 and found.shape == theirs.shape
    assert relative_error(found, want) <= BF16 * relative_error(theirs, want)


def test_a_row_that_sees_nothing_is_zero() -> None:
    """As torch's is: padding depends neither on the kind of CPU nor on tokens after it."""
    q, k, v = inputs(1, 2, 5, 5, 8, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    mask[..., :2] = False
    found, theirs = cpu_attention.attend(q, k, v, mask, 1.0), reference(q, k, v, mask, 1.0)
    assert (found[:, :, :2] == 0).all() and (theirs[:, :, :2] == 0).all()
    assert relative_error(found, theirs) < 2e-2


def test_scores_beyond_the_limit_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.double() for x in inputs(2, 3, 40, 40, 8, 8))
    want = cpu_attention.attend(q, k, v, None, 0.3)
    monkeypatch.setattr(cpu_attention, "MOST_BYTES", 2 * 3 * 40 * 8 * 7)
    assert torch.allclose(cpu_attention.attend(q, k, v, None, 0.3), want)
    assert torch.allclose(reference(q, k, v, None, 0.3), want)


@pytest.mark.parametrize(
    "features, changed, expected",
    [
        ({"avx512bw": True, "amx_bf16": False}, {}, True),
        ({"avx512bw": True, "amx_bf16": True}, {}, False),
        ({"avx512bw": False, "amx_bf16": False}, {}, False),
        ({"avx512bw": True, "amx_bf16": False}, {"dtype": torch.float32}, False),
        ({"avx512bw": True, "amx_bf16": False}, {"m": 1}, False),
        ({"avx512bw": True, "amx_bf16": False}, {"grad": True}, False),
    ],
    ids=str,
)
def test_where_it_is_taken(
    features: dict[str, bool], changed: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention._native, "cpu_features", lambda: features)
    cpu_attention._has_products_only.cache_clear()
    q = torch.zeros(1, 2, changed.get("m", 4), 8, dtype=changed.get("dtype", torch.bfloat16))
    k = torch.zeros(1, 2, 9, 8, dtype=q.dtype)
    with torch.set_grad_enabled(changed.get("grad", False)):
        assert cpu_attention.is_faster(q, k) is expected
        monkeypatch.setattr(cpu_attention, "MOST_BYTES", 4 * k.numel() - 1)
        assert not cpu_attention.is_faster(q, k)
    cpu_attention._has_products_only.cache_clear()
