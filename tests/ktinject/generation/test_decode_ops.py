"""The kernels of a decode step against the formulas that transformers computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_limits import pretended
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from ktinject.generation import feed_forward_spec, layer_spec
from ktinject.generation.cuda import decode_ops, fused_steps, projections
from ktinject.generation.cuda.chooser import Chooser
from ktinject.generation.cuda.decode_ops import Cache, Norm
from ktinject.operators.probes import latent_formula

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
# Sums in another order, then one rounding: relative to the largest result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


# Llama's; one whose weight is stored less 1; one that rounds after the weight alone.
NORMS = [Qwen3MoeRMSNorm, Qwen3NextRMSNorm, GptOssRMSNorm]


def norm_of(module: nn.Module) -> Norm:
    """As steps take it, by what it is found to compute."""
    spec = layer_spec.of_norm(module)
    assert isinstance(spec, layer_spec.NormSpec)
    norm = projections.norm_of(spec, module)
    assert norm is not None
    return norm


def assert_close(ours: Tensor, theirs: Tensor, roundings: float = 1) -> None:
    error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
    assert error <= roundings * TOLERANCE[theirs.dtype], error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2048), (8, 1, 7168), (3, 1, 40), (2, 5, 4, 128)])
@pytest.mark.parametrize("kind", NORMS)
class TestNorm:
    pytestmark = gpu

    def test_is_the_module_s(self, dtype: torch.dtype, shape: tuple[int, ...], kind: type[nn.Module]) -> None:
        norm = kind(shape[-1]).to("cuda", dtype)
        nn.init.normal_(norm.weight)
        x = torch.randn(shape, device="cuda", dtype=dtype) * 3
        ours, theirs = decode_ops.rms_norm(x, norm_of(norm)), norm(x)
        assert_close(ours, theirs)
        # Another rounding would turn more of them.
        assert dtype == torch.float32 or (ours != theirs).float().mean() < 0.02


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
        weights, ids = decode_ops.route(logits, top_k, normed)
        wanted, wanted_ids = logits.float().softmax(-1).topk(top_k, -1)
        if normed:
            wanted = wanted / wanted.sum(-1, keepdim=True)
        assert_close(weights, wanted.to(dtype))
        assert torch.equal(logits.gather(1, ids), logits.gather(1, wanted_ids)), "as likely"
        assert all(len(row.unique()) == top_k for row in ids)

    def test_what_is_no_number_is_told_by_its_weights(self, dtype, experts, top_k, normed) -> None:
        logits = torch.randn(3, experts, device="cuda").to(dtype)
        logits[1] = torch.nan
        weights, ids = decode_ops.route(logits, top_k, normed)
        assert weights[1].isnan().all() and not weights[[0, 2]].isnan().any()
        assert ((ids >= 0) & (ids < experts)).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "experts, groups, kept, top_k, normed",
    [(256, 8, 4, 8, True), (64, 1, 1, 6, False), (384, 1, 1, 8, True), (32, 4, 1, 8, True)],
)
class TestGroupedRouter:
    pytestmark = gpu

    def router(self, dtype, experts, groups, kept, top_k, normed) -> tuple[nn.Module, Any]:
        """A router, and the step of what it is found to compute."""
        config = DeepseekV3Config(
            hidden_size=64,
            moe_intermediate_size=8,
            n_routed_experts=experts,
            num_experts_per_tok=top_k,
            n_group=groups,
            topk_group=kept,
            norm_topk_prob=normed,
        )
        block = DeepseekV3MoE(config).to("cuda", dtype)
        spec, router = feed_forward_spec.of_moe(block), block.gate
        assert isinstance(spec, feed_forward_spec.MoeSpec)
        nn.init.normal_(router.weight)
        bias = torch.float32 if dtype == torch.bfloat16 else dtype
        router.e_score_correction_bias = torch.randn(experts, device="cuda", dtype=bias) * 0.2
        return router, fused_steps.step_of(spec.router, router, torch.zeros(1))

    def test_is_the_module_s(self, dtype, experts, groups, kept, top_k, normed) -> None:
        router, step = self.router(dtype, experts, groups, kept, top_k, normed)
        x = torch.eye(64, device="cuda", dtype=dtype)[
            [3, 60, 7, 31, 5]
        ]  # logits are weights, without rounding
        (logits, weights, ids), wanted = step(x), router(x)
        assert torch.equal(logits, wanted[0])
        assert torch.equal(ids, wanted[2]), "in the same order"
        assert_close(weights, wanted[1])
        x = torch.randn(5, 64, device="cuda", dtype=dtype)
        assert_close(step(x)[0], router(x)[0])

    def test_what_is_no_number_is_told_by_its_weights(
        self, dtype, experts, groups, kept, top_k, normed
    ) -> None:
        _, step = self.router(dtype, experts, groups, kept, top_k, normed)
        x = torch.randn(3, 64, device="cuda", dtype=dtype)
        x[1] = torch.nan
        _, weights, ids = step(x)
        assert weights[1].isnan().all() and not weights[[0, 2]].isnan().any()
        assert ((ids >= 0) & (ids < experts)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_the_grouped_router_does_not_serve_is_refused() -> None:
    logits, bias = torch.zeros(1, 96, device="cuda"), torch.zeros(96, device="cuda")
    for groups, kept in ((3, 1), (0, 1), (4, 5)):
        with pytest.raises(ValueError, match="groups must divide 32"):
            decode_ops.route_grouped(logits, bias, 4, groups, kept, True, 1.0)
    logits, bias = logits[:, :90].contiguous(), bias[:90].contiguous()
    with pytest.raises(ValueError, match="multiple of 32"):
        decode_ops.route_grouped(logits, bias, 4, 1, 1, True, 1.0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 3, 8])
# One matrix or several; fewer outputs than a tile, tiles that end within a block, more than the device has blocks for;
# inputs that are fewer, as many and more than the warps of a block share out, and than are fetched ahead; on a GPU of
# 132 multiprocessors, every number of tiles that a block may take at once.
@pytest.mark.parametrize(
    "k, n",
    [(32, [5]), (2048, [4096, 512, 512]), (7168, [100, 36, 8, 9]), (96, [20000, 3]), (1056, [1030])]
    + [(4096, [2048]), (64, [3000]), (96, [4000]), (64, [6000])],
)
class TestLinear:
    pytestmark = gpu

    @pytest.mark.parametrize("normed", [None, *NORMS])
    def test_is_norm_linear_and_residual(self, dtype, rows, k, n, normed) -> None:
        torch.manual_seed(k)
        make = {"device": "cuda", "dtype": dtype}
        x, residual = torch.randn(rows, k, **make), torch.randn(rows, sum(n), **make)
        weights = [torch.randn(m, k, **make) * k**-0.5 for m in n]
        biases = [torch.randn(m, **make) if i % 2 == 0 else None for i, m in enumerate(n)]
        norm = (normed or Qwen3MoeRMSNorm)(k).to(**make)
        nn.init.normal_(norm.weight, 1)
        kept = torch.full_like(x, torch.nan)
        out = decode_ops.linear(
            x,
            weights,
            biases,
            norm=norm_of(norm) if normed else None,
            normed=kept if normed else None,
            residual=residual,
            then=weights[0],
        )
        if normed:
            x = norm(x)
            assert_close(kept, x)
        wanted = torch.cat(
            [
                nn.functional.linear(x.float(), w.float(), None if b is None else b.float())
                for w, b in zip(weights, biases)
            ],
            1,
        )
        assert_close(out, wanted.to(dtype) + residual)
        assert_close(
            decode_ops.linear(x, weights),
            torch.cat([nn.functional.linear(x.float(), w.float()) for w in weights], 1).to(dtype),
        )

    def test_gives_the_same_bits_every_time(self, dtype, rows, k, n) -> None:
        x = torch.randn(rows, k, device="cuda", dtype=dtype)
        weights = [torch.randn(m, k, device="cuda", dtype=dtype) for m in n]
        first = decode_ops.linear(x, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain = [decode_ops.linear(x, weights) for _ in range(4)]
        graph.replay()
        assert all(torch.equal(first, other) for other in chain)

    @pytest.mark.parametrize("device", ["sm_86 RTX 3050", "sm_120 RTX 5090"])
    def test_smaller_devices_get_the_same_bits(self, dtype, rows, k, n, device) -> None:
        """With less shared memory, and with programmatic dependent launch or without."""
        torch.manual_seed(k)
        x = torch.randn(rows, k, device="cuda", dtype=dtype)
        weights = [torch.randn(m, k, device="cuda", dtype=dtype) for m in n]
        norm = Qwen3MoeRMSNorm(k).to("cuda", dtype)
        wanted = decode_ops.linear(x, weights, norm=norm_of(norm))
        with pretended(device):
            assert torch.equal(decode_ops.linear(x, weights, norm=norm_of(norm)), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_with_too_little_shared_memory_is_told_so() -> None:
    x = torch.zeros(1, 64, device="cuda", dtype=torch.bfloat16)
    with pretended("sm_120 RTX 5090", block_shared_bytes=60 << 10):
        with pytest.raises(
            RuntimeError, match=r"decode_linear: .* needs \d+ bytes .*, and this device allows 61440"
        ):
            decode_ops.linear(x, [torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_linear_does_not_serve_is_refused() -> None:
    def call(rows: int, k: int, dtype: torch.dtype, offset: int = 0) -> None:
        x = torch.zeros(rows * k + offset, device="cuda", dtype=dtype)[offset:].view(rows, k)
        decode_ops.linear(x, [torch.zeros(8, k, device="cuda", dtype=dtype)])

    for arguments, words in [
        ((9, 32, torch.bfloat16), "1 to 8 rows"),
        ((1, 40, torch.bfloat16), "multiple of 32"),
        ((1, 32, torch.float32), "fp32"),
        ((1, 32, torch.float16, 1), "multiples of 16"),
    ]:
        with pytest.raises(ValueError, match=words):
            call(*arguments)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "batch, heads, groups, size",
    [(1, 32, 4, 128), (3, 4, 4, 64), (8, 8, 1, 256), (2, 6, 2, 32), (2, 24, 2, 64), (1, 20, 2, 256)],
)
# A block takes 128 or 256 positions at once, by the size of heads: just as many, and one more.
@pytest.mark.parametrize(
    "capacity, position",
    [(256, 0), (256, 15), (256, 16), (256, 255), (512, 100), (512, 127), (512, 128), (512, 256)]
    + [(4096, 3000), (16384, 16383)],
)
class TestAttend:
    pytestmark = gpu

    @pytest.mark.parametrize("has_norms", [False, True])
    def test_is_norm_rotation_and_sdpa(
        self, dtype, batch, heads, groups, size, capacity, position, has_norms
    ) -> None:
        torch.manual_seed(0)
        make = {"device": "cuda", "dtype": dtype}
        # Of one tensor, as the projections leave them.
        whole = torch.randn(batch, (heads + 2 * groups) * size, **make)
        q, k, v = (
            part.view(batch, -1, size)
            for part in whole.split([heads * size, groups * size, groups * size], 1)
        )
        keys, values = (
            torch.randn(batch, groups, 2 * capacity, size, **make)[:, :, :capacity] for _ in range(2)
        )
        # What nobody has written may be anything.
        keys[:, :, position:], values[:, :, position:] = torch.nan, torch.nan
        mask = torch.zeros(batch, 1, 1, capacity, dtype=torch.bool, device="cuda")
        mask[..., : position + 1] = True
        mask[0, ..., : position // 3] = False
        config = Qwen3MoeConfig(hidden_size=size * heads, num_attention_heads=heads, head_dim=size)
        rotary = Qwen3MoeRotaryEmbedding(config).cuda()
        rotation = rotary(q, torch.arange(position, position + batch, device="cuda")[:, None])
        norms = [Qwen3MoeRMSNorm(size).to("cuda", dtype) for _ in range(2)]
        for norm in norms:
            nn.init.normal_(norm.weight, 1)
        at = torch.tensor([position], device="cuda")
        arrived = torch.zeros(batch * heads, dtype=torch.int32, device="cuda")
        kept = keys.clone(), values.clone()
        given = [Norm(norm.weight, norm.variance_epsilon) if has_norms else None for norm in norms]
        out = decode_ops.attend(
            q, k, v, (given[0], given[1]), rotation, Cache(keys, values, at, mask), size**-0.5, arrived
        )
        assert not arrived.any(), "ready for the next call"
        if has_norms:
            q, k = norms[0](q), norms[1](k)
        q, k = apply_rotary_pos_emb(q[:, :, None], k[:, :, None], *rotation)
        for cache, new, before in zip((keys, values), (k, v[:, :, None]), kept):
            assert_close(cache[:, :, position], new[:, :, 0])
            others = [n for n in range(capacity) if n != position]
            assert torch.equal(cache[:, :, others].nan_to_num(7), before[:, :, others].nan_to_num(7))
        wanted = nn.functional.scaled_dot_product_attention(
            q.float(),
            keys[:, :, : position + 1].float().repeat_interleave(heads // groups, 1),
            values[:, :, : position + 1].float().repeat_interleave(heads // groups, 1),
            attn_mask=mask[..., : position + 1],
            scale=size**-0.5,
        )
        assert_close(out, wanted[:, :, 0].to(dtype))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[b, heads, d] with the first values rotated by halves; cos and sin [b, 1, r]."""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = rotated.shape[-1] // 2
    other = torch.cat([-rotated[..., half:], rotated[..., :half]], -1)
    return torch.cat([rotated * cos + other * sin, rest], -1)


# Rings that are full, not full, sliced to a bucket, of several splits; heads of which a part is rotated, by cos and sin
# of one half or both; norms of either kind.
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "batch, heads, groups, size, rotary, is_half",
    [
        (1, 64, 8, 64, 64, True),
        (3, 16, 2, 256, 64, False),
        (2, 4, 2, 64, 32, False),
        (8, 4, 4, 128, 64, True),
    ],
)
@pytest.mark.parametrize(
    "window, places, position",
    [(0, 256, 20), (0, 4096, 3000), (128, 128, 5), (128, 128, 127), (128, 128, 1000), (4096, 256, 200)]
    + [(1030, 1030, 5000), (1030, 1030, 700)],
)
class TestAttendInRings:
    pytestmark = gpu

    @pytest.mark.parametrize("has_gates", [False, True])
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_is_attention_to_the_window(
        self,
        dtype,
        batch,
        heads,
        groups,
        size,
        rotary,
        is_half,
        window,
        places,
        position,
        has_gates,
        has_sinks,
    ) -> None:
        torch.manual_seed(0)
        make = {"device": "cuda", "dtype": dtype}
        wide = size * (2 if has_gates else 1)
        whole = torch.randn(batch, heads * wide + 2 * groups * size, **make)
        q, k, v = (
            part.view(batch, -1, n)
            for part, n in zip(
                whole.split([heads * wide, groups * size, groups * size], 1), (wide, size, size)
            )
        )
        keys, values = (torch.randn(batch, groups, places, size, **make) for _ in range(2))
        place, used = position % (window or places), min(position + 1, window or places)
        # What nobody has written, or what leaves the window, may be anything.
        for cache in (keys, values):
            cache[:, :, used:] = cache[:, :, place] = torch.nan
        mask = torch.ones(batch, 1, 1, places, dtype=torch.bool, device="cuda")
        mask[..., used:] = False
        mask[0, ..., : used // 3] = False
        mask[..., place] = True
        angles = torch.randn(batch, 1, rotary // 2, device="cuda")
        turn = [part.to(dtype) for part in (angles.cos(), angles.sin())]
        full = [torch.cat([part, part], -1) for part in turn]
        norms = (
            [Norm(torch.randn(size, **make) * 0.1, 1e-6, 1.0, False) for _ in range(2)]
            if has_gates
            else [None] * 2
        )
        sinks = torch.randn(heads, **make) * 3 if has_sinks else None
        at, counts = (
            torch.tensor([position], device="cuda"),
            torch.zeros(batch * heads, dtype=torch.int32, device="cuda"),
        )
        out = decode_ops.attend(
            q, k, v, (norms[0], norms[1]), tuple(turn if is_half else full),
            Cache(keys, values, at, mask, window),
            size**-0.5, counts, sinks=sinks, has_gates=has_gates, halves_alike=is_half,
        )  # fmt: skip
        assert not counts.any(), "ready for the next call"

        query, gates = q[..., :size].float(), q[..., size:].float()
        key = k.float()
        if has_gates:
            query, key = (
                (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (1 + norm.weight.float()))
                for x, norm in ((query, norms[0]), (key, norms[1]))
            )
        query, key = (_turned(x.to(dtype).float(), *(part.float() for part in full)) for x in (query, key))
        assert_close(keys[:, :, place], key.to(dtype))
        assert torch.equal(values[:, :, place], v)
        held = [cache[:, :, :used].float().repeat_interleave(heads // groups, 1) for cache in (keys, values)]
        scores = torch.einsum("bhd,bhnd->bhn", query.to(dtype).float(), held[0]) * size**-0.5
        scores = scores.masked_fill(~mask[:, :, 0, :used], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[None, :, None].expand(batch, -1, 1)], -1)
        wanted = torch.einsum("bhn,bhnd->bhd", scores.softmax(-1)[..., :used], held[1])
        if has_gates:
            wanted = wanted * gates.sigmoid()
        assert_close(out, wanted.to(dtype), roundings=2)  # of the shares, too, which nearly cancel


# Rows that are tokens of one text: of one split and several, beginning and ending within one, behind a ring, too, where
# their places are not their positions.
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [2, 8, 32])
@pytest.mark.parametrize(
    "heads, groups, size, rotary", [(32, 4, 128, 128), (8, 8, 64, 32), (24, 2, 64, 64), (6, 1, 256, 64)]
)
@pytest.mark.parametrize("places, position", [(256, 0), (256, 13), (256, 224), (4096, 3000), (160, 128)])
class TestAttendToOneText:
    pytestmark = gpu

    def test_is_one_token_after_the_other(self, dtype, rows, heads, groups, size, rotary, places, position):
        """To the bit: how many are computed at once does not show."""
        torch.manual_seed(0)
        make = {"device": "cuda", "dtype": dtype}
        q, k, v = (torch.randn(rows, count, size, **make) for count in (heads, groups, groups))
        keys, values = (torch.randn(1, groups, places, size, **make) for _ in range(2))
        for cache in (keys, values):
            cache[:, :, position:] = torch.nan  # what nobody has written may be anything
        mask = torch.rand(rows, 1, 1, places, device="cuda") < 0.8
        order = torch.arange(rows, device="cuda")
        mask |= (torch.arange(places, device="cuda") == position + order[:, None])[:, None, None]
        angles = torch.randn(rows, 1, rotary // 2, device="cuda").repeat(1, 1, 2)
        turn = angles.cos().to(dtype), angles.sin().to(dtype)
        norms = [Norm(torch.randn(size, **make), 1e-6) for _ in range(2)]
        counts = torch.zeros(rows * heads, dtype=torch.int32, device="cuda")

        def attend(first: int, end: int, cache: Cache) -> Tensor:
            part = slice(first, end)
            angles = turn[0][part], turn[1][part]
            given = q[part], k[part], v[part], (norms[0], norms[1]), angles, cache, size**-0.5, counts
            return decode_ops.attend(*given)

        at = torch.tensor([position], device="cuda")
        alone = keys.clone(), values.clone()
        wanted = [attend(i, i + 1, Cache(*alone, at + i, mask[i : i + 1])) for i in range(rows)]
        shared = (cache.expand(rows, -1, -1, -1) for cache in (keys, values))
        out = attend(0, rows, Cache(*shared, at, mask, is_consecutive=True))
        assert torch.equal(out, torch.cat(wanted)) and not counts.any()
        for ours, theirs in zip((keys, values), alone):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
        assert keys[:, :, position : position + rows].isfinite().all()

    def test_rows_that_share_no_cache_are_refused(
        self, dtype, rows, heads, groups, size, rotary, places, position
    ):
        keys = torch.zeros(rows, groups, places, size, device="cuda", dtype=dtype)
        q, k = (torch.zeros(rows, count, size, device="cuda", dtype=dtype) for count in (heads, groups))
        mask = torch.ones(rows, 1, 1, places, dtype=torch.bool, device="cuda")
        turn = (torch.zeros(rows, 1, rotary, device="cuda", dtype=dtype),) * 2
        at, counts = (
            torch.zeros(n, dtype=t, device="cuda") for n, t in ((1, torch.int64), (rows * heads, torch.int32))
        )
        shared = keys[:1].expand(rows, -1, -1, -1)
        for cache, is_consecutive in ((keys, True), (shared, False)):
            with pytest.raises(ValueError, match="share the one row"):
                given = Cache(cache, cache, at, mask, is_consecutive=is_consecutive)
                decode_ops.attend(q, k, k, (None, None), turn, given, 1.0, counts)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows, heads, nope, rope, rank", [(1, 128, 128, 64, 512), (3, 5, 8, 256, 33)])
@pytest.mark.parametrize("kind", ["halves", "neighbours"])
class TestLatent:
    pytestmark = gpu

    @pytest.mark.parametrize("is_one_text", [False, True])
    def test_is_norm_and_rotation(self, dtype, rows, heads, nope, rope, rank, kind, is_one_text) -> None:
        make = {"device": "cuda", "dtype": dtype}
        q = torch.randn(rows, heads * (nope + rope) + 8, **make)[:, 8:].view(rows, heads, -1)
        kv = torch.randn(rows, rank + rope + 7, **make)[:, : rank + rope] * 3
        norm = Qwen3MoeRMSNorm(rank).to(**make)
        nn.init.normal_(norm.weight)
        angles = torch.rand(rows, 1, rope // 2, device="cuda") * 6
        both = torch.cat([angles, angles], -1)
        turn = both.cos().to(dtype), both.sin().to(dtype)
        keys, values = (
            torch.full((1 if is_one_text else rows, 1, 12, size), torch.nan, **make) for size in (rank, rope)
        )
        shared = (tensor.expand(rows, -1, -1, -1) for tensor in (keys, values))
        cache = Cache(*shared, torch.tensor([7], device="cuda"), torch.ones(1), is_consecutive=is_one_text)
        wanted = [
            latent_formula.rotate(kind, part, turn)
            for part in (q[:, :, None, nope:], kv[:, None, None, rank:])
        ]
        kept = q[..., :nope].clone()
        decode_ops.latent(q, kv, Norm(norm.weight, norm.variance_epsilon), turn, cache, kind == "neighbours")
        assert torch.equal(q[..., :nope], kept)
        assert torch.equal(q[..., nope:], wanted[0][:, :, 0]), "the same roundings"
        places = [*range(7, 7 + rows)] if is_one_text else [7]
        latents, rotated = (tensor[:, 0, places].flatten(0, 1) for tensor in (keys, values))
        assert torch.equal(rotated, wanted[1][:, 0, 0])
        assert_close(latents, norm(kv[:, :rank]))
        others = [i for i in range(12) if i not in places]
        assert keys[:, :, others].isnan().all() and values[:, :, others].isnan().all()

    def test_what_is_not_served_is_refused(self, dtype, rows, heads, nope, rope, rank, kind) -> None:
        make = {"device": "cuda", "dtype": dtype}
        q, kv = torch.zeros(1, 2, 4 + rope, **make), torch.zeros(1, rank + rope, **make)
        turn = (torch.zeros(1, 1, rope, **make),) * 2
        position = torch.zeros(1, dtype=torch.int64, device="cuda")
        cache = Cache(
            torch.zeros(1, 1, 4, rank, **make), torch.zeros(1, 1, 4, rope, **make), position, position
        )
        for weights in (rank - 1, rank + 1):
            with pytest.raises(ValueError, match="do not belong together"):
                decode_ops.latent(q, kv, Norm(torch.ones(weights, **make), 1e-6), turn, cache, True)


@pytest.mark.parametrize("batch", [1, 3, 40])
@pytest.mark.parametrize("vocab", [5, 2048, 151_936])
class TestChoose:
    pytestmark = gpu

    def state(self, batch: int, vocab: int, pad: int | None) -> dict[str, Any]:
        make = {"device": "cuda"}
        return {
            "ids": torch.zeros(batch, 1, dtype=torch.int64, **make),
            "result": torch.stack([torch.zeros(batch), torch.arange(batch) % 3 != 1]).long().to("cuda"),
            "length": torch.tensor([7], **make),
            "seen": torch.zeros(batch, vocab + 1, dtype=torch.bool, **make),
            "ends": torch.arange(vocab, device="cuda") % 2 == 0,
            "pad": pad,
        }

    @pytest.mark.parametrize("pad", [None, 1])
    def test_takes_the_greatest_and_keeps_count(self, batch: int, vocab: int, pad: int | None) -> None:
        state = self.state(batch, vocab, pad)
        alive = state["result"][1].clone()
        choose = Chooser(**state)
        for call in range(3):
            # Few values, so that many are equal: the first of them counts.
            scores = torch.randn(batch, vocab, device="cuda").mul(2).round()
            scores[:, vocab // 2] = -torch.inf
            choose(scores, None)
            wanted = scores.cpu().argmax(-1).cuda()
            assert torch.equal(scores.gather(1, wanted[:, None]), scores.amax(-1, keepdim=True))
            wanted = torch.tensor(
                [row.eq(row.max()).nonzero()[0].item() for row in scores.cpu()], device="cuda"
            )
            if pad is not None:
                wanted = torch.where(alive == 1, wanted, pad)
            assert torch.equal(state["ids"][:, 0], wanted) and torch.equal(state["result"][0], wanted)
            alive = alive * (wanted % 2 == 1)
            assert torch.equal(state["result"][1], alive)
            assert state["seen"].gather(1, wanted[:, None]).all() and state["length"].item() == 8 + call

    def test_samples_as_torch_does_from_the_same_numbers(self, batch: int, vocab: int) -> None:
        state = self.state(batch, vocab, None)
        choose = Chooser(**state)
        for _ in range(3):
            scores = torch.randn(batch, vocab, device="cuda") * 4
            scores[:, ::3] = -torch.inf
            noise = torch.empty_like(scores).exponential_(1)
            choose(scores, noise)
            ratios = scores.softmax(-1) / noise
            found = ratios.gather(1, state["ids"])[:, 0]
            assert (found >= ratios.amax(-1) * (1 - 1e-4)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [8, 64])
class TestBetweenSteps:
    pytestmark = gpu

    def test_rotation_is_the_module_s(self, dtype: torch.dtype, half: int) -> None:
        config = Qwen3MoeConfig(head_dim=2 * half)
        rotary = Qwen3MoeRotaryEmbedding(config).cuda()
        x, positions = torch.empty(0, device="cuda", dtype=dtype), torch.tensor([[0], [5], [40_000]]).cuda()
        ours = decode_ops.rotation(positions, rotary.inv_freq, 1.5, dtype)
        rotary.attention_scaling = 1.5
        for a, b in zip(ours, rotary(x, positions)):
            assert a.shape == b.shape
            assert (a.float() - b.float()).abs().max() <= (2**-7 if dtype != torch.float32 else 1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("last", [8, 64])
def test_advance_moves_on_by_one(device: str, last: int) -> None:
    position, positions = torch.tensor([last], device=device), torch.tensor([[3], [5]], device=device)
    mask = torch.zeros(2, 1, 1, last + 2, dtype=torch.bool, device=device)
    for _ in range(2):  # the second time there is no such position
        decode_ops.advance(position, positions, mask)
    assert position.item() == last + 2 and positions.tolist() == [[5], [7]]
    assert mask.nonzero()[:, 3].tolist() == [last + 1] * 2
