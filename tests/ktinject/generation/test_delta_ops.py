"""The kernel of the gated delta rule against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import tiny
from test_decode_ops import HALVES, TOLERANCE, gpu
from torch import Tensor, nn
from transformers import DynamicCache

from ktinject.generation.cuda import delta_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.delta_ops import Projected, States, Weights

FAMILIES = ["qwen3_next", "qwen3_5_moe_text"]
# Heads of keys and of values, their sizes, and inputs of the convolution.
SIZES = [
    (16, 32, 128, 128, 4),
    (2, 2, 32, 256, 2),
    (1, 3, 256, 32, 8),
    (2, 4, 64, 96, 3),
    (2, 20, 160, 64, 5),
]


def attention_of(family: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str = "cuda") -> Any:
    """A model's first layer of linear attention, with its config, and a norm and gates that are not all the same."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    torch.manual_seed(0)
    model = tiny(family, **{f"linear_{name}": size for name, size in zip(names, sizes)})
    module: Any = model.model.layers[0].linear_attn.to(device, dtype)
    for name, parameter in module.named_parameters():
        if "proj" not in name and name != "A_log":
            nn.init.normal_(parameter, 1.0)
        elif "proj" in name:
            nn.init.normal_(parameter, 0.0, parameter.shape[1] ** -0.5)
    return module, model.config


def projected(module: Any, x: Tensor) -> Projected:
    """x [b, hidden]"""
    if hasattr(module, "in_proj_qkvz"):
        both = module.in_proj_qkvz(x), module.in_proj_ba(x)
        return Projected.of_groups(*both, module.head_k_dim, module.num_k_heads)
    parts = [getattr(module, f"in_proj_{name}")(x) for name in ("qkv", "z", "b", "a")]
    # Of one tensor, as one kernel leaves them.
    parts = torch.cat(parts, 1).split([part.shape[1] for part in parts], 1)
    return Projected.of_parts(*parts, module.key_dim, module.num_k_heads)


def weights_of(module: Any) -> Weights:
    norm = Norm(module.norm.weight, module.norm.variance_epsilon)
    return Weights(module.conv1d.weight, module.A_log, module.dt_bias, norm)


def states_of(cache: DynamicCache) -> States:
    return States(cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_the_projections_are_the_module_s(family: str) -> None:
    module, _ = attention_of(family, SIZES[3], torch.float32, "cpu")
    x = torch.randn(2, module.hidden_size)
    parts = projected(module, x)
    assert [part.shape[1] for part in parts] == [module.num_k_heads] * 6
    flat = {name: part.reshape(2, -1) for name, part in parts._asdict().items()}
    if family == "qwen3_next":
        both = module.in_proj_qkvz(x)[:, None], module.in_proj_ba(x)[:, None]
        seen = dict(zip("qkvzba", module.fix_query_key_value_ordering(*both)))
    else:
        q, k, v = module.in_proj_qkv(x).split([module.key_dim, module.key_dim, module.value_dim], 1)
        seen = {"q": q, "k": k, "v": v} | {n: getattr(module, f"in_proj_{n}")(x) for n in "zba"}
    assert all(torch.equal(flat[name], seen[name].reshape(2, -1)) for name in "qkvzba")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SIZES)
class TestGatedDelta:
    pytestmark = gpu

    @pytest.mark.parametrize("rows, is_wide", [(1, False), (3, True), (20, False)])
    @torch.inference_mode()
    def test_steps_in_a_graph_are_the_module_s(self, dtype, family, sizes, rows, is_wide) -> None:
        module, config = attention_of(family, sizes, dtype)
        if is_wide:
            for owner, name in ((module, "A_log"), (module, "dt_bias"), (module.norm, "weight")):
                setattr(owner, name, nn.Parameter(getattr(owner, name).float()))
        module.out_proj = nn.Identity()
        cache = DynamicCache(config=config)
        make = {"device": "cuda", "dtype": dtype}
        module(torch.randn(rows, 5, module.hidden_size, **make), cache_params=cache)
        theirs = states_of(cache)
        ours = States(theirs.inputs.clone(), theirs.states.clone())
        counts = torch.zeros(rows * module.num_k_heads, dtype=torch.int32, device="cuda")
        x = torch.randn(rows, module.hidden_size, **make)
        then = torch.zeros(1000, 64, **make)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = delta_ops.gated_delta(projected(module, x), weights_of(module), ours, counts, then)
        for _ in range(3):
            x.normal_()
            graph.replay()
            wanted = module(x[:, None], cache_params=cache)[:, 0]
            assert torch.equal(ours.inputs, states_of(cache).inputs), "to the bit"
            for found, right in ((out, wanted), (ours.states, states_of(cache).states)):
                error = (found.float() - right.float()).norm() / right.float().norm()
                assert error <= TOLERANCE[dtype], error  # cuDNN may round a channel's sum the other way
            assert not counts.any(), "ready for the next call"

    @torch.inference_mode()
    def test_steps_on_each_other_s_heels(self, dtype, family, sizes) -> None:
        """Each reads what the one before has left, and begins while that one still runs."""
        module, config = attention_of(family, sizes, dtype)
        cache = DynamicCache(config=config)
        x = torch.randn(6, module.hidden_size, device="cuda", dtype=dtype)
        module(x[None], cache_params=cache)
        found: list[list[Tensor]] = []
        for apart in (True, False):
            states = States(*(tensor.clone() for tensor in states_of(cache)))
            counts = torch.zeros(module.num_k_heads, dtype=torch.int32, device="cuda")
            parts = [projected(module, row[None]) for row in x]
            outs = []
            for part in parts:
                outs.append(delta_ops.gated_delta(part, weights_of(module), states, counts))
                if apart:
                    torch.cuda.synchronize()
            found.append([*outs, *states])
        assert all(torch.equal(a, b) for a, b in zip(*found))

    @torch.inference_mode()
    def test_where_the_convolution_s_factors_lie_does_not_show(self, dtype, family, sizes) -> None:
        """To the bit: two channels of four are read as one piece only where they may be."""
        module, config = attention_of(family, sizes, dtype)
        cache = DynamicCache(config=config)
        x = torch.randn(2, module.hidden_size, device="cuda", dtype=dtype)
        module(torch.stack([x] * 3, 1), cache_params=cache)
        aligned = weights_of(module)
        room = aligned.taps.new_zeros(aligned.taps.numel() + 1)
        moved = aligned._replace(taps=room[1:].view(aligned.taps.shape).copy_(aligned.taps))
        assert moved.taps.data_ptr() % 16 != 0
        found: list[list[Tensor]] = []
        for weights in (aligned, moved):
            states = States(*(tensor.clone() for tensor in states_of(cache)))
            counts = torch.zeros(2 * module.num_k_heads, dtype=torch.int32, device="cuda")
            out = delta_ops.gated_delta(projected(module, x), weights, states, counts)
            found.append([out, *states])
        assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_the_kernel_does_not_serve_is_refused() -> None:
    for sizes, words in [
        ((1, 1, 48, 64, 4), "multiple of 32"),
        ((1, 1, 64, 288, 4), "multiple of 32"),
        ((1, 1, 64, 64, 9), "2 to 8 inputs"),
    ]:
        module, _ = attention_of("qwen3_next", sizes, torch.bfloat16)
        parts = projected(module, torch.zeros(1, module.hidden_size, device="cuda", dtype=torch.bfloat16))
        states = States(
            torch.zeros(1, *module.conv1d.weight[:, 0].shape, device="cuda", dtype=torch.bfloat16),
            torch.zeros(1, 1, *sizes[2:4], device="cuda"),
        )
        counts = torch.zeros(1, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match=words):
            delta_ops.gated_delta(parts, weights_of(module), states, counts)
