"""What an indexer computes, which chooses the places that a token attends to (DeepSeek-V3.2, GLM-5, Mistral Large 4).

    q           = wq_b(low), a head, its first values turned          low: what q_b_proj takes, or q_input_norm(x)
    k           = k_norm(wk(x)), its first values turned              ← what is cached
    score       = Σ over heads of weights_proj(x) · relu(q · k)       of each place that is not masked
    the choice  = the places with the top_k greatest scores

That is found by running the class's own forward on a twin whose children give random values: the order in which it
gives all places is that of their scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation import layer_probes
from ktinject.generation.cpu import openmp
from ktinject.hf import compat
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.operators.probes.latent_formula import GROWTH, grown, rotate
from ktinject.support import Support

_CHILDREN = {"wq_b", "wk", "k_norm", "weights_proj"}
# Of one that takes x alone: a norm of it, and what queries are multiplied with by their position.
_INPUT_NORM = "q_input_norm"
_MORE = {_INPUT_NORM, GROWTH}
# Of so many places, the order shows small differences of their scores.
_TOKENS, _PLACES = 3, 192


@dataclass(frozen=True)
class IndexerSpec:
    """The formula above.

    size           values of a head, and of a key
    rotary         of these that are turned, the first ones
    rope           which pairs of values are turned together, as `LatentSpec` has it: halves, neighbours or none
    epsilon        of k_norm, a layer norm with weight and bias
    input_epsilon  of q_input_norm, likewise, whose input is x: queries are made of that, and grow with their position
                   (`latent_formula.grown`) before they are turned; None: of the low-rank query, and do not
    at_end         the last values are turned, not the first ones (Hunyuan 4)
    """

    heads: int
    size: int
    rotary: int
    top_k: int
    rope: str
    epsilon: float
    input_epsilon: float | None = None
    at_end: bool = False


@answered_once
@openmp.one_thread()
def of_indexer(module: nn.Module) -> IndexerSpec | Support:
    """The spec of an indexer, or why it has none."""
    found: Any = module
    children = {name for name, _ in module.named_children()}
    takes_input = children == _CHILDREN | _MORE
    if (not takes_input and children != _CHILDREN) or [*module.parameters(recurse=False)]:
        return Support.no(f"its {type(module).__name__} holds {', '.join(sorted(children))}")
    names = ("n_heads", "head_dim", "qk_rope_head_dim", "index_topk")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int) and size > 0]
    if len(sizes) < len(names) or sizes[2] % 2 or sizes[1] < sizes[2]:
        return Support.no(f"its {type(module).__name__} has no {', '.join(names)}, or odd ones")
    norms = [found.k_norm, *([found.get_submodule(_INPUT_NORM)] if takes_input else [])]
    if any(type(norm) is not nn.LayerNorm or norm.weight is None or norm.bias is None for norm in norms):
        return Support.no(f"a norm of its {type(module).__name__} is no layer norm with a weight and a bias")
    heads, size, rotary, top_k = sizes
    try:
        rope = _rope(module, heads, size, rotary, takes_input)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    if rope is None:
        return Support.no(f"its {type(module).__name__} scores places in another way")
    turned = 0 if rope[0] == "none" else rotary
    of_input = norms[1].eps if takes_input else None
    return IndexerSpec(heads, size, turned, top_k, rope[0], norms[0].eps, of_input, rope[1])


class _Index:
    """Stands for a cache that holds keys of other tokens already, which it gives for those that it is given."""

    def __init__(self, keys: Tensor) -> None:
        self.held, self.given = keys, keys

    def update_indexer(self, keys: Tensor, *_: Any) -> Tensor:
        self.given = keys
        return self.held


def _rope(
    module: nn.Module, heads: int, size: int, rotary: int, takes_input: bool
) -> tuple[str, bool] | None:
    """Which pairs are turned together, and whether at the end of a head; None if the formula gives something else than
    the indexer.
    """
    random = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)

    queries, key, weights = drawn(1, _TOKENS, heads * size), drawn(1, _TOKENS, size), drawn(1, _TOKENS, heads)
    half = drawn(1, _TOKENS, rotary // 2)
    angles = torch.cat([half, half], -1)
    x, low, index = drawn(1, _TOKENS, 8), drawn(1, _TOKENS, 6), _Index(drawn(1, _PLACES, size))
    positions = torch.tensor([[0, 3, 4000]], device="cpu") if takes_input else None
    mask = torch.ones(1, _TOKENS, _PLACES, dtype=torch.bool, device="cpu").tril(_PLACES - _TOKENS)
    seen: dict[str, Tensor] = {}

    def gives(name: str, value: Tensor) -> nn.Module:
        def given(x: Tensor) -> Tensor:
            seen[name] = x
            return value

        found = layer_probes.Stub(given)
        found.weight = nn.Parameter(torch.empty(0, device="cpu", dtype=torch.float32), False)
        return found

    children = {
        "wq_b": gives("wq_b", queries),
        "wk": gives("wk", key),
        "k_norm": layer_probes.Stub(torch.tanh),
        "weights_proj": gives("weights_proj", weights),
    }
    if takes_input:
        children[_INPUT_NORM] = gives(_INPUT_NORM, low)
        growth = {name: drawn(heads) for name in ("scale", "bias")}
        children[GROWTH] = twin.of(module.get_submodule(GROWTH), tensors=growth)

    def chosen(mask: Tensor, top_k: int) -> Tensor:
        with twin.on_cpu():
            small = twin.of(module, children, attributes={"index_topk": top_k})
            rotation = (angles.cos(), angles.sin())
            made_of = (x,) if takes_input else (x, low)
            found: Tensor = twin.run(small, *made_of, rotation, mask, positions, **{compat.CACHE: index})
        return found

    all_places, few = chosen(mask, _PLACES), chosen(mask, 5)
    added = chosen(
        torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min),
        _PLACES,
    )
    split = queries.view(1, _TOKENS, heads, size).transpose(1, 2)
    if positions is not None:
        split = grown(children[GROWTH], split, positions)
    given = {"wq_b": low, "wk": x, "weights_proj": x, **({_INPUT_NORM: x} if takes_input else {})}
    takes = all(torch.equal(seen[name], value) for name, value in given.items())

    def turns(x: Tensor, rope: str, at_end: bool) -> Tensor:
        first = size - rotary if at_end else 0
        before, middle, behind = x.split([first, rotary, size - rotary - first], -1)
        return torch.cat([before, rotate(rope, middle, (angles.cos(), angles.sin())), behind], -1)

    kinds = [(rope, at_end) for at_end in (False, True) for rope in ("halves", "neighbours", "none")]
    for rope, at_end in kinds:
        turned = [turns(part, rope, at_end) for part in (split, torch.tanh(key)[:, None])]
        products = torch.relu(turned[0] @ index.held[:, None].mT)  # [1, heads, m, n]
        scores = (weights.transpose(1, 2)[..., None] * products).sum(1).masked_fill(~mask, -torch.inf)
        best = scores.sort(-1, descending=True).values
        agrees = takes and torch.allclose(index.given, turned[1][:, 0], atol=1e-6)
        for found in (all_places, added, few):
            # Of places that tie, any may come first; behind those that are seen, any masked ones.
            reached = scores.gather(-1, found.long())
            agrees = agrees and torch.allclose(reached, best[..., : found.shape[-1]], atol=1e-5)
        if agrees:
            return rope, at_end
    return None
