"""Latent attention as DeepSeek has it: its children, its sizes and the formula. attention.py finds out which modules
compute that.

DeepSeek-V3.2's attention holds an indexer, which gives the places that each token attends to; GLM-5's may be given
those of a layer before. What the indexer computes is its own affair.

    q            = q_b(norm(q_a(x))) or q_proj(x), a head: [q_nope, rope(q_rope)], or that times what its position says
    latent, k    = norm(first kv_lora_rank of kv_a(x)), rope(the rest of it, one for all heads)   ← what is cached
                   dots3-note multiplies what the norms give with numbers, norms the rest, too, and gates the heads
    k_nope, v    = kv_b(latent), a head
    out          = o(softmax(scaling * (q_nope · k_nope + q_rope · k)) v)     over the chosen places, or all
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import Cache

from ktinject.hf import compat

QUERY = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm")
EXPANSION = "kv_b_proj"
OUTPUT = "o_proj"
INDEXER = "indexer"
GROWTH = "softmax_scaling"
KEY_NORM, GATE = "k_rope_only_layernorm", "g_proj"
KEPT = (*QUERY, *LATENT, OUTPUT, INDEXER, GROWTH, KEY_NORM, GATE)
CHILDREN = (*KEPT, EXPANSION)
# What a layer without an indexer of its own is given.
GIVEN = "prev_topk_indices"

Positions = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class LatentSpec:
    """Sizes are values a head, but for the two ranks.

    rope      which pairs of values are turned together: halves (i, i + n/2) or neighbours (2i, 2i + 1); complex:
              neighbours, by complex numbers, left where they are; none
    dropout   of attention weights, in training
    chooses   whose choice of places it attends to: of its own indexer, or one that it is given; none: all places
    hands_on  its forward returns that choice behind its output and the weights
    tuned     (e, f) of queries that are multiplied with 1 + f · log(1 + floor(position / e)); or none
    grows     queries are multiplied with what the child `softmax_scaling` gives their positions, see `grown`
    factors   that the normed low-rank query and the normed latent are multiplied with
    has_key_norm  the child `k_rope_only_layernorm` norms the rotary key before it is turned
    has_gate  the child `g_proj` gives each head a value, whose sigmoid the head's output is multiplied with
    """

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    layer_idx: int
    scaling: float
    rope: str
    dropout: float
    chooses: Literal["none", "own", "given"] = "none"
    hands_on: bool = False
    tuned: tuple[float, float] | None = None
    grows: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    has_key_norm: bool = False
    has_gate: bool = False

    @property
    def by_position(self) -> bool:
        """Whether queries depend on their positions, beside the rotation."""
        return self.tuned is not None or self.grows


def rotate(kind: str, x: Tensor, positions: Positions) -> Tensor:
    """Rotary embedding of x [b, heads, m, n], in x's dtype.

    positions   (cos, sin) [b, m, n] each, both halves alike; complex [b, m, n / 2] for the kind `complex`
    """
    if kind == "none":
        return x
    if kind == "complex":
        assert isinstance(positions, Tensor)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * positions.to(x.device)[:, None]).flatten(-2).type_as(x)
    assert isinstance(positions, tuple)
    n = x.shape[-1] // 2
    cos, sin = (table[:, None, :, :n] for table in positions)
    a, b = (x[..., ::2], x[..., 1::2]) if kind == "neighbours" else (x[..., :n], x[..., n:])
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def at_positions(spec: LatentSpec, module: Any, q: Tensor, positions: Tensor) -> Tensor:
    """Queries q [b, heads, m, n] at positions [b or 1, m], as the spec has them. module: holds `softmax_scaling`."""
    if spec.tuned is not None:
        every, factor = spec.tuned
        times = 1 + factor * torch.log(1 + torch.floor(positions.float() / every))
        q = q * times[:, None, :, None].to(q.dtype)
    return grown(getattr(module, GROWTH), q, positions) if spec.grows else q


def grown(by: Any, q: Tensor, positions: Tensor) -> Tensor:
    """Queries q [b, heads, m, n] times scale · log(position + 1) + bias, [heads] each."""
    logs = (positions + 1).float().log().to(q.dtype)[:, None]
    times = by.scale.to(q.dtype)[:, None] * logs + by.bias.to(q.dtype)[:, None]
    return q * times[..., None]


def low_query(module: Any, spec: LatentSpec, x: Tensor) -> Tensor | None:
    """[b, m, q_lora_rank] of x [b, m, hidden]: what q_b_proj takes, if there is one."""
    if spec.q_lora_rank is None:
        return None
    low: Tensor = module.q_a_layernorm(module.q_a_proj(x))
    return low if spec.factors[0] == 1.0 else low * spec.factors[0]


def cached(module: Any, spec: LatentSpec, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of x [b, m, hidden]: latents [b, 1, m, kv_lora_rank] as they are cached, and rotary keys, not yet turned."""
    latent, key = module.kv_a_proj_with_mqa(x)[:, None].split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
    latent = module.kv_a_layernorm(latent)
    latent = latent if spec.factors[1] == 1.0 else latent * spec.factors[1]
    return latent, getattr(module, KEY_NORM)(key) if spec.has_key_norm else key


def gated(module: Any, spec: LatentSpec, out: Tensor, x: Tensor) -> Tensor:
    """The heads' outputs [b, m, heads, v] for x [b, m, hidden], behind their gates if there are any."""
    return out * getattr(module, GATE)(x)[..., None].sigmoid() if spec.has_gate else out


def choice(indexer: Any, x: Tensor, low: Tensor | None, *others: Any, cache: Any) -> Tensor:
    """[b, m, k]: the places that an indexer gives for x [b, m, hidden], or of what is made of it, `low`.

    others  rotation, mask [b or 1, m, s], position_ids
    """
    made_of = (x,) if low is None else (x, low)
    found: Tensor = indexer(*made_of, *others, **{compat.CACHE: cache})
    return found


def attended(mask: Tensor, chosen: Tensor) -> Tensor:
    """A mask [b or 1, 1, m, s], of bool or to be added to scores, that hides what is not chosen, too.

    chosen   [b, m, k]: places
    """
    shape = (len(chosen), chosen.shape[1], mask.shape[-1])
    others = torch.ones(shape, dtype=torch.bool, device=mask.device).scatter(-1, chosen.long(), False)[
        :, None
    ]
    return (
        mask & ~others if mask.dtype == torch.bool else mask.masked_fill(others, torch.finfo(mask.dtype).min)
    )


def formula(
    module: Any,
    spec: LatentSpec,
    hidden_states: Tensor,
    position_embeddings: Positions,
    attention_mask: Tensor,
    cache: Cache | None,
    chosen: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The formula above on the module's children: hidden_states [b, m, hidden] → [b, m, hidden], and the choice.

    chosen   [b, m, k]: places that are attended to, of a layer that is given them
    """
    heads, low = (spec.num_heads, -1), low_query(module, spec, hidden_states)
    q = module.q_proj(hidden_states) if low is None else module.q_b_proj(low)
    q_nope, q_rope = (
        q.unflatten(-1, heads).transpose(1, 2).split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
    )
    latent, k_rope = cached(module, spec, hidden_states)
    q_rope, k_rope = (rotate(spec.rope, part, position_embeddings) for part in (q_rope, k_rope))
    if spec.by_position:
        assert position_ids is not None
        q_nope, q_rope = (at_positions(spec, module, part, position_ids) for part in (q_nope, q_rope))
    if cache is not None:
        latent, k_rope = cache.update(latent, k_rope, spec.layer_idx)
    kv = module.kv_b_proj(latent[:, 0]).unflatten(-1, heads).transpose(1, 2)
    k_nope, v = kv.split([spec.qk_nope_head_dim, spec.v_head_dim], -1)
    if spec.chooses == "own":
        others = (position_embeddings, attention_mask[:, 0], position_ids)
        chosen = choice(module.indexer, hidden_states, low, *others, cache=cache)
    if chosen is not None:
        attention_mask = attended(attention_mask, chosen)
    scores = spec.scaling * (q_nope @ k_nope.mT + q_rope @ k_rope.mT) + attention_mask
    found = gated(module, spec, (scores.softmax(-1) @ v).transpose(1, 2), hidden_states)
    out: Tensor = module.o_proj(found.flatten(2))
    return out, chosen
