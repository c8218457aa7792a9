"""Random layers through every kernel of the table against fp64, for as many cases as asked.

    python tests/native/differential.py --cases 10000 --seed 0

A case draws shape (odd sizes included), format, kernel, tokens, top-k, activation, routing (skewed, sentinels), dtype
and channels that are larger than all others, with columns of weights that are as much smaller.

The reference rounds its activations as the kernels do, so a wrong index, scale or padding stands out far above
the tolerance. Prints median and worst error of each kernel; exits 1 if any case is over its tolerance.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Before the tests' folder is on the path: it has a folder ktinject, too.
from ktinject import _native
from ktinject.operators.probes.experts import ExpertsSpec

sys.path.insert(0, str(Path(__file__).parents[1]))

import k_quants
import reference

INNER_SIZES = [1, 8, 16, 17, 24, 32, 33, 48, 64, 96, 100, 128, 160, 200, 256, 300]
ACTIVATIONS = ["silu", "silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"]


@dataclass(frozen=True)
class Case:
    """One random problem; everything follows from the seed."""

    seed: int
    kernel: str
    weights: str
    group_size: int
    symmetric: bool
    spec: ExpertsSpec
    tokens: int
    top_k: int
    dtype: torch.dtype
    large: int = 0  # channels of the input and of the intermediate
    factor: float = 1.0


def draw(seed: int, kernels: list[dict[str, object]]) -> Case:
    choose = random.Random(seed)
    row = choose.choice(kernels)
    has_gate = choose.random() < 0.85
    is_limited = has_gate and choose.random() < 0.2
    wide = row["weights"] in k_quants.KINDS
    experts = choose.choice([1, 2, 3] if wide else [1, 2, 3, 8, 17])
    sizes = [256, 512] if wide else INNER_SIZES
    if row["weights"] in k_quants.INPUTS:  # whole blocks of the file, and parts of the kernels'
        sizes = [32, 96, 128, 160, 256, 352, 512]
    spec = ExpertsSpec(
        num_experts=experts,
        hidden_size=choose.choice(sizes),
        intermediate_size=choose.choice(sizes),
        has_gate=has_gate,
        has_bias=choose.random() < 0.3,
        is_transposed=False,
        is_concatenated=True,
        activation=choose.choice(ACTIVATIONS),
        alpha=choose.choice([1.0, 1.702]),
        gate_max=1.5 if is_limited else math.inf,
        up_limit=1.5 if is_limited else math.inf,
        up_offset=1.0 if is_limited else 0.0,
    )
    slow = str(row["name"]).startswith(("reference", "modelled"))
    tokens = choose.choice([1, 2, 3, 5, 17] if slow else [1, 1, 2, 3, 4, 5, 7, 16, 17, 31, 33, 64, 130])
    return Case(
        seed,
        str(row["name"]),
        str(row["weights"]),
        choose.choice([32, 64, 128]) if row["weights"] == "int4" else 0,
        row["weights"] != "int4" or choose.random() < 0.5,
        spec,
        tokens,
        choose.randint(1, experts),
        choose.choice([torch.float32, torch.bfloat16, torch.float16]),
        choose.choice([0, 0, 1, 2, 5]),
        choose.choice([3.0, 30.0, 100.0]),
    )


def expected(
    spec: ExpertsSpec, w: dict[str, Tensor], x: Tensor, index: Tensor, scale: Tensor, rounding: str
) -> Tensor:
    """reference.experts, an expert at a time instead of a token at a time."""
    x = reference.rounded(x, rounding)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e in range(spec.num_experts):
        tokens, slots = torch.where(index == e)
        rows = x[tokens]
        gate = rows @ w["gate"][e].T + w["gate_bias"][e] if spec.has_gate else None
        h = reference.to_bf16(reference.intermediate(gate, rows @ w["up"][e].T + w["up_bias"][e], spec))
        h = h if rounding == "bf16" else reference.rounded(h, rounding)
        out.index_add_(
            0, tokens, (h @ w["down"][e].T + w["down_bias"][e]) * scale[tokens, slots, None].double()
        )
    return out


def run(case: Case) -> tuple[float, float]:
    """The case's relative error against fp64 with the same rounding of activations, and what it may be."""
    spec = case.spec
    torch.manual_seed(case.seed)
    native = _native.Experts(
        experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        weights=case.weights,
        group_size=case.group_size,
        symmetric=case.symmetric,
        has_gate=spec.has_gate,
        has_bias=spec.has_bias,
        activation=spec.activation,
        alpha=spec.alpha,
        gate_max=spec.gate_max,
        up_limit=spec.up_limit,
        up_offset=spec.up_offset,
        kernel=case.kernel,
    )
    native.allocate()
    h, i = spec.hidden_size, spec.intermediate_size
    sizes = {"gate": (i, h), "up": (i, h), "down": (h, i)}
    if not spec.has_gate:
        del sizes["gate"]
    unpacked: dict[str, Tensor] = {}
    large = {size: torch.randperm(size)[: case.large] for size in {h, i}}
    for projection, (n, k) in sizes.items():
        weight = torch.randn(spec.num_experts, n, k).to(case.dtype) / math.sqrt(k)
        weight[:, :, large[k]] /= case.factor
        if projection == "up":
            weight[:, large[i]] *= case.factor
        bias = torch.randn(spec.num_experts, n) * 0.1 * spec.has_bias
        unpacked[projection] = torch.empty(spec.num_experts, n, k)
        unpacked[f"{projection}_bias"] = bias.double()
        for e in range(spec.num_experts):
            if case.weights in k_quants.KINDS:
                native.load_blocks(projection, e, k_quants.quantised(weight[e], case.weights))
            else:
                native.load(projection, e, weight[e])
            native.unpack(projection, e, unpacked[projection][e])
            if spec.has_bias:
                native.load_bias(projection, e, bias[e])
    assert not native.absent(1)
    x = torch.randn(case.tokens, h).to(case.dtype)
    x[:, large[h]] *= case.factor
    popularity = torch.rand(spec.num_experts) ** 3 + 1e-6
    index = torch.multinomial(popularity.expand(case.tokens, -1), case.top_k)
    drop = torch.rand(index.shape) < 0.1
    index[drop] = torch.where(torch.rand(index.shape) < 0.5, -1, spec.num_experts)[drop]
    scale = torch.rand(case.tokens, case.top_k)
    out = torch.full_like(x, math.nan)
    native.forward(x, index.int() if case.seed % 2 else index, scale, out)
    weights = {
        name: reference.multiplied(value, case.weights) if name in sizes else value.double()
        for name, value in unpacked.items()
    }
    want = expected(spec, weights, x, index, scale, reference.rounding(case.weights))
    allowed = tolerance(case)
    if requantises(case.kernel):
        allowed += 0.02
        if min(h, i) < 8 or case.large:
            allowed += 2 * requantisation(case, weights, x, index, scale, want)
    return reference.relative_error(out, want.to(case.dtype)), allowed


def requantisation(
    case: Case, weights: dict[str, Tensor], x: Tensor, index: Tensor, scale: Tensor, want: Tensor
) -> float:
    """What rounding the weights once more does to this very case, at the worst of 16 draws.

    A layer a few values wide may cancel to near zero, and a large input makes what its weights miss larger, so no
    constant bounds its relative error. A weight moves by at
    most half a level: 8 / 127 of its column's largest scale, which is at most the largest weight / 5.8.
    """
    errors = []
    for _ in range(16):
        moved = {
            name: w
            if name.endswith("bias")
            else w + w.abs().amax(-1, keepdim=True) * 0.0055 * (2 * torch.rand_like(w) - 1)
            for name, w in weights.items()
        }
        errors.append(reference.relative_error(expected(case.spec, moved, x, index, scale, "int8"), want))
    return max(errors)


def tolerance(case: Case) -> float:
    """What a single case may miss by, but for weights that are rounded once more.

    bf16: fp32 sums in another order, and an intermediate that falls to the other side of a rounding boundary. int8
    activations: the same fall may hit the largest value of a row, which moves that row's whole grid by 2^-8; so one
    case may come near the error of int8 activations themselves, and the median watches over the rest.
    """
    name = reference.rounding(case.weights)
    output = {torch.float32: 0.0, torch.bfloat16: 4e-3, torch.float16: 1e-3}[case.dtype]
    return reference.KERNEL_TOLERANCE[name.partition("_")[0]] + output


def requantises(kernel: str) -> bool:
    """AMX rounds int4 weights once more, to the int8 grid of their column: about 1 % of each weight matrix."""
    return kernel.endswith("amx_int4")


def median_tolerance(kernel: str) -> float:
    """Half of all cases meet no rounding boundary that matters: what is left there is the output's own rounding."""
    return 2e-2 if requantises(kernel) else 2e-3


def sweep(
    cases: int, seed: int, kernels: list[dict[str, object]]
) -> tuple[dict[str, list[float]], list[str]]:
    """Errors by kernel, and what is over its tolerance."""
    errors: dict[str, list[float]] = {}
    failures = []
    for number in range(seed, seed + cases):
        case = draw(number, kernels)
        error, allowed = run(case)
        errors.setdefault(case.kernel, []).append(error)
        if not error <= allowed:
            failures.append(f"error {error:.2e} > {allowed:.2e}: {case}")
    for kernel, values in errors.items():
        if not statistics.median(values) <= median_tolerance(kernel):
            failures.append(
                f"{kernel}: median error {statistics.median(values):.2e} > {median_tolerance(kernel):.0e}"
            )
    return errors, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernel", nargs="+", default=None, help="only these rows of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels = [k for k in _native.kernels() if k["available"]]
    if arguments.kernel:
        kernels = [k for k in kernels if k["name"] in arguments.kernel]
    errors, failures = sweep(arguments.cases, arguments.seed, kernels)
    for name, values in sorted(errors.items()):
        print(
            f"{name:20s} {len(values):6d} cases, median {statistics.median(values):.1e}, worst {max(values):.1e}"
        )
    for failure in failures[:20]:
        print(failure)
    print(f"{arguments.cases - len(failures)} passed, {len(failures)} failed")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
