"""Routing of decode steps: made from a reuse curve, uniform, or recorded from a model.

The curve is the one published for large Mixture-of-Experts models: 45 % of a token's experts are used again by the
next token of the same layer, 80 % within eight tokens. `reuse` draws for each choice how many tokens ago its expert
was used last: at most `a` with probability 0.45 + 0.35 · log8(a) up to eight, and 1 - 1.6 / a beyond, so that 6 % come
again after more than 26 tokens and 1.6 % after more than 100. Which expert that is, is chance: none is more popular
than others in the long run, so a fixed set of experts gets no more than its share of the uses.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_LONGEST = 400  # tokens
_CURVE = [0.45 + 0.35 * math.log(a, 8) if a <= 8 else 1 - 1.6 / a for a in range(1, _LONGEST + 1)]


def reuse(tokens: int, experts: int = 128, top_k: int = 8, seed: int = 0) -> Tensor:
    """[tokens, top_k] int64: routing of one layer that follows the curve."""
    chance = random.Random(seed)
    # by how many tokens ago the experts were used last
    aged: dict[int, list[int]] = {}
    for rank, expert in enumerate(chance.sample(range(experts), experts)):
        aged.setdefault(rank // top_k + 1, []).append(expert)
    found = []
    for _ in range(tokens):
        row = []
        for _ in range(top_k):
            wanted = bisect.bisect_left(_CURVE, chance.random() * _CURVE[-1]) + 1
            age = next(
                near
                for step in itertools.count()
                for near in (wanted + step, wanted - step)
                if aged.get(near)
            )
            there = aged[age]
            row.append(there.pop(chance.randrange(len(there))))
        aged = {age + 1: there for age, there in aged.items() if there}
        aged[1] = row.copy()
        found.append(row)
    return torch.tensor(found)


def uniform(tokens: int, experts: int = 128, top_k: int = 8, seed: int = 0) -> Tensor:
    """[tokens, top_k] int64: every choice of experts is as likely as every other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k].contiguous()


def recorded(model: Any, ids: Tensor, experts: Sequence[torch.nn.Module]) -> list[Tensor]:
    """The routing [tokens, top_k] of each layer for one text.

    ids      [1, n] int64
    experts  the modules of the layers' routed experts, called with (hidden states, ids, weights)
    """
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, arguments: Any, keywords: Any) -> None:
            given = [*arguments, *keywords.values()]
            found[layer] = (
                next(one for one in given if not one.is_floating_point()).reshape(ids.shape[1], -1).cpu()
            )

        return hook

    hooks = [
        module.register_forward_pre_hook(keep(layer), with_kwargs=True)
        for layer, module in enumerate(experts)
    ]
    try:
        with torch.inference_mode():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[layer] for layer in range(len(experts))]


def again(trace: Tensor, within: int) -> float:
    """The share of the uses of experts whose last use was at most so many tokens ago; first uses are left out."""
    last: dict[int, int] = {}
    near = total = 0
    for token, row in enumerate(trace.tolist()):
        for expert in row:
            if expert in last:
                total += 1
                near += token - last[expert] <= within
            last[expert] = token
    return near / max(1, total)
