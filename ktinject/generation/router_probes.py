"""How a Mixture-of-Experts block chooses its experts, and what it makes of them, found by running it as layer_probes.py
runs the parts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.generation import router_kinds
from ktinject.generation.layer_probes import ROWS, Stub, random, run_twin
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.operators.probes.dense_mlp import is_linear
from ktinject.support import Support

# Buffers or parameters of a router, or buffers of its block, that are added to the scores for the choice.
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")
_RTOL, _ATOL = 1e-3, 1e-5  # of weights
# Sums of the chosen scores below which a router may divide by another number: published ones add up to 1e-6 to them.
_LEAST = 2e-3
# What is made of logits.
SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "root_softplus": lambda logits: functional.softplus(logits).sqrt(),
}


def routing(
    block: nn.Module,
    name: str,
    router: nn.Module,
    shared: str | None = None,
    shared_gate: str | None = None,
    *,
    narrow: Sequence[str] = (),
    norm: str | None = None,
    within: str = "",
    scaling: Collection[str] = (),
) -> dict[str, Any] | Support:
    """How a Mixture-of-Experts block chooses its experts: `RouterSpec` without its path.

    name    of the block's router
    router  stands for it; its own weights are not looked at
    shared  the child whose output is added, times the sigmoid of the child `shared_gate`
    narrow  children that lead to the experts and back
    norm    the child that all of it is given to at last
    within  the child that holds the router and the experts, if the block itself does not
    scaling numbers of the router that do nothing but multiply its logits
    """
    holder = block.get_submodule(within)
    parameters, buffers = dict(router.named_parameters()), dict(router.named_buffers())
    weight_path = _weight_path(router)
    outer = dict(holder.named_buffers(recurse=False)) | dict(holder.named_parameters(recurse=False))
    corrections = [path for path in (*parameters, *buffers, *outer) if path.endswith(_CORRECTIONS)]
    beside = parameters.keys() - {weight_path, "bias", *corrections}
    if weight_path is None or beside or ("bias" in parameters and weight_path != "weight"):
        return Support.no(f"its {type(router).__name__} holds something else than a weight and a bias")
    if corrections and [path for path in (*buffers, *outer) if path not in corrections] + corrections[1:]:
        names = ", ".join(sorted({*buffers, *outer, *corrections}))
        return Support.no(f"its {type(block).__name__} and router hold {names}")
    experts, hidden = parameters[weight_path].shape
    weight, x = 3 * hidden**-0.5 * random(experts, hidden), random(1, ROWS, hidden, seed=1)
    bias = (
        random(experts, seed=3)
        if "bias" in parameters
        else torch.zeros(experts, dtype=torch.float32, device="cpu")
    )
    drawn = {
        path: 0.1 * random(*tensor.shape, seed=2)
        for path, tensor in (parameters | buffers | outer).items()
        if path not in (weight_path, "bias")
    }
    given: list[tuple[Tensor, Tensor]] = []
    before_norm: list[Tensor] = []

    def normed(x: Tensor) -> Tensor:
        before_norm.append(x)
        return torch.sin(x + 0.3)

    def taken(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given.append((ids, weights))
        return torch.tanh(x)

    def run(
        x: Tensor,
        dtype: torch.dtype,
        weight: Tensor = weight,
        times: float = 1.0,
        varied: tuple[nn.Module, str, float] | None = None,
    ) -> Tensor:
        """times: of corrections. varied: a module, and a number of it that is another one."""
        given_drawn = {path: tensor * times for path, tensor in drawn.items()}
        own = {weight_path: weight.to(dtype), "bias": bias.to(dtype), **given_drawn}
        held = _by_children(router, {path: tensor for path, tensor in own.items() if path not in outer})
        numbers: dict[int, dict[str, Any]] = {id(router): {}, id(holder): {}}
        if varied is not None:
            numbers[id(varied[0])][varied[1]] = varied[2]
        children: dict[str, Any] = {
            name: Stub(lambda x, *given: run_twin(router, held | numbers[id(router)], x, *given)),
            "experts": Stub(taken),
        }
        of_holder = {path: given_drawn[path] for path in outer}
        if within:
            children, of_holder = {within: twin.of(holder, children, of_holder, numbers[id(holder)])}, {}
        else:
            of_holder |= numbers[id(holder)]
        if shared is not None:
            children[shared] = Stub(torch.cos)
        if shared_gate is not None:
            children[shared_gate] = Stub(lambda x: x[..., :1] * 0.3)
        children |= dict(zip(narrow, (Stub(torch.sin), Stub(torch.atan))))
        if norm is not None:
            children[norm] = Stub(normed)
        out = run_twin(block, {**children, **of_holder}, x)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    try:
        out = run(x, x.dtype)
        if norm is not None:
            if not before_norm or not torch.equal(out, torch.sin(before_norm[0] + 0.3).view_as(out)):
                return Support.no(f"its {type(block).__name__} does something behind {norm}")
            out = before_norm[0].view_as(out)
        kept = _run_narrow(run, x.bfloat16(), parameters[weight_path].dtype)
        (ids, weights), (rounded_ids, rounded) = given[0], given[-1]
        of_shared = torch.zeros_like(x)
        if shared is not None:
            of_shared = torch.cos(x) * (1 if shared_gate is None else torch.sigmoid(x[..., :1] * 0.3))
        routed = torch.atan(torch.tanh(torch.sin(x))) if narrow else torch.tanh(x)
        factors = _factors(out, routed, of_shared)
        if factors is None:
            return Support.no(f"its {type(block).__name__} does not add shared experts to routed ones")
        added = drawn[corrections[0]].flatten() if corrections else None
        found = _explained(router, x[0] @ weight.T + bias, added, ids, weights)
        if found is not None and added is None and found["groups"] == 1:
            found["by_logits"] = _is_by_logits(
                lambda x, w: (run(x, x.dtype, w), given[-1][0])[1], weight, bias
            )
        elif found is None and added is None and not narrow:
            found = router_kinds.near(
                router, lambda x, w: (run(x[None], x.dtype, w), given[-1])[1], experts, hidden
            )
        if found is not None and "nearness" not in found:
            for rows, scaled, times in _far_apart(weight, hidden):
                run(rows, rows.dtype, scaled, times)
                if not _is_so(found, rows[0] @ scaled.T + bias, added, times, *given[-1]):
                    return Support.no(f"its {type(router).__name__} chooses in another way for other scores")
            for module in (router, holder):
                for number, value in _numbers(module).items():
                    other = run(x, x.dtype, varied=(module, number, 4 * value))
                    logits = x[0] @ weight.T + bias
                    if module is router and number in scaling:
                        follows = _is_so(found, 4 * logits, added, 1.0, *given[-1])
                    else:
                        follows = _explained(router, logits, added, *given[-1]) is not None
                    if not follows or (norm is None and _factors(other, routed, of_shared) is None):
                        return Support.no(f"its {type(module).__name__} does something else by {number}")
    except Exception as error:
        return refusal_of(error)
    if found is None:
        return Support.no(f"its {type(router).__name__} chooses in another way")
    rounded_logits = x[0].bfloat16().float() @ weight.to(kept).float().T + bias.to(kept).float()
    if corrections:
        found |= {"correction": corrections[0], "of_block": corrections[0] in outer}
    if "nearness" not in found:
        found["rounds"] = rounded.dtype == torch.bfloat16
        found |= _roundings(rounded_logits, found, rounded_ids, rounded)
    return {
        **found,
        "factors": factors,
        "num_experts": experts,
        "has_bias": "bias" in parameters,
        "weight": weight_path,
    }


def by_tokens(block: nn.Module, name: str, router: nn.Module, shared: str | None) -> dict[str, Any] | Support:
    """How a block weighs experts that go by the numbers of tokens, as `routing` says it: by their scores, which a table
    [vocabulary, top_k] of the router names.
    """
    kind = type(router).__name__
    tables = {path: table for path, table in router.named_buffers() if table.dtype == torch.int64}
    if [*dict(router.named_parameters())] != ["weight"] or len(tables) != 1 or len([*router.buffers()]) != 1:
        return Support.no(f"its {kind} holds something else than a weight and a table of experts")
    [(path, held)] = tables.items()
    experts, hidden = router.get_parameter("weight").shape
    weight, x = 3 * hidden**-0.5 * random(experts, hidden), random(1, ROWS, hidden, seed=1)
    table = torch.stack([random(experts, seed=20 + i).argsort()[: held.shape[-1]] for i in range(ROWS + 2)])
    tokens = torch.arange(ROWS, device="cpu").flip(0)[None] + 1
    given: list[tuple[Tensor, Tensor]] = []

    def taken(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given.append((ids, weights))
        return torch.tanh(x)

    def run(x: Tensor, dtype: torch.dtype, weight: Tensor = weight) -> Tensor:
        own = {"weight": weight.to(dtype), path: table}
        children = {
            name: Stub(lambda x, *given: run_twin(router, own, x, *given)),
            "experts": Stub(taken),
            **({} if shared is None else {shared: Stub(torch.cos)}),
        }
        found: Tensor = run_twin(block, children, x, tokens)
        return found

    try:
        out = run(x, x.dtype)
        kept = _run_narrow(run, x.bfloat16(), router.get_parameter("weight").dtype)
        factors = _factors(out, torch.tanh(x), torch.zeros_like(x) if shared is None else torch.cos(x))
        (ids, weights), (_, rounded) = given[0], given[-1]
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    if factors is None or not torch.equal(ids, table[tokens[0]]):
        return Support.no(f"its {kind} chooses in another way")
    found = _weighed(x[0] @ weight.T, ids, weights)
    for rows, scaled, _ in _far_apart(weight, hidden):
        rows = rows[:, :ROWS]
        try:
            weights = (run(rows, rows.dtype, scaled), given[-1][1])[1]
        except Exception as error:
            return refusal_of(error)
        found = found if found == _weighed(rows[0] @ scaled.T, ids, weights) else None
    if found is None:
        return Support.no(f"its {kind} weighs experts in another way")
    found |= {"top_k": ids.shape[1], "is_corrected": False, "groups": 1, "top_groups": 1, "table": path}
    logits = x[0].bfloat16().float() @ weight.to(kept).float().T
    found["rounds"] = rounded.dtype == torch.bfloat16
    return {
        **found, **_roundings(logits, found, ids, rounded), "factors": factors, "num_experts": experts
    }  # fmt: skip


def _weighed(logits: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Any] | None:
    """The scores that give these weights [m, k] for experts by logits [m, e], and how."""
    for kind, score in SCORES.items():
        scores = score(logits).gather(1, ids)
        for is_normed in (True, False):
            want = scores / scores.sum(-1, keepdim=True) if is_normed else scores
            factor = float(f"{(weights.sum() / want.sum()).item():.6g}")
            if factor > 0 and torch.allclose(weights, factor * want, rtol=1e-3, atol=1e-5):
                return {"scores": kind, "is_normed": is_normed, "factor": factor}
    return None


def _is_by_logits(ids_of: Callable[[Tensor, Tensor], Tensor], weight: Tensor, bias: Tensor) -> bool:
    """Whether experts are chosen by logits where their scores are so large, or so small, that they tie.

    ids_of  the ids [m, k] that are chosen of x [1, m, hidden] with a weight
    """
    x, large = random(1, 16, weight.shape[1], seed=4), 40 * weight
    ids = ids_of(x, large)
    return torch.equal(
        ids.sort(-1).values, (x[0] @ large.T + bias).topk(ids.shape[1], -1).indices.sort(-1).values
    )


def _factors(out: Tensor, routed: Tensor, shared: Tensor) -> tuple[float, float] | None:
    """(a, b) for which out is b · (a · routed + shared), as `MoeSpec` has them; shared may be zeros."""
    parts = [routed.flatten()] + ([shared.flatten()] if shared.any() else [])
    solved = torch.linalg.lstsq(torch.stack(parts, -1).double(), out.double().flatten()[:, None]).solution
    first, *last = (float(f"{one:.6g}") for one in solved[:, 0].tolist())
    whole = last[0] if last else 1.0
    want = first * routed + whole * shared
    if first <= 0 or whole <= 0 or out.shape != want.shape or not torch.allclose(out, want, atol=1e-5):
        return None
    near = [1.0 if abs(one - 1) < 1e-5 else one for one in (first / whole, whole)]
    return near[0], near[1]


def _weight_path(router: nn.Module) -> str | None:
    """Where a router has its weight: its own, or that of the one linear layer in it."""
    linears = [name for name, child in router.named_children() if is_linear(child)]
    if "weight" in dict(router.named_parameters(recurse=False)):
        return "weight"
    return f"{linears[0]}.weight" if len(linears) == 1 else None


def _by_children(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors by path, as `_run` takes them: those of a child are in a twin of it."""
    held: dict[str, Any] = {path: tensor for path, tensor in tensors.items() if "." not in path}
    for name in {path.partition(".")[0] for path in tensors} - held.keys():
        of_child = {
            path.removeprefix(f"{name}."): t for path, t in tensors.items() if path.startswith(f"{name}.")
        }
        held[name] = twin.of(module.get_submodule(name), tensors=of_child)
    return held


def _run_narrow(run: Callable[[Tensor, torch.dtype], Any], x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Run a block on x in bf16 with a router in fp32, if it has one and takes that, or in bf16; in which it was."""
    if dtype == torch.float32:
        try:
            run(x, dtype)
        except RuntimeError:  # the product of two dtypes: the model is not in bf16
            pass
        else:
            return dtype
    run(x, torch.bfloat16)
    return torch.bfloat16


def _roundings(logits: Tensor, found: Mapping[str, Any], ids: Tensor, weights: Tensor) -> dict[str, bool]:
    """What is rounded to bf16 on the way from logits [m, e] in fp32 to weights [m, k]: `rounds_logits`, and
    `rounds_scores`, behind which all is in bf16."""

    def error(rounded: tuple[bool, bool]) -> float:
        given = logits.bfloat16().float() if rounded[0] else logits
        scores = SCORES[found["scores"]](given)
        want = (scores.bfloat16() if rounded[1] else scores).gather(1, ids)
        want = (want / want.sum(-1, keepdim=True) if found["is_normed"] else want) * found["factor"]
        return (want.to(weights.dtype).float() - weights.float()).abs().sum().item()

    least = min(((False, False), (True, False), (True, True)), key=error)
    return {"rounds_logits": least[0], "rounds_scores": least[1]}


def _explained(
    router: Any, logits: Tensor, correction: Tensor | None, ids: Tensor, weights: Tensor
) -> dict[str, Any] | None:
    """The way of choosing that gives these ids and weights for these logits.

    correction   [e], is added for the choice
    """
    found = torch.zeros_like(logits).scatter_add(1, ids, weights.float())
    groups, top_groups = (int(getattr(router, name, None) or 1) for name in ("num_group", "topk_group"))
    top_k, named = ids.shape[1], bool(getattr(router, "norm_topk_prob", True))
    for kind, score in SCORES.items():
        scores = score(logits)
        chosen = _chosen(scores if correction is None else scores + correction, top_k, groups, top_groups)
        for is_normed in (named, not named):
            want = torch.where(chosen, scores, 0.0)
            want = want / want.sum(-1, keepdim=True) if is_normed else want
            factor = float(f"{(found.sum() / want.sum()).item():.6g}")
            if factor > 0 and torch.allclose(found, factor * want, rtol=_RTOL, atol=_ATOL):
                return {
                    "scores": kind,
                    "top_k": top_k,
                    "is_corrected": correction is not None,
                    "groups": groups,
                    "top_groups": top_groups,
                    "is_normed": is_normed,
                    "factor": factor,
                }
    return None


def _is_so(
    found: Mapping[str, Any],
    logits: Tensor,
    correction: Tensor | None,
    times: float,
    ids: Tensor,
    weights: Tensor,
) -> bool:
    """Whether experts and weights are what `_explained` has found, where chosen scores sum to `_LEAST` or more.

    times  as large are corrections
    """
    scores = SCORES[found["scores"]](logits)
    by = scores if correction is None else scores + times * correction
    kept = torch.where(_chosen(by, found["top_k"], found["groups"], found["top_groups"]), scores, 0.0)
    sums = kept.sum(-1, keepdim=True)
    want = found["factor"] * (kept / sums if found["is_normed"] else kept)
    given = torch.zeros_like(want).scatter_add(1, ids, weights.float())
    seen = (sums >= _LEAST).flatten()
    return torch.allclose(given[seen], want[seen], rtol=_RTOL, atol=_ATOL)


@twin.on_cpu()
def _far_apart(weight: Tensor, hidden: int) -> list[tuple[Tensor, Tensor, float]]:
    """Rows [1, m, hidden], a weight, and how many times as large corrections are, at which a bound shows that scores of
    Gaussian logits do not reach: all scores alike; chosen ones however small they are; all of them small.
    """
    rows, common = random(1, 16, hidden, seed=5), random(hidden, seed=6)
    down = -rows * (rows @ common).sign()[..., None]
    lower = weight + 4 * hidden**-0.5 * common
    return [(rows, 0.01 * weight, 1.0), (rows, 1.5 * weight, 30.0), (down, lower, 1.0), (down, lower, 30.0)]


def _numbers(module: nn.Module) -> dict[str, float]:
    """Attributes that may be factors or bounds. Integers say how many there are of something."""
    return {name: value for name, value in vars(module).items() if isinstance(value, float) and value}


def _chosen(scores: Tensor, top_k: int, groups: int, top_groups: int) -> Tensor:
    """Which of scores [m, e] are the top_k greatest within the top groups, as bool of the same shape."""
    if groups > 1:
        parted = scores.view(len(scores), groups, -1)
        best = parted.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
        kept = torch.zeros(len(scores), groups, dtype=torch.bool, device="cpu").scatter(1, best, True)
        scores = parted.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = scores.topk(top_k, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
