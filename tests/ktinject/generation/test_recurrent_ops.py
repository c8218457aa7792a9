"""The kernels of Mamba-2 and of short convolutions against transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import tiny
from test_decode_ops import HALVES, TOLERANCE, gpu
from torch import Tensor, nn
from transformers import DynamicCache

from ktinject.generation import layer_spec
from ktinject.generation.cuda import recurrent_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.delta_ops import States
from ktinject.generation.cuda.recurrent_ops import Mamba2Weights
from ktinject.generation.recurrent_spec import Mamba2Spec, ShortConvolutionSpec
from ktinject.hf import compat

NEMOTRON = {"layers_block_type": ["mamba", "attention"], "conv_kernel": 3}
GRANITE = {"layer_types": ["mamba", "attention"], "hidden_size": 64}
LFM = {"layer_types": ["conv", "full_attention"]}
# Families, what differs from their tiny models, and what is found in their first layers.
CASES: list[tuple[str, dict[str, Any], Any]] = [
    (
        "nemotron_h",
        {**NEMOTRON, "mamba_num_heads": 6, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128},
        Mamba2Spec("", 0, 6, 2, 64, 128, 1e-5),
    ),
    (
        "nemotron_h",
        {**NEMOTRON, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 4, "ssm_state_size": 64},
        Mamba2Spec("", 0, 4, 4, 32, 64, 1e-5),
    ),
    (
        "granitemoehybrid",
        {**GRANITE, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 256},
        Mamba2Spec("", 0, 4, 1, 32, 256, 1e-6),
    ),
    ("lfm2_moe", {**LFM, "conv_L_cache": 3}, ShortConvolutionSpec("", 0)),
    ("lfm2_moe", {**LFM, "conv_L_cache": 8, "conv_bias": True}, ShortConvolutionSpec("", 0)),
]


def mixer_of(family: str, changes: dict[str, Any], dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """What a model's first layer mixes tokens with, and the config."""
    torch.manual_seed(0)
    model: Any = tiny(family, **changes)
    layer = model.model.layers[0]
    module = next(getattr(layer, name) for name in ("mixer", "mamba", "conv") if hasattr(layer, name))
    for name, parameter in module.named_parameters():
        if "proj" in name and parameter.dim() == 2:
            nn.init.normal_(parameter, 0.0, parameter.shape[1] ** -0.5)
        elif name != "A_log":
            nn.init.normal_(parameter, 0.5)
    return module.to(device, dtype), model.config


def call_of(module: Any, spec: Any, states: tuple[Tensor, ...], counts: Tensor) -> Callable[[Tensor], Tensor]:
    """What the kernel makes of x [b, hidden], before the output projection."""

    def mamba2(x: Tensor) -> Tensor:
        norm = Norm(module.norm.weight, spec.norm_epsilon)
        convolution = module.conv1d.weight, module.conv1d.bias
        weights = Mamba2Weights(*convolution, module.A_log, module.dt_bias, module.D, norm)
        return recurrent_ops.mamba2(module.in_proj(x), weights, States(*states), spec.groups, counts)

    def convolution(x: Tensor) -> Tensor:
        return recurrent_ops.short_convolution(
            module.in_proj(x), module.conv.weight, module.conv.bias, states[0]
        )

    return mamba2 if isinstance(spec, Mamba2Spec) else convolution


def states_of(cache: DynamicCache) -> tuple[Tensor, ...]:
    layer: Any = cache.layers[0]
    found = layer.conv_states[0], layer.recurrent_states[0]
    return tuple(tensor for tensor in found if tensor is not None)


@pytest.mark.parametrize("family, changes, spec", CASES)
def test_layers_are_told_by_what_they_hold(family: str, changes: dict[str, Any], spec: Any) -> None:
    model = tiny(family, **changes)
    assert spec in dict(layer_spec.parts(model)).values()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family, changes, spec", CASES)
class TestRecurrent:
    pytestmark = gpu

    @pytest.mark.parametrize("rows, is_wide", [(1, False), (3, True), (20, False)])
    @torch.inference_mode()
    def test_steps_in_a_graph_are_those_of_the_module(
        self, dtype, family, changes, spec, rows, is_wide
    ) -> None:
        module, config = mixer_of(family, changes, dtype, "cuda")
        if is_wide and isinstance(spec, Mamba2Spec):
            for name in ("A_log", "dt_bias", "D"):
                setattr(module, name, nn.Parameter(getattr(module, name).float()))
        module.out_proj = nn.Identity()
        cache, make = DynamicCache(config=config), {"device": "cuda", "dtype": dtype}
        hidden = module.in_proj.in_features
        is_older = isinstance(spec, Mamba2Spec) and compat.CACHE != "cache"
        name = "cache_params" if is_older else compat.CACHE
        module(torch.randn(rows, 5, hidden, **make), **{name: cache})
        ours = tuple(tensor.clone() for tensor in states_of(cache))
        counts = torch.zeros(rows * 4, dtype=torch.int32, device="cuda")
        x, call = torch.randn(rows, hidden, **make), call_of(module, spec, ours, counts)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            wanted = module(x[:, None], **{name: cache})[:, 0]
            assert torch.equal(ours[0], states_of(cache)[0]), "to the bit"
            for found, right in zip((out, *ours[1:]), (wanted, *states_of(cache)[1:])):
                error = (found.float() - right.float()).norm() / right.float().norm()
                assert error <= TOLERANCE[dtype], error  # cuDNN may round a channel's sum the other way
            assert not counts.any(), "ready for the next call"
