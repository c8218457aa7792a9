"""What a latent attention module computes, found out by running a small copy of it.

Names and flags are not believed: a family may scale its queries by position, add an indexer or normalise somewhere
else, under the same child names. A copy of the module's own class at toy sizes is run beside the formula below, with
and without a cache; only where both agree is the module served.

    q            = q_b(norm(q_a(x))) or q_proj(x), a head: [q_nope, rope(q_rope)]
    latent, k    = norm(first kv_lora_rank of kv_a(x)), rope(the rest of it, one for all heads)   ← what is cached
    k_nope, v    = kv_b(latent), a head
    out          = o(softmax(scaling * (q_nope · k_nope + q_rope · k)) v)
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ktinject.errors import few

# Sizes of the small copy; no two are equal, so that an exchange of them shows.
_SMALL = {
    "hidden_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 18,
    "head_dim": 8,
    "v_head_dim": 14,
}
# fp64 on both sides, but for norms and softmax, which transformers computes in fp32.
_TOLERANCE = 1e-5
# A position at which families that scale by it do so.
_FAR = 20_000

QUERY = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm")
EXPANSION = "kv_b_proj"
OUTPUT = "o_proj"
CHILDREN = (*QUERY, *LATENT, EXPANSION, OUTPUT)

Positions = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class LatentSpec:
    """Sizes are values a head, but for the two ranks.

    rope      which pairs of values are turned together: halves (i, i + n/2) or neighbours (2i, 2i + 1); complex:
              neighbours, by complex numbers, left where they are; none
    dropout   of attention weights, in training
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


def rotate(kind: str, x: Tensor, positions: Positions) -> Tensor:
    """Rotary embedding of x [b, heads, m, n].

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
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


Attention = Callable[[nn.Module, LatentSpec], Callable[..., Tensor]]

# Module → what it looked like when it was tried out, and what came of it.
_tried: weakref.WeakKeyDictionary[nn.Module, tuple[LatentSpec, LatentSpec | str]] = (
    weakref.WeakKeyDictionary()
)


def describe(module: nn.Module, attention: Attention) -> LatentSpec | str:
    """What the module computes, or the reason why it is not latent attention as above, without its full stop.

    attention   (module, spec) → the forward to compare with; called with the module's own arguments
    """
    layout = _layout(module)
    if isinstance(layout, str):
        return layout
    if module not in _tried or _tried[module][0] != layout:
        _tried[module] = (layout, _try_out(module, layout, attention))
    return _tried[module][1]


def _try_out(module: nn.Module, layout: LatentSpec, attention: Attention) -> LatentSpec | str:
    small = _small_copy(module, layout)
    if isinstance(small, str):
        return small
    twin, sizes = small
    differences = []
    error: Exception | None = None
    for rope in ("halves", "neighbours", "complex", "none"):
        spec = dataclasses.replace(sizes, rope=rope)
        try:
            differences.append(_difference(twin, attention(twin, spec), rope))
        except Exception as failure:  # transformers' own code, given what it may not be made for
            error = failure
            continue
        if differences[-1] <= _TOLERANCE:
            return dataclasses.replace(layout, rope=rope)
    if not differences:
        return f"a small copy of it does not run: {error}"
    return f"it computes something else than latent attention: max difference {min(differences):.1e}"


def _layout(module: nn.Module) -> LatentSpec | str:
    """The sizes, from the children's shapes and the config."""
    children = dict(module.named_children())
    has_query = "q_proj" in children or {"q_a_proj", "q_a_layernorm", "q_b_proj"} <= children.keys()
    absent = [name for name in (*LATENT, EXPANSION, OUTPUT) if name not in children]
    if absent or not has_query:
        absent += [] if has_query else ["q_proj, or q_a_proj, q_a_layernorm and q_b_proj"]
        return f"it has no {', '.join(absent)}: it is no latent attention with DeepSeek's children"
    extra = [name for name in children if name not in CHILDREN]
    extra += [
        name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    ]
    if extra:
        return f"it also holds {', '.join(few(extra))}, which absorbed_mla would lose"
    config = getattr(module, "config", None)
    sizes: dict[str, Any] = {
        name: getattr(module, name, None) for name in ("num_heads", *list(_SMALL)[4:7], "v_head_dim")
    }
    wrong = [name for name, value in sizes.items() if type(value) is not int or value < 1]
    if wrong or config is None or not isinstance(getattr(module, "scaling", None), float):
        return f"it does not state {', '.join(wrong) or 'its config and scaling'}"
    expansion = children[EXPANSION]
    outputs = sizes["num_heads"] * (sizes["qk_nope_head_dim"] + sizes["v_head_dim"])
    if not isinstance(expansion, nn.Linear) or expansion.bias is not None:
        return f"its {EXPANSION} is a {type(expansion).__name__}; a Linear without bias is needed"
    if (expansion.out_features, expansion.in_features) != (outputs, sizes["kv_lora_rank"]):
        found = [expansion.out_features, expansion.in_features]
        return f"its {EXPANSION} is {found}; its sizes ask for {[outputs, sizes['kv_lora_rank']]}"
    if expansion.weight.dtype.itemsize == 1:
        return f"its {EXPANSION} is {expansion.weight.dtype}: it is quantised; inject into the plain model"
    if not getattr(module, "is_causal", True):
        return "it is not causal"
    query = children.get("q_a_proj")
    return LatentSpec(
        num_heads=sizes["num_heads"],
        q_lora_rank=None if query is None else query.out_features,
        kv_lora_rank=sizes["kv_lora_rank"],
        qk_nope_head_dim=sizes["qk_nope_head_dim"],
        qk_rope_head_dim=sizes["qk_rope_head_dim"],
        v_head_dim=sizes["v_head_dim"],
        layer_idx=getattr(module, "layer_idx", 0) or 0,
        scaling=module.scaling,
        rope="none",
        dropout=float(getattr(module, "attention_dropout", 0.0)),
    )


def _small_copy(module: nn.Module, layout: LatentSpec) -> tuple[nn.Module, LatentSpec] | str:
    """A module of the same class and config at toy sizes with Gaussian weights in fp64, and its spec."""
    config: Any = copy.deepcopy(module.config)
    for name, size in _SMALL.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    config._attn_implementation = "eager"
    try:
        with torch.device("cpu"):
            twin = type(module)(config, layout.layer_idx)
    except Exception as error:  # transformers' own code on sizes that it may not be made for
        return f"a small copy of it cannot be built: {error}"
    # Without touching the global random state.
    random = torch.Generator().manual_seed(0)
    for parameter in twin.double().parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else noise * parameter.shape[-1] ** -0.5)
    sizes = _layout(twin)
    return sizes if isinstance(sizes, str) else (twin.eval(), sizes)


@torch.no_grad()
def _difference(module: nn.Module, attention: Callable[..., Tensor], rope: str) -> float:
    """The greatest difference of outputs and of what is cached, on two sequences, a prompt and the token after it."""
    random = torch.Generator().manual_seed(1)
    n = _SMALL["qk_rope_head_dim"]
    x = torch.randn(2, 6, _SMALL["hidden_size"], generator=random, dtype=torch.float64)
    angles = torch.rand(2, 6, n // 2, generator=random, dtype=torch.float64) * 6
    mask = torch.full((2, 1, 6, 6), torch.finfo(torch.float64).min, dtype=torch.float64).triu(1)
    mask[1, 0, 2:, 0] = torch.finfo(torch.float64).min
    taken = inspect.signature(type(module).forward).parameters

    def at(start: int, stop: int) -> dict[str, Any]:
        here = angles[:, start:stop]
        # transformers rotates by complex numbers in fp32.
        positions: Positions = torch.polar(torch.ones_like(here), here).to(torch.complex64)
        if rope != "complex":
            both = torch.cat([here, here], -1)
            positions = (both.cos(), both.sin())
        return {
            "hidden_states": x[:, start:stop],
            "position_embeddings": positions,
            "attention_mask": mask[:, :, start:stop, :stop],
            "position_ids": torch.arange(_FAR + start, _FAR + stop).expand(2, -1),
        }

    def run(forward: Callable[..., Any], names: Any) -> list[Tensor]:
        def call(arguments: dict[str, Any]) -> Tensor:
            if names is not None:
                arguments = {name: value for name, value in arguments.items() if name in names}
            result = forward(**arguments)
            return result[0] if isinstance(result, tuple) else result

        cache = DynamicCache()
        outputs = [call(at(0, 6) | {"past_key_values": None})]
        outputs += [call(at(*part) | {"past_key_values": cache}) for part in ((0, 5), (5, 6))]
        layer = cache.layers[module.layer_idx]
        return [*outputs, layer.keys, layer.values]

    keywords = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    theirs = run(module, None if keywords else taken)
    ours = run(attention, None)
    if [a.shape for a in theirs] != [b.shape for b in ours]:
        return inf
    return max(((a - b).abs() / (1 + b.abs())).max().item() for a, b in zip(theirs, ours))
