"""Attention of a text that goes on: it is what transformers computes, and other masks are left to it."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import ktinject
from ktinject.errors import OperatorError
from ktinject.generation import continued
from ktinject.hf import compat

torch.set_num_threads(1)
SHAPE = {"batch_size": 2, "q_length": 5, "kv_length": 9, "q_offset": 4, "mask_function": causal_mask_function}


def is_recognised(**changes: Any) -> bool:
    found = continued.mask(**{**SHAPE, **changes})
    assert found is None or torch.equal(found, compat.sdpa_mask(**{**SHAPE, **changes}))
    return getattr(found, continued._MARK, None) is not None


def heads(*counts: int, tokens: tuple[int, ...], dim: int = 16, **kind: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, count, each, dim, generator=generator).to(**kind)
        for count, each in zip(counts, tokens)
    ]


def both(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    module = nn.Module()
    module.num_key_value_groups = q.shape[1] // k.shape[1]
    arguments = (module, q, k, v, mask)
    found, want = (
        forward(*arguments, scaling=0.4, **more)[0]
        for forward in (continued.forward, compat.sdpa_attention_forward)
    )
    return found, want


@pytest.mark.parametrize(
    "changes, want",
    [
        ({}, True),
        ({"attention_mask": torch.ones(2, 9, dtype=torch.bool)}, True),
        ({"attention_mask": torch.tensor([[False] + [True] * 8, [True] * 9])}, False),
        ({"kv_length": 16}, False),  # a static cache, which is longer than the text
        ({"kv_offset": 2}, False),
        ({"q_offset": torch.tensor(4)}, False),
        ({"mask_function": sliding_window_causal_mask_function(3)}, False),
        ({"local_size": 3}, False),
        ({"use_vmap": True}, False),
        ({"q_length": 1, "q_offset": 8}, False),  # there is no mask
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else str(value),
)
def test_which_masks_are_recognised(changes: dict[str, Any], want: bool) -> None:
    assert is_recognised(**changes) == want


@pytest.mark.parametrize("kv, most", [(2, 1 << 20), (2, 0), (6, 1 << 20)])
def test_it_is_transformers_attention(kv: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continued, "_MOST_REPEATED", most)
    mask = continued.mask(**{**SHAPE, "batch_size": 1})  # of more, it would lie in memory once
    assert mask is not None
    for _ in range(2):  # of a second layer, the repeated mask is there
        torch.testing.assert_close(*both(*heads(6, kv, kv, tokens=(5, 9, 9)), mask))
    mask[..., 0] = False
    torch.testing.assert_close(*both(*heads(6, kv, kv, tokens=(5, 9, 9)), mask))
    bias = torch.randn(1, 6, 5, 9)
    mask = continued.mask(**SHAPE)
    assert mask is not None
    torch.testing.assert_close(*both(*heads(6, kv, kv, tokens=(5, 9, 9)), mask, position_bias=bias))


@pytest.mark.parametrize("family, taken", [("qwen3_moe", 2), ("deepseek_v3", 0), ("gpt_oss", 0)])
def test_a_second_turn_takes_it_where_layers_see_all(
    family: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention computes by itself, and sinks go with transformers' eager attention."""
    model: Any = ktinject.optimize(models.tiny(family), "auto", devices=["cpu"], progress=False)
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    before, calls, attend = model.config._attn_implementation, [], continued._attend
    monkeypatch.setattr(continued, "_attend", lambda *args: calls.append(1) or attend(*args))

    def written(**more: Any) -> list[int]:
        return model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, **more)[0].tolist()

    want = written()
    assert calls == []
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache)
    assert written(past_key_values=cache) == want
    assert len(calls) == taken
    assert written(prefill_chunk_size=12) == want
    assert len(calls) == 3 * taken  # of three chunks, the first one is whole
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("goes_on", [True, False])
def test_chunks_behind_a_cache(goes_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of transformers would read what the cache holds once more."""
    model: Any = ktinject.optimize(models.tiny("qwen3_moe"), "auto", devices=["cpu"], progress=False)
    if not goes_on:
        monkeypatch.setattr(continued, "chunks_go_on", lambda: False)
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache)

    def written(**more: Any) -> list[int]:
        return model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, **more)[0].tolist()

    if goes_on and continued.chunks_go_on():
        assert written(past_key_values=cache, prefill_chunk_size=4) == written()
        return
    with pytest.raises(OperatorError, match="prefill_chunk_size=4 with a cache that holds 20 tokens"):
        written(past_key_values=cache, prefill_chunk_size=4)
    assert cache.get_seq_length() == 20


def test_attention_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ktinject.optimize(models.tiny("qwen3_moe"), "auto", devices=["cpu"], progress=False)
    monkeypatch.setattr(continued, "_attend", lambda *_: 1 / 0)
    ids = torch.randint(3, 90, (1, 30))
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, max_new_tokens=4, do_sample=False, prefill_chunk_size=12)
    assert model.config._attn_implementation == "sdpa"


def test_another_attention_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ktinject.optimize(models.tiny("qwen3_moe"), "auto", devices=["cpu"], progress=False)
    assert continued.support(model)
    monkeypatch.setitem(compat.ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda *_, **__: None)
    assert continued.support(model).reason == "another attention is registered as 'sdpa'"
    model.config._attn_implementation = "eager"
    assert continued.support(model).reason == "attention runs as 'eager'"


def test_modules_are_looked_at_once_while_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ktinject.optimize(models.tiny("qwen3_moe"), "auto", devices=["cpu"], progress=False)
    looks, own = [], continued._modules_support
    monkeypatch.setattr(continued, "_modules_support", lambda model: looks.append(1) or own(model))
    model.ktinject_decoding.model_support()  # looks at the model as it is
    assert continued.support(model) and continued.support(model)
    assert len(looks) == 1
    model.model.embed_tokens = copy.copy(model.model.embed_tokens)
    assert continued.support(model) and continued.support(model)
    assert len(looks) == 3, "of a model that is not the one that was recorded, each time"
    model.ktinject_decoding.model_support()
    assert continued.support(model) and continued.support(model)
    assert len(looks) == 4


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_code_that_asks_for_the_name_keeps_it(family: str) -> None:
    """Tokens that an indexer did not choose are hidden under transformers' own name alone."""
    model: Any = ktinject.optimize(models.tiny(family), "auto", devices=["cpu"], progress=False)
    name = f"transformers.models.{family}.modeling_{family}"
    assert continued.support(model).reason == (
        f"{name} does something else where attention has another name than 'sdpa'"
    )
    assert not continued.asks_for_stock("transformers.models.qwen3_moe.modeling_qwen3_moe")
    assert continued.asks_for_stock("a.module.without.source")


@pytest.mark.gpu
@pytest.mark.parametrize("dim, kv", [(128, 4), (64, 8)])
def test_on_a_gpu_it_is_as_exact(dim: int, kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = continued.mask(**{**SHAPE, "q_length": 33, "q_offset": 1967, "kv_length": 2000, "device": "cuda"})
    assert mask is not None
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = heads(8, kv, kv, tokens=(33, 2000, 2000), dim=dim, **kind)
    exact = both(*(part.float() for part in (q, k, v)), mask)[1]
    calls, on_gpu = [], continued._on_gpu
    monkeypatch.setattr(continued, "_on_gpu", lambda *args: calls.append(1) or on_gpu(*args))
    found, want = both(q, k, v, mask)
    assert calls, "torch's flash kernel takes such heads"
    assert (found - exact).norm() <= 1.2 * (want - exact).norm()
