"""What a latent attention module computes, found out by running a small copy of it.

Names and flags are not believed: a family may scale its queries by position, add an indexer or normalise somewhere
else, under the same child names. A copy of the module's own class at toy sizes is run beside that of
latent_formula.py, with and without a cache; only where both agree is the module served.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ktinject.errors import few
from ktinject.hf import compat
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import Memory, PassingRefusal, answered_once, key_of, refusal_of
from ktinject.operators.probes.comparison import Tolerance, difference
from ktinject.operators.probes.latent_formula import (
    CHILDREN,
    EXPANSION,
    GATE,
    GIVEN,
    GROWTH,
    INDEXER,
    KEY_NORM,
    LATENT,
    OUTPUT,
    LatentSpec,
    Positions,
    formula,
)
from ktinject.support import Support

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
    "index_head_dim": 12,
    "index_n_heads": 2,
    "index_topk": 3,
}
_TOLERANCE = Tolerance(
    1e-5, "fp64 on both sides, but for norms and softmax, which transformers computes in fp32"
)
# A position at which families that scale by it do so.
_FAR = 20_000
# What a module calls that which it multiplies the normed low-rank query and latent with.
_FACTORS = ("q_lora_scale", "kv_lora_scale")
# What layers that share keys hand on.
_SHARED = "shared_kv_states"
# What their configs call the steps of that, and how much each counts.
_STEPS = ("original_max_position_embeddings", "llama_4_scaling_beta")


class _Hidden:
    """Stands for the index of a layer where that is only handed on to a cache. Whatever else is done with it raises."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def _used(self, *_: Any) -> Any:
        raise TypeError("the index of the layer is used")

    __bool__ = __eq__ = __str__ = __repr__ = __format__ = _used


_HIDDEN = _Hidden()


class _OneLayer(DynamicCache):
    """A cache of one layer, whichever it is called."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, 0, *args, **kwargs)
        return found

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: Any) -> Tensor:
        held = [*getattr(self, "index", ()), indexer_key_states]
        self.index = [torch.cat(held, dim=1)]
        return self.index[0]


@answered_once
def probe(module: nn.Module) -> LatentSpec | Support:
    """What a module computes that is latent attention as above."""
    layout = _layout(module)
    if isinstance(layout, Support):
        return layout
    try:
        with twin.on_cpu():
            small = twin.small(module, _SMALL, layout.layer_idx)
    except Exception as error:  # transformers' own code on sizes that it may not be made for
        return refusal_of(error, "a small copy of it cannot be built")
    found = _shared_way(small)
    return found if isinstance(found, Support) else dataclasses.replace(layout, rope=found[0], tuned=found[1])


# The kind of rotary embedding, and what queries are multiplied with.
_Way = tuple[str, tuple[float, float] | None]
_ways: Memory[_Way | PassingRefusal | None] = Memory()


def _shared_way(small: nn.Module) -> _Way | Support:
    """`_way`, found once for small copies that differ in nothing but the index of their layer.

    They share the answer if it is found while the index is hidden: then it cannot depend on it. What the class made of
    the index when the copy was built, such as a window in some layers, are attributes, and tell copies apart.
    """
    index = vars(small).get("layer_idx")
    holders = [module for module in small.modules() if "layer_idx" in vars(module)]
    for holder in holders:
        vars(holder)["layer_idx"] = _HIDDEN

    def way() -> _Way | PassingRefusal | None:
        found = _way(small)
        return found if isinstance(found, (tuple, PassingRefusal)) else None

    found = _ways.once(key_of(small), way)
    for holder in holders:
        vars(holder)["layer_idx"] = index
    return _way(small) if found is None else found


def _tuned_by(config: Any) -> tuple[float, float] | None:
    """What a config says that queries are multiplied with."""
    said = getattr(config, "rope_parameters", None)
    every, factor = (said.get(name) if isinstance(said, dict) else None for name in _STEPS)
    if not isinstance(every, (int, float)) or not isinstance(factor, (int, float)) or every < 1:
        return None
    return (float(every), float(factor)) if factor else None


def _way(small: Any) -> _Way | Support:
    """With which the formula is what a small copy computes."""
    sizes = _layout(small)
    if isinstance(sizes, Support):
        return sizes
    differences = []
    failed: Support | None = None
    by = _tuned_by(small.config)
    ways: list[_Way] = [
        (rope, one)
        for one in ((None,) if by is None else (None, by))
        for rope in (("halves", "neighbours", "complex", "none") if sizes.qk_rope_head_dim else ("none",))
    ]
    # Beside a place far behind: where what queries are multiplied with is first another, and where nothing is.
    starts = (_FAR,) if by is None else (_FAR, max(0, int(by[0]) - 3), 0)
    for rope, one in ways:
        spec = dataclasses.replace(sizes, rope=rope, tuned=one)
        try:
            differences.append(max(_difference(small, spec, start) for start in starts))
        except Exception as error:  # transformers' own code, given what it may not be made for
            failed = refusal_of(error, "a small copy of it does not run")
            if isinstance(failed, PassingRefusal):
                return failed
            continue
        if _TOLERANCE.allows(differences[-1]):
            return rope, one
    if failed is not None and not differences:
        return failed
    return Support.no(
        f"it computes something else than latent attention: max difference {min(differences):.1e}"
    )


def _layout(module: nn.Module) -> LatentSpec | Support:
    """The sizes, from the children's shapes and the config."""
    children = dict(module.named_children())
    has_query = "q_proj" in children or {"q_a_proj", "q_a_layernorm", "q_b_proj"} <= children.keys()
    absent = [name for name in (*LATENT, EXPANSION, OUTPUT) if name not in children]
    if absent or not has_query:
        absent += [] if has_query else ["q_proj, or q_a_proj, q_a_layernorm and q_b_proj"]
        return Support.no(
            f"it has no {', '.join(absent)}: it is no latent attention with DeepSeek's children"
        )
    extra = [name for name in children if name not in CHILDREN]
    extra += [
        name for name, _ in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    ]
    if extra:
        return Support.no(f"it also holds {', '.join(few(extra))}, which absorbed_mla would lose")
    config = getattr(module, "config", None)
    sizes: dict[str, Any] = {
        name: getattr(module, name, None) for name in ("num_heads", *list(_SMALL)[4:7], "v_head_dim")
    }
    wrong = [
        name
        for name, value in sizes.items()
        if type(value) is not int or value < (name != "qk_rope_head_dim")  # of which some layers have none
    ]
    if wrong or config is None or not isinstance(getattr(module, "scaling", None), float):
        return Support.no(f"it does not state {', '.join(wrong) or 'its config and scaling'}")
    expansion = children[EXPANSION]
    outputs = sizes["num_heads"] * (sizes["qk_nope_head_dim"] + sizes["v_head_dim"])
    if not isinstance(expansion, nn.Linear) or expansion.bias is not None:
        return Support.no(f"its {EXPANSION} is a {type(expansion).__name__}; a Linear without bias is needed")
    if (expansion.out_features, expansion.in_features) != (outputs, sizes["kv_lora_rank"]):
        found = [expansion.out_features, expansion.in_features]
        return Support.no(f"its {EXPANSION} is {found}; its sizes ask for {[outputs, sizes['kv_lora_rank']]}")
    if expansion.weight.dtype.itemsize == 1:
        return Support.no(
            f"its {EXPANSION} is {expansion.weight.dtype}: it is quantised; inject into the plain model"
        )
    if not getattr(module, "is_causal", True):
        return Support.no("it is not causal")
    query, layer_idx = children.get("q_a_proj"), getattr(module, "layer_idx", None)
    takes_choice = GIVEN in inspect.signature(type(module).forward).parameters
    grows = children[GROWTH].named_parameters() if GROWTH in children else ()
    held = {name: [*tensor.shape] for name, tensor in grows}
    if GROWTH in children and held != {name: [sizes["num_heads"]] for name in ("scale", "bias")}:
        return Support.no(f"its {GROWTH} holds something else than a scale and a bias a head")
    return LatentSpec(
        num_heads=sizes["num_heads"],
        q_lora_rank=None if query is None else query.out_features,
        kv_lora_rank=sizes["kv_lora_rank"],
        qk_nope_head_dim=sizes["qk_nope_head_dim"],
        qk_rope_head_dim=sizes["qk_rope_head_dim"],
        v_head_dim=sizes["v_head_dim"],
        layer_idx=layer_idx if isinstance(layer_idx, int) else 0,
        scaling=module.scaling,
        rope="none",
        dropout=float(getattr(module, "attention_dropout", 0.0)),
        chooses="own" if INDEXER in children else "given" if takes_choice else "none",
        hands_on=takes_choice,
        grows=GROWTH in children,
        factors=(float(getattr(module, _FACTORS[0], 1.0)), float(getattr(module, _FACTORS[1], 1.0))),
        has_key_norm=KEY_NORM in children,
        has_gate=GATE in children,
    )


@torch.no_grad()
def _difference(module: nn.Module, spec: LatentSpec, far: int) -> float:
    """The greatest difference of outputs and of what is cached, on two sequences, a prompt and the token after it, of
    which the first is at a position so far behind.

    What is cached is not compared where a module caches heads' keys and values (transformers 5.17, with an index).
    """
    taken, shared = inspect.signature(type(module).forward).parameters, {}  # type: ignore[var-annotated]
    random = torch.Generator().manual_seed(1)
    n = spec.qk_rope_head_dim
    x = torch.randn(2, 6, _SMALL["hidden_size"], generator=random, dtype=torch.float64, device="cpu")
    angles = torch.rand(2, 6, n // 2, generator=random, dtype=torch.float64, device="cpu") * 6
    mask = torch.full((2, 1, 6, 6), torch.finfo(torch.float64).min, dtype=torch.float64, device="cpu").triu(1)
    mask[1, 0, 2:, 0] = torch.finfo(torch.float64).min
    # Its own place and two before it, or some that are hidden.
    given = (
        (torch.arange(6, device="cpu")[:, None] - torch.tensor([0, 1, 3], device="cpu"))
        .clamp(min=0)
        .expand(2, -1, -1)
        .int()
    )

    def at(start: int, stop: int) -> dict[str, Any]:
        here = angles[:, start:stop]
        # transformers rotates by complex numbers in fp32.
        positions: Positions = torch.polar(torch.ones_like(here), here).to(torch.complex64)
        if spec.rope != "complex":
            both = torch.cat([here, here], -1)
            positions = (both.cos(), both.sin())
        return {
            "hidden_states": x[:, start:stop],
            "position_embeddings": positions,
            "attention_mask": mask[:, :, start:stop, :stop],
            "position_ids": torch.arange(far + start, far + stop, device="cpu").expand(2, -1),
            **({GIVEN: given[:, start:stop]} if spec.hands_on else {}),
            **({_SHARED: shared} if _SHARED in taken else {}),
        }

    def run(forward: Callable[..., Any], names: Collection[str]) -> list[Tensor]:
        def call(arguments: dict[str, Any]) -> list[Tensor]:
            result = forward(**{name: value for name, value in arguments.items() if name in names})
            held = [result[2].double()] if spec.hands_on else []
            return [result[0] if isinstance(result, tuple) else result, *held]

        cache = _OneLayer()
        outputs = call(at(0, 6) | {compat.CACHE: None})
        outputs += [one for part in ((0, 5), (5, 6)) for one in call(at(*part) | {compat.CACHE: cache})]
        layer: Any = cache.layers[0]
        is_latent = layer.keys.shape[1] == 1 or spec.chooses == "none"
        return [*outputs, *getattr(cache, "index", ()), *((layer.keys, layer.values) if is_latent else ())]

    keywords = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    theirs = run(module, (*at(0, 6), compat.CACHE) if keywords else taken)
    if shared:
        raise ValueError("other layers attend to what it keeps")

    def ours_by(**arguments: Any) -> Any:
        choice, cache = arguments.pop(GIVEN, None), arguments.pop(compat.CACHE)
        chosen = choice if spec.chooses == "given" else None
        out, chosen = formula(module, spec, cache=cache, chosen=chosen, **arguments)
        return out, None, chosen

    ours = run(ours_by, (*inspect.signature(formula).parameters, compat.CACHE, GIVEN))
    return max(difference(a, b) for a, b in zip(theirs, ours))
