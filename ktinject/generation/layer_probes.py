"""What the parts of a decoder layer compute, found by running them on the CPU: twins with other children or weights.

The children that are not in question are replaced by functions that no two of which can be mistaken for each other. A
module of the real sizes is never run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.hf import compat
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import refusal_of
from ktinject.operators.probes.attention import GIVEN
from ktinject.operators.probes.dense_mlp import is_linear
from ktinject.support import SUPPORTED, Support

_ROWS = 3
# What gate, up and down of a gated unit may be called; or one layer for gate and up, and down.
GATED_UNITS: tuple[tuple[str, ...], ...] = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("input_linear", "output_linear"),
)
# Buffers or parameters of a router, or buffers of its block, that are added to the scores for the choice.
_CORRECTIONS = ("e_score_correction_bias", "expert_bias")


class _Stub(nn.Module):
    """A child that computes a function of its first argument."""

    def __init__(self, function: Callable[..., Any], names_kept: bool = False) -> None:
        """names_kept  the function takes other arguments by name, too"""
        super().__init__()
        self.function, self._names_kept = function, names_kept

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.pop("hidden_states")
        return self.function(x, *args[1:], **kwargs if self._names_kept else {})


def stub(function: Callable[..., Any]) -> Any:
    """A child that computes a function of its first argument."""
    return _Stub(function)


def _run(module: nn.Module, changed: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The class's own forward on a twin, on the CPU.

    changed   children, or tensors that stand for parameters and buffers, by name
    Raises    whatever transformers' code does where it is given what it is not made for
    """
    children = {name: value for name, value in changed.items() if isinstance(value, nn.Module)}
    tensors = {name: value for name, value in changed.items() if isinstance(value, Tensor)}
    with twin.on_cpu():
        return twin.run(twin.of(module, children, tensors), *args, **kwargs)


@functools.lru_cache(
    8
)  # a model's layers are of few shapes, and a router's weight takes longer to draw than to try
def _random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed; not to be written to."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def residual_factor(
    layer: nn.Module, names: Sequence[str], hands_on: bool = False, behind: Sequence[str] = ("", "")
) -> float | Support:
    """What a layer multiplies its parts with: it adds attention of the normed input to that, and then the feed-forward
    part of the sum, normed again.

    names     of norm, attention, norm and feed-forward part, and of what is added to that; of a norm that there is
              not, none. Linear attention, convolutions and state spaces give one tensor, other attention its weights
              along
    behind    of norms of what attention and the feed-forward part give, or none
    hands_on  attention takes the places that a layer before has chosen and gives its own choice: so does the layer
    """
    x = _random(1, 2, 8).double()
    choices = torch.tensor([[[0], [1]]]), torch.tensor([[[1], [0]]])
    taken: list[Any] = []

    def attention(x: Tensor, **kwargs: Any) -> Any:
        taken.append(kwargs.get(GIVEN))
        mixed = torch.cos(2 * x)
        if names[1] != "self_attn":
            return mixed
        return (mixed, None, choices[1]) if hands_on else (mixed, None)

    def same(x: Tensor) -> Tensor:
        return x

    norms = (lambda x: torch.sin(x + 0.3), lambda x: torch.tanh(x - 0.5), torch.atan, torch.sinh)
    before, again, first, last = (
        norm if name else same for name, norm in zip((names[0], names[2], *behind), norms, strict=True)
    )
    children = {
        names[0]: _Stub(before),
        names[1]: _Stub(attention, names_kept=True),
        names[2]: _Stub(again),
        names[3]: _Stub(lambda x: x * x),
        behind[0]: _Stub(first),
        behind[1]: _Stub(last),
        **{name: _Stub(torch.exp) for name in names[4:]},
    }
    children.pop("", None)
    arguments = dict.fromkeys(("attention_mask", "position_ids", compat.CACHE, "position_embeddings"))
    given = {GIVEN: choices[0]} if hands_on else {}

    def run() -> Any:
        found = _run(layer, children, x, use_cache=True, **arguments, **given)
        if hands_on and (found[1] is not choices[1] or taken[-1] is not choices[0]):
            raise RuntimeError("a choice of places is not handed on")
        return found[0] if isinstance(found, tuple) else found

    try:
        try:
            found = run()
        except (
            ValueError
        ):  # it takes its feed-forward part's output apart: a block may give its routing along
            children[names[3]] = _Stub(lambda x: (x * x, None))
            found = run()
        children |= {name: _Stub(torch.zeros_like) for name in names[4:]}
        plain = children[names[3]].function
        children[names[3]] = _Stub(lambda x: _times(plain(x), 0.0))
        attended = run()
    except Exception as error:
        return refusal_of(error)
    is_known = all(isinstance(one, Tensor) and one.shape == x.shape for one in (found, attended))
    mixed = first(torch.cos(2 * before(x)))
    # Of digits beyond these, doubles know nothing.
    factor = float(f"{((attended - x) * mixed).sum() / (mixed * mixed).sum():.12g}") if is_known else 0.0
    y = x + factor * mixed
    z = again(y)
    want = y + factor * last(z**2 + z.exp() if names[4:] else z**2)
    if is_known and factor > 0 and torch.allclose(found, want, rtol=1e-9, atol=1e-9):
        return factor
    return Support.no("it is not x + attention(norm(x)), and that + feed_forward(norm(that))")


def _times(found: Any, factor: float) -> Any:
    return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor


def is_gated_silu(module: nn.Module, names: Sequence[str]) -> Support:
    """Whether a module is down(silu(gate(x)) · up(x)).

    names  of gate, up and down, or of one that gives gate and up, one behind the other, and of down
    """
    parts = (
        (torch.sin, torch.cos, torch.tanh)
        if len(names) == 3
        else (lambda x: torch.cat([torch.sin(x), torch.cos(x)], -1), torch.tanh)
    )
    children = dict(zip(names, map(_Stub, parts), strict=True))
    if not children.keys() <= {name for name, _ in module.named_children()}:
        return Support.no(f"its {type(module).__name__} has no {', '.join(names[:-1])} and {names[-1]}")
    x = 3 * _random(_ROWS, 16)
    try:
        found = _run(module, children, x)
    except Exception as error:
        return refusal_of(error)
    want = torch.tanh(functional.silu(torch.sin(x)) * torch.cos(x))
    if isinstance(found, Tensor) and torch.allclose(found, want, atol=1e-5):
        return SUPPORTED
    return Support.no(f"its {type(module).__name__} is no gated unit with SiLU")


class _Keys:
    """Stands for a cache, and ends the forward that gives it keys."""

    def update(self, keys: Tensor, *_: Any, **__: Any) -> None:
        raise _GivenKeys(keys)


class _GivenKeys(Exception):
    """Its argument is what a cache was given."""


@dataclass(frozen=True)
class Turning:
    """How attention turns keys, and queries in the same way.

    by_neighbours  pairs of a head's values are (2i, 2i + 1) and stay there; else they are (i, i + n / 2)
    before_norms   norms are of heads that are turned
    is_none        nothing is turned
    """

    by_neighbours: bool = False
    before_norms: bool = False
    is_none: bool = False


BY_HALVES = Turning()


def turning(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Turning | Support:
    """How attention makes the keys that it caches of what the projection gives.

    heads  names of the projections, keys' the second
    norms  of those of its norms of queries and keys that there are
    gate   of a projection to gates, if there is one
    """
    size = module.head_dim
    given = (*heads[:3], gate) if gate else heads[:3]
    made = {name: getattr(module.get_submodule(name), "out_features", 0) for name in given}
    keys = _random(1, _ROWS, made[heads[1]], seed=4).double()
    angles = _random(1, _ROWS, size // 2, seed=5).double().repeat(1, 1, 2)
    children = {
        **{name: _Stub(functools.partial(_zeros, made[name])) for name in given if name != heads[1]},
        heads[1]: _Stub(lambda _: keys),
        **dict.fromkeys(norms, _Stub(_norm)),
    }
    try:
        _run(
            module,
            children,
            _random(1, _ROWS, 8).double(),
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            **{compat.CACHE: _Keys()},
        )
    except _GivenKeys as given:
        (found,) = given.args
    except Exception as error:
        return refusal_of(error)
    else:
        found = None
    split = keys.view(1, _ROWS, -1, size).transpose(1, 2)
    for way in (Turning(), Turning(True), Turning(False, True), Turning(True, True), Turning(is_none=True)):
        want = split if way.before_norms or not norms else _norm(split)
        want = want if way.is_none else _turned(want, angles, way.by_neighbours)
        want = _norm(want) if way.before_norms and norms else want
        if isinstance(found, Tensor) and found.shape == want.shape and torch.allclose(found, want):
            return way
    return Support.no(f"{type(module).__name__} makes keys in another way")


@dataclass(frozen=True)
class Outputs:
    """What attention makes of the values of its heads, beside weighing them.

    scale  that they are multiplied with before they are cached
    gate   a function of what a projection gives, each head's one or each value's, that they are multiplied with
           before the output projection; none: there is no such
    """

    scale: float = 1.0
    gate: Literal["none", "sigmoid", "softplus"] = "none"


PLAIN_OUTPUTS = Outputs()


def outputs(module: Any, heads: Sequence[str], norms: Sequence[str], gate: str = "") -> Outputs | Support:
    """What attention makes of values, of a text of one token, which sees its own alone. Arguments as of `turning`."""
    made = {
        name: getattr(module.get_submodule(name), "out_features", 0) for name in (*heads[:3], gate) if name
    }
    groups = made[heads[1]] // module.head_dim
    queries = made[heads[0]] // module.head_dim
    values = _random(1, 1, made[heads[2]], seed=6).double()
    gates = 3 * _random(1, 1, made.get(gate, 1), seed=7).double()
    seen: list[Tensor] = []

    def cached(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    angles = torch.zeros(1, 1, module.head_dim, dtype=torch.float64, device="cpu")
    sinks = getattr(module, "sinks", None)
    children: dict[str, Any] = {
        **{name: _Stub(functools.partial(_zeros, made[name])) for name in heads[:2]},
        heads[2]: _Stub(lambda _: values),
        heads[3]: _Stub(cached),
        **dict.fromkeys(norms, _Stub(_norm)),
    }
    if gate:
        children[gate] = _Stub(lambda _: gates)
    if sinks is not None:  # which are to have no part in it
        children["sinks"] = torch.full(sinks.shape, -1e9, dtype=torch.float64, device="cpu")
    try:
        _run(
            module,
            children,
            _random(1, 1, 8).double(),
            position_embeddings=(angles.cos(), angles.sin()),
            attention_mask=None,
            **{compat.CACHE: None},
        )
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error)
    split = values.view(groups, -1).repeat_interleave(queries // groups, 0)
    by_gate = {"none": torch.ones_like(split)}
    if gate:
        of_heads = gates.view(queries, -1).expand_as(split)
        by_gate = {"sigmoid": of_heads.sigmoid(), "softplus": functional.softplus(of_heads)}
    for name, factors in by_gate.items():
        want = (split * factors).flatten()
        found = seen[0].flatten() if seen else want[:0]
        if found.shape != want.shape:
            break
        scale = float(f"{((found * want).sum() / (want * want).sum()).item():.6g}")
        if scale > 0 and torch.allclose(found, scale * want, rtol=1e-4, atol=1e-5):
            return Outputs(scale, name)  # type: ignore[arg-type]
    return Support.no(f"{type(module).__name__} makes something else of values")


def _zeros(width: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], width)


def _norm(x: Tensor) -> Tensor:
    """Stands for a norm, of a head or of all: what it makes of a value depends on that alone."""
    return torch.tanh(x + 0.3)


def _turned(x: Tensor, angles: Tensor, by_neighbours: bool) -> Tensor:
    """x [1, heads, m, n] turned by angles [1, m, n], which are twice side by side."""
    half = x.shape[-1] // 2
    cos, sin = angles[..., :half].cos(), angles[..., :half].sin()
    a, b = (x[..., ::2], x[..., 1::2]) if by_neighbours else (x[..., :half], x[..., half:])
    pair = a * cos - b * sin, b * cos + a * sin
    return torch.stack(pair, -1).flatten(-2) if by_neighbours else torch.cat(pair, -1)


def is_rotation(module: nn.Module, frequencies: Tensor, scale: float) -> Support:
    """Whether a module gives cos and sin of positions · frequencies, twice side by side, times scale."""
    frequencies = frequencies.detach().cpu().float()
    positions = torch.tensor([[0, 7, 1000]])
    try:
        found = _run(module, {"inv_freq": frequencies}, torch.zeros(1, 3, 1), positions)
    except Exception as error:
        return refusal_of(error)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    wanted = (angles.cos() * scale, angles.sin() * scale)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if is_pair and all(a.shape == b.shape and torch.allclose(a, b, atol=1e-3) for a, b in zip(found, wanted)):
        return SUPPORTED
    return Support.no("it does not give cos and sin, twice side by side")


def routing(
    block: nn.Module,
    name: str,
    router: nn.Module,
    shared: str | None = None,
    shared_gate: str | None = None,
) -> dict[str, Any] | Support:
    """How a Mixture-of-Experts block chooses its experts: `RouterSpec` without its path.

    name    of the block's router
    router  stands for it; its own weights are not looked at
    shared  the child whose output is added, times the sigmoid of the child `shared_gate`
    """
    parameters, buffers = dict(router.named_parameters()), dict(router.named_buffers())
    weight_path = _weight_path(router)
    outer = dict(block.named_buffers(recurse=False)) | dict(block.named_parameters(recurse=False))
    corrections = [path for path in (*parameters, *buffers, *outer) if path.endswith(_CORRECTIONS)]
    others = parameters.keys() - {weight_path, "bias", *corrections}
    if weight_path is None or others or ("bias" in parameters and weight_path != "weight"):
        return Support.no(f"its {type(router).__name__} holds something else than a weight and a bias")
    if corrections and [path for path in (*buffers, *outer) if path not in corrections] + corrections[1:]:
        names = ", ".join(sorted({*buffers, *outer, *corrections}))
        return Support.no(f"its {type(block).__name__} and router hold {names}")
    experts, hidden = parameters[weight_path].shape
    weight, x = 3 * hidden**-0.5 * _random(experts, hidden), _random(1, _ROWS, hidden, seed=1)
    bias = _random(experts, seed=3) if "bias" in parameters else torch.zeros(experts)
    drawn = {
        path: 0.1 * _random(*tensor.shape, seed=2)
        for path, tensor in (parameters | buffers | outer).items()
        if path not in (weight_path, "bias")
    }
    given: list[tuple[Tensor, Tensor]] = []

    def taken(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        given.append((ids, weights))
        return torch.tanh(x)

    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        own = {weight_path: weight.to(dtype), "bias": bias.to(dtype), **drawn}
        held = _by_children(router, {path: tensor for path, tensor in own.items() if path not in outer})
        children = {
            name: _Stub(lambda x, *given: _run(router, held, x, *given)),
            "experts": _Stub(taken),
        }
        if shared is not None:
            children[shared] = _Stub(torch.cos)
        if shared_gate is not None:
            children[shared_gate] = _Stub(lambda x: x[..., :1] * 0.3)
        out = _run(block, {**children, **{path: drawn[path] for path in outer}}, x)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    try:
        out = run(x, x.dtype)
        kept = _run_narrow(run, x.bfloat16(), parameters[weight_path].dtype)
        (ids, weights), (rounded_ids, rounded) = given[0], given[-1]
        of_shared = torch.zeros_like(x)
        if shared is not None:
            of_shared = torch.cos(x) * (1 if shared_gate is None else torch.sigmoid(x[..., :1] * 0.3))
        factors = _factors(out, torch.tanh(x), of_shared)
        if factors is None:
            return Support.no(f"its {type(block).__name__} does not add shared experts to routed ones")
        added = drawn[corrections[0]].flatten() if corrections else None
        found = _explained(router, x[0] @ weight.T + bias, added, ids, weights)
    except Exception as error:
        return refusal_of(error)
    if found is None:
        return Support.no(f"its {type(router).__name__} chooses in another way")
    narrow = x[0].bfloat16().float() @ weight.to(kept).float().T + bias.to(kept).float()
    if corrections:
        found |= {"correction": corrections[0], "of_block": corrections[0] in outer}
    return {
        **found,
        "factors": factors,
        "num_experts": experts,
        "rounds": rounded.dtype == torch.bfloat16,
        **_roundings(narrow, found, rounded_ids, rounded),
        "has_bias": "bias" in parameters,
        "weight": weight_path,
    }


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
        scores = given.sigmoid() if found["scores"] == "sigmoid" else given.softmax(-1)
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
    groups, top_groups = (int(getattr(router, name, 1)) for name in ("num_group", "topk_group"))
    top_k, named = ids.shape[1], bool(getattr(router, "norm_topk_prob", True))
    for kind in ("sigmoid", "softmax"):
        scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
        chosen = _chosen(scores if correction is None else scores + correction, top_k, groups, top_groups)
        for is_normed in (named, not named):
            want = torch.where(chosen, scores, 0.0)
            want = want / want.sum(-1, keepdim=True) if is_normed else want
            factor = float(f"{(found.sum() / want.sum()).item():.6g}")
            if factor > 0 and torch.allclose(found, factor * want, rtol=1e-3, atol=1e-5):
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


def _chosen(scores: Tensor, top_k: int, groups: int, top_groups: int) -> Tensor:
    """Which of scores [m, e] are the top_k greatest within the top groups, as bool of the same shape."""
    if groups > 1:
        parted = scores.view(len(scores), groups, -1)
        best = parted.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
        kept = torch.zeros(len(scores), groups, dtype=torch.bool).scatter(1, best, True)
        scores = parted.masked_fill(~kept[..., None], -math.inf).flatten(1)
    ids = scores.topk(top_k, -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
