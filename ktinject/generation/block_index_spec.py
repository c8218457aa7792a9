"""What an index computes that chooses blocks of the places that attention attends to (MiniMax-M3).

    q           = q_norm(q_proj(x)), a head, its first values turned
    k           = k_norm(k_proj(x)), its first values turned          ← what is cached
    score       = the greatest q · k of a block's places, up to the token's position in its text
    the choice  = for each head, the blocks with the top_k greatest scores, and among them always as many as `local`
                  says that end with the block of that position
    attention   = heads in order share the choice of a head of the index; of its blocks, they see what the mask shows

That is found by running the class's own forward on a twin whose children give random values. Blocks are of places in
the cache, positions are those in a text: padding before it counts only in the first. So they come apart by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation import layer_probes
from ktinject.generation.cpu import openmp
from ktinject.hf import compat
from ktinject.operators.probes import norm, twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.operators.probes.latent_formula import rotate
from ktinject.operators.probes.norm import RmsNormSpec
from ktinject.support import Support

_CHILDREN = {"q_proj", "k_proj", "q_norm", "k_norm"}
# Tokens of a step, places of the cache, of a block.
_TOKENS, _PLACES, _BLOCK = 3, 22, 4


@dataclass(frozen=True)
class BlockIndexSpec:
    """The formula above.

    size           values of a head, and of a key
    block          places of a block
    """

    heads: int
    size: int
    block: int
    top_k: int
    local: int
    q_norm: RmsNormSpec
    k_norm: RmsNormSpec


def is_one(module: nn.Module) -> bool:
    """Whether a module looks like such an index."""
    return {name for name, _ in module.named_children()} == _CHILDREN and hasattr(module, "topk_blocks")


def shortest_block(model: nn.Module) -> int | None:
    """The fewest places of a block of a model's indexes; None: it has none."""
    return min((int(module.block_size) for module in model.modules() if is_one(module)), default=None)  # type: ignore[arg-type]


@answered_once
@openmp.one_thread()
def of_index(module: nn.Module) -> BlockIndexSpec | Support:
    """The spec of an index of blocks, or why it has none."""
    found: Any = module
    if not is_one(module) or [*module.parameters(recurse=False)]:
        held = ", ".join(sorted(name for name, _ in module.named_children()))
        return Support.no(f"its {type(module).__name__} holds {held}")
    names = ("num_heads", "head_dim", "block_size", "topk_blocks", "local_blocks")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int) and size >= 0]
    if len(sizes) < len(names) or 0 in sizes[:4] or sizes[4] > sizes[3]:
        return Support.no(f"its {type(module).__name__} has no {', '.join(names)}, or they do not fit")
    q_norm, k_norm = norm.probe(found.q_norm), norm.probe(found.k_norm)
    for one in (q_norm, k_norm):
        if isinstance(one, Support):
            return one
    try:
        agrees = _chooses(module, sizes[0], sizes[1]) and _hides(module, sizes[0])
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    if not agrees:
        return Support.no(f"its {type(module).__name__} chooses blocks in another way")
    return BlockIndexSpec(*sizes, q_norm, k_norm)  # type: ignore[call-arg, arg-type]


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu", dtype=torch.float32
    )


class _Index:
    """Stands for a cache's layer that holds keys of other tokens already, which it gives for those that it is given."""

    def __init__(self, keys: Tensor) -> None:
        self.held, self.given = keys, keys

    def update_index(self, keys: Tensor) -> Tensor:
        self.given = keys
        return self.held


def _chooses(module: Any, heads: int, size: int) -> bool:
    """Whether it chooses as the formula says, of rows without padding and with some."""
    rotary = max(2, size // 4 * 2)
    queries, key = (_drawn(2, _TOKENS, n * size, seed=seed) for n, seed in ((heads, 0), (1, 1)))
    half = _drawn(2, _TOKENS, rotary // 2, seed=2)
    angles = torch.cat([half, half], -1)
    x, index = _drawn(2, _TOKENS, 8, seed=3), _Index(_drawn(2, 1, _PLACES, size, seed=4))
    positions = torch.arange(_PLACES - _TOKENS, _PLACES, device="cpu")[None] - torch.tensor(
        [[0], [5]], device="cpu"
    )
    seen: list[Tensor] = []

    def gives(value: Tensor) -> nn.Module:
        def given(x: Tensor) -> Tensor:
            seen.append(x)
            return value

        return layer_probes.Stub(given)

    children = {
        "q_proj": gives(queries),
        "k_proj": gives(key),
        "q_norm": layer_probes.Stub(torch.tanh),
        "k_norm": layer_probes.Stub(torch.sin),
    }

    def turned(part: Tensor) -> Tensor:
        rotation = angles.cos(), angles.sin()
        return torch.cat([rotate("halves", part[..., :rotary], rotation), part[..., rotary:]], -1)

    q = turned(torch.tanh(queries.view(2, _TOKENS, heads, size)).transpose(1, 2))
    scores = (q @ index.held.mT).masked_fill(
        torch.arange(_PLACES, device="cpu") > positions[:, None, :, None], -torch.inf
    )  # [2, heads, m, n]
    scores = torch.cat([scores, scores.new_full((2, heads, _TOKENS, -_PLACES % _BLOCK), -torch.inf)], -1)
    blocks = scores.unflatten(-1, (-1, _BLOCK)).amax(-1)
    for top_k, local in ((2, 1), (3, 2), (3, 0), (9, 1)):
        with twin.on_cpu():
            sizes = {"block_size": _BLOCK, "topk_blocks": top_k, "local_blocks": local, "layer_idx": 0}
            small = twin.of(module, children, attributes=sizes)
            cache = SimpleNamespace(layers=[index])
            found = twin.run(
                small, x, (angles.cos(), angles.sin()), **{compat.CACHE: cache}, position_ids=positions
            )
        best = blocks.clone()
        own = positions[:, None, :, None].expand(-1, heads, -1, -1) // _BLOCK
        for back in range(local):
            best.scatter_(-1, (own - back).clamp(min=0), torch.inf)
        chosen = _members(best.topk(min(top_k, best.shape[-1]), -1).indices, best.shape[-1])
        chosen &= best > -torch.inf
        if not torch.equal(_members(found, best.shape[-1]), chosen):
            return False
    return all(one is x for one in seen) and torch.allclose(
        index.given, turned(torch.sin(key)[:, None]), atol=1e-6
    )


def _members(indices: Tensor, count: int) -> Tensor:
    """[..., count] bool of numbers [..., k], of which -1 are none."""
    known = torch.where(indices < 0, count, indices)
    found = torch.zeros(*indices.shape[:-1], count + 1, dtype=torch.bool, device="cpu")
    return found.scatter(-1, known, True)[..., :count]


def _hides(module: Any, heads: int) -> bool:
    """Whether heads see of the chosen blocks what the mask shows, and nothing else."""
    held = 2 * heads
    config = SimpleNamespace(num_attention_heads=held)
    chosen = torch.tensor([0, 3, -1, 5, 2, 1], device="cpu").repeat(heads)[: 2 * heads].view(1, heads, 1, 2)
    places, shown = -(-_PLACES // _BLOCK) * _BLOCK, _drawn(1, 1, 1, _PLACES, seed=5) > -0.5
    positions = torch.tensor([[_PLACES - 2]], dtype=torch.int64, device="cpu")
    blocks = _members(chosen, places // _BLOCK).repeat_interleave(_BLOCK, -1)[..., :_PLACES]
    future = torch.arange(_PLACES, device="cpu") > positions[:, None, :, None]
    added = torch.zeros(shown.shape, dtype=torch.float32, device="cpu").masked_fill(
        ~shown, torch.finfo(torch.float32).min
    )
    for mask, seen in ((shown, shown), (added, shown), (None, ~future)):
        with twin.on_cpu():
            small = twin.of(module, attributes={"block_size": _BLOCK, "config": config})
            found = small.build_block_mask(
                chosen, mask, _PLACES, torch.float32, torch.device("cpu"), positions
            )
        want = (blocks & seen).repeat_interleave(held // heads, 1)
        if (
            found.shape != want.shape
            or not torch.equal(found == 0, want)
            or bool((found[~want] > -1e30).any())
        ):
            return False
    return True
