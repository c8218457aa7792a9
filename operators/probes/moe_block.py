"""What a Mixture-of-Experts block does with the output of its routed experts, found out by running it.

A block has a router, a module of routed experts and perhaps shared experts. Deferral takes part of the routed experts'
sum away and adds it one MoE layer later, past whatever the block does next. That is the same sum only if the block
passes the experts' output on unchanged, row by row, and at most adds to it. So `probe` runs the block's own `forward`
on a twin with random weights, hands it an output of its own choosing in place of the experts', and looks at what
comes out. A block with a norm, a projection or a factor behind its experts is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktinject.operators.probes import experts, twin
from ktinject.operators.probes.answer import PassingRefusal, answered_once, refusal_of
from ktinject.operators.probes.comparison import Tolerance
from ktinject.support import Support

_TOLERANCE = Tolerance(1e-5, "fp32 in, fp32 out, one addition: what is left is the rounding of that addition")
_BATCH = 3


@dataclass(frozen=True)
class BlockSpec:
    """experts: the child that computes the routed ones; top_k: a token's; adds: whether the block adds to them."""

    experts: str
    top_k: int
    adds: bool


class _Answering(nn.Module):
    """Stands for the experts: records how it is called and answers with `answer` [m, hidden]."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        plain = {k: v for k, v in vars(experts).items() if isinstance(v, (int, float, str))}
        self.__dict__.update(plain)
        self.answer = torch.empty(0, dtype=torch.float32, device="cpu")
        self.calls: list[tuple[tuple[int, ...], ...]] = []

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.calls.append((tuple(hidden_states.shape), tuple(top_k_index.shape), tuple(top_k_weights.shape)))
        return self.answer.clone()


@answered_once
def probe(block: nn.Module) -> BlockSpec | Support:
    """What a block does with its experts' output; it may be on the meta device. A refusal: they cannot be deferred."""
    answers = {name: experts.probe(child) for name, child in block.named_children()}
    for answer in answers.values():
        if isinstance(answer, PassingRefusal):
            return answer
    found = {name: answer for name, answer in answers.items() if isinstance(answer, experts.ExpertsSpec)}
    if len(found) != 1:
        names = ", ".join(found) or "none"
        return Support.no(
            f"a Mixture-of-Experts block has one child that computes routed experts; found: {names}"
        )
    ((name, spec),) = found.items()
    try:
        with twin.on_cpu():
            return _run(block, name, spec.hidden_size)
    except Exception as error:  # the block's own code runs here, so anything may come out of it
        return refusal_of(error, "its forward fails on a copy with one token a row")


def _run(block: nn.Module, name: str, hidden_size: int) -> BlockSpec | Support:
    """name: of the child that computes the routed experts."""
    random = torch.Generator("cpu").manual_seed(0)
    stand_in = _Answering(block.get_submodule(name))
    small = twin.filled(block, random, {name: stand_in})
    x = torch.randn(_BATCH, 1, hidden_size, generator=random, dtype=torch.float32, device="cpu")

    def answer(value: Tensor) -> Tensor:
        stand_in.answer = value
        out = twin.run(small, x)
        return out[0] if isinstance(out, tuple) else out

    delta = torch.randn(_BATCH, hidden_size, generator=random, dtype=torch.float32, device="cpu")
    alone, together = answer(torch.zeros_like(delta)), answer(delta)
    if len(stand_in.calls) != 2:
        return Support.no(f"it calls its experts {len(stand_in.calls) // 2} times for one input")
    rows, index, weights = stand_in.calls[0]
    if rows != (_BATCH, hidden_size) or len(index) != 2 or index[0] != _BATCH or weights != index:
        return Support.no(
            f"it calls its experts with shapes {[*rows]}, {[*index]}, {[*weights]}; "
            f"expected [{_BATCH}, {hidden_size}], [{_BATCH}, top_k], [{_BATCH}, top_k]"
        )
    if together.numel() != delta.numel():
        return Support.no(
            f"its output has shape {list(together.shape)}, that of its experts {list(delta.shape)}"
        )
    off = ((together - alone).reshape(delta.shape) - delta).abs().max().item()
    if not _TOLERANCE.allows(off / (1 + alone.abs().max().item())):
        return Support.no(f"it does more with its experts' output than add to it: max difference {off:.1e}")
    return BlockSpec(experts=name, top_k=index[1], adds=bool(alone.count_nonzero()))
