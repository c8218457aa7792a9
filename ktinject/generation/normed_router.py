"""Routers that norm what they take, and multiply the weights of each expert with a number of its own, as Gemma 4's do.

logits = proj(norm(x) · scale · factor)         norm without a weight
weights = softmax of the logits, of the chosen ones divided by their sum, · per_expert_scale
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation import norm_spec, router_probes
from ktinject.generation.layer_probes import Stub, random, run_twin
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.operators.probes.dense_mlp import is_linear
from ktinject.operators.probes.norm import RmsNormSpec, formula
from ktinject.support import Support

_SCALE, _FACTORS = "scale", "per_expert_scale"


class _Block(nn.Module):
    """A Mixture-of-Experts block of a router and experts, and nothing else."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, weights, ids = self.router(rows)
        found: Tensor = self.experts(rows, ids, weights)
        return found.view(x.shape)


@twin.on_cpu()
def of_router(router: nn.Module) -> dict[str, Any] | Support:
    """`RouterSpec` of a router that gives probabilities, weights and ids, without its path."""
    name = type(router).__name__
    children = dict(router.named_children())
    parameters = {path: tensor for path, tensor in router.named_parameters() if path != "proj.weight"}
    proj = children.get("proj")
    if children.keys() != {"norm", "proj"} or proj is None or not is_linear(proj) or [*router.buffers()]:
        return Support.no(f"its {name} holds {', '.join(sorted(children))}")
    experts, hidden = proj.get_parameter("weight").shape
    if {path: tuple(tensor.shape) for path, tensor in parameters.items()} != {
        _SCALE: (hidden,),
        _FACTORS: (experts,),
    }:
        return Support.no(f"its {name} holds {', '.join(sorted(parameters))}")
    norm = norm_spec.norm_at(router, "norm", hidden)
    if isinstance(norm, Support):
        return norm
    if norm.has_weight or not isinstance(norm.rms, RmsNormSpec):
        return Support.no(f"the norm of its {name} has a weight")
    try:
        factor = _input_factor(router, hidden, norm.rms.epsilon)
        if isinstance(factor, Support):
            return factor
        plain, alike = _without(router, factor, experts, hidden)
        if _input_factor(plain, hidden, 0.0, is_normed=False) != 1.0:
            return Support.no(f"its {name} has the factor {factor:.6g} of what it takes in no attribute")
        scaling = [number for number in alike if _scales(plain, number, hidden)]
        found = router_probes.routing(_Block(plain, nn.Identity()), "router", plain, scaling=scaling)
        if isinstance(found, Support):
            return found
        if not _multiplies(router, experts, hidden):
            return Support.no(f"its {name} does not multiply weights with {_FACTORS}")
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    if found.pop("factors") != (1.0, 1.0):
        return Support.no(f"its {name} gives something else than weights")
    return {
        **found,
        "rounds": False,  # weights times factors in fp32 are in fp32
        "norm": replace(norm, path=_SCALE),
        "input_factor": factor,
        "expert_factors": _FACTORS,
    }


def _without(
    router: nn.Module, factor: float, experts: int, hidden: int
) -> tuple[nn.Module, Collection[str]]:
    """A twin that has a projection, whose parameters are those of a router without norms, and no factors; and its
    numbers that are 1 instead of the factor."""
    alike = {
        name: 1.0
        for name, value in vars(router).items()
        if isinstance(value, float) and abs(value / factor - 1) < 1e-5
    }
    plain = twin.of(router, {"norm": Stub(lambda x: x)}, attributes=alike)
    for held, size in ((_SCALE, hidden), (_FACTORS, experts)):
        del plain._parameters[held]
        # Of 16 bits, so that it changes no dtype.
        vars(plain)[held] = torch.ones(size, dtype=torch.bfloat16, device="cpu")
    return plain, alike


def _scales(plain: nn.Module, number: str, hidden: int) -> bool:
    """Whether a router without norms multiplies what it takes with this number."""
    other = twin.of(plain, attributes={number: 4.0})
    return _input_factor(other, hidden, 0.0, is_normed=False) == 4.0


def _input_factor(router: nn.Module, hidden: int, epsilon: float, is_normed: bool = True) -> float | Support:
    """What it multiplies with norm(x) · scale before the projection."""
    seen: list[Tensor] = []
    scale, x = 1 + 0.3 * random(hidden, seed=5), random(7, hidden, seed=6)
    experts = router.get_submodule("proj").get_parameter("weight").shape[0]
    scale = scale if is_normed else torch.ones(hidden, dtype=torch.float32, device="cpu")

    def normed(x: Tensor, scale: Tensor) -> Tensor:
        return formula(x, scale, epsilon) if is_normed else x

    def project(x: Tensor) -> Tensor:
        seen.append(x)
        return random(7, experts, seed=7).to(x.dtype)

    changed = {
        "proj": Stub(project),
        _SCALE: scale,
        _FACTORS: torch.ones(experts, dtype=torch.float32, device="cpu"),
    }
    run_twin(router, changed, x)
    want = normed(x, scale)
    factor = ((seen[0] * want).sum() / (want * want).sum()).item()
    # Of digits beyond these, fp32 knows nothing; a root of the width is what it is.
    factor = next(
        (one for one in (hidden**-0.5, 1.0) if abs(factor / one - 1) < 1e-5), float(f"{factor:.6g}")
    )
    narrow = x.bfloat16()
    run_twin(router, {**changed, _SCALE: scale.bfloat16()}, narrow)
    rounded = normed(narrow, scale.bfloat16()) * factor
    if not torch.allclose(seen[0], factor * want, rtol=1e-4, atol=1e-5) or factor <= 0:
        return Support.no(f"its {type(router).__name__} makes something else of what it takes")
    if (seen[1] != rounded).float().mean() > 0.02:
        return Support.no(f"its {type(router).__name__} rounds what it takes at another place")
    return factor


def _multiplies(router: nn.Module, experts: int, hidden: int) -> bool:
    """Whether weights are multiplied with each expert's own number, in fp32 also where that is in 16 bits."""
    logits, factors = random(7, experts, seed=7), (1 + 0.3 * random(experts, seed=8)).bfloat16()
    scale = torch.ones(hidden, dtype=torch.float32, device="cpu")
    given = []
    for own in (torch.ones(experts, dtype=torch.float32, device="cpu"), factors, factors.float()):
        changed = {"proj": Stub(lambda x: logits), _SCALE: scale, _FACTORS: own}
        given.append(run_twin(router, changed, random(7, hidden, seed=6)))
    (_, plain, ids), *others = given
    return all(
        torch.equal(other[2], ids)
        and other[1].dtype == torch.float32
        and torch.allclose(other[1], plain * factors.float()[ids], rtol=1e-6)
        for other in others
    )
