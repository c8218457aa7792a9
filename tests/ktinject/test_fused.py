"""The kernels of a decode step against the formulas that transformers computes, and whole steps with and without."""

from __future__ import annotations

import pytest
import torch
from test_generate import prompt, swapped
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ktinject import fused

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sums in another order, then one rounding: relative to the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= TOLERANCE[theirs.dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2048), (8, 1, 7168), (3, 1, 40), (2, 5, 4, 128)])
class TestNorm:
    pytestmark = gpu

    def test_is_the_module_s(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        norm = Qwen3MoeRMSNorm(shape[-1]).to("cuda", dtype)
        nn.init.normal_(norm.weight)
        x = torch.randn(shape, device="cuda", dtype=dtype) * 3
        assert_close(fused.rms_norm(x, norm.weight, norm.variance_epsilon), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "experts, top_k, normed", [(128, 8, True), (256, 8, False), (6, 2, True), (1000, 32, True)]
)
class TestRoute:
    pytestmark = gpu

    def test_is_softmax_and_topk(self, dtype: torch.dtype, experts: int, top_k: int, normed: bool) -> None:
        logits = torch.stack([torch.randperm(experts) for _ in range(5)]).to("cuda", dtype) / experts * 4
        if logits.unique(dim=-1).shape[-1] < experts:
            logits = logits[:, torch.randperm(experts)]  # ties by rounding: ids are not compared then
        weights, ids = fused.route(logits, top_k, normed)
        wanted, wanted_ids = logits.float().softmax(-1).topk(top_k, -1)
        if normed:
            wanted = wanted / wanted.sum(-1, keepdim=True)
        assert_close(weights, wanted.to(dtype))
        assert torch.equal(logits.gather(1, ids), logits.gather(1, wanted_ids)), "as likely"
        assert all(len(row.unique()) == top_k for row in ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "batch, heads, groups, size", [(1, 32, 4, 128), (3, 4, 4, 64), (8, 8, 1, 256), (2, 6, 2, 32)]
)
@pytest.mark.parametrize("capacity, place", [(256, 0), (256, 255), (512, 100), (4096, 3000)])
class TestAttend:
    pytestmark = gpu

    def test_is_norm_rotation_and_sdpa(
        self, dtype: torch.dtype, batch: int, heads: int, groups: int, size: int, capacity: int, place: int
    ) -> None:
        torch.manual_seed(0)
        make = {"device": "cuda", "dtype": dtype}
        q, k, v = (torch.randn(batch, h, size, **make) for h in (heads, groups, groups))
        keys, values = (
            torch.randn(batch, groups, 2 * capacity, size, **make)[:, :, :capacity] for _ in range(2)
        )
        mask = torch.zeros(batch, 1, 1, capacity, dtype=torch.bool, device="cuda")
        mask[..., : place + 1] = True
        mask[0, ..., : place // 3] = False
        config = Qwen3MoeConfig(hidden_size=size * heads, num_attention_heads=heads, head_dim=size)
        rotary = Qwen3MoeRotaryEmbedding(config).cuda()
        position = torch.full((batch, 1), place + 1, device="cuda")
        rotation = rotary(q, position)
        norms = [Qwen3MoeRMSNorm(size).to("cuda", dtype) for _ in range(2)]
        for norm in norms:
            nn.init.normal_(norm.weight, 1)
        at = torch.tensor([place], device="cuda")
        kept = keys.clone(), values.clone()
        out = fused.attend(
            q, k, v, (norms[0].weight, norms[1].weight, norms[0].variance_epsilon), rotation, (keys, values), at,
            mask, size**-0.5,
        )  # fmt: skip
        q, k = apply_rotary_pos_emb(norms[0](q)[:, :, None], norms[1](k)[:, :, None], *rotation)
        for cache, new, before in zip((keys, values), (k, v[:, :, None]), kept):
            assert_close(cache[:, :, place], new[:, :, 0])
            others = [n for n in range(capacity) if n != place]
            assert torch.equal(cache[:, :, others], before[:, :, others])
        wanted = nn.functional.scaled_dot_product_attention(
            q.float(),
            keys.float().repeat_interleave(heads // groups, 1),
            values.float().repeat_interleave(heads // groups, 1),
            attn_mask=mask,
            scale=size**-0.5,
        )
        assert_close(out, wanted[:, :, 0].to(dtype))


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
class TestWholeSteps:
    pytestmark = gpu

    @pytest.mark.parametrize("batch", [1, 3])
    def test_tokens_are_those_of_transformers_kernels(self, name: str, batch: int) -> None:
        size = {"head_dim": 32} if name == "qwen3_moe" else {}
        few, many = (swapped(name, device="cuda", **size) for _ in range(2))
        many.ktinject_decoding.fused = None
        arguments = prompt(batch, device="cuda")
        assert torch.equal(few.generate(**arguments), many.generate(**arguments))
        assert few.ktinject_decoding.last == many.ktinject_decoding.last == "graph loop"
        assert len(few.ktinject_decoding.fused) and not few.ktinject_decoding.fused.refused

    def test_a_module_that_computes_something_else_keeps_its_own(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = swapped(name, device="cuda")
        norm = type(model.model.norm)
        own = norm.forward
        monkeypatch.setattr(norm, "forward", lambda self, x: own(self, x) + self.weight)
        model.generate(**prompt(device="cuda"))
        assert "model.norm" in model.ktinject_decoding.fused.refused
        assert "relative difference" in model.ktinject_decoding.fused.refused["model.norm"]
        assert "forward" not in vars(model.model.norm)


def test_known_modules_are_told_by_what_they_hold() -> None:
    qwen = fused.Fused(swapped("qwen3_moe"))
    assert {path.rpartition(".")[2] for path in qwen._steps} >= {
        "input_layernorm",
        "self_attn",
        "gate",
        "norm",
    }
    deepseek = fused.Fused(swapped("deepseek_v3"))
    assert {path.rpartition(".")[2] for path in deepseek._steps} == {
        "input_layernorm", "post_attention_layernorm", "q_a_layernorm", "kv_a_layernorm", "norm",
    }  # fmt: skip
