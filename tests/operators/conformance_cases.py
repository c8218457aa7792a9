"""One small case for each operator that rules can name: what `test_conformance.py` holds to the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import models
import pytest
import reference
import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.machine import Machine, detect
from ktinject.operators import REGISTRY, Operator

torch.set_num_threads(1)


@dataclass(frozen=True)
class Case:
    """How one operator is tried.

    make        a module that it replaces, with weights
    inputs      the number of tokens → what the module's forward takes; the first is the hidden states [..., width]
    tolerance   ‖operator - module‖ / ‖module‖; against the unpacked weights where the format rounds coarsely
    arguments   of its config
    delegate    the operator inside that answers for weights and inputs; its errors have that one's name
    kept_first  what it keeps of the module sees the inputs first, and refuses them
    on_gpu      it computes on a CUDA device alone
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    tolerance: float
    arguments: dict[str, Any] = field(default_factory=dict)
    delegate: str = ""
    kept_first: bool = False
    on_gpu: bool = False

    @property
    def device(self) -> str:
        return "cuda:0" if self.on_gpu else "cpu"


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


CASES: dict[str, Case] = {
    # The same sums in another order, twice.
    "absorbed_mla": Case(attention, attended, 5e-5, {"prefill": "absorbed"}, kept_first=True),
    "cpu_experts": Case(experts, routed, reference.TOLERANCE["bf16"]),
    "cpu_linear": Case(linear, rows(64), 4e-3),
    # A logit on the border between two bf16 values may fall to the other side.
    "cpu_router": Case(
        router, rows(40, torch.bfloat16, "hidden_states"), 3e-3, delegate="cpu_linear", kept_first=True
    ),
    "deferred_moe": Case(
        block,
        lambda tokens: {"hidden_states": gaussian(2, tokens, 40, seed=2)},
        reference.TOLERANCE["bf16"],
        delegate="hybrid_experts",
        kept_first=True,
    ),
    "dense_linear": Case(
        lambda: linear(torch.bfloat16), rows(64, torch.bfloat16), 6e-3, delegate="cpu_linear"
    ),
    "fp8_linear": Case(
        lambda: linear(torch.bfloat16),
        rows(64, torch.bfloat16, "x"),
        reference.FP8_LINEAR_TOLERANCE,
        on_gpu=True,
    ),
    "hybrid_experts": Case(experts, routed, reference.TOLERANCE["bf16"]),
    "int4_linear": Case(
        lambda: linear(torch.bfloat16),
        rows(64, torch.bfloat16),
        reference.INT4_LINEAR_TOLERANCE[torch.bfloat16],
        {"group_size": 64},
        on_gpu=True,
    ),
    # The order of the sum.
    "rms_norm": Case(
        norm, lambda tokens: {"hidden_states": gaussian(2, tokens, 40, seed=2)}, 1e-5, kept_first=True
    ),
}
NEVER_BUILT = {"keep"}  # not even another operator in its place: the module stays

# Test doubles register themselves, too; these are the package's own.
NAMES = [name for name, operator in REGISTRY.items() if operator.__module__.startswith("ktinject.")]
BUILT = [name for name in NAMES if name in CASES]
# Here where the operator computes on the CPU, and with `-m gpu` where it needs a GPU.
FILLED = [pytest.param(name, marks=[pytest.mark.gpu] if CASES[name].on_gpu else []) for name in BUILT]


def machine() -> Machine:
    """This one, with the CUDA parts whether the build has them or not: plans are made without."""
    return replace(detect(), cuda_built=True)


def config_of(name: str, module: nn.Module) -> tuple[type[Operator], Any]:
    """The operator that serves the case's module, with its config, as the planner settles them."""
    case, operator = CASES[name], REGISTRY[name]
    config = operator.Config(**{"device": "auto" if name == "absorbed_mla" else case.device} | case.arguments)
    resolved = operator.resolve(module, config)
    assert resolved is not None
    return resolved


def built(name: str, module: nn.Module) -> Operator:
    operator, config = config_of(name, module)
    assert operator.supports(module, config, machine()) is None
    placement = operator.plan_placement(nn.Module(), {"it": (module, config)}, {}).get("it")
    assert not isinstance(placement, str), placement
    made = operator.build(module, config)
    if placement is not None:
        made.place(placement)
    return made.eval()


def taken(operator: Operator, module: nn.Module) -> dict[str, Tensor]:
    """The module's parameters that the operator loads."""
    parameters = reference.parameters_of(module)
    return {name: parameters[name].cpu() for name in operator.parameter_shapes()}


def filled(name: str, module: nn.Module) -> Operator:
    operator = built(name, module)
    operator.allocate()
    for key, tensor in taken(operator, module).items():
        operator.load(key, tensor, None, None)
    operator.finish()
    return operator


def outputs(found: Any) -> list[Tensor]:
    """The floating-point ones: ids of experts may turn over where two are nearly equal."""
    parts = [found] if isinstance(found, Tensor) else [part for part in found if isinstance(part, Tensor)]
    return [part for part in parts if part.is_floating_point()]


def on(device: str, given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.to(device)
    if isinstance(given, dict):
        return {name: on(device, value) for name, value in given.items()}
    return tuple(on(device, value) for value in given) if isinstance(given, tuple) else given


def call(module: nn.Module, arguments: dict[str, Any]) -> list[Tensor]:
    """By place for the first argument, whose name differs, and by name for the rest."""
    first, *others = arguments
    with torch.no_grad():
        return outputs(module(arguments[first], **{name: arguments[name] for name in others}))


def cuda_or_skip(name: str) -> None:
    if CASES[name].on_gpu and not _native.cuda_built():
        pytest.skip("built without CUDA")
