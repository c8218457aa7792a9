"""Roles: what a module is for in its model, as rules name it. Which module has which is found where probes are."""

from __future__ import annotations

from collections.abc import Callable

from ktinject.support import Support

ROLES = {
    "routed_experts": "computes the experts that a router chooses; also whatever is called `experts`, so that an "
    "operator's refusal can say what it computes instead",
    "shared_experts": "a `dense_mlp` beside routed experts",
    "router": "beside routed experts, and multiplies a weight with a row for each of them by one `F.linear`",
    "moe_block": "routes rows to its routed experts, and returns their sum or adds to it",
    "attention": "mixes tokens: attention of any kind, also linear attention, state spaces and short convolutions",
    "latent_attention": "attention that computes DeepSeek's latent attention",
    "linear": "an `nn.Linear` with the forward of that class",
    "dense_mlp": "linear layers through which each row goes by itself, back to its own size",
    "norm": "an RMS norm",
    "output_layer": "gives the logits",
    "embedding": "embeds the token ids",
}
"""Role → which modules have it."""

ELSEWHERE = Support.no("it is not where such a module stands")
"""The answer for what does not come near a role."""

HasRole = Callable[[str, str], Support]
"""(path of a module, role) → whether it has the role; the reason why not is for people."""


def no_roles(path: str, role: str) -> Support:
    """Where nobody knows the modules, none has a role."""
    return ELSEWHERE
