"""What the feed-forward part of a decoder layer computes: dense layers, or a Mixture-of-Experts block.

As in layer_spec.py, children are found by the names that transformers gives them, and what they compute by running them
on twins (layer_probes.py, router_probes.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from ktinject.generation import layer_probes, router_kinds, router_probes, streams_spec
from ktinject.generation.cpu import openmp
from ktinject.generation.layer_probes import PLAIN, Gating
from ktinject.generation.norm_spec import NormSpec
from ktinject.operators import Operator
from ktinject.operators.cpu_router import CpuRouter
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import Memory, key_of
from ktinject.operators.stand_in import StandIn
from ktinject.support import Support

# What leads to a block's experts and back, as Nemotron-H calls it; identities where they are as wide as the model.
_NARROW = ("fc1_latent_proj", "fc2_latent_proj")
# A norm of what a block gives, within it, as A.X-K1 calls it.
_NORM_BEHIND = "post_mlp_layernorm"
# Blocks in one that has experts for text and others for images, as ERNIE-4.5-VL calls them.
_OF_TEXT, _OF_IMAGES = "text_moe", "vision_moe"
# A router as large as DeepSeek-V3's takes a while to try.
_routings: Memory[dict[str, Any] | Support] = Memory(most=64)
_gatings: Memory[Gating | Support] = Memory(most=64)


@dataclass(frozen=True)
class RouterSpec:
    """A choice of top_k of num_experts by the scores of weight · x, + bias where there is one.

    is_corrected   a buffer or parameter is added for the choice, not to the weights
    correction     its path below the router, or below the block, which gives it to the router
    of_block       it is the block's
    groups         of experts, of which the `top_groups` with the greatest sums of two take part; 1: no groups
    is_normed      the chosen weights are divided by their sum
    factor         that they are multiplied with at last
    rounds         they are in the dtype of the logits of a model in 16 bits; else in fp32
    has_bias       a bias is added to weight · x
    rounds_logits  of a model in 16 bits, weight · x is rounded before anything is made of it
    rounds_scores  and so are the scores
    weight         path of the weight below the router
    by_logits      the choice is by the logits, which scores may tie of
    norm           of what the router takes: an RMS norm whose weight, of the router, is at its path; or none
    input_factor   that what it takes is then multiplied with
    expert_factors a parameter of the router that the weights are multiplied with at last, each expert's; or none
    nearness       weights are of a softmax over experts near the best one, and for the second over those near that one
                   (router_kinds.py); 0: they are not
    scales_input   what an expert takes is multiplied with its weight, not what it gives
    table          a buffer [vocabulary, top_k] of the router, by which experts go by the token's number; or none
    """

    path: str
    scores: Literal["softmax", "sigmoid", "root_softplus"]
    num_experts: int
    top_k: int
    is_corrected: bool
    groups: int
    top_groups: int
    is_normed: bool
    factor: float
    rounds: bool
    has_bias: bool = False
    rounds_logits: bool = False
    rounds_scores: bool = False
    correction: str = "e_score_correction_bias"
    of_block: bool = False
    weight: str = "weight"
    by_logits: bool = False
    norm: NormSpec | None = None
    input_factor: float = 1.0
    expert_factors: str = ""
    nearness: float = 0.0
    scales_input: bool = False
    table: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether the router itself holds its weight, and whatever corrects its choice as DeepSeek-V3's is called; and
        scores are what its weights are made of."""
        others = (
            self.norm
            or self.input_factor != 1.0
            or self.expert_factors
            or self.nearness
            or self.scales_input
            or self.table
        )
        is_named = self.weight == "weight" and self.correction == "e_score_correction_bias"
        return is_named and not self.of_block and not others


@dataclass(frozen=True)
class DenseSpec:
    """down_proj(silu(gate_proj(x)) · up_proj(x)); or, without a gate, down_proj(relu(up_proj(x))²).

    names   of gate, up and down; of one layer that gives both gate and up, one behind the other, and of down; or of up
            and down
    gating  limits of gate and up, another activation, and what else there is beside their product
    """

    path: str
    names: tuple[str, ...] = layer_probes.GATED_UNITS[0]
    gating: Gating = PLAIN

    @property
    def has_gate(self) -> bool:
        return self.names != layer_probes.PLAIN_UNIT


@dataclass(frozen=True)
class MoeSpec:
    """The routed experts' sum, and the shared experts' output on top; of a block with others for images, on text.

    experts      path of the routed experts
    shared       None: there are none
    shared_gate  path of a linear layer to one value, whose sigmoid the shared output is multiplied with, or None
    narrow       paths of the linear layers to experts that are narrower than the model, and back; or none
    factors      that the routed sum is multiplied with, and then the whole
    norm         path of what all of that is given to at last, which `layer_spec` looks at, or None
    *_norms      of what the experts and the shared experts take, and of what they give
    """

    path: str
    router: RouterSpec
    experts: str
    shared: DenseSpec | None
    shared_gate: str | None
    narrow: tuple[str, ...] = ()
    factors: tuple[float, float] = (1.0, 1.0)
    norm: str | None = None
    experts_norms: tuple[NormSpec | None, NormSpec | None] = (None, None)
    shared_norms: tuple[NormSpec | None, NormSpec | None] = (None, None)


@dataclass(frozen=True)
class OtherFeedForward:
    """A feed-forward part that is not known; why."""

    path: str
    reason: str


FeedForwardSpec = DenseSpec | MoeSpec | OtherFeedForward


def of_feed_forward(module: nn.Module) -> FeedForwardSpec:
    """The spec of a feed-forward part, with an empty path; those of its parts are relative to it."""
    has_experts = hasattr(module, "experts") or hasattr(module, _OF_TEXT)
    found = of_moe(module) if has_experts else of_dense(module)
    return OtherFeedForward("", found.reason) if isinstance(found, Support) else found


def with_shared(spec: FeedForwardSpec, shared: DenseSpec | Support, path: str) -> FeedForwardSpec:
    """An MoE block's spec with shared experts at a path beside it. Paths are those of what holds both."""
    if isinstance(spec, OtherFeedForward):
        return spec
    if isinstance(shared, Support):
        return OtherFeedForward("", shared.reason)
    if not isinstance(spec, MoeSpec) or spec.shared or spec.norm or spec.factors != (1.0, 1.0):
        return OtherFeedForward(
            "", f"beside {path} stands something else than an MoE block without shared experts"
        )
    router = replace(spec.router, path=f"{spec.path}.{spec.router.path}")
    experts = f"{spec.path}.{spec.experts}"
    narrow = tuple(f"{spec.path}.{name}" for name in spec.narrow)
    return MoeSpec("", router, experts, replace(shared, path=path), None, narrow)


def of_dense(module: nn.Module) -> DenseSpec | Support:
    children = {name for name, _ in module.named_children()}
    units = layer_probes.GATED_UNITS
    names = next((names for names in units if {*names} <= children), None)
    plain = layer_probes.PLAIN_UNIT
    if names is None and {*plain} <= children:
        support = layer_probes.is_plain_squared_relu(module, plain)
        return DenseSpec("", plain) if support else support
    names = names or units[0]
    alone = twin.of(module)
    vars(alone)["_modules"] = {}
    others = [(name, key_of(child)) for name, child in module.named_children() if name not in names]
    key = (key_of(alone), names, *others, {*names} <= children)
    gating = _gatings.once(key, lambda: layer_probes.gating(module, names))
    return gating if isinstance(gating, Support) else DenseSpec("", names, gating)


@openmp.one_thread()
def of_moe(block: nn.Module) -> MoeSpec | Support:
    """The spec of a Mixture-of-Experts block, or why it has none."""
    names = {name for name, _ in block.named_children()}
    within = _OF_TEXT if {_OF_TEXT, _OF_IMAGES} <= names else ""
    holder = block.get_submodule(within)
    if within:
        names = names - {_OF_TEXT, _OF_IMAGES} | {name for name, _ in holder.named_children()}
    gate = "router" if "gate" not in names else "gate"
    shared = sorted(names & {"shared_experts", "shared_expert", "shared_mlp"})
    gated = names & {"shared_expert_gate"}
    narrow = tuple(
        name for name in _NARROW if not isinstance(getattr(block, name, None), (nn.Identity, type(None)))
    )
    norm = _NORM_BEHIND if _NORM_BEHIND in names else None
    if (
        names - {*shared} - gated - {*_NARROW, _NORM_BEHIND} != {gate, "experts"}
        or len(narrow) == 1
        or len(shared) > 1
        or len(gated) > len(shared)
    ):
        return Support.no(f"its {type(block).__name__} holds {', '.join(sorted(names))}")
    if isinstance(block, Operator):
        return Support.no(f"{block.name} routes by itself")
    dense = of_dense(block.get_submodule(shared[0])) if shared else None
    if isinstance(dense, Support):
        return dense
    found = _routing(block, within, gate, (*shared, *gated), narrow, norm)
    if isinstance(found, Support):
        return found
    found = dict(found)
    factors = found.pop("factors")
    inside = f"{within}." if within else ""
    return MoeSpec(
        path="",
        router=RouterSpec(inside + gate, **found),
        factors=factors,
        experts=inside + "experts",
        shared=None if dense is None else replace(dense, path=shared[0]),
        shared_gate="shared_expert_gate" if gated else None,
        narrow=narrow,
        norm=norm,
    )


def _routing(
    block: nn.Module,
    within: str,
    name: str,
    shared: tuple[str, ...],
    narrow: tuple[str, ...],
    norm: str | None,
) -> dict[str, Any] | Support:
    """What `router_probes.routing` says, once. within: the path of what holds router and experts."""
    holder = block.get_submodule(within)
    router = _plain_router(holder.get_submodule(name))
    alone = [twin.of(block), twin.of(holder)]
    for one in alone:
        vars(one)["_modules"] = {}
    key = (*map(key_of, alone), within, name, key_of(router), shared, narrow, norm)
    if getattr(getattr(holder.get_submodule("experts"), "spec", None), "takes_rows", False):
        if norm is not None or len(shared) > 1 or narrow or within:
            return Support.no(f"its {type(block).__name__} has more around experts that take rows")
        beside = shared[0] if shared else None
        return _routings.once((key, "rows"), lambda: router_kinds.scaled_inputs(block, name, router, beside))
    if streams_spec.is_block(block) and streams_spec.of_block(block).by_token:
        beside = shared[0] if shared and not narrow and norm is None else None
        return _routings.once((key, "tokens"), lambda: router_probes.by_tokens(block, name, router, beside))
    return _routings.once(
        key,
        lambda: router_probes.routing(block, name, router, *shared, narrow=narrow, norm=norm, within=within),
    )


def _plain_router(gate: nn.Module) -> nn.Module:
    """A router of transformers' class with the same attributes, also where `cpu_router` computes its product."""
    if not isinstance(gate, CpuRouter):
        return gate
    kind = next(base for base in type(gate).__mro__ if not issubclass(base, StandIn))
    plain: Any = object.__new__(kind)
    shapes = gate.parameter_shapes()
    vars(plain).update(
        {name: value for name, value in vars(gate).items() if name not in ("linear", "packed", *shapes)}
    )
    # A linear layer without a bias has None as that.
    vars(plain)["_parameters"] = {"bias": None} | {
        name: nn.Parameter(torch.empty(shape, dtype=gate.weight.dtype, device="meta"), False)
        for name, shape in shapes.items()
    }
    router: nn.Module = plain
    return router
