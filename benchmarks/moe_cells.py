"""What bench_moe.py measures and how it is written down: shapes, inputs, cells, ceilings, tables, rows of the CSV."""

from __future__ import annotations

import datetime
import functools
import math
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rows import commit
from torch import Tensor

from ktinject import _native


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
        Shape("deepseek-v3-256", 256, 8, 7168, 2048),  # named alone only: 45 GB in bf16, packed and unpacked
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
    "int4z-g128": 0.5 + 3 / 128,  # with zero points
    "fp8": 1.0 + 4 / (16 * 128),
    "mxfp4": 0.5 + 1 / 32,
    "fp8_channel": 1.0,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp8": 1.0 + 1 / 32,
}


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


# What a row of the kernel table must have → the unit that it multiplies with, the fastest first.
_UNITS = {
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "avx512_vnni": "avx512_int8",
    "avx512_bf16": "avx512_bf16",
    "avx_vnni": "avxvnni_int8",
}


def unit_of(kernel: str) -> str:
    """The multiply unit that bounds a row of the kernel table; AVX2 converts everything to fp32 or int16."""
    (has,) = (row["isa"].split() for row in _native.kernels() if row["name"] == kernel)
    return next((unit for isa, unit in _UNITS.items() if isa in has), "avx2_fp32")


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
        return unit_of(self.kernel)


@dataclass
class Ceilings:
    """What the machine does at best: bytes a second, operations a second a unit."""

    read: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)

    def measure(self, units: Iterable[str]) -> None:
        self.read = max(self.read, _native.read_bandwidth(256 << 20))
        for unit in dict.fromkeys(units):
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


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown CPU"


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
