"""What is found out about Mixture-of-Experts blocks, of every family."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from deferred import blocks, qwen
from torch import Tensor

from ktinject.operators.probes import moe_block
from ktinject.support import Support

# Why a family's block is refused; all others are served.
NOT_A_SUM = {
    "axk1": "does more with its experts' output than add to it",
    "beam": "does more with its experts' output than add to it",
    "minimax_m3_vl_text": "does more with its experts' output than add to it",
    "nemotron_h": "its forward fails",
    "gemma4_text": "its forward fails",
}


@pytest.mark.parametrize("family", models.AVAILABLE)
def test_families(family: str) -> None:
    """What the probe says of a block is true of the block: what its experts return comes out, plus what it adds."""
    model = models.tiny(family)
    path, routed = models.leaf(model)
    block = model.get_submodule(path.rpartition(".")[0])
    found = moe_block.probe(block)
    if family in NOT_A_SUM:
        assert isinstance(found, Support) and NOT_A_SUM[family] in found.reason
        return
    if family == "aria_text" and not hasattr(routed, "is_transposed"):
        pytest.skip("this transformers routes inside AriaExperts")
    assert (found.experts, found.top_k) == ("experts", 1 if family == "zaya" else 2)
    outputs = []
    hook = routed.register_forward_hook(lambda *arguments: outputs.append(arguments[-1]))
    x = torch.randn(2, 1, model.config.hidden_size)
    with torch.no_grad():
        whole = block(x)
    hook.remove()
    whole = whole[0] if isinstance(whole, tuple) else whole
    assert torch.allclose(whole.view_as(outputs[0]), outputs[0], atol=1e-6) != found.adds


class Wrapped(torch.nn.Module):
    """A block with a factor behind its experts that is one for a zero input, and one that calls them twice."""

    def __init__(self, block: Any, twice: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.twice = block.gate, block.experts, twice

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        _, weights, index = self.gate(flat)
        out = self.experts(flat, index, weights)
        if self.twice:
            return out.view_as(x) + 0 * self.experts(flat, index, weights).view_as(x)
        return (out * (1 + 0.01 * flat.mean(-1, keepdim=True))).view_as(x)


def test_blocks_that_are_no_sum() -> None:
    block = blocks(qwen())[0]
    assert "add to it" in str(moe_block.probe(Wrapped(block, twice=False)))
    assert "calls its experts 2 times" in str(moe_block.probe(Wrapped(block, twice=True)))
    assert "one child that computes routed experts; found: none" in str(moe_block.probe(block.gate))


class Configured(torch.nn.Module):
    """A block that asks its config in its forward."""

    def __init__(self, block: Any, config: Any) -> None:
        super().__init__()
        self.gate, self.experts, self.config = block.gate, block.experts, config

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, index = self.gate(flat)[0].topk(self.config.num_experts_per_tok)
        return self.experts(flat, index, weights).view_as(x)


def test_blocks_that_differ_in_their_config() -> None:
    """Classes, shapes and attributes are the same; what was found out about one is not taken for the other."""
    model = qwen()
    for top_k in (2, 3):
        config = copy.deepcopy(model.config)
        config.num_experts_per_tok = top_k
        assert moe_block.probe(Configured(blocks(model)[0], config)).top_k == top_k
