"""One linear layer on the GPU: int4_linear and fp8_linear beside cuBLAS bf16 and torch's int4 kernel, in one process.

    python benchmarks/bench_linear.py                                 # half a minute
    python benchmarks/bench_linear.py --shapes all --tokens 1 4 8 16 32 64 128 256 1024 4096 --groups 128 32

Every call is captured in a CUDA graph that goes through copies of the layer which together are several times as
large as the L2 cache, so weights come from memory. Roofline of a cell = max(bytes / read bandwidth, operations /
cuBLAS's rate on a large matrix), both measured here and now.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rows import RESULTS, commit, record
from torch import Tensor, nn
from torch.nn import functional

from ktinject.operators import REGISTRY
from ktinject.operators.linears.gpu_linear import GpuLinear

SHAPES = {
    "7168x18432": (7168, 18432),  # k, n: DeepSeek-V3's dense MLP
    "16384x7168": (16384, 7168),  # its attention output
    "4096x4096": (4096, 4096),
    "7168x2048": (7168, 2048),  # its shared expert
    "2048x768": (2048, 768),
}
_CACHES = 5  # copies of a layer fill this many L2 caches


def measure(calls: Sequence[Callable[[], object]], seconds: float) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of a call in µs; the calls are captured one after the other in one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    repeat = max(1, 40 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    times: list[float] = []
    graph.replay()
    torch.cuda.synchronize()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (repeat * len(calls)))
    times.sort()
    return statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10]


def read_bandwidth() -> float:
    """Bytes a second at which a large sum reads the device's memory."""
    source = torch.randn(1 << 29, device="cuda")
    return 4 * source.numel() / measure([source.sum], 0.3)[1] * 1e6


def multiply_rate() -> float:
    """Operations a second of cuBLAS on 8192³ in bf16, random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / measure([lambda: a @ b], 0.3)[1] * 1e6


def copies(bytes_a_layer: int) -> int:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-_CACHES * cache // bytes_a_layer))


def operator(name: str, weight: Tensor, count: int, **arguments: object) -> list[GpuLinear]:
    """`count` filled operators with the same weight, each in its own memory."""
    n, k = weight.shape
    module = nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16)
    kind = REGISTRY[name]
    made = []
    for _ in range(count):
        made.append(kind.build(module, kind.Config(device="cuda:0", **arguments)))
        made[-1].allocate()
        made[-1].load("weight", weight, None, None)
        made[-1].finish()
    return made


def tinygemm(weight: Tensor, count: int, group: int) -> list[Callable[[Tensor], Tensor]]:
    """torch's own int4 kernel; values do not matter for its time."""
    n, k = weight.shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    packed = [torch._convert_weight_to_int4pack(codes, 8) for _ in range(count)]
    scales = [torch.randn(k // group, n, 2, device="cuda").bfloat16() for _ in range(count)]
    return [lambda x, w=w, s=s: torch._weight_int4pack_mm(x, w, group, s) for w, s in zip(packed, scales)]


def relative_error(found: Tensor, want: Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def bench(arguments: argparse.Namespace) -> list[dict[str, object]]:
    torch.manual_seed(0)
    bandwidth, rate = read_bandwidth(), multiply_rate()
    name = torch.cuda.get_device_name()
    machine = arguments.machine or name
    stamp = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "benchmark": "linear",
    }
    print(f"# {machine} ({name}), commit {stamp['commit']}, torch {torch.__version__}")
    print(f"# read {bandwidth / 1e12:.2f} TB/s, cuBLAS bf16 {rate / 1e12:.0f} TFLOPS")
    print(
        f"{'k x n':12s} {'m':>5s} {'weights':10s} {'µs':>8s} {'GB/s':>6s} {'TFLOPS':>6s} {'share':>5s} {'error':>8s} "
        f"{'cuBLAS µs':>9s} {'ratio':>6s} {'tinygemm µs':>11s} {'ratio':>6s}"
    )
    rows: list[dict[str, object]] = []
    for shape in arguments.shapes:
        k, n = SHAPES[shape]
        weight = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
        dense = [weight.clone() for _ in range(copies(2 * n * k))]
        variants: list[tuple[str, str, list[GpuLinear], list[Callable[[Tensor], Tensor]]]] = []
        for group in arguments.groups:
            count = copies(n * k // 2)
            made = operator("int4_linear", weight, count, group_size=group)
            peers = tinygemm(weight, count, group) if group > 0 else []
            variants.append((f"int4-g{group}", "int4", made, peers))
        if "fp8_linear" in REGISTRY and arguments.fp8:
            variants.append(("fp8", "fp8", operator("fp8_linear", weight, copies(n * k)), []))
        for m in arguments.tokens:
            x = torch.randn(m, k, device="cuda").bfloat16()
            cublas_us = measure([partial(functional.linear, x, w) for w in dense], arguments.seconds)[0]
            for label, _, made, peers in variants:
                error = relative_error(
                    made[0](x), x.double() @ made[0].unpack("weight").to("cuda").double().T
                )
                median, low, high = measure([partial(o, x) for o in made], arguments.seconds)
                tiny_us = measure([partial(f, x) for f in peers], arguments.seconds)[0] if peers else None
                moved = sum(made[0].footprint().values()) + 2 * m * (n + k)
                floor_memory, floor_multiply = moved / bandwidth * 1e6, 2 * m * n * k / rate * 1e6
                row = stamp | {
                    "shape": shape,
                    "tokens": m,
                    "weights": label,
                    "kernel": made[0].describe()["kernel"].split(",")[0],
                    "us": round(median, 2),
                    "us_p10": round(low, 2),
                    "us_p90": round(high, 2),
                    "gb_s": round(moved / median / 1e3, 1),
                    "tflops": round(2 * m * n * k / median / 1e6, 2),
                    "roofline_us": round(max(floor_memory, floor_multiply), 2),
                    "share": round(max(floor_memory, floor_multiply) / median, 3),
                    "bound": "memory" if floor_memory > floor_multiply else "multiply",
                }
                rows.append(
                    row
                    | {
                        "peer": f"cuBLAS bf16, torch {torch.__version__}",
                        "peer_us": round(cublas_us, 2),
                        "ratio": round(cublas_us / median, 3),
                    }
                )
                line = (
                    f"{shape:12s} {m:5d} {label:10s} {median:8.1f} {row['gb_s']:6.0f} {row['tflops']:6.1f} "
                    f"{row['share']:5.2f} {error:8.1e} {cublas_us:9.1f} {cublas_us / median:5.2f}x"
                )
                if tiny_us:
                    rows.append(
                        row
                        | {
                            "peer": f"tinygemm int4, torch {torch.__version__}",
                            "peer_us": round(tiny_us, 2),
                            "ratio": round(tiny_us / median, 3),
                        }
                    )
                    line += f" {tiny_us:11.1f} {tiny_us / median:5.2f}x"
                print(line, flush=True)
        del dense, variants
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["7168x18432", "4096x4096"], choices=[*SHAPES, "all"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 1024])
    parser.add_argument("--groups", nargs="+", type=int, default=[128], help="group sizes; -1: a scale a row")
    parser.add_argument("--seconds", type=float, default=0.2, help="measured per cell")
    parser.add_argument("--no-fp8", dest="fp8", action="store_false", help="leave fp8_linear out")
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
