"""What an RMS norm computes, found out by running it.

    y = weight * round(x / sqrt(mean(x²) + ε))        rounded before the weight, as Llama does
    y = round(weight * x / sqrt(mean(x²) + ε))        rounded after it, as gpt-oss does

Sums are in fp32; `round` is to the dtype of x. Where the weight is stored less 1, as Qwen3-Next stores it, 1 is added.
Some norms have no weight, which is 1 then. What a layer norm computes is found in the same way:

    y = round(weight * (x - mean(x)) / sqrt(var(x) + ε) + bias)
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.operators.probes.comparison import Tolerance
from ktinject.support import Support

_TOLERANCE = Tolerance(
    1e-5, "fp32 on both sides: what is left is the order of a sum; times the greatest weight"
)
_ROUNDED = Tolerance(
    0.02,
    "the part of bf16 values that differ: another order of a sum turns few roundings, another rounding a fifth",
)


@dataclass(frozen=True)
class RmsNormSpec:
    """An RMS norm as above.

    size                  of its weight
    has_unit_offset       the weight is stored without the 1 that it is around
    rounds_before_weight  x is rounded to its dtype before the weight is multiplied, not after
    """

    size: int
    epsilon: float
    has_unit_offset: bool
    rounds_before_weight: bool


@dataclass(frozen=True)
class LayerNormSpec:
    """A layer norm as above.

    size      of its weight
    has_bias  there is a bias as long as the weight
    """

    size: int
    epsilon: float
    has_bias: bool


def formula(x: Tensor, weight: Tensor, epsilon: float, rounds_before_weight: bool = True) -> Tensor:
    """The formula in PyTorch's operations: x [..., n] → the same shape and dtype.

    weight   [n], in the dtype of x, with the 1 that may be stored apart
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype) if rounds_before_weight else (weight.float() * normed).to(x.dtype)


@answered_once
def probe(module: nn.Module) -> RmsNormSpec | Support:
    """What a norm computes that holds a weight and nothing else."""
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.dim() != 1 or len(module.state_dict()) != 1 or [*module.children()]:
        return Support.no("it holds something else than one vector called weight")
    if [*module.buffers()]:
        return Support.no("it has a buffer beside its weight")
    try:
        with twin.on_cpu():
            return _compare(module, weight.shape[0])
    except Exception as error:  # the module's own code runs here, so anything may come out of it
        return refusal_of(error)


@answered_once
def probe_centred(module: nn.Module) -> LayerNormSpec | Support:
    """What a layer norm computes that holds a weight, and at most a bias."""
    parameters = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    shape = parameters.get("weight", ())
    if len(shape) != 1 or parameters.keys() - {"weight", "bias"} or {*parameters.values()} != {shape}:
        return Support.no("it holds something else than one vector called weight, and one called bias")
    if any(True for _ in module.buffers()) or any(True for _ in module.children()):
        return Support.no("it has a buffer or a child beside its weight")
    try:
        with twin.on_cpu():
            return _compare_centred(module, shape[0], "bias" in parameters)
    except Exception as error:  # the module's own code runs here, so anything may come out of it
        return refusal_of(error)


def probe_without_weight(module: nn.Module, size: int) -> float | Support:
    """The ε of an RMS norm of `size` values that has no weight, and whose forward takes x alone."""
    if module.state_dict() or any(True for _ in module.buffers()) or any(True for _ in module.children()):
        return Support.no(f"a {type(module).__name__} holds something")
    try:
        with twin.on_cpu():
            alone, random = twin.of(module), torch.Generator("cpu").manual_seed(0)
            x, ones = (
                torch.randn(3, size, generator=random, dtype=torch.float32, device="cpu"),
                torch.ones(size, dtype=torch.float32, device="cpu"),
            )
            x, tiny = (
                torch.cat([x, 1e-3 * x, 30 * x]),
                torch.full((1, size), 2.0**-60, dtype=torch.float32, device="cpu"),
            )
            scale = (alone(tiny) / tiny).median().item()
            epsilon = float(f"{scale**-2:.6g}") if math.isfinite(scale) and scale > 0 else math.nan
            difference = (alone(x) - formula(x, ones, epsilon)).abs().max().item()
            narrow = x.bfloat16()
            rounded = (alone(narrow) != formula(narrow, ones.bfloat16(), epsilon)).float().mean().item()
    except Exception as error:
        return refusal_of(error)
    if _TOLERANCE.allows(difference) and _ROUNDED.allows(rounded):
        return epsilon
    return Support.no(f"a {type(module).__name__} is not x / sqrt(mean(x²) + ε)")


def _compare_centred(module: nn.Module, n: int, has_bias: bool) -> LayerNormSpec | Support:
    random = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(n, generator=random, dtype=torch.float32, device="cpu") + 2.0
    bias = (
        torch.randn(n, generator=random, dtype=torch.float32, device="cpu")
        if has_bias
        else torch.zeros(n, dtype=torch.float32, device="cpu")
    )
    rows = torch.randn(3, n, generator=random, dtype=torch.float32, device="cpu") + 0.5
    x = torch.cat([rows * size for size in (1.0, 1e-3, 30.0)])

    def run(x: Tensor, bias: Tensor) -> Tensor:
        tensors = {"weight": weight.to(x.dtype)} | ({"bias": bias.to(x.dtype)} if has_bias else {})
        found: Tensor = twin.of(module, tensors=tensors)(x[None])[
            0
        ]  # not of rows alone, as GroupNorm takes them
        return found

    # With differences far below sqrt(ε), y is weight * (x - mean(x)) / sqrt(ε) where there is no bias.
    tiny = (2.0**-60 * (1.0 - torch.arange(n, dtype=torch.float32, device="cpu") % 2 * 2))[None]
    scale = (
        (run(tiny, torch.zeros(n, dtype=torch.float32, device="cpu")) / (weight * (tiny - tiny.mean())))
        .median()
        .item()
    )
    if not (math.isfinite(scale) and scale > 0):
        return Support.no("it is no layer norm")
    epsilon = float(f"{scale**-2:.6g}")
    difference = (run(x, bias) - _centred(x, weight, bias, epsilon)).abs().max().item()
    if not _TOLERANCE.allows(difference / weight.abs().max().item()):
        return Support.no(
            f"it is not weight * (x - mean(x)) / sqrt(var(x) + ε): max difference {difference:.1e}"
        )
    narrow = x.bfloat16()
    want = _centred(narrow, weight.bfloat16(), bias.bfloat16(), epsilon)
    differing = (run(narrow, bias) != want).float().mean().item()
    if not _ROUNDED.allows(differing):
        return Support.no(f"it rounds bf16 at another place: {differing:.0%} of the values differ")
    return LayerNormSpec(n, epsilon, has_bias)


def _centred(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    away = wide - wide.mean(-1, keepdim=True)
    normed = away * torch.rsqrt(away.pow(2).mean(-1, keepdim=True) + epsilon)
    return (weight.float() * normed + bias.float()).to(x.dtype)


def probe_of_one_input(module: nn.Module) -> RmsNormSpec | Support:
    """The same, of a norm whose forward takes nothing beside x: a gated one computes something else with its gate."""
    spec = probe(module)
    if isinstance(spec, Support):
        return spec
    _, _, *more = inspect.signature(type(module).forward).parameters
    return Support.no(f"its forward takes {', '.join(more)} as well") if more else spec


def _compare(module: nn.Module, n: int) -> RmsNormSpec | Support:
    random = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(n, generator=random, dtype=torch.float32, device="cpu") + 2.0
    rows = torch.randn(3, n, generator=random, dtype=torch.float32, device="cpu")
    x = torch.cat([rows * size for size in (1.0, 1e-3, 30.0)])
    # With x far below sqrt(ε), y is weight * x / sqrt(ε).
    tiny = torch.full((1, n), 2.0**-60, dtype=torch.float32, device="cpu")
    ratio, want = _run(module, values, tiny) / tiny, _run(module, values, x)
    differences = []
    for offset in (0.0, 1.0):
        weight = values + offset
        scale = (ratio / weight).median().item()
        if not (math.isfinite(scale) and scale > 0):
            continue
        epsilon = float(f"{scale**-2:.6g}")
        differences.append(
            (want - formula(x, weight, epsilon)).abs().max().item() / weight.abs().max().item()
        )
        if _TOLERANCE.allows(differences[-1]):
            break
    else:
        off = f": max difference {min(differences):.1e}" if differences else ""
        return Support.no(f"it is not weight * x / sqrt(mean(x²) + ε){off}")
    x, values = x.bfloat16(), values.bfloat16()
    found = _run(module, values, x)
    weights = {True: values + offset, False: values.float() + offset}
    differing = {
        before: (found != formula(x, weight, epsilon, before)).float().mean().item()
        for before, weight in weights.items()
    }
    before = differing[True] <= differing[False]
    if not _ROUNDED.allows(differing[before]):
        return Support.no(f"it rounds bf16 at another place: {differing[before]:.0%} of the values differ")
    return RmsNormSpec(n, epsilon, offset == 1.0, before)


def _run(module: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    found: Tensor = twin.of(module, tensors={"weight": weight})(x)
    return found
