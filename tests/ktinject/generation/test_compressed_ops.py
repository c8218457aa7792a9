"""The kernels of compressed keys against their formula in torch's operations, and that against the modules."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from test_compressed import KINDS, of_kinds
from test_decode_ops import TOLERANCE, gpu
from test_layer_kinds import HEAVY, SPARSE, request
from test_streams_ops import in_torch, mixed
from torch import Tensor

from ktinject.generation import layer_spec
from ktinject.generation.compressed import Part
from ktinject.generation.compressed_spec import CompressorSpec, SharedKeyAttentionSpec
from ktinject.generation.cuda import compressed_ops, compressed_steps, streams_ops
from ktinject.generation.cuda.compressed_ops import CompressorWeights
from ktinject.generation.cuda.fused import Fused
from ktinject.generation.decoding import run_model
from ktinject.hf import compat

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    not compat.support("compressed") or compat.CACHE != "cache",
    reason="norms of transformers 5.17 round before the weight, which the kernel does not",
)


def turned_in_torch(
    x: Tensor, cos: Tensor, sin: Tensor, *, eps: float | None = None, is_back: bool = False
) -> Tensor:
    """What `turn_heads` computes."""
    if eps is not None:
        x = x * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt().to(x.dtype)
    rest, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    a, b = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None].float(), sin[:, None].float() * (-1 if is_back else 1)
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([rest, pairs.to(x.dtype)], -1)


def softmax_in_torch(
    scores: Tensor, scale: float, first: Tensor, rest: Tensor | None, sinks: Tensor
) -> Tensor:
    """What `sink_softmax` computes."""
    added = first if rest is None else torch.cat([first, rest], -1)
    scores = scores * scale + added[:, None]
    scores = torch.cat([scores.float(), sinks[None, :, None].expand(len(scores), -1, -1)], -1)
    return scores.softmax(-1)[..., :-1].to(added.dtype)


def compressed_in_torch(
    kv: Tensor,
    gate: Tensor,
    part: Part,
    weights: CompressorWeights,
    cache_position: Tensor,
    positions: Tensor,
    always: bool = True,
) -> Tensor:
    """What `compress` computes."""
    rate, d, dtype = part.kv.shape[1], part.keys.shape[2], kv.dtype
    window, slot = divmod(int(cache_position), rate)
    part.kv[:, slot], part.gate[:, slot] = kv, gate
    order = torch.arange(part.keys.shape[1], device=kv.device)
    added = torch.zeros(len(kv), len(order), dtype=dtype, device=kv.device)
    added.masked_fill_(order >= ((positions + 1) // rate)[:, None], float("-inf"))
    if not always and slot < rate - 1:
        return added
    logits, values = part.gate + weights.bias, part.kv
    own = logits[..., -d:], values[..., -d:]
    if part.overlap_kv is not None:
        own = torch.cat([part.overlap_gate, own[0]], 1), torch.cat([part.overlap_kv, own[1]], 1)
    pooled = (own[1] * own[0].softmax(1, dtype=torch.float32).to(dtype)).sum(1)
    wide = pooled.float()
    normed = (weights.norm * (wide * (wide.square().mean(-1, keepdim=True) + weights.eps).rsqrt())).to(dtype)
    angles = float(window * rate) * weights.angles
    cos, sin = ((part * weights.scale).to(dtype)[None] for part in (angles.cos(), angles.sin()))
    part.keys[:, window] = turned_in_torch(normed[:, None], cos, sin)[:, 0]
    if part.overlap_kv is not None and slot == rate - 1:
        part.overlap_kv.copy_(values[..., :d])
        part.overlap_gate.copy_(logits[..., :d])
    return added


def test_specs_of_a_model() -> None:
    found = dict(layer_spec.parts(of_kinds(*KINDS)))
    for index, rotation in enumerate(("main", "compress", "compress")):
        path = f"model.layers.{index}.self_attn"
        assert found[path] == SharedKeyAttentionSpec("", index, 4, 16, 0.25, rotation, 1e-6)
    of_index = CompressorSpec("", 2, "indexer", 16, True, 1e-6, "compress", 1.0)
    path = "model.layers.{}.self_attn.compressor"
    assert found[path.format(1)] == CompressorSpec("", 1, "compressor", 16, False, 1e-6, "compress", 1.0)
    assert found[path.format(2)] == CompressorSpec(
        "", 2, "compressor", 16, True, 1e-6, "compress", 1.0, of_index
    )
    assert found[f"{path.format(2)}.indexer"] == of_index


def test_angles_that_depend_on_the_length_have_no_spec() -> None:
    model: Any = of_kinds(HEAVY)
    model.model.layers[0].self_attn.compressor.rotary_emb.rope_type["compress"] = "dynamic"
    assert "model.layers.0.self_attn.compressor" not in dict(layer_spec.parts(model))


@pytest.mark.parametrize("topk", [8, 512])
def test_steps_are_the_modules(monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
    """With kernels in torch's operations, on a CPU: in a first step they are compared, and then used.

    With 512, an index would choose all keys that there are.
    """

    def compress(
        kv: Tensor, gate: Tensor, part: Part, weights: Any, at: Tensor, seen: Tensor, always: bool
    ) -> Tensor:
        added = compressed_in_torch(kv, gate, part, weights, at, seen, always)
        part.keys[:, int(at) // part.kv.shape[1]] *= 1 + 1e-6  # as a kernel's other roundings do
        return added

    kernels = {"compress": compress, "turn_heads": turned_in_torch, "sink_softmax": softmax_in_torch}
    for name, function in kernels.items():
        monkeypatch.setattr(compressed_ops, name, function)
    for name, function in (("hyper_connection", in_torch), ("mix", mixed)):
        monkeypatch.setattr(streams_ops, name, function)
    model = of_kinds(*KINDS, index_topk=topk)
    decoding = model.ktinject_decoding
    # One of them begins before the first window.
    for length, padding in ((17, 5), (1, 0))[topk > 8 :]:
        arguments = request(2, length, 10, padding=padding)
        wanted = model.generate(**arguments)
        runner, own = decoding.runners[2], decoding.runners[2]._forward
        fused = Fused(model)
        fused._steps = {path: step for path, step in fused._steps.items() if not path.endswith("norm")}
        count = len(fused)
        assert count == 12 + 3 + 3, [*fused._steps]
        runner._forward = partial(run_model, weakref.ref(model), fused, decoding._masks)
        found = model.generate(**arguments)
        assert decoding.runners[2] is runner and not fused.refused and len(fused) == count
        assert torch.equal(found, wanted)
        runner._forward = own


def test_a_wrong_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways write to one cache, so it must be compared, and left as the module left it."""

    def compress(
        kv: Tensor, gate: Tensor, part: Part, weights: Any, at: Tensor, seen: Tensor, always: bool
    ) -> Tensor:
        added = compressed_in_torch(kv, gate, part, weights, at, seen, always)
        part.keys[:, int(at) // part.kv.shape[1]] *= 1.5
        return added

    monkeypatch.setattr(compressed_ops, "compress", compress)
    monkeypatch.setattr(compressed_ops, "turn_heads", turned_in_torch)
    model = of_kinds(HEAVY)
    arguments = request(2, 17, 14)
    wanted, runner = model.generate(**arguments), model.ktinject_decoding.runners[2]
    fused, path = Fused(model), "model.layers.0.self_attn.compressor"
    fused._steps = {path: fused._steps[path]}
    runner._forward = partial(run_model, weakref.ref(model), fused, model.ktinject_decoding._masks)
    assert torch.equal(model.generate(**arguments), wanted)
    assert fused.refused[path] == "relative difference 0.5"


def values(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("dtype", [*TOLERANCE])
class TestKernels:
    pytestmark = gpu

    @pytest.mark.parametrize(
        "rate, d, turned", [(4, 512, 64), (128, 512, 64), (4, 128, 64), (3, 16, 2), (5, 1024, 0)]
    )
    @pytest.mark.parametrize("overlaps, always", [(False, False), (True, True), (True, False)])
    @torch.inference_mode()
    def test_compress_in_a_graph(
        self, dtype: torch.dtype, rows: int, rate: int, d: int, turned: int, overlaps: bool, always: bool
    ) -> None:
        torch.manual_seed(0)
        width, windows, make = d * (1 + overlaps), 7, {"dtype": dtype}
        overlap = (values(rows, rate, d, **make), values(rows, rate, d)) if overlaps else (None, None)
        longer = values(rows, windows + 3, d, **make)
        part = Part(
            values(rows, rate, width, **make),
            values(rows, rate, width, **make),
            longer[:, :windows],
            *overlap,
        )
        like = Part(
            part.kv.clone(),
            part.gate.clone(),
            part.keys.clone(),
            *(t.clone() if overlaps else t for t in overlap),
        )
        angles = 160000.0 ** -(torch.arange(turned // 2, device="cuda").float() / max(1, turned // 2))
        weights = CompressorWeights(values(rate, width), values(d), 1e-6, angles, 1.1)
        both = values(rows, 2 * width, **make)
        kv, gate = both.split(width, 1)
        at = torch.tensor([2 * rate - 1], device="cuda")
        seen = torch.full((rows, 1), 2 * rate - 2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            added = compressed_ops.compress(kv, gate, part, weights, at, seen[:, 0], always=always)
        for _ in range(2 * rate):
            both.normal_()
            graph.replay()
            wanted = compressed_in_torch(kv, gate, like, weights, at, seen[:, 0], always)
            assert torch.equal(added, wanted), f"added, at {at.item()}"
            for name in ("kv", "gate", "keys", "overlap_kv", "overlap_gate"):
                ours, theirs = getattr(part, name), getattr(like, name)
                if ours is None:
                    continue
                error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
                assert error <= TOLERANCE[dtype], (
                    f"{name}, at {at.item()}: relative difference {error.item():.2g}"
                )
            at += 1
            seen += 1

    @pytest.mark.parametrize("heads, size, angles", [(64, 512, 32), (1, 512, 32), (5, 16, 1), (7, 128, 64)])
    @pytest.mark.parametrize("eps, is_back", [(None, False), (1e-6, False), (None, True)])
    @torch.inference_mode()
    def test_turned_heads(
        self,
        dtype: torch.dtype,
        rows: int,
        heads: int,
        size: int,
        angles: int,
        eps: float | None,
        is_back: bool,
    ) -> None:
        torch.manual_seed(1)
        x = values(rows, heads + 1, size, dtype=dtype)[:, :heads]
        turns = values(1, angles)
        cos, sin = (part.to(dtype).expand(rows, -1) for part in (turns.cos(), turns.sin()))
        found = compressed_ops.turn_heads(x, cos, sin, eps=eps, is_back=is_back)
        wanted = turned_in_torch(x, cos, sin, eps=eps, is_back=is_back)
        error = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert error <= TOLERANCE[dtype], error.item()

    @pytest.mark.parametrize("heads, n, first", [(64, 640, 128), (3, 128, 128), (2, 5000, 7), (1, 3, 0)])
    @torch.inference_mode()
    def test_softmax_with_sinks(self, dtype: torch.dtype, rows: int, heads: int, n: int, first: int) -> None:
        torch.manual_seed(2)
        scores, sinks = values(rows, heads, n, dtype=dtype) * 8, values(heads)
        given = values(rows, first + 3, dtype=dtype)[:, :first]
        rest = values(rows, n - first, dtype=dtype) if n > first else None
        if rest is not None:
            rest[:, ::2] = float("-inf")
        found = compressed_ops.sink_softmax(scores, 0.3, given, rest, sinks)
        wanted = softmax_in_torch(scores, 0.3, given, rest, sinks)
        error = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert error <= TOLERANCE[dtype], error.item()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("topk", [8, 512])
class TestInAModel:
    pytestmark = gpu

    def test_its_attention_has_these_steps(self, batch: int, topk: int) -> None:
        model = of_kinds(*KINDS, device="cuda", index_topk=topk)
        model.generate(**request(batch, 17, 12, "cuda", padding=0))
        fused = model.ktinject_decoding.fused
        assert fused is not None and model.ktinject_decoding.last == "graph loop"
        wanted = {f"model.layers.{i}.self_attn" for i in range(3)}
        wanted |= {f"model.layers.{i}.self_attn.compressor" for i in (1, 2)}
        wanted.add("model.layers.2.self_attn.compressor.indexer")
        missing = {path: fused.refused.get(path) for path in wanted - {*fused._steps}}
        assert not missing, missing


@pytest.mark.parametrize("kind", [HEAVY, SPARSE])
def test_of_a_prompt_modules_are_their_own(kind: str) -> None:
    model: Any = of_kinds(kind)
    module, path = model.model.layers[0].self_attn.compressor, "model.layers.0.self_attn.compressor"
    step = compressed_steps.compressor_step(dict(layer_spec.parts(model))[path], module)
    given = torch.randn(1, 7, 40), torch.randn(1, 7, 24), torch.arange(7)[None], None, 0
    with torch.no_grad():
        for found, wanted in zip(step(*given), module(*given), strict=True):
            assert torch.equal(found, wanted)
