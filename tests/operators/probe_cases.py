"""Modules of routed experts, described or refused, and compared with the reference."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import models
import pytest
import reference
import torch
import transformers
from torch import Tensor, nn

from ktinject.operators.probes.experts import ExpertsSpec, probe
from ktinject.support import Support

torch.set_num_threads(1)

PLAIN = ExpertsSpec(
    num_experts=6,
    hidden_size=40,
    intermediate_size=24,
    has_gate=True,
    has_bias=False,
    is_transposed=False,
    is_concatenated=True,
    activation="silu",
    alpha=1.0,
    gate_max=inf,
    up_limit=inf,
    up_offset=0.0,
)

# What differs from PLAIN, sizes aside, in the families that are not like the others.
ODD: dict[str, dict[str, Any]] = {
    "aria_text": {"is_transposed": True},
    "deepseek_v4": {"gate_max": 1.5, "up_limit": 1.5},
    "gemma4_text": {"activation": "gelu_tanh"},
    "gpt_oss": {
        "has_bias": True,
        "is_transposed": True,
        "is_concatenated": False,
        "alpha": 1.702,
        "gate_max": 1.5,
        "up_limit": 1.5,
        "up_offset": 1.0,
    },
    "hy_v4": {"gate_max": 1.5, "up_limit": 1.5},
    "minimax_m3_vl_text": {"alpha": 1.702, "gate_max": 1.5, "up_limit": 1.5, "up_offset": 1.0},
    "nemotron_h": {"has_gate": False, "activation": "relu2", "hidden_size": 20},
}
if "swiglu_limit" not in transformers.GptOssConfig().to_dict():
    ODD["gpt_oss"] |= {"gate_max": 7.0, "up_limit": 7.0}  # hard-coded there in transformers 5.17
# Families whose experts have the config's `intermediate_size`, not a size of their own.
WIDE = {
    *("aria_text", "cohere2_moe", "deepseek_v4", "flex_olmo", "gpt_oss", "granitemoe", "granitemoehybrid"),
    *("granitemoeshared", "hunyuan_v1_moe", "jamba", "minimax", "minimax_m2", "minimax_m3_vl_text"),
    *("mixtral", "olmoe", "phimoe"),
}


def spec_of(family: str) -> ExpertsSpec:
    """What the experts of a tiny family have to be described as."""
    size = 56 if family in WIDE else 24
    return replace(PLAIN, intermediate_size=size, **ODD.get(family, {}))


# Kernels see nothing of a family but its spec. So they are tested with one family for each spec there is, and every
# other family is only shown to have the spec of one of these.
KINDS = [name for name in (*ODD, "qwen3_moe", "mixtral") if name in models.AVAILABLE]


def experts_module(name: str, device: str = "cpu") -> nn.Module:
    if device == "cpu":
        module = models.leaf(models.tiny(name))[1]
    else:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(models.config(name))
        module = models.leaf(model)[1]
    skip_unless_routed_outside(name, module)
    return module


def skip_unless_routed_outside(name: str, experts: nn.Module) -> None:
    if name == "aria_text" and not hasattr(experts, "is_transposed"):
        pytest.skip("this transformers routes inside AriaExperts")


TOKENS = 7


def described(module: nn.Module) -> ExpertsSpec:
    spec = probe(module)
    assert isinstance(spec, ExpertsSpec), spec
    return spec


def refusal(module: nn.Module) -> str:
    found = probe(module)
    assert isinstance(found, Support), found
    assert "\n" not in found.reason and not found.reason.endswith(".")
    return found.reason


def inputs(
    spec: ExpertsSpec, tokens: int = TOKENS, k: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, spec.hidden_size, generator=random)
    index = torch.stack([torch.randperm(spec.num_experts, generator=random)[:k] for _ in range(tokens)])
    return x, index, torch.rand(tokens, k, generator=random)


def assert_reference_is(module: nn.Module, spec: ExpertsSpec) -> None:
    """Fill the module with Gaussian weights and compare its own eager forward with the reference."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2)
    if hasattr(module, "config"):
        module.config._experts_implementation = "eager"
    x, index, weights = inputs(spec)
    want = reference.experts(
        x, index, weights, reference.weights_of(spec, reference.parameters_of(module)), spec
    )
    with torch.no_grad():
        assert reference.relative_error(module(x, index, weights), want) < 1e-5
    assert want.norm() > 0.1
