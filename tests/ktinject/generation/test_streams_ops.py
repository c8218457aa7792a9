"""The kernels of residual streams against transformers' modules."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from models import tiny
from test_decode_ops import TOLERANCE, gpu
from test_layer_kinds import COMPRESSED, HEAVY, SPARSE, model_of, request
from torch import Tensor, nn
from torch.nn import functional

from ktinject.generation import layer_spec, streams_spec
from ktinject.generation.cuda import streams_ops
from ktinject.generation.cuda.fused import Fused
from ktinject.generation.cuda.streams_ops import STREAMS, ConnectionWeights
from ktinject.generation.cuda.streams_steps import connection_step
from ktinject.generation.decoding import run_model
from ktinject.generation.streams_spec import HyperConnectionSpec, StreamsLayerSpec, TokenRoutedSpec
from ktinject.hf import compat
from ktinject.support import SUPPORTED

V4 = pytest.mark.skipif(not compat.support("compressed"), reason="another DeepSeek-V4")
# Of fp32, 20 divisions of sums in another order.
TOLERANCES = {**TOLERANCE, torch.float32: 3e-5}


def connection(n: int, device: str = "cpu", **changes: Any) -> Any:
    """A hyper-connection of streams of n values, whose weights are far from their first ones."""
    model: Any = tiny("deepseek_v4", hidden_size=n, **changes)
    module = model.model.layers[0].attn_hc
    random = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
        parameter.data = torch.randn(parameter.shape, generator=random) * 2 * scale
    return module.to(device)


def weights_of(module: Any) -> ConnectionWeights:
    numbers = module.input_norm.eps, module.hc_eps, module.hc_sinkhorn_iters
    return ConnectionWeights(module.fn, module.base, module.scale, *numbers)


def mixed(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """As DeepseekV4DecoderLayer's forward has it, of rows of one token."""
    dtype = streams.dtype
    return post.to(dtype)[..., None] * y[:, None] + comb.to(dtype).mT @ streams


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error <= TOLERANCES[dtype], f"{what}: relative difference {error.item():.2g}"


@V4
class TestSpecs:
    def test_of_a_model(self) -> None:
        routers = ["hash_moe", "moe"]
        found = dict(layer_spec.parts(tiny("deepseek_v4", hc_sinkhorn_iters=7, mlp_layer_types=routers)))
        for index in range(2):
            layer = f"model.layers.{index}"
            assert found[layer] == StreamsLayerSpec("", index)
            assert found[f"{layer}.mlp"] == TokenRoutedSpec("", index == 0)
            for name in ("attn_hc", "ffn_hc"):
                assert found[f"{layer}.{name}"] == HyperConnectionSpec("", STREAMS, 7, 1e-6, 1e-6)

    def test_refused_are_other_parameters(self) -> None:
        module = connection(40)
        module.fn = nn.Parameter(module.fn[:23])
        assert streams_spec.of_connection(module).reason == "fn is [23, 160] of 4 streams"
        narrow = connection(40).bfloat16()
        spec = streams_spec.of_connection(narrow)
        assert isinstance(spec, HyperConnectionSpec)
        assert connection_step(spec, narrow, torch.zeros(1, dtype=torch.int32)) is None
        module = connection(40)
        del module.hc_eps
        assert streams_spec.of_connection(module).reason == "it has no hc_eps, or no input_norm.eps"


@V4
def test_other_streams_are_refused() -> None:
    module, counts = connection(40), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"found 3 streams of torch\.float32; served are 4"):
        streams_ops.hyper_connection(torch.zeros(1, 3, 40), weights_of(module), counts)
    with pytest.raises(ValueError, match="found 1 block counts; needed are 2"):
        streams_ops.hyper_connection(torch.zeros(2, 4, 40), weights_of(module), counts)
    with pytest.raises(ValueError, match=r"fn: found \[24, 160\]"):
        streams_ops.hyper_connection(torch.zeros(1, 4, 36), weights_of(module), counts)
    with pytest.raises(ValueError, match="found 3 streams"):
        streams_ops.mix(*(torch.zeros(1, 3, 40), torch.zeros(1, 40), torch.zeros(1, 3), torch.zeros(1, 3, 3)))


def in_torch(streams: Tensor, weights: ConnectionWeights, _: Tensor) -> tuple[Tensor, ...]:
    """What the kernel computes."""
    w = functional.linear(
        functional.rms_norm(streams.flatten(1), (4 * streams.shape[2],), eps=weights.norm_eps), weights.fn
    )
    pre, post, comb = w.split([4, 4, 16], dim=1)
    base = weights.base.split([4, 4, 16])
    pre, post = (torch.sigmoid(part * weights.scale[i] + base[i]) for i, part in enumerate((pre, post)))
    comb = (comb * weights.scale[2] + base[2]).view(-1, 4, 4).softmax(-1) + weights.eps
    comb = comb / (comb.sum(-2, keepdim=True) + weights.eps)
    for _ in range(1, weights.iterations):
        for dim in (-1, -2):
            comb = comb / (comb.sum(dim, keepdim=True) + weights.eps)
    return 2 * post, comb, ((pre + weights.eps)[..., None] * streams).sum(1)


@V4
def test_a_layer_s_step_is_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels in torch's operations, on a CPU."""
    module = connection(40)
    streams = torch.randn(3, 4, 40)
    found = in_torch(streams, weights_of(module), streams)
    with torch.no_grad():
        for name, a, b in zip(("post", "comb", "collapsed"), found, module(streams[:, None]), strict=True):
            assert_close(a, b[:, 0], torch.float32, name)
    monkeypatch.setattr(streams_ops, "hyper_connection", in_torch)
    monkeypatch.setattr(streams_ops, "mix", mixed)
    model = model_of("deepseek_v4", COMPRESSED)
    model.ktinject_decoding.graphs = SUPPORTED
    arguments = request(2, 17, 4)
    wanted = model.generate(**arguments)
    runner = model.ktinject_decoding.runners[2]
    fused = Fused(model)
    of_streams = {f"model.layers.{i}{part}" for i in range(3) for part in ("", ".mlp", ".attn_hc", ".ffn_hc")}
    fused._steps = {path: step for path, step in fused._steps.items() if path in of_streams}
    assert len(fused) == 12
    runner._forward = partial(run_model, weakref.ref(model), fused, model.ktinject_decoding._masks)
    for _ in range(2):  # steps are compared, and then used
        assert torch.equal(model.generate(**arguments), wanted)
        assert model.ktinject_decoding.runners[2] is runner and not fused.refused and len(fused) == 12


@V4
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("n", [37, 40, 4096])
@pytest.mark.parametrize("dtype", [*TOLERANCES])
class TestKernels:
    pytestmark = gpu

    @torch.inference_mode()
    def test_a_connection_in_a_graph_is_that_of_the_module(
        self, dtype: torch.dtype, n: int, rows: int
    ) -> None:
        module, random = connection(n, "cuda"), torch.Generator("cuda").manual_seed(2)
        streams = torch.randn(rows, STREAMS, n, generator=random, device="cuda").to(dtype)
        counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
        streams_ops.hyper_connection(streams, weights_of(module), counts)  # as a step before a capture does
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = streams_ops.hyper_connection(streams, weights_of(module), counts)
        for _ in range(3):
            streams.normal_(generator=random)
            graph.replay()
            wanted = [part[:, 0] for part in module(streams[:, None])]
            for name, a, b in zip(("post", "comb", "collapsed"), found, wanted, strict=True):
                assert_close(a, b, b.dtype, name)
            assert not counts.any(), "ready for the next call"

    @torch.inference_mode()
    def test_mixed_streams_are_those_of_the_layer(self, dtype: torch.dtype, n: int, rows: int) -> None:
        random = torch.Generator("cuda").manual_seed(3)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device="cuda")

        streams, y = values(rows, STREAMS, n).to(dtype), values(rows, n).to(dtype)
        post, comb = values(rows, STREAMS), values(rows, STREAMS, STREAMS)
        assert_close(streams_ops.mix(streams, y, post, comb), mixed(streams, y, post, comb), dtype, "mixed")


@V4
@pytest.mark.parametrize("batch", [1, 3])
class TestInAModel:
    pytestmark = gpu

    def test_its_layers_have_these_steps(self, batch: int) -> None:
        changes = {**COMPRESSED, "layer_types": ["sliding_attention", HEAVY, SPARSE]}
        model = model_of("deepseek_v4", changes, "cuda")
        model.generate(**request(batch, 17, 12, "cuda", padding=0))
        fused = model.ktinject_decoding.fused
        assert fused is not None and model.ktinject_decoding.last == "graph loop"
        wanted = {f"model.layers.{i}{part}" for i in range(3) for part in ("", ".mlp", ".attn_hc", ".ffn_hc")}
        assert wanted <= {*fused._steps}, {path: fused.refused.get(path) for path in wanted - {*fused._steps}}
