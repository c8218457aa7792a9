"""Attention of a text that goes on: it is what transformers computes, and other masks are left to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
from ktinject.support import Support

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


# Code that asks for the name of its attention: an index hides tokens under transformers' own names alone.
ASKING = ["deepseek_v32", "glm_moe_dsa"]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ASKING else pytest.mark.nightly)
        for family in models.AVAILABLE
    ],
)
def test_a_second_turn_has_the_logits_of_transformers_attention(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = ktinject.optimize(models.tiny(family), "auto", devices=["cpu"], progress=False)
    ids = torch.randint(3, 60, (1, 30), generator=torch.Generator().manual_seed(0))

    def logits(**more: Any) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], **{compat.CACHE: cache})
        found = model.generate(
            ids,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **{compat.CACHE: cache},
        )
        return found.logits[0]

    try:
        found = logits()
    except Exception as error:  # its caches are of another kind
        pytest.skip(f"{type(error).__name__}: {error}")
    monkeypatch.setattr(continued, "support", lambda _: Support.no("this is the comparison"))
    torch.testing.assert_close(found, logits(), rtol=1e-4, atol=1e-5)


def test_models_of_one_config_answer_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_config` takes the config itself. While a prompt of one model is read, it says what it said before."""
    plain = models.tiny("qwen3_moe")
    config, other = plain.config, type(plain)(plain.config).eval()
    other.load_state_dict(plain.state_dict())
    first, second = (
        ktinject.optimize(model, "auto", devices=["cpu"], progress=False) for model in (plain, other)
    )
    assert first.config is config and second.config is config
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(0))

    def written(model: Any) -> list[int]:
        asked = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "prefill_chunk_size": 16}
        found: list[int] = model.generate(ids, **asked)[0].tolist()
        return found

    want = written(first), first.ktinject_decoding.last, first.ktinject_decoding.reason
    attend, met, seen = continued._attend, [], []

    def meanwhile(*given: Any) -> Any:
        if not met:  # within the first model's prompt
            met.append(True)
            seen.append(config._attn_implementation)
            with ThreadPoolExecutor(1) as pool:
                seen.append(pool.submit(written, second).result())
            seen.append((second.ktinject_decoding.last, second.ktinject_decoding.reason))
        return attend(*given)

    monkeypatch.setattr(continued, "_attend", meanwhile)
    assert written(first) == want[0]
    assert seen == ["sdpa", want[0], want[1:]]
    assert (first.ktinject_decoding.last, first.ktinject_decoding.reason) == want[1:]


def test_other_threads_and_other_models_have_transformers_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = ktinject.optimize(models.tiny("qwen3_moe"), "auto", devices=["cpu"], progress=False)
    assert continued.support(model)
    calls: list[int] = []
    own = continued.forward
    monkeypatch.setattr(continued, "forward", lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs))
    ids, stock = torch.randint(3, 90, (1, 9)), models.tiny("qwen3_moe")
    with continued.recognised(model):
        model(ids)
        assert len(calls) == 2
        stock(ids)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(model, ids).result()
    assert len(calls) == 2


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
