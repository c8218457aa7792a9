"""What layers compute is found by running their parts, and what computes something else is refused."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

import ktinject
from ktinject.generation import feed_forward_spec, layer_spec
from ktinject.generation.cuda import feed_forward_steps
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec, OtherFeedForward, RouterSpec
from ktinject.generation.layer_spec import (
    DecoderLayerSpec,
    GroupedAttentionSpec,
    LatentAttentionSpec,
    NormSpec,
    RotationSpec,
)
from ktinject.operators.probes.norm import LayerNormSpec, RmsNormSpec
from ktinject.support import Support

torch.set_num_threads(1)
SIGMOIDS = RouterSpec("gate", "sigmoid", 6, 2, True, 2, 1, True, 2.5, rounds=False)
ROUTERS = {
    "qwen3_moe": RouterSpec("gate", "softmax", 6, 2, False, 1, 1, True, 1.0, rounds=True, rounds_logits=True),
    "qwen2_moe": RouterSpec(
        "gate", "softmax", 6, 2, False, 1, 1, False, 1.0, rounds=True, rounds_logits=True
    ),
    "mixtral": RouterSpec("gate", "softmax", 6, 2, False, 1, 1, True, 1.0, rounds=False, rounds_logits=True),
    "glm4_moe": SIGMOIDS,
    "gpt_oss": RouterSpec(
        "router",
        "softmax",
        6,
        2,
        False,
        1,
        1,
        True,
        1.0,
        rounds=True,
        has_bias=True,
        rounds_logits=True,
        by_logits=True,
    ),
    "deepseek_v3": SIGMOIDS,
    "kimi_k2": SIGMOIDS,
}


def known(found: Any, kind: type) -> Any:
    assert isinstance(found, kind), found
    return found


@pytest.mark.parametrize("is_swapped", [False, True])
@pytest.mark.parametrize("family", ROUTERS)
def test_layers_of_families(family: str, is_swapped: bool) -> None:
    model = models.tiny(family).bfloat16()
    if is_swapped:
        ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    elif family in ("deepseek_v3", "kimi_k2"):
        rule = {"name": "a", "match": {"path": r".*self_attn"}, "replace": {"operator": "absorbed_mla"}}
        ktinject.optimize(model, [rule], devices=["cpu"], progress=False)
    first, last = (known(layer_spec.of_layer(layer), DecoderLayerSpec) for layer in model.model.layers)
    norm = model.config.rms_norm_eps
    is_gpt = family == "gpt_oss"
    rms = RmsNormSpec(model.config.hidden_size, norm, has_unit_offset=False, rounds_before_weight=not is_gpt)
    assert last.input_norm == NormSpec("input_layernorm", rms)
    assert last.feed_forward.router == ROUTERS[family]
    has_dense_first = family in ("deepseek_v3", "kimi_k2", "glm4_moe")
    assert isinstance(first.feed_forward, DenseSpec if has_dense_first else MoeSpec)
    shared = {"qwen2_moe": "shared_expert", **dict.fromkeys(("qwen3_moe", "mixtral", "gpt_oss"))}.get(
        family, "shared_experts"
    )
    assert (last.feed_forward.shared and last.feed_forward.shared.path) == shared
    assert last.feed_forward.shared_gate == ("shared_expert_gate" if family == "qwen2_moe" else None)
    latent = family in ("deepseek_v3", "kimi_k2")
    assert isinstance(last.attention, LatentAttentionSpec if latent else GroupedAttentionSpec)
    assert getattr(last.attention, "has_sinks", False) == is_gpt
    assert last.attention.layer_idx == 1 and (last.attention.q_norm is not None) == (
        family in ("qwen3_moe", "deepseek_v3", "kimi_k2")
    )


@pytest.mark.parametrize(
    "family, has_unit_offset, rounds_before_weight",
    [("qwen3_moe", False, True), ("gpt_oss", False, False), ("qwen3_next", True, False)],
)
def test_kinds_of_norms(family: str, has_unit_offset: bool, rounds_before_weight: bool) -> None:
    norm = models.tiny(family).model.norm
    found = known(layer_spec.of_norm(norm), NormSpec).rms
    assert (found.has_unit_offset, found.rounds_before_weight) == (has_unit_offset, rounds_before_weight)


def qwen() -> Any:
    return models.tiny("qwen3_moe")


def derived(module: Any, forward: Any) -> Any:
    """The module, of a class with another forward."""
    module.__class__ = type("Odd", (type(module),), {"forward": forward})
    return module


def reason(found: Any) -> str:
    return str(known(found, (Support, OtherFeedForward)).reason)


class TestRefusals:
    def test_a_norm_that_adds_its_weight(self) -> None:
        norm = qwen().model.norm
        own = type(norm).forward
        assert "it is not weight * x" in reason(
            layer_spec.of_norm(derived(norm, lambda self, x: own(self, x) + self.weight))
        )

    def test_layer_norm(self) -> None:
        """Is no RMS norm, and known as what it is; one that divides by another deviation is neither."""
        for bias in (False, True):
            found = layer_spec.of_norm(nn.LayerNorm(8, eps=1e-3, bias=bias))
            assert found == NormSpec("", LayerNormSpec(8, 1e-3, bias))
        odd = nn.LayerNorm(8, bias=False)
        derived(odd, lambda self, x: self.weight * (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-5))
        assert "it is not weight * x" in reason(layer_spec.of_norm(odd))
        odd = nn.LayerNorm(8)
        derived(odd, lambda self, x: type(self).__mro__[1].forward(self, x) + 0.1)
        assert "something else than one vector" in reason(layer_spec.of_norm(odd))

    def test_a_layer_that_scales_its_residual(self) -> None:
        layer = qwen().model.layers[0]
        own = type(layer).forward
        derived(layer, lambda self, x, **kwargs: x + 0.5 * (own(self, x, **kwargs) - x))
        assert "it is not x + attention(norm(x))" in reason(layer_spec.of_layer(layer))

    def test_a_layer_of_other_children(self) -> None:
        layer = qwen().model.layers[0]
        layer.register_module("extra", nn.Identity())
        assert reason(layer_spec.of_layer(layer)).startswith("it holds extra, input_layernorm, mlp")

    def test_an_attention_of_other_children(self) -> None:
        attention = qwen().model.layers[0].self_attn
        attention.register_module("extra_proj", nn.Linear(4, 4))
        assert "holds extra_proj, k_norm" in reason(layer_spec.of_attention(attention))

    def test_an_attention_with_parameters_of_its_own(self) -> None:
        attention = qwen().model.layers[0].self_attn
        attention.temperature = nn.Parameter(torch.ones(4))
        assert "itself holds temperature" in reason(layer_spec.of_attention(attention))

    def test_a_gated_unit_of_another_activation(self) -> None:
        mlp = models.tiny("deepseek_v3").model.layers[0].mlp
        mlp.act_fn = nn.GELU()
        assert "is no gated unit with SiLU" in reason(feed_forward_spec.of_feed_forward(mlp))

    def test_a_router_that_chooses_the_least(self) -> None:
        block = qwen().model.layers[0].mlp
        own = type(block.gate).forward
        derived(block.gate, lambda self, x: own(self, -x))
        assert "chooses in another way" in reason(feed_forward_spec.of_feed_forward(block))

    def test_a_block_that_squares_its_experts(self) -> None:
        block = qwen().model.layers[0].mlp
        own = type(block).forward
        assert "does not add shared experts to routed ones" in reason(
            feed_forward_spec.of_feed_forward(derived(block, lambda self, x: own(self, x) ** 2))
        )

    def test_a_rotation_by_neighbours(self) -> None:
        rotary = qwen().model.rotary_emb
        own = type(rotary).forward

        def forward(self: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            return tuple(
                t.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for t in own(self, x, positions)
            )

        assert isinstance(layer_spec.of_rotation(rotary), RotationSpec)
        assert "twice side by side" in reason(layer_spec.of_rotation(derived(rotary, forward)))


def test_a_block_that_scales_its_experts() -> None:
    """Which the captured step's kernels do not."""
    block = qwen().model.layers[0].mlp
    own = type(block).forward
    found = known(feed_forward_spec.of_moe(derived(block, lambda self, x: own(self, x) * 2)), MoeSpec)
    assert found.factors == (2.0, 1.0)
    assert feed_forward_steps.moe_step(found, block) is None
    assert feed_forward_steps.Routed.of(found, block) is None


def test_probes_change_nothing_of_a_module() -> None:
    model = qwen()
    before = {path: {**vars(module)} for path, module in model.named_modules()}
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    assert len(dict(layer_spec.parts(model))) == 18
    assert {path: {**vars(module)} for path, module in model.named_modules()} == before
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("family", ["minimax_m2", "hy_v3"])
def test_a_correction_that_the_block_holds(family: str) -> None:
    if family not in models.AVAILABLE:
        pytest.skip(f"transformers has no {family}")
    model = models.tiny(family).bfloat16()
    ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    block = model.model.layers[1].mlp
    found = known(feed_forward_spec.of_moe(block), MoeSpec)
    assert found.router.correction == "e_score_correction_bias" and found.router.of_block
    # transformers rounds MiniMax-M2's logits before their sigmoid; Hunyuan 3's are in fp32.
    assert found.router.rounds_logits == (family == "minimax_m2")
    # The captured step calls a router with x alone.
    assert feed_forward_steps.moe_step(found, block) is None
    assert feed_forward_steps.router_step(found.router, block.gate) is None


def test_blocks_and_routers_that_hold_more_are_refused() -> None:
    if "minimax_m2" not in models.AVAILABLE:
        pytest.skip("transformers has no minimax_m2")
    block = models.tiny("minimax_m2").model.layers[1].mlp
    block.gate.register_buffer("temperature", torch.ones(6))
    found = feed_forward_spec.of_moe(block)
    assert found == Support.no(
        "its MiniMaxM2SparseMoeBlock and router hold e_score_correction_bias, temperature"
    )
