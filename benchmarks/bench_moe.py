"""One routed-experts layer: ktinject's kernels beside the machine's ceilings and other implementations, in one process.

    python benchmarks/bench_moe.py                                # a minute: what `make bench` runs
    python benchmarks/bench_moe.py --sweep --csv out.csv          # every shape, format and number of tokens: an hour
    python benchmarks/bench_moe.py --kernels all --tokens 16      # every kernel this CPU can run

Roofline of a cell = max(bytes of the distinct experts / read bandwidth, operations / multiply rate). Both ceilings are
measured in this process, with the same threads, before each format again, because a shared host gives more at one time
and less at another. The highest figure of the run counts, and a cell that itself reads or multiplies faster raises the
ceiling: so no share exceeds 1, and a share is low rather than high.

Steps cycle through copies of the layer that are together eight times as large as the last-level cache, and through
many routings, so that a step finds its experts in memory.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from moe_peers import KtKernel, KtLayer, load_kt_kernel, quiet, torch_layer
from torch import Tensor

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

    @property
    def weights_an_expert(self) -> int:
        return 3 * self.hidden * self.intermediate


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
SWEEP_TOKENS = [1, 4, 16, 64, 128, 256, 1024, 4096]
COLUMNS = [
    "date", "commit", "machine", "threads", "benchmark", "shape", "routing", "tokens", "weights", "kernel",
    "us", "us_p10", "us_p90", "gb_s", "tflops", "roofline_us", "share", "bound", "peer", "peer_us", "ratio",
]  # fmt: skip


@dataclass
class Problem:
    """Inputs of a cell, the same for everybody."""

    shape: Shape
    routing: str
    tokens: int
    sets: list[Tensor]  # top-k indices [tokens, top_k], int64
    x: Tensor  # [tokens, hidden] bf16
    weight: Tensor  # [tokens, top_k] fp32
    torch_us: float | None = None

    @functools.cached_property
    def distinct(self) -> float:
        return statistics.mean(len(ids.unique()) for ids in self.sets)

    @property
    def operations(self) -> float:
        return 2.0 * self.shape.weights_an_expert * self.shape.top_k * self.tokens


@dataclass
class Cell:
    """A measured cell; its share is known when the run's ceilings are."""

    problem: Problem
    weights: str
    asked: str  # kernel as asked for: auto, or a row of the table
    kernel: str  # the row that ran
    times: list[float]  # µs, sorted
    peers: dict[str, float] = field(default_factory=dict)  # name: µs

    @property
    def us(self) -> float:
        return statistics.median(self.times)

    @property
    def bytes(self) -> float:
        return self.problem.distinct * self.problem.shape.weights_an_expert * BYTES_A_WEIGHT[self.weights]

    @property
    def unit(self) -> str:
        """What bounds the kernel; int4 runs on the int8 units, AVX2 converts everything to fp32 or int16."""
        isa = self.kernel.split("_")[0]
        if isa in ("avx2", "reference"):
            return "avx2_fp32"
        return f"{isa}_{'bf16' if self.weights == 'bf16' else 'int8'}"


@dataclass
class Ceilings:
    """What the machine does at best: bytes a second, operations a second a unit."""

    read: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)

    def measure(self) -> None:
        self.read = max(self.read, _native.read_bandwidth(256 << 20))
        for unit in _native.multiply_units():
            self.rates[unit] = max(self.rates.get(unit, 0.0), _native.multiply_rate(unit))

    def raise_to(self, cell: Cell) -> None:
        self.read = max(self.read, cell.bytes / cell.us * 1e6)
        self.rates[cell.unit] = max(self.rates.get(cell.unit, 0.0), cell.problem.operations / cell.us * 1e6)

    def roofline(self, cell: Cell) -> tuple[float, str]:
        """Least µs for the work, and what binds it."""
        memory = cell.bytes / self.read * 1e6
        multiply = cell.problem.operations / self.rates[cell.unit] * 1e6
        return max(memory, multiply), "memory" if memory > multiply else "multiply"

    def __str__(self) -> str:
        units = ", ".join(f"{unit} {rate / 1e12:.2f} T" for unit, rate in self.rates.items())
        return f"read {self.read / 1e9:.1f} GB/s; {units}"


def routing_sets(shape: Shape, tokens: int, skewed: bool) -> list[Tensor]:
    """Random top-k indices [tokens, top_k], int64; skewed: expert popularity falls off as 1 / rank."""
    popularity = torch.ones(shape.experts)
    if skewed:
        popularity = 1.0 / torch.arange(1, shape.experts + 1)
        popularity = popularity[torch.randperm(shape.experts)]
    sets = 64 if tokens <= 64 else 8
    return [torch.multinomial(popularity.expand(tokens, -1), shape.top_k) for _ in range(sets)]


def random_weights(shape: Shape) -> tuple[Tensor, Tensor]:
    """gate_up [e, 2i, h] and down [e, h, i] in bf16: one expert of random numbers, the others shifted copies of it."""
    gate_up = torch.empty(shape.experts, 2 * shape.intermediate, shape.hidden, dtype=torch.bfloat16)
    down = torch.empty(shape.experts, shape.hidden, shape.intermediate, dtype=torch.bfloat16)
    for weight in gate_up, down:
        first = weight[0].normal_(0, 0.02)
        for e in range(1, shape.experts):
            weight[e] = first.roll((17 * e, 31 * e), (0, 1))
    return gate_up, down


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


Step = Callable[[int, Tensor], object]


def measure(steps: dict[str, Step], sets: list[Tensor], seconds: float) -> dict[str, list[float]]:
    """Sorted µs of each step(turn, ids). Several steps alternate in two rounds, with a pause that lets the workers of
    the last one fall asleep; at least six turns each, unless that takes very long, after two of warm-up a round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    rounds = 1 if len(steps) == 1 else 2
    for _ in range(rounds):
        for name, step in steps.items():
            time.sleep(0.1)
            begun = time.perf_counter()
            for turn in range(2):
                if turn == 0 or time.perf_counter() - begun < seconds:
                    step(turn, sets[turn])
            taken = times[name]
            begun, before = time.perf_counter(), len(taken)
            while True:
                elapsed, turns = time.perf_counter() - begun, len(taken) - before
                if elapsed > seconds / rounds and (turns >= 6 // rounds or (turns and elapsed > 3 * seconds)):
                    break
                ids = sets[len(taken) % len(sets)]
                start = time.perf_counter()
                step(len(taken), ids)
                taken.append((time.perf_counter() - start) * 1e6)
    return {name: sorted(taken) for name, taken in times.items()}


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


def measure_cell(
    problem: Problem, weights: str, asked: str, layers: list[_native.Experts], peers: dict[str, list[KtLayer]],
    seconds: float,
) -> Cell:  # fmt: skip
    out = torch.empty_like(problem.x)

    def ours(turn: int, ids: Tensor) -> None:
        layers[turn % len(layers)].forward(problem.x, ids, problem.weight, out)

    def theirs(peer: list[KtLayer], turn: int, ids: Tensor) -> None:
        peer[turn % len(peer)].forward(problem.x, ids, problem.weight, out)

    steps: dict[str, Step] = {"": ours}
    steps |= {name: functools.partial(theirs, peer) for name, peer in peers.items()}
    times = measure(steps, problem.sets, seconds)
    many, few = layers[0].kernels
    kernel = many if problem.tokens * problem.shape.top_k / problem.distinct >= 5 else few
    cell = Cell(problem, weights, asked, kernel, times.pop(""))
    if problem.torch_us is not None:
        cell.peers[f"torch {torch.__version__} bf16"] = problem.torch_us
    cell.peers |= {name: statistics.median(taken) for name, taken in times.items()}
    return cell


def line(cell: Cell, ceilings: Ceilings) -> str:
    best = min((us for name, us in cell.peers.items() if not name.startswith("torch")), default=None)
    other = f"{best:10.0f} {best / cell.us:5.2f}x" if best is not None else ""
    torch_us = cell.problem.torch_us
    slow = f"{torch_us:10.0f} {torch_us / cell.us:5.2f}x" if torch_us is not None else " " * 17
    return (
        f"{cell.problem.shape.name:15s} {cell.problem.routing:8s} {cell.problem.tokens:5d} {cell.weights:10s} "
        f"{cell.kernel:15s} {cell.us:10.0f} {cell.bytes / cell.us / 1e3:7.1f} "
        f"{cell.problem.operations / cell.us / 1e6:7.3f} {ceilings.roofline(cell)[0] / cell.us:6.2f} {slow} {other}"
    )


HEADER = (
    f"{'shape':15s} {'routing':8s} {'m':>5s} {'weights':10s} {'kernel':15s} {'µs':>10s} {'GB/s':>7s} {'TFLOPS':>7s} "
    f"{'share':>6s} {'PyTorch':>10s} {'ratio':>6s} {'kt-kernel':>10s} {'ratio':>6s}"
)


def peers_of(
    kt: KtKernel | None, weights: str, gate_up: Tensor, down: Tensor, shape: Shape, most: int, count: int
) -> dict[str, list[KtLayer]]:
    """kt-kernel's layers beside ours, each proved right first."""
    found: dict[str, list[KtLayer]] = {}
    for format in KtKernel.FORMATS.get(weights, []) if kt is not None else []:
        assert kt is not None
        try:
            layers = [kt.layer(format, gate_up, down, shape.top_k, most) for _ in range(count)]
        except AttributeError:
            continue  # its build for this CPU lacks the format
        error = layers[0].error(gate_up, down)
        if error > 0.35:
            raise RuntimeError(
                f"{layers[0].name}: relative error {error:.2f}; it would be no fair comparison"
            )
        found[layers[0].name] = layers
    return found


def bench(arguments: argparse.Namespace, cells: list[Cell], ceilings: Ceilings) -> None:
    """Adds to `cells` and raises `ceilings`."""
    threads = _native.threads()
    extension = load_kt_kernel() if arguments.peers else None
    kt = KtKernel(extension, arguments.kt_threads or threads) if extension is not None else None
    ceilings.measure()
    print(f"# {ceilings}")
    if kt is not None:
        print(f"# kt-kernel {kt.version}, {kt.workers} workers and a dispatcher")
    print(HEADER)
    for shape in (SHAPES[name] for name in arguments.shapes):
        gate_up, down = random_weights(shape)
        problems = []
        for routing in arguments.routing:
            for tokens in arguments.tokens:
                sets = routing_sets(shape, tokens, routing == "skewed")
                x, weight = torch.randn(tokens, shape.hidden).bfloat16(), torch.rand(tokens, shape.top_k)
                problem = Problem(shape, routing, tokens, sets, x, weight)
                if arguments.peers and tokens <= arguments.peer_tokens:
                    step = functools.partial(torch_layer, gate_up, down, x, weight)
                    times = measure({"": lambda _, ids, step=step: step(ids)}, sets, arguments.seconds)
                    problem.torch_us = statistics.median(times[""])
                problems.append(problem)
        for weights in arguments.weights:
            ceilings.measure()
            peers: dict[str, list[KtLayer]] = {}
            for position, kernel in enumerate(kernels_for(weights, arguments.kernels)):
                layers = [build(shape, weights, kernel, gate_up, down)]
                layers += [
                    build(shape, weights, kernel, gate_up, down) for _ in range(1, copies(layers[0].bytes))
                ]
                if position == 0:
                    most = min(max(arguments.tokens), arguments.peer_tokens)
                    peers = peers_of(kt, weights, gate_up, down, shape, most, len(layers))
                for problem in problems:
                    is_compared = position == 0 and problem.tokens <= arguments.peer_tokens
                    beside = peers if is_compared else {}
                    cell = measure_cell(problem, weights, kernel, layers, beside, arguments.seconds)
                    ceilings.raise_to(cell)
                    cells.append(cell)
                    print(line(cell, ceilings), flush=True)
                del layers
            del peers
    with quiet():
        del kt  # says goodbye


def summary(cells: list[Cell], ceilings: Ceilings) -> str:
    """Shares by number of tokens under the run's final ceilings, and how far ahead of the peers."""
    tokens = sorted({cell.problem.tokens for cell in cells})
    lines = [
        f"# ceilings of the run: {ceilings}",
        "",
        "share of roofline".ljust(52) + "".join(f"{m:>7d}" for m in tokens),
    ]
    table: dict[tuple[str, ...], dict[int, Cell]] = {}
    for cell in cells:
        key = cell.problem.shape.name, cell.problem.routing, cell.weights, cell.asked
        table.setdefault(key, {})[cell.problem.tokens] = cell
    for key, row in table.items():
        shares = (f"{ceilings.roofline(row[m])[0] / row[m].us:7.2f}" if m in row else " " * 7 for m in tokens)
        lines.append(" ".join(key).ljust(52) + "".join(shares))
    ratios: dict[str, list[float]] = {}
    for cell in cells:
        for peer, us in cell.peers.items():
            ratios.setdefault(peer, []).append(us / cell.us)
    for peer, values in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        lines.append(
            f"times faster than {peer}: {mean:.2f} in the geometric mean, {min(values):.2f} at least"
        )
    return "\n".join(lines)


def rows_of(cells: list[Cell], ceilings: Ceilings, machine: str) -> list[dict[str, object]]:
    """Rows for results.csv: one for each peer of a cell."""
    stamp = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "threads": _native.threads(),
        "benchmark": "moe",
    }
    rows = []
    for cell in cells:
        roofline, bound = ceilings.roofline(cell)
        row = stamp | {
            "shape": cell.problem.shape.name,
            "routing": cell.problem.routing,
            "tokens": cell.problem.tokens,
            "weights": cell.weights,
            "kernel": cell.kernel,
            "us": round(cell.us, 1),
            "us_p10": round(cell.times[len(cell.times) // 10], 1),
            "us_p90": round(cell.times[len(cell.times) * 9 // 10], 1),
            "gb_s": round(cell.bytes / cell.us / 1e3, 2),
            "tflops": round(cell.problem.operations / cell.us / 1e6, 3),
            "roofline_us": round(roofline, 1),
            "share": round(roofline / cell.us, 3),
            "bound": bound,
        }
        rows += [
            row | {"peer": peer, "peer_us": round(us, 1), "ratio": round(us / cell.us, 2)}
            for peer, us in cell.peers.items()
        ] or [row]
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
    parser.add_argument(
        "--sweep", action="store_true", help="all shapes, weights, routings and numbers of tokens"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: all the process may use")
    parser.add_argument("--kt-threads", type=int, default=0, help="0: one less than CPUs, its best setting")
    parser.add_argument("--seconds", type=float, default=1.0, help="measured per cell and implementation")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave the others out")
    parser.add_argument("--peer-tokens", type=int, default=1024, help="the others up to so many tokens")
    parser.add_argument("--machine", help="name for the machine column")
    parser.add_argument("--csv", type=Path, default=None, help=f"append to this file, e.g. {RESULTS}")
    parser.add_argument(
        "--plot", type=Path, default=None, help="draw roofline and shares to this PNG; needs matplotlib"
    )
    arguments = parser.parse_args()
    if arguments.sweep:
        arguments.shapes, arguments.tokens = ["all"], SWEEP_TOKENS
        arguments.weights, arguments.routing = list(BYTES_A_WEIGHT), ["uniform", "skewed"]
    if "all" in arguments.shapes:
        arguments.shapes = list(SHAPES)
    if arguments.plot:
        from plot_moe import require_matplotlib

        require_matplotlib()  # before the work, not after it
    if arguments.threads:
        _native.set_threads(arguments.threads)
    torch.set_num_threads(_native.threads())
    torch.manual_seed(0)
    machine = arguments.machine or f"{cpu_name()}, {len(os.sched_getaffinity(0))} vCPU"
    print(f"# {machine}, {_native.threads()} threads, commit {commit()}, torch {torch.__version__}")
    cells: list[Cell] = []
    ceilings = Ceilings()
    try:
        bench(arguments, cells, ceilings)
    except KeyboardInterrupt:
        print("# interrupted; what was measured so far:")
    print(summary(cells, ceilings))
    rows = rows_of(cells, ceilings, machine)
    if arguments.csv:
        record(rows, arguments.csv)
    if arguments.plot:
        from plot_moe import draw

        draw([{key: str(value) for key, value in row.items()} for row in rows], arguments.plot)


if __name__ == "__main__":
    main()
