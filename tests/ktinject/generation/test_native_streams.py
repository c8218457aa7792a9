"""Native decode steps of DeepSeek-V4: several residual streams, one key for all heads in a window and compressed ones
behind it, and experts that go by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from test_generate import prompt, stock
from test_layer_kinds import HEAVY, SPARSE
from test_native_decoder import (
    INT8_TOLERANCE,
    TOLERANCE,
    assert_same_tokens,
    difference,
    doubled,
    logits_of,
    stock_step,
    varied,
)
from test_native_kimi import linear
from test_native_windows import assert_native, assert_steps_take_turns
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import feed_forward_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.feed_forward_spec import MoeSpec
from ktinject.hf import compat
from tests.models import tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not compat.support("compressed"), reason="another DeepSeek-V4")
SLIDING = "sliding_attention"
# All experts are taken, so none can turn over. Windows that texts go beyond, and fewer keys that are chosen than there
# are; of few heads, scores tie at 0.
SURE: dict[str, Any] = {
    "num_experts_per_tok": 6,
    "sliding_window": 7,
    "index_topk": 3,
    "index_n_heads": 8,
    "compress_rates": {HEAVY: 5, SPARSE: 3},
}
# What from_pretrained leaves in fp32.
WIDE = ("_hc", "hc_head", "sinks", "position_bias", "norm", "layernorm")


def swapped_beside_fp32(
    one: Callable[[], PreTrainedModel], wide: Sequence[str], weights: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: parts of the names of what from_pretrained leaves in fp32"""
    model, truth = one().to(dtype), one().float()
    for name, parameter in model.named_parameters():
        if any(part in name for part in wide):
            parameter.data = parameter.data.float()
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth


def made(
    *kinds: str,
    weights: str = "bf16",
    dtype: torch.dtype = torch.bfloat16,
    wide: bool = True,
    routers: str = "moe",
    **changes: Any,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: with what from_pretrained leaves in fp32."""
    given = {
        "num_hidden_layers": len(kinds),
        "layer_types": [*kinds],
        "mlp_layer_types": [routers, *["moe"] * (len(kinds) - 1)],
    }

    def one() -> PreTrainedModel:
        model = varied(doubled(tiny("deepseek_v4", **SURE | given | changes).bfloat16()))
        generator = torch.Generator().manual_seed(5)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):
                drawn = torch.rand(len(tensor), 6, generator=generator).argsort(-1)
                tensor.copy_(drawn[:, : tensor.shape[1]])
            elif any(part in name for part in ("sinks", "position_bias", ".base", ".scale", "hc_base")):
                drawn = 0.5 * torch.randn(tensor.shape, generator=generator)
                tensor.data.copy_(drawn + float(".scale" in name))
        return model

    return swapped_beside_fp32(one, WIDE if wide else (), weights, dtype)


def parts_of(cache: Any) -> list[Tensor]:
    """What compressors keep in a runner's cache."""
    return [
        tensor
        for held in cache.compressed
        if held is not None
        for part in held.parts.values()
        for tensor in (part.kv, part.gate, part.keys, *part.overlap)
    ]


def assert_as_exact_as_its_own(
    model: PreTrainedModel, truth: PreTrainedModel, tolerance: float = TOLERANCE
) -> None:
    """Over many windows, also of what compressors keep: see the function of that name in test_native_decoder.py."""
    native = NativeDecoder(model)
    logits_of(model, native)
    assert native.is_proven, native.support.reason
    ours, runner = logits_of(model, native, steps=26)
    theirs, their_runner = logits_of(model, stock_step(model), steps=26)
    assert difference(ours, theirs) <= tolerance
    for mine, own in zip(runner.cache.layers, their_runner.cache.layers):
        assert all(difference(x, y) <= tolerance for x, y in zip(mine, own))
    # But for the key of a window that is not complete, which native steps leave as it was.
    for a, b in zip(parts_of(runner.cache), parts_of(their_runner.cache), strict=True):
        assert difference(a, b) <= tolerance
    want, _ = logits_of(truth, stock_step(truth), steps=26)
    assert difference(ours, want) <= 1.3 * difference(theirs, want)


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "kinds",
    [
        (SLIDING, HEAVY, SPARSE),
        *(pytest.param((kind,), marks=NIGHTLY) for kind in (SLIDING, HEAVY, SPARSE)),
    ],
    ids=str,
)
def test_steps_are_as_exact_as_the_model_s_own(kinds: tuple[str, ...]) -> None:
    assert_as_exact_as_its_own(*made(*kinds))


@pytest.mark.parametrize(
    "kinds, changes",
    [
        # All of it in bf16.
        pytest.param((HEAVY, SPARSE), {"wide": False}, marks=NIGHTLY),
        pytest.param((HEAVY, SPARSE), {"routers": "hash_moe"}, marks=NIGHTLY),
        ((SPARSE,), {"hc_mult": 2, "hc_sinkhorn_iters": 1, "wide": False}),
        # Vectors with a rest, several tasks of a key's values, and heads on the pool.
        pytest.param(
            (HEAVY, SPARSE),
            {"head_dim": 136, "index_head_dim": 72, "num_attention_heads": 64, "o_groups": 4},
            marks=NIGHTLY,
        ),
        pytest.param((SLIDING, SPARSE), {"index_topk": 64, "sliding_window": 64}, marks=NIGHTLY),
    ],
    ids=str,
)
def test_variants(kinds: tuple[str, ...], changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(*kinds, **changes))


@NIGHTLY
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(HEAVY, SPARSE, weights=weights), INT8_TOLERANCE)


def test_models_in_fp32_give_the_same_tokens() -> None:
    """Also of rows with padding, which windows count, and positions do not."""
    model, _ = made(HEAVY, SPARSE, weights="int8", dtype=torch.float32, routers="hash_moe")
    for batch, length, padding in ((3, 9, 4), (1, 40, 3), (2, 31, 2), (1, 17, 0)):
        arguments = {**prompt(batch, length, padding=padding), "eos_token_id": None}
        assert torch.equal(model.generate(**arguments), stock(model, **arguments))
        assert_native(model)


@NIGHTLY
def test_tokens_are_the_stock_loop_s() -> None:
    model, _ = made(SLIDING, HEAVY, SPARSE, routers="hash_moe", index_topk=64)
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None})
        assert_native(model)


def test_several_turns_on_a_caller_s_cache() -> None:
    """That go in and out at any token of a window."""
    model, _ = made(HEAVY, SPARSE, weights="int8", dtype=torch.float32)
    ours, theirs = (DynamicCache(config=model.config) for _ in range(2))
    ids = prompt(1, 9, padding=0)["input_ids"]
    for new in (2, 5, 1, 7, 3, 4):
        arguments = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "eos_token_id": None,
        }  # fmt: skip
        found = model.generate(**arguments, **{compat.CACHE: ours})
        assert torch.equal(found, stock(model, **arguments, **{compat.CACHE: theirs}))
        assert new == 1 or model.ktinject_decoding.last == "native loop"  # one token needs no step
        ids = torch.cat([found, ids[:, :2]], dim=1)


def test_beams() -> None:
    """Whose windows are put in another order with each step."""
    model, _ = made(HEAVY, SPARSE, weights="int8", dtype=torch.float32)
    arguments = {**prompt(2, 16, padding=3), "eos_token_id": None, "num_beams": 3}
    found = model.generate(**arguments)
    assert model.ktinject_decoding.last == "native, stock loop: beam search"
    layer = DynamicCache(config=model.config).layers[-1]
    if "reorder_cache" in vars(type(layer)):  # transformers 5.17 leaves the windows of other beams
        assert torch.equal(found, stock(model, **arguments))


@NIGHTLY
def test_a_cache_that_grows() -> None:
    model, _ = made(HEAVY, SPARSE, weights="int8", dtype=torch.float32, max_position_embeddings=512)
    arguments = {**prompt(2, 245, padding=7), "eos_token_id": None}
    assert torch.equal(model.generate(**arguments), stock(model, **arguments))
    assert_native(model)
    assert model.ktinject_decoding.runners[2].cache.capacity == 512


def test_steps_take_turns_with_the_model_s_own() -> None:
    model, _ = made(SLIDING, SPARSE)
    arguments = {**prompt(1, 17, padding=2), "eos_token_id": None}
    model.generate(**arguments)
    assert_native(model)
    assert_steps_take_turns(model, arguments)


def test_lookups_are_not_taken() -> None:
    """A step of several tokens would leave windows that cannot be taken back."""
    model, _ = made(SPARSE)
    ids = torch.tensor([[5, 6, 7, 8] * 5])
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    found = model.generate(**arguments, eos_token_id=None)
    assert torch.equal(found, model.generate(**arguments, eos_token_id=None, prompt_lookup_num_tokens=3))
    assert model.ktinject_decoding.reason.endswith("a layer's compressed keys are not taken back")


class TestWhatIsCompared:
    """A native layer that computes something else than the model's now is seen."""

    @pytest.mark.parametrize(
        "kind, path, name",
        [
            (HEAVY, "self_attn.compressor", "position_bias"),
            (SPARSE, "self_attn.compressor", "position_bias"),
            (SPARSE, "self_attn.compressor.indexer", "position_bias"),
            (HEAVY, "attn_hc", "fn"),
            (HEAVY, "ffn_hc", "base"),
        ],
    )
    def test_parameters(self, kind: str, path: str, name: str) -> None:
        model, _ = made(kind)
        native = NativeDecoder(model)
        module = model.model.layers[0].get_submodule(path)
        setattr(module, name, nn.Parameter(3 * getattr(module, name).detach().flip(0)))
        logits_of(model, native)
        assert not native.is_proven

    def test_what_an_index_chooses_by(self) -> None:
        model, _ = made(SPARSE)
        native = NativeDecoder(model)
        scorer = model.model.layers[0].self_attn.compressor.indexer.scorer
        weight = -torch.randn(8, 40).abs().bfloat16()
        scorer.weights_proj = nn.Linear(40, 8, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        scorer.weights_proj.weight.copy_(weight)
        logits_of(model, native)
        assert not native.is_proven

    def test_texts_that_show_no_choice(self) -> None:
        """Of fewer than two windows, which the first request has to have."""
        model, _ = made(SPARSE)
        long, short = (
            {**prompt(2, length, padding=2), "eos_token_id": None, "max_new_tokens": 4} for length in (7, 6)
        )
        for arguments, how in ((short, "eager loop"), (long, "native loop"), (short, "native loop")):
            model.generate(**arguments)
            assert model.ktinject_decoding.last == how
            said = (
                ""
                if how == "native loop"
                else "4 tokens show no choice of compressed or pooled keys; the first request takes 5"
            )
            assert model.ktinject_decoding.reason == said


class TestRefusals:
    def test_of_another_head(self) -> None:
        model, _ = made(SLIDING)
        model.model.hc_head.more = nn.Parameter(torch.ones(1))
        refused = "its DeepseekV4HyperHead does not collapse streams in a known way"
        assert NativeDecoder(model).support.reason == refused

    def test_of_another_number_of_streams(self) -> None:
        model, _ = made(SLIDING, SLIDING)
        model.model.layers[1].attn_hc.hc_mult = 2
        assert NativeDecoder(model).support.reason == "fn is [24, 160] of 2 streams"

    def test_of_other_groups_of_heads(self) -> None:
        model, _ = made(SLIDING)
        model.model.layers[0].self_attn.o_a_proj = nn.Linear(32, 16, bias=False)
        refused = "layer 0: its o_a_proj is a Linear that is not known"
        assert NativeDecoder(model).support.reason == refused

    def test_of_other_tables(self) -> None:
        model, _ = made(SLIDING, routers="hash_moe")
        model.model.layers[0].mlp.gate.tid2eid = model.model.layers[0].mlp.gate.tid2eid.float()
        refused = (
            "layer 0: its DeepseekV4HashRouter holds something else than a weight and a table of experts"
        )
        assert NativeDecoder(model).support.reason == refused


def test_specs_of_routers() -> None:
    model = tiny("deepseek_v4", **SURE, mlp_layer_types=["hash_moe", "moe"])
    by_token, chosen = (feed_forward_spec.of_moe(layer.mlp) for layer in model.model.layers)
    for found, table in ((by_token, "tid2eid"), (chosen, "")):
        assert isinstance(found, MoeSpec) and found.factors == (1.0, 1.0)
        router = found.router
        assert (router.scores, router.is_normed, router.factor) == ("root_softplus", True, 1.5)
        assert (router.table, router.is_corrected, router.top_k) == (table, not table, 6)
        assert found.shared is not None and found.shared.gating.up_limit == 1.5


def streams(**changes: Any) -> Any:
    """Three streams of 8 values, and no number that another one could stand for."""
    torch.manual_seed(3)
    numbers = {"norm_eps": 1e-3, "eps": 1e-2, "iterations": 4, **changes}
    outputs = 3 if numbers.get("is_head") else 15 if numbers["iterations"] else 6
    scales = {3: 1, 15: 3, 6: 2}[outputs]
    tensors = {
        "fn": torch.randn(outputs, 24),
        "base": torch.randn(outputs),
        "scale": torch.rand(scales) + 0.5,
    }
    return _native.HyperConnection(streams=3, hidden=8, **tensors, **numbers), tensors


def expected(x: Tensor, y: Tensor, tensors: dict[str, Tensor], changes: dict[str, Any]) -> Tensor:
    """x [b, 3, 8] behind a part that gives y of what they are collapsed to: their double through one linear layer."""
    w = (x.flatten(1) * torch.rsqrt(x.flatten(1).square().mean(-1, keepdim=True) + 1e-3)) @ tensors["fn"].T
    scale, base = tensors["scale"], tensors["base"]
    pre = torch.sigmoid(w[:, :3] * scale[0] + base[:3]) + 1e-2
    collapsed = (pre[..., None] * x).sum(1)
    if changes.get("is_head"):
        return collapsed
    post = torch.sigmoid(w[:, 3:6] * scale[1] + base[3:6])
    post = changes.get("post_factor", 2.0) * post + changes.get("post_eps", 0.0)
    added = post[..., None] * (collapsed @ y.T)[:, None]
    if changes.get("iterations") == 0:
        return x + added
    comb = torch.softmax((w[:, 6:] * scale[2] + base[6:]).view(-1, 3, 3), -1) + 1e-2
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-2)
    for _ in range(3):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-2)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-2)
    return added + comb.mT @ x


class TestNative:
    @pytest.mark.parametrize(
        "changes", [{}, {"iterations": 0, "post_factor": 1.5, "post_eps": 0.2, "rounds": False}], ids=str
    )
    def test_the_formula(self, changes: dict[str, Any]) -> None:
        connection, tensors = streams(**changes)
        layers = [linear(8, 8) for _ in range(2)]
        unit = _native.PlainUnit(layers[0][0], layers[1][0])
        decoder = _native.Decoder(8, "float32", 3)
        decoder.add(None, None, None, unit, feed_forward_streams=connection)
        x = torch.randn(2, 3, 8)
        found = run(decoder, x.flatten(1), 24, last=1)
        weights = [weight for _, weight in layers]

        class Part:
            """What stands for y in `expected`: relu(up(x))² instead of one product."""

            T = None

            def __rmatmul__(self, collapsed: Tensor) -> Tensor:
                return functional.relu(collapsed @ weights[0].T).square() @ weights[1].T

        part: Any = Part()
        part.T = part
        want = expected(x, part, tensors, changes)
        # Products of cpu_linear take their inputs in bf16.
        torch.testing.assert_close(found.view_as(want), want, rtol=2e-2, atol=2e-2)

    def test_heads(self) -> None:
        head, tensors = streams(is_head=True, iterations=0)
        mean = _native.HyperConnection(streams=3, hidden=8, fn=None, base=None, scale=None, is_head=True)
        x = torch.randn(2, 3, 8)
        decoder = _native.Decoder(8, "float32", 3)
        found = run(decoder, x.flatten(1), 8, last=0, head=head)
        torch.testing.assert_close(found, expected(x, x, tensors, {"is_head": True}))
        torch.testing.assert_close(run(decoder, x.flatten(1), 8, last=0, head=mean), x.mean(1))

    def test_what_does_not_fit(self) -> None:
        connection, tensors = streams()
        unit = _native.PlainUnit(linear(8, 8)[0], linear(8, 8)[0])
        two = _native.HyperConnection(streams=2, hidden=8, fn=torch.zeros(8, 16), base=torch.zeros(8),
                                      scale=torch.zeros(3), iterations=1)  # fmt: skip
        decoder = _native.Decoder(8, "float32", 3)
        with pytest.raises(ValueError, match="each part of a layer has a hyper-connection"):
            decoder.add(None, None, None, unit)
        with pytest.raises(ValueError, match="must be of 3 streams of 8 values"):
            decoder.add(None, None, None, unit, feed_forward_streams=two)
        with pytest.raises(ValueError, match="adds its parts as they are"):
            decoder.add(None, None, None, unit, feed_forward_streams=connection, feed_forward_sum=(1.0, 2.0))
        with pytest.raises(ValueError, match="each part of a layer has a hyper-connection"):
            _native.Decoder(8, "float32").add(None, None, None, unit, feed_forward_streams=connection)
        with pytest.raises(ValueError, match="found 1; served are 2 to 16"):
            _native.HyperConnection(streams=1, hidden=8, **tensors)
        with pytest.raises(ValueError, match="expected a weight and a base of 15 outputs, and 3 scales"):
            _native.HyperConnection(
                streams=3, hidden=8, iterations=1, **(tensors | {"base": torch.zeros(14)})
            )
        with pytest.raises(ValueError, match="a head before the last norm"):
            norm = _native.Norm(torch.ones(8), 1e-6)
            run(decoder, torch.zeros(1, 24), 24, last=0, final_norm=norm)

    def test_tokens_without_experts(self) -> None:
        model, _ = made(SLIDING, routers="hash_moe", weights="int8", dtype=torch.float32)
        native = NativeDecoder(model)
        _, runner = logits_of(model, native)
        assert native.is_proven
        model.model.layers[0].mlp.gate.tid2eid.fill_(6)
        with pytest.raises(ValueError, match=r"router: token \d+ has no expert"):
            runner.step()


def run(decoder: Any, x: Tensor, width: int, **arguments: Any) -> Tensor:
    """What a decoder without attention makes of x."""
    caches = _native.DecoderCache(
        *([torch.zeros(len(x), 1, 1)] * max(1, arguments["last"]) for _ in range(2))
    )
    if not arguments["last"]:
        unit = _native.PlainUnit(linear(8, 8)[0], linear(8, 8)[0])
        decoder = _native.Decoder(8, "float32", 3)
        decoder.add(None, None, None, unit, feed_forward_streams=streams()[0])
    out = torch.empty(len(x), width)
    decoder.forward(
        x=x, cos=None, sin=None, mask=None, position=0, cache=caches, first=0, out=out,
        **{"final_norm": None, **arguments},
    )  # fmt: skip
    return out
