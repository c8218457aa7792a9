"""Roles of modules: what probes say of them, and where they stand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ktinject.operators.probes import dense_mlp
from ktinject.operators.probes.dense_mlp import DenseMlpSpec
from ktinject.operators.probes.roles import Roles
from ktinject.rules import ELSEWHERE
from ktinject.support import Support
from tests.models import AVAILABLE, config, tiny

LAYER = re.compile(r"model\.layers\.1\.")


def roles(name: str) -> dict[str, set[str]]:
    """Role → paths in the second layer, and outside of layers."""
    with torch.device("meta"):
        model = type(tiny(name))(config(name)).bfloat16()
    found = Roles(model)
    by_role: dict[str, set[str]] = {}
    for path, _ in model.named_modules():
        if path and "layers.0" not in path:
            for role in found.of(path):
                by_role.setdefault(role, set()).add(LAYER.sub("", path))
    return by_role


def test_the_roles_of_deepseek_v3() -> None:
    found = roles("deepseek_v3")
    linears = {f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
    projections = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    norms = {"self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"}
    assert found == {
        "routed_experts": {"mlp.experts"},
        "shared_experts": {"mlp.shared_experts"},
        "router": {"mlp.gate"},
        "moe_block": {"mlp"},
        "attention": {"self_attn"},
        "latent_attention": {"self_attn"},
        "linear": {*linears, *(f"self_attn.{name}" for name in projections), "lm_head"},
        "dense_mlp": {"mlp.shared_experts"},
        "norm": {*norms, "input_layernorm", "post_attention_layernorm", "model.norm"},
        "output_layer": {"lm_head"},
        "embedding": {"model.embed_tokens"},
    }


@pytest.mark.parametrize(
    "name, role, paths",
    [
        ("qwen3_next", "attention", {"self_attn"}),
        ("qwen2_moe", "router", {"mlp.gate"}),  # and not the gate of the shared expert
        (
            "granitemoehybrid",
            "dense_mlp",
            {"shared_mlp"},
        ),  # two linear layers, the first of which is two in one
        ("lfm2_moe", "attention", {"conv"}),
        ("gemma4_text", "router", None),  # its linear layer is a child
        ("deepseek_v32", "latent_attention", {"self_attn"}),
        ("hy_v4", "latent_attention", None),
    ],
)
def test_roles_of_other_families(name: str, role: str, paths: set[str] | None) -> None:
    if name not in AVAILABLE:
        pytest.skip(f"this transformers has no {name}")
    assert roles(name).get(role) == paths


def test_what_comes_near_a_role_says_why_it_has_it_not() -> None:
    model = tiny("deepseek_v3")
    model.model.layers[1].self_attn.gate_proj = nn.Linear(8, 8)
    found = Roles(model)
    answer = found.has("model.layers.1.self_attn", "latent_attention")
    assert not answer and "gate_proj" in answer.reason
    assert found.has("model.layers.1.mlp", "latent_attention") is ELSEWHERE
    assert found.has("model.layers.0", "attention") is ELSEWHERE  # which takes the cache, too


class Mlp(nn.Module):
    """down(relu(up(x))) and what a kind of it does else."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 12 if kind == "narrow" else 8)
        if kind == "stack":
            self.stack = nn.Parameter(torch.zeros(2, 2))

    def forward(self, x: Tensor, *required: Any) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        if self.kind == "mixing":
            out = out + x.mean(1, keepdim=True)
        return torch.zeros_like(out) if self.kind == "constant" else out


@pytest.mark.parametrize(
    "kind, reason",
    [
        ("mixing", "its rows depend on each other"),
        ("narrow", "something else than rows of the size of its input"),
        ("constant", "does not depend on its input"),
        ("stack", "beside its linear layers it holds stack"),
    ],
)
def test_what_is_no_dense_mlp(kind: str, reason: str) -> None:
    with torch.device("meta"):
        module = Mlp(kind)
    found = dense_mlp.probe(module)
    assert isinstance(found, Support) and reason in found.reason


def test_a_dense_mlp_of_any_size() -> None:
    with torch.device("meta"):
        module = Mlp()
        module.up, module.down = nn.Linear(8192, 65536), nn.Linear(65536, 8192)
    assert dense_mlp.probe(module) == DenseMlpSpec(("up", "down"), 8192)
    assert dense_mlp.probe(nn.Linear(8, 8)) == Support.no(
        "it has 0 linear layers; at least two lead there and back"
    )
