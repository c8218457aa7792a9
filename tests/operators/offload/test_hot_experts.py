"""Experts that follow the traffic: which are exchanged, and that every step in between is right."""

from __future__ import annotations

import time

import pytest
import reference
import torch
from test_hybrid_experts import EXPERTS, HIDDEN, cuda, hybrid, placed, plain  # noqa: F401

from ktinject import _native
from ktinject.operators.hybrid_experts import HybridExpertsConfig
from ktinject.operators.offload import handoff, hot_experts

CUDA_PARTS = pytest.mark.skipif(not _native.cuda_built(), reason="built without CUDA")


def test_what_is_clearly_hotter_comes_in() -> None:
    heat = torch.tensor([50.0, 1, 9, 30, 0, 12])
    assert hot_experts.exchanges(heat, [1, 4]) == [(4, 0), (1, 3)]
    assert hot_experts.exchanges(heat, [4, 0]) == [(4, 3)]
    assert hot_experts.exchanges(heat, [0, 3]) == []
    # Hotter, but not clearly; and everything is cold.
    assert hot_experts.exchanges(torch.tensor([10.0, 12, 0]), [0]) == []
    assert hot_experts.exchanges(torch.tensor([0.0, 3, 0]), [0]) == []
    assert hot_experts.exchanges(torch.tensor([5.0, 6]), [0, 1]) == []


@CUDA_PARTS
def test_dynamic_needs_one_format() -> None:
    with pytest.raises(ValueError, match="weights is int8 and gpu_weights bf16"):
        HybridExpertsConfig(weights="int8", dynamic=True)
    # On the GPU an expert has no zero points: only those that lie there are packed without, and no other could follow.
    with pytest.raises(ValueError, match="int4 with zero points and gpu_weights int4"):
        HybridExpertsConfig(weights="int4", gpu_weights="int4", symmetric=False, dynamic=True)
    assert placed(gpu_experts=2, weights="int4", gpu_weights="int4", dynamic=True) == [(0, 1)] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_steps_are_right_while_experts_move(cuda: str, weights: str, graph: bool) -> None:  # noqa: F811
    """The traffic turns to other experts every half second; each result is compared with the CPU's alone."""
    formats = {"weights": weights, "gpu_weights": weights}
    made = hybrid(cuda, gpu_experts=4, dynamic=True, **formats)
    assert made.on_gpu is not None and made.on_gpu.resident == [0, 1, 2, 3]
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device=cuda)
    ids = torch.zeros(2, 4, dtype=torch.int64, device=cuda)
    routing = torch.rand(2, 4, device=cuda)
    steps = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        out = made(x, ids, routing)
        if graph:
            with torch.cuda.graph(steps):
                out = made(x, ids, routing)
        for hot in ([8, 9, 10, 11], [3, 6, 12, 15]):
            until, worst, count = time.monotonic() + 600, 0.0, 0
            while time.monotonic() < until and (count < 50 or sorted(made.on_gpu.resident) != hot):
                x.normal_()
                noise = torch.randint(EXPERTS, (2, 1), device=cuda)
                order = torch.tensor(hot, device=cuda)[torch.randperm(4, device=cuda)]
                ids.copy_(order.expand(2, 4))
                ids[:, :1] = noise
                if graph:
                    handoff.wake()
                    steps.replay()
                else:
                    out = made(x, ids, routing)
                want = plain(weights=weights)(x.cpu(), ids.cpu(), routing.cpu())
                worst, count = max(worst, reference.relative_error(out.cpu(), want)), count + 1
            assert sorted(made.on_gpu.resident) == hot
            found = made.on_gpu.places.tolist()
            assert [found[expert] for expert in made.on_gpu.resident] == [0, 1, 2, 3]
            # int4: the CPU rounds activations to int8, the GPU to bf16.
            assert worst <= {"bf16": 8e-3, "int4": 4e-2}[weights]
    made.handoff.check()
