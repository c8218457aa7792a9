"""One routed-experts layer: ktinject's kernels beside the machine's ceilings and PyTorch, in one process.

    python benchmarks/bench_moe.py                                    # a minute: what `make bench` runs
    python benchmarks/bench_moe.py --shapes all --tokens 1 4 16 64 128 256 1024 4096 --weights bf16 int8 int4

Roofline of a cell = max(bytes of the distinct experts / read bandwidth, operations / multiply rate), both measured
here and now with the same threads. Share = roofline / measured time. Routing sets are cycled, and so are copies of a
layer that is not eight times as large as the last-level cache: a step should find its experts in memory.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import itertools
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ktinject import _native

RESULTS = Path(__file__).parent / "results.csv"


@dataclass(frozen=True)
class Shape:
    """A layer; experts may be fewer than the model's, so that it fits in memory."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("deepseek-v3", 32, 8, 7168, 2048),  # 32 of its 256 experts
        Shape("mixtral-8x7b", 8, 2, 4096, 14336),
        Shape("qwen2-57b-a14b", 64, 8, 3584, 2560),
    )
}
BYTES_A_WEIGHT = {
    "bf16": 2.0,
    "int8": 1.0,
    "int4-g128": 0.5 + 2 / 128,
    "int4-g64": 0.5 + 2 / 64,
    "int4-g32": 0.5 + 2 / 32,
}
LINE = "{shape:15s} {tokens:5d} {weights:10s} {kernel:15s} {us:10.0f} {gb_s:7.1f} {tflops:7.3f} {share:6.2f}"
COLUMNS = [
    "date", "commit", "machine", "threads", "benchmark", "shape", "routing", "tokens", "weights", "kernel",
    "us", "us_p10", "us_p90", "gb_s", "tflops", "roofline_us", "share", "bound", "peer", "peer_us", "ratio",
]  # fmt: skip


def routing_sets(shape: Shape, tokens: int, skewed: bool, sets: int = 16) -> list[Tensor]:
    """Random top-k indices [tokens, top_k], int64; skewed: expert popularity falls off as 1 / rank."""
    popularity = torch.ones(shape.experts)
    if skewed:
        popularity = 1.0 / torch.arange(1, shape.experts + 1)
        popularity = popularity[torch.randperm(shape.experts)]
    return [torch.multinomial(popularity.expand(tokens, -1), shape.top_k) for _ in range(sets)]


def build(shape: Shape, weights: str, kernel: str, gate_up: Tensor, down: Tensor) -> _native.Experts:
    """Packed experts from gate_up [e, 2i, h] and down [e, h, i] in bf16."""
    name, _, group = weights.partition("-g")
    experts = _native.Experts(
        experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        weights=name,
        group_size=int(group or 0),
        has_gate=True,
        has_bias=False,
        activation="silu",
        alpha=1.0,
        gate_max=math.inf,
        up_limit=math.inf,
        up_offset=0.0,
        kernel=kernel,
    )
    experts.allocate()
    for e in range(shape.experts):
        experts.load("gate", e, gate_up[e, : shape.intermediate])
        experts.load("up", e, gate_up[e, shape.intermediate :])
        experts.load("down", e, down[e])
    return experts


def torch_layer(gate_up: Tensor, down: Tensor, x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """The plain way: sort the pairs, loop over the experts hit, oneDNN underneath."""
    out = torch.zeros(x.shape, dtype=torch.float32)
    flat = index.flatten()
    order = flat.argsort()
    tokens = order // index.shape[1]
    sorted_weight = weight.flatten()[order]
    start = 0
    for e, count in enumerate(torch.bincount(flat, minlength=gate_up.shape[0]).tolist()):
        if count == 0:
            continue
        rows = tokens[start : start + count]
        gate, up = functional.linear(x[rows], gate_up[e]).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, down[e])
        out.index_add_(0, rows, y.float() * sorted_weight[start : start + count, None])
        start += count
    return out


def measure(
    step: Callable[[Tensor], object], sets: list[Tensor], seconds: float
) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of one step, in µs; at least five steps after two of warm-up."""
    for ids in sets[:2]:
        step(ids)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = time.perf_counter()
        step(sets[len(times) % len(sets)])
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10]


def multiply_unit(kernel: str, weights: str) -> str:
    """The unit whose rate bounds a kernel; int4 runs on the int8 units, AVX2 converts everything to fp32 or int16."""
    isa = kernel.split("_")[0]
    if isa in ("avx2", "reference"):
        return "avx2_fp32"
    return f"{isa}_{'bf16' if weights == 'bf16' else 'int8'}"


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("KTINJECT_COMMIT", "unknown")


@dataclass(frozen=True)
class Ceilings:
    """What the machine does at best, measured in this process: bytes a second, operations a second a unit."""

    read: float
    rates: dict[str, float]

    def roofline(self, moved: float, operations: float, unit: str) -> tuple[float, str]:
        """Least µs for the work, and what binds it."""
        memory, multiply = moved / self.read * 1e6, operations / self.rates[unit] * 1e6
        return max(memory, multiply), "memory" if memory > multiply else "multiply"


def kernels_for(weights: str, asked: list[str]) -> list[str]:
    """`all` means every fast kernel this CPU runs; the reference and modelled ones are for tests."""
    if asked != ["all"]:
        return asked
    rows = [k for k in _native.kernels() if k["available"] and k["weights"] == weights.split("-")[0]]
    return [k["name"] for k in rows if not k["name"].startswith(("reference", "modelled"))]


def copies(bytes_a_layer: int) -> int:
    """Layers to cycle through, at most 8."""
    cache = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    last_level = int(cache.read_text().strip().removesuffix("K")) << 10 if cache.exists() else 64 << 20
    return min(8, math.ceil(8 * last_level / bytes_a_layer))


def cell(
    shape: Shape, weights: str, layers: list[_native.Experts], sets: list[Tensor], x: Tensor, weight: Tensor,
    ceilings: Ceilings, seconds: float,
) -> dict[str, object]:  # fmt: skip
    """One line of the table: x [tokens, hidden] bf16, weight [tokens, top_k] fp32, sets of top-k indices."""
    tokens = x.shape[0]
    out = torch.empty_like(x)
    turn = itertools.cycle(layers)
    median, low, high = measure(lambda ids: next(turn).forward(x, ids, weight, out), sets, seconds)
    distinct = statistics.mean(len(ids.unique()) for ids in sets)
    each = 3 * shape.hidden * shape.intermediate
    moved, operations = distinct * each * BYTES_A_WEIGHT[weights], 2.0 * each * shape.top_k * tokens
    many, few = layers[0].kernels
    used = many if tokens * shape.top_k / distinct >= 5 else few
    roofline, bound = ceilings.roofline(moved, operations, multiply_unit(used, weights))
    return {
        "shape": shape.name,
        "tokens": tokens,
        "weights": weights,
        "kernel": used,
        "us": round(median, 1),
        "us_p10": round(low, 1),
        "us_p90": round(high, 1),
        "gb_s": round(moved / median / 1e3, 2),
        "tflops": round(operations / median / 1e6, 3),
        "roofline_us": round(roofline, 1),
        "share": round(roofline / median, 3),
        "bound": bound,
    }


def bench(arguments: argparse.Namespace) -> list[dict[str, object]]:
    if arguments.threads:
        _native.set_threads(arguments.threads)
    threads = _native.threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rates = {unit: _native.multiply_rate(unit) for unit in _native.multiply_units()}
    ceilings = Ceilings(_native.read_bandwidth(256 << 20), rates)
    machine = arguments.machine or f"{cpu_name()}, {len(os.sched_getaffinity(0))} vCPU"
    stamp = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "threads": threads,
        "benchmark": "moe",
    }
    print(f"# {machine}, {threads} threads, commit {stamp['commit']}, torch {torch.__version__}")
    print(
        f"# read {ceilings.read / 1e9:.1f} GB/s; "
        + ", ".join(f"{u} {r / 1e12:.2f} T" for u, r in rates.items())
    )
    print(
        f"{'shape':15s} {'m':>5s} {'weights':10s} {'kernel':15s} {'µs':>10s} {'GB/s':>7s} {'TFLOPS':>7s} "
        f"{'share':>6s} {'PyTorch µs':>11s} {'ratio':>6s}"
    )
    rows: list[dict[str, object]] = []
    for shape in (SHAPES[name] for name in arguments.shapes):
        gate_up = torch.empty(
            shape.experts, 2 * shape.intermediate, shape.hidden, dtype=torch.bfloat16
        ).normal_(0, 0.02)
        down = torch.empty(shape.experts, shape.hidden, shape.intermediate, dtype=torch.bfloat16).normal_(
            0, 0.02
        )
        problems = {}
        for routing in arguments.routing:
            for tokens in arguments.tokens:
                sets = routing_sets(shape, tokens, routing == "skewed")
                x, weight = torch.randn(tokens, shape.hidden).bfloat16(), torch.rand(tokens, shape.top_k)
                step = functools.partial(torch_layer, gate_up, down, x, weight)
                peer_us = measure(step, sets, arguments.seconds)[0] if arguments.peer else None
                problems[routing, tokens] = sets, x, weight, peer_us
        for weights in arguments.weights:
            for kernel in kernels_for(weights, arguments.kernels):
                layers = [build(shape, weights, kernel, gate_up, down)]
                layers += [
                    build(shape, weights, kernel, gate_up, down) for _ in range(1, copies(layers[0].bytes))
                ]
                for (routing, _), (sets, x, weight, peer_us) in problems.items():
                    row = stamp | cell(shape, weights, layers, sets, x, weight, ceilings, arguments.seconds)
                    row["routing"] = routing
                    line = LINE.format_map(row)
                    if peer_us:
                        row |= {"peer": f"torch {torch.__version__} bf16", "peer_us": round(peer_us, 1)}
                        row["ratio"] = round(peer_us / float(str(row["us"])), 2)
                        line += f" {peer_us:11.0f} {row['ratio']:5.2f}x"
                    print(line, flush=True)
                    rows.append(row)
                del layers
    return rows


def record(rows: list[dict[str, object]], path: Path) -> None:
    """Append; the header is written once."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b"], choices=[*SHAPES, "all"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 1024])
    parser.add_argument(
        "--weights", nargs="+", default=["bf16", "int8", "int4-g128"], choices=list(BYTES_A_WEIGHT)
    )
    parser.add_argument(
        "--kernels", nargs="+", default=["auto"], help="rows of the kernel table, auto, or all"
    )
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=["uniform", "skewed"])
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured per cell")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="leave PyTorch out")
    parser.add_argument("--machine", help="name for the machine column")
    parser.add_argument("--csv", type=Path, default=None, help=f"append to this file, e.g. {RESULTS}")
    arguments = parser.parse_args()
    if "all" in arguments.shapes:
        arguments.shapes = list(SHAPES)
    rows = bench(arguments)
    if arguments.csv:
        record(rows, arguments.csv)


if __name__ == "__main__":
    main()
