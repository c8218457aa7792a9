"""One small case for each operator that rules can name: what `test_conformance.py` holds to the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import reference
import torch
from torch import Tensor, nn

from ktinject.operators import REGISTRY
from ktinject.testing import Case

torch.set_num_threads(1)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """24 outputs, 64 inputs: what every format of a linear layer takes."""
    layer = nn.Linear(64, 24).requires_grad_(False)
    layer.weight.copy_(gaussian(24, 64) / 8)
    layer.bias.copy_(gaussian(24, seed=1))
    return layer.to(dtype)


def rows(width: int, dtype: torch.dtype = torch.float32, name: str = "x") -> Callable[[int], dict[str, Any]]:
    return lambda tokens: {name: gaussian(tokens, width, seed=2).to(dtype)}


def experts() -> nn.Module:
    return models.leaf(models.tiny("qwen3_moe"))[1]


def routed(tokens: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(tokens, 40, generator=random),
        "top_k_index": torch.rand(tokens, 6, generator=random).argsort(-1)[:, :2].contiguous(),
        "top_k_weights": torch.rand(tokens, 2, generator=random) + 0.1,
    }


def attention() -> nn.Module:
    return models.tiny("deepseek_v3").model.layers[1].self_attn


def attended(tokens: int) -> dict[str, Any]:
    x = gaussian(2, tokens, 40, seed=2)
    places = torch.arange(tokens)[None].expand(2, -1)
    rotary = models.tiny("deepseek_v3").model.rotary_emb
    return {"hidden_states": x, "position_embeddings": rotary(x, places), "attention_mask": None}


def block() -> nn.Module:
    return models.tiny("qwen3_moe").model.layers[1].mlp


def router() -> nn.Module:
    return models.tiny("deepseek_v3").bfloat16().model.layers[1].mlp.gate


def norm() -> nn.Module:
    module: nn.Module = models.tiny("qwen3_moe").model.norm
    with torch.no_grad():
        module.weight.copy_(gaussian(40, seed=3))
    return module


def case(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Callable[[int], dict[str, Any]],
    tolerance: float,
    arguments: dict[str, Any] | None = None,
    **expected: Any,
) -> Case:
    """What computes on the CPU loses nothing of a bf16 module; what computes on a GPU alone rounds coarsely."""
    return Case(
        REGISTRY[name], make, inputs, arguments or {}, tolerance=tolerance, **{"lossless": True, **expected}
    )


# A step of int4 in a group of 64.
ON_GPU = {"device": "cuda:0", "lossless": False, "against_unpacked": True, "weight_tolerance": 0.15}

CASES: dict[str, Case] = {
    # The same sums in another order, twice. The attention that it replaces takes no empty input.
    "absorbed_mla": case(
        "absorbed_mla",
        attention,
        attended,
        5e-5,
        {"device": "auto", "prefill": "absorbed"},
        kept_first=True,
        takes_none=False,
    ),
    "cpu_experts": case("cpu_experts", experts, routed, reference.TOLERANCE["bf16"]),
    "cpu_linear": case("cpu_linear", linear, rows(64), 4e-3),
    # A logit on the border between two bf16 values may fall to the other side.
    "cpu_router": case(
        "cpu_router",
        router,
        rows(40, torch.bfloat16, "hidden_states"),
        3e-3,
        delegate="cpu_linear",
        kept_first=True,
    ),
    "deferred_moe": case(
        "deferred_moe",
        block,
        lambda tokens: {"hidden_states": gaussian(2, tokens, 40, seed=2)},
        reference.TOLERANCE["bf16"],
        delegate="hybrid_experts",
        kept_first=True,
    ),
    "dense_linear": case(
        "dense_linear",
        lambda: linear(torch.bfloat16),
        rows(64, torch.bfloat16),
        6e-3,
        delegate="cpu_linear",
    ),
    "fp8_linear": case(
        "fp8_linear",
        lambda: linear(torch.bfloat16),
        rows(64, torch.bfloat16, "x"),
        reference.FP8_LINEAR_TOLERANCE,
        **ON_GPU,
    ),
    "hybrid_experts": case("hybrid_experts", experts, routed, reference.TOLERANCE["bf16"]),
    "int4_linear": case(
        "int4_linear",
        lambda: linear(torch.bfloat16),
        rows(64, torch.bfloat16),
        reference.INT4_LINEAR_TOLERANCE[torch.bfloat16],
        {"group_size": 64},
        **ON_GPU,
    ),
    # The order of the sum.
    "rms_norm": case(
        "rms_norm",
        norm,
        lambda tokens: {"hidden_states": gaussian(2, tokens, 40, seed=2)},
        1e-5,
        kept_first=True,
    ),
}
NEVER_BUILT = {"keep"}  # not even another operator in its place: the module stays

# Test doubles register themselves, too; these are the package's own.
NAMES = [name for name, operator in REGISTRY.items() if operator.__module__.startswith("ktinject.")]
