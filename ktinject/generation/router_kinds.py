"""Kinds of routers beside those that choose by scores (router_probes.py): found by comparing them with a formula.

near            weights are those of a softmax over experts whose logits are near the best one's (Phi-3.5-MoE)
scaled inputs   what an expert takes is multiplied with its weight (Llama 4)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.layer_probes import ROWS, Stub, random, run_twin
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.support import Support


def near_weights(logits: Tensor, nearness: float) -> tuple[Tensor, Tensor]:
    """ids and weights [m, 2] of logits [m, e], in whose dtype everything is.

    The first expert is the best one; its weight is that of a softmax over all experts of which
    (best - logit) / max(|logit|, best) is at most `nearness`. The second is the best of the others, likewise.
    """
    ids, weights = [], []
    left = logits
    for _ in range(2):
        best, chosen = left.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().clamp(min=best) > nearness
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


@twin.on_cpu()
def near(
    router: nn.Module, choose: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], experts: int, hidden: int
) -> dict[str, Any] | None:
    """The part of `RouterSpec` by which a router chooses so, or None.

    choose   ids and weights that it gives for x [m, hidden] and a weight [experts, hidden] of one dtype
    """
    noise = getattr(router, "router_jitter_noise", None)
    if not isinstance(noise, float) or noise <= 0 or experts < 2:
        return None
    # Of rows of a unit matrix, the logits are the columns of the weight: near each other, or not, or of another sign.
    m = min(hidden, 64)
    x = torch.eye(m, hidden, device="cpu", dtype=torch.float32)
    spread = torch.tensor([0.01, 0.03, 0.1, 1.0], dtype=torch.float32, device="cpu").repeat(m)[:m, None]
    middle = (
        torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float32, device="cpu")
        .repeat_interleave(4)
        .repeat(m)[:m, None]
    )
    logits = middle + spread * random(m, experts, seed=9)
    weight = torch.zeros(experts, hidden, device="cpu", dtype=torch.float32)
    weight[:, :m] = logits.T
    for dtype in (torch.float32, torch.bfloat16):
        ids, weights = choose(x.to(dtype), weight.to(dtype))
        want_ids, want = near_weights(logits.to(dtype), 2 * noise)
        is_same = ids.shape == want_ids.shape and torch.equal(ids, want_ids) and weights.dtype == dtype
        if not is_same or not torch.allclose(weights, want, rtol=1e-5 if dtype == torch.float32 else 0):
            return None
    return {
        "scores": "softmax",
        "top_k": 2,
        "is_corrected": False,
        "groups": 1,
        "top_groups": 1,
        "is_normed": False,
        "factor": 1.0,
        "nearness": 2 * noise,
        "rounds": True,
        "rounds_logits": True,
        "rounds_scores": False,
    }


@twin.on_cpu()
def scaled_inputs(
    block: nn.Module, name: str, router: nn.Module, shared: str | None
) -> dict[str, Any] | Support:
    """How a block chooses experts that take rows alone, all experts' one behind the other: as `routing` says it.

    A row of an expert that is chosen is multiplied with the sigmoid of its logit; those of others are zeros.
    """
    kind = type(block).__name__
    if not isinstance(router, nn.Linear) or router.bias is not None or [*block.buffers(recurse=False)]:
        return Support.no(f"the router of its {kind} is no linear layer without a bias")
    experts, hidden = router.get_parameter("weight").shape
    weight = 3 * hidden**-0.5 * random(experts, hidden)
    taken: list[Tensor] = []

    def rows_of(x: Tensor) -> Tensor:
        taken.append(x)
        return torch.tanh(x)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        children: Mapping[str, nn.Module] = {
            name: Stub(lambda x: run_twin(router, {"weight": weight}, x)),
            "experts": Stub(rows_of),
        }
        out = run_twin(block, {**children, **({shared: Stub(torch.cos)} if shared else {})}, x)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    x = random(1, ROWS, hidden, seed=1)
    try:
        out = run(x, weight)
        logits = x[0] @ weight.T
        rows = taken[0].view(experts, ROWS, hidden)
        is_chosen = rows.abs().amax(-1).T > 0
        top_k = int(is_chosen[0].sum())
        scores = _scores(logits, top_k)
        want = (scores.T[..., None] * x).flatten(0, 1)
        of_shared = torch.cos(x) if shared else torch.zeros_like(x)
        whole = of_shared + torch.tanh(rows).sum(0)
        is_same = torch.allclose(taken[0], want, atol=1e-5) and out.numel() == whole.numel()
        if not is_same or not torch.allclose(out.flatten(), whole.flatten(), atol=1e-5):
            return Support.no(f"its {kind} gives its experts something else than rows times sigmoids")
        # Where sigmoids tie, the choice is by logits.
        run(x, 40 * weight)
        if not torch.allclose(
            taken[1], (_scores(40 * logits, top_k).T[..., None] * x).flatten(0, 1), atol=1e-5
        ):
            return Support.no(f"its {kind} chooses in another way")
        narrow = x.bfloat16()
        run(narrow, weight.bfloat16())
        logits = torch.nn.functional.linear(narrow[0], weight.bfloat16())
        want = (_scores(logits, top_k).T[..., None] * narrow).flatten(0, 1)
        if taken[2].dtype != torch.bfloat16 or (taken[2] != want).float().mean() > 0.02:
            return Support.no(f"its {kind} rounds at another place")
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    return {
        "factors": (1.0, 1.0),
        "num_experts": experts,
        "scores": "sigmoid",
        "top_k": top_k,
        "is_corrected": False,
        "groups": 1,
        "top_groups": 1,
        "is_normed": False,
        "factor": 1.0,
        "rounds": True,
        "rounds_logits": True,
        "rounds_scores": True,
        "by_logits": True,
        "scales_input": True,
    }


def _scores(logits: Tensor, top_k: int) -> Tensor:
    """[m, e]: the sigmoids of the greatest logits, rounded to their dtype; 0 for the others."""
    chosen = logits.topk(top_k, -1).indices
    return torch.zeros_like(logits).scatter(
        -1, chosen, logits.gather(-1, chosen).float().sigmoid().to(logits.dtype)
    )
