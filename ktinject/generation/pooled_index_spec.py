"""What an index computes that chooses pools of tokens, each by one key (GLM-5.3-Flash).

    q           = wq_b(low), a head                                   low: what q_b_proj takes
    k, g        = k_norm(wk(x)), index_kpool_compress_gate x          ← cached, with 1 for a token, 0 for padding
    key         = Σ over a pool's tokens of softmax(g + index_kpool_compress_ape) k, each value for itself
    score       = Σ over heads of weights_proj(x) · heads^-½ · relu(softmax_scale · q · key)
    the choice  = the places of the complete pools with the greatest scores, as many as have `top_k` places,
                  and those of the last pool, where that is not complete

Pools are counted from a row's first token on that is no padding. That is found by running the class's own forward on a
twin whose children give random values.
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
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.support import Support

BIAS, GATE = "index_kpool_compress_ape", "index_kpool_compress_gate"
_CHILDREN = {"wq_b", "wk", "k_norm", "weights_proj"}
# Of a trial: new tokens, places with theirs, padding before the second row, and tokens of a pool.
_TOKENS, _PLACES, _PADDING, _POOL = 4, 44, 5, 3


@dataclass(frozen=True)
class PooledIndexSpec:
    """The formula above.

    size     values of a head, and of a key
    pool     tokens that share a key
    top_k    places that are chosen, beside those of a pool that is not complete
    epsilon  of k_norm, a layer norm with weight and bias
    scale    `softmax_scale`
    """

    heads: int
    size: int
    pool: int
    top_k: int
    epsilon: float
    scale: float


def is_one(module: Any) -> bool:
    """Whether a module looks like such an index."""
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    return parameters == {BIAS, GATE} and {name for name, _ in module.named_children()} == _CHILDREN


@answered_once
@openmp.one_thread()
def of_index(module: nn.Module) -> PooledIndexSpec | Support:
    """The spec of an index of pools, or why it has none."""
    found: Any = module
    kind = type(module).__name__
    if not is_one(module):
        return Support.no(f"its {kind} is no index of pools with {BIAS} and {GATE}")
    names = ("n_heads", "head_dim", "index_kpool", "index_topk")
    sizes = [size for name in names if isinstance(size := getattr(module, name, None), int) and size > 0]
    scale = getattr(module, "softmax_scale", None)
    if len(sizes) < len(names) or not isinstance(scale, float):
        return Support.no(f"its {kind} has no {', '.join(names)} and softmax_scale")
    heads, size, pool, top_k = sizes
    if top_k % pool or getattr(module, BIAS).shape != (pool, size):
        return Support.no(f"its {kind} has an {names[3]} or a {BIAS} that its pools of {pool} do not fit")
    norm = found.k_norm
    if type(norm) is not nn.LayerNorm or norm.weight is None or norm.bias is None:
        return Support.no(f"a norm of its {kind} is no layer norm with a weight and a bias")
    try:
        agrees = _chooses(module, heads, size, scale)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    if not agrees:
        return Support.no(f"its {kind} chooses pools in another way")
    return PooledIndexSpec(heads, size, pool, top_k, norm.eps, scale)


class _Cache:
    """Stands for a cache that holds other tokens already, and gives these, too, for those that it is given."""

    def __init__(self, held: Tensor, index: int) -> None:
        layer = SimpleNamespace(
            keys=torch.empty(1, 1, held.shape[1], 1, dtype=torch.float32, device="cpu"),
            get_seq_length=lambda: held.shape[1],
        )
        self.held, self.given = held, held
        self.layers = {index: layer}

    def update_indexer(self, states: Tensor, *_: Any) -> Tensor:
        self.given = states
        return self.held


def _chooses(module: Any, heads: int, size: int, scale: float) -> bool:
    """Whether it chooses as the formula says, of a row without padding and one with some."""
    random = torch.Generator("cpu").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device="cpu", dtype=torch.float32)

    x, low = drawn(2, _TOKENS, 8), drawn(2, _TOKENS, 6)
    given = {"wq_b": drawn(2, _TOKENS, heads * size), "wk": drawn(2, _TOKENS, size)}
    given["weights_proj"] = drawn(2, _TOKENS, heads)
    held, gate, bias = drawn(2, _PLACES, 2 * size + 1), drawn(size, 8), drawn(_POOL, size)
    held[..., -1] = 1
    held[1, :_PADDING, -1] = 0
    cache = _Cache(held, module.layer_idx)
    seen: dict[str, Tensor] = {}

    def gives(name: str) -> nn.Module:
        def one(x: Tensor) -> Tensor:
            seen[name] = x
            return given[name]

        return layer_probes.Stub(one)

    children = {name: gives(name) for name in given}
    for child in children.values():
        child.weight = nn.Parameter(torch.empty(0, device="cpu", dtype=torch.float32), False)
    children["k_norm"] = layer_probes.Stub(torch.tanh)
    want = torch.cat(
        [torch.tanh(given["wk"]), x @ gate.T, torch.ones(2, _TOKENS, 1, dtype=torch.float32, device="cpu")],
        -1,
    )
    scores = _scores(given["wq_b"].unflatten(-1, (heads, size)), given["weights_proj"], held, bias, scale)
    for count in (1, 2, 3, 5, 40):
        sizes = {"index_topk": count * _POOL, "index_kpool": _POOL}
        with twin.on_cpu():
            small = twin.of(module, children, {BIAS: bias, GATE: gate}, sizes)
            mask = torch.ones(2, _TOKENS, dtype=torch.bool, device="cpu")
            found = twin.run(small, x, low, mask, **{compat.CACHE: cache})
        takes = all(seen[name] is (low if name == "wq_b" else x) for name in given)
        if not takes or not torch.allclose(cache.given, want, atol=1e-6):
            return False
        for row, first in enumerate((0, _PADDING)):
            for token in range(_TOKENS):
                wanted = _places(scores[row][token], first, _PLACES - _TOKENS + token + 1, count)
                if {*found[row, token].tolist()} - {-1} != wanted:
                    return False
    return True


def _scores(q: Tensor, weights: Tensor, held: Tensor, bias: Tensor, scale: float) -> list[Tensor]:
    """Of each row, those [m, pools] of its complete pools; q [b, m, heads, size], held [b, n, 2 · size + 1]."""
    found = []
    for row, first in enumerate((0, _PADDING)):
        pools = (held.shape[1] - first) // _POOL
        tokens = held[row, first : first + pools * _POOL].unflatten(0, (pools, _POOL))
        keys, gates = tokens[..., :-1].chunk(2, -1)
        keys = ((gates + bias).softmax(1) * keys).sum(1)
        products = torch.relu(scale * q[row] @ keys.T)  # [m, heads, pools]
        found.append((weights[row, :, :, None] * q.shape[2] ** -0.5 * products).sum(1))
    return found


def _places(scores: Tensor, first: int, seen: int, count: int) -> set[int]:
    """Those that a token attends to, which sees so many; so many pools are chosen."""
    complete = (seen - first) // _POOL
    best = scores[:complete].topk(min(count, complete)).indices.tolist()
    pools = {first + pool * _POOL + at for pool in best for at in range(_POOL)}
    return pools | {*range(first + complete * _POOL, seen)}
