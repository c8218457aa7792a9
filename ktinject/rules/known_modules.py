"""Modules as KTransformers 0.x files mean them, of no model in particular.

They are enough to see which of two rules comes first, and whether a rule finds anything at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from ktinject.rules.legacy import LegacyRule
from ktinject.rules.pattern import fullmatch

# Layers that files tell apart: the first ones, and those around the borders between GPUs.
_LAYERS = (0, 1, 2, 3, 9, 10, 15, 25, 30, 45, 60, 93)
_IN_LAYER = {
    "": (), ".self_attn": ("attention",), ".self_attn.rotary_emb": ("rotary",), ".input_layernorm": ("norm",),
    ".post_attention_layernorm": ("norm",), ".self_attn.q_a_layernorm": ("norm",), ".mlp": ("block", "mlp"),
    ".mlp.gate": ("router", "linear"), ".mlp.experts": ("experts",), ".mlp.shared_experts": ("mlp",),
    ".mlp.shared_expert": ("mlp",), ".mlp.shared_expert_gate": ("linear",), ".linear_attn": ("attention",),
    ".linear_attn.out_proj": ("linear",), ".block_sparse_moe": ("block",),
    ".block_sparse_moe.gate": ("router", "linear"),
    ".block_sparse_moe.experts": ("experts",), ".feed_forward": ("block", "mlp"),
    ".feed_forward.experts": ("experts",), ".feed_forward.router": ("router", "linear"),
    ".mlp.router": ("router", "linear"), ".linear_attn.in_proj_qkvz": ("linear",),
    **{f".self_attn.{name}": ("linear",) for name in (
        "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")},
    **{f".mlp.{inner}{name}_proj": ("linear",) for inner in ("", "shared_experts.", "shared_expert.")
       for name in ("gate", "up", "down")},
}  # fmt: skip
MODULES: dict[str, tuple[str, ...]] = {
    "model": ("model",), "model.embed_tokens": ("embedding",), "model.norm": ("norm",), "model.rotary_emb": ("rotary",),
    "lm_head": ("linear",), "model.layers": (),
    **{f"model.layers.{layer}{tail}": kinds for layer in _LAYERS for tail, kinds in _IN_LAYER.items()},
}  # fmt: skip
"""Path → what the module may be for. Classes of the authors' own models are known by what they are for."""

_SECONDS = 0.4
# What is in the name of a class that is matched → what such modules are for. The first that is found counts.
_KINDS = (
    ("rotary", "rotary"), ("norm", "norm"), ("delta", "attention"), ("attention", "attention"), ("experts", "experts"),
    ("router", "router"), ("gate", "router"), ("mlp", "mlp"), ("embedding", "embedding"), ("model", "model"),
    ("moe", "block"),
)  # fmt: skip


def kind_of(class_name: str) -> str | None:
    """What modules of a class are for, by its name; None if it does not tell."""
    if class_name == "Linear":
        return "linear"
    return next((kind for part, kind in _KINDS if part in class_name.lower()), None)


def hits(rules: Sequence[LegacyRule], linear_routers: bool) -> dict[int, list[str]] | None:
    """Number of a rule → paths of the known modules that it matches; None if that takes too long.

    A rule whose class tells nothing is left out.

    linear_routers  whether routers are linear layers
    """
    end = time.thread_time() + _SECONDS
    found: dict[int, list[str]] = {}
    try:
        for rule in rules:
            if rule.of_class and not kind_of(rule.of_class):
                continue
            found[rule.number] = []
            for path in _matched(rule, linear_routers):
                found[rule.number].append(path)
            if time.thread_time() > end:
                return None
    except TimeoutError:
        return None
    return found


def _matched(rule: LegacyRule, linear_routers: bool) -> Iterator[str]:
    kind = kind_of(rule.of_class) if rule.of_class else None
    for path, kinds in MODULES.items():
        if not linear_routers and "router" in kinds:
            kinds = ("router",)
        if rule.of_class and kind not in kinds:
            continue
        if rule.path is None or fullmatch(rule.path, path):
            yield path
