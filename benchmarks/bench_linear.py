"""One linear layer on the GPU: int4_linear and fp8_linear beside cuBLAS bf16 and torch's int4 kernel, in one process.

    python benchmarks/bench_linear.py                                 # half a minute
    python benchmarks/bench_linear.py --shapes all --tokens 1 4 8 16 32 64 128 256 1024 4096 --groups 128 32
    python benchmarks/bench_linear.py --bf16-copy                     # a minute

Every call is captured in a CUDA graph that goes through copies of the layer which together are several times as
large as the L2 cache, so weights come from memory. Roofline of a cell = max(bytes / read bandwidth, operations /
cuBLAS's rate on a large matrix), both measured here and now.

With --bf16-copy: int4_linear alone, with `bf16_copy`, and cuBLAS, in turns, for all layers for which the operator has a
choice that was measured; and in how many cells cuBLAS is ahead by more than 2 %.
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
from ktinject.operators.linears.int4_choice import INT4_IS_FASTER

SHAPES = {
    "7168x18432": (7168, 18432),  # k, n: DeepSeek-V3's dense MLP
    "16384x7168": (16384, 7168),  # its attention output
    "4096x4096": (4096, 4096),
    "7168x2048": (7168, 2048),  # its shared expert
    "2048x768": (2048, 768),
}
_CACHES = 5  # copies of a layer fill this many L2 caches
_BEHIND = 1.02  # so many times cuBLAS's time are behind it


def captured(calls: Sequence[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls, one after the other, and how many of them it has."""
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
    graph.replay()
    torch.cuda.synchronize()
    return graph, repeat * len(calls)


def in_turns(variants: Sequence[Sequence[Callable[[], object]]], seconds: float) -> list[list[float]]:
    """µs of a call of each variant, sorted: one number a replay, and replays take turns."""
    graphs = [captured(calls) for calls in variants]
    times: list[list[float]] = [[] for _ in graphs]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for (graph, count), found in zip(graphs, times):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop) * 1e3 / count)
    return [sorted(found) for found in times]


def measure(calls: Sequence[Callable[[], object]], seconds: float) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile of a call in µs; the calls are captured one after the other in one graph."""
    (times,) = in_turns([calls], seconds)
    return statistics.median(times), times[len(times) // 10], times[len(times) * 9 // 10]


def read_bandwidth() -> float:
    """Bytes a second at which a large sum reads the device's memory."""
    source = torch.randn(1 << 29, device="cuda")
    return 4 * source.numel() / measure([source.sum], 0.3)[1] * 1e6


def multiply_rate() -> float:
    """Operations a second of cuBLAS on 8192³ in bf16, random data."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / measure([lambda: a @ b], 0.3)[1] * 1e6


def copies(bytes_a_layer: int, caches: int = _CACHES) -> int:
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-caches * cache // bytes_a_layer))


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


def stamped(arguments: argparse.Namespace) -> dict[str, object]:
    """The columns that all rows share; they are printed, too."""
    name = torch.cuda.get_device_name()
    machine = arguments.machine or name
    print(f"# {machine} ({name}), commit {commit()}, torch {torch.__version__}")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine,
        "benchmark": "linear",
    }


def bench(arguments: argparse.Namespace) -> list[dict[str, object]]:
    torch.manual_seed(0)
    bandwidth, rate = read_bandwidth(), multiply_rate()
    stamp = stamped(arguments)
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


def bench_copy(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """int4_linear alone and with `bf16_copy` beside cuBLAS in bf16.

    Where the choice is int4, both are the same kernel, and the first one's time counts for both.
    """
    torch.manual_seed(0)
    stamp = stamped(arguments)
    print("# µs of int4_linear, of int4_linear with bf16_copy where that is cuBLAS, and of cuBLAS in bf16")
    print(f"{'k x n':12s}" + "".join(f"{m:>9d} tokens   " for m in arguments.tokens))
    rows: list[dict[str, object]] = []
    for k, n in INT4_IS_FASTER:
        weight = torch.randn(n, k, device="cuda").mul_(0.02).bfloat16()
        group = 128 if k % 128 == 0 else 64
        # Fewer of them than elsewhere, as each operator quantises.
        many, few = copies(n * k // 2, 3), copies(2 * n * k, 3)
        alone = operator("int4_linear", weight, many, group_size=group)
        both = operator("int4_linear", weight, few, group_size=group, bf16_copy=True)
        dense = [weight.clone() for _ in range(few)]
        line = f"{k}x{n}".ljust(12)
        for m in arguments.tokens:
            x = torch.randn(m, k, device="cuda").bfloat16()
            is_copied = both[0]._is_copied(m, x.dtype)
            variants = [[partial(one, x) for one in alone], [partial(functional.linear, x, w) for w in dense]]
            if is_copied:
                variants.append([partial(one, x) for one in both])
            int4, cublas, *more = in_turns(variants, arguments.seconds)
            cublas_us = statistics.median(cublas)
            for label, times in (("", int4), ("+bf16", more[0] if is_copied else int4)):
                us = statistics.median(times)
                rows.append(
                    stamp
                    | {
                        "shape": f"{k}x{n}",
                        "tokens": m,
                        "weights": f"int4-g{group}{label}",
                        "kernel": "cuBLAS bf16"
                        if times is not int4
                        else alone[0].describe()["kernel"].split(",")[0],
                        "us": round(us, 2),
                        "us_p10": round(times[len(times) // 10], 2),
                        "us_p90": round(times[len(times) * 9 // 10], 2),
                        "peer": f"cuBLAS bf16, torch {torch.__version__}",
                        "peer_us": round(cublas_us, 2),
                        "ratio": round(cublas_us / us, 3),
                    }
                )
            chosen = f"{rows[-1]['us']:.1f}" if is_copied else "-"
            line += f"{rows[-2]['us']:6.1f} {chosen:>5s} {cublas_us:5.1f} "
        print(line, flush=True)
    for line in behind(rows):
        print(line)
    return rows


def behind(rows: Sequence[dict[str, object]]) -> list[str]:
    """In how many cells cuBLAS is ahead by more than 2 %, without the copy and with it; and which these are."""
    lines = []
    for with_copy in (False, True):
        mine = [row for row in rows if str(row["weights"]).endswith("+bf16") == with_copy]
        found = [row for row in mine if float(str(row["us"])) > _BEHIND * float(str(row["peer_us"]))]
        least = min(float(str(row["ratio"])) for row in mine)
        lines.append(
            f"# {'with bf16_copy' if with_copy else 'int4 alone'}: behind cuBLAS by more than 2 % in {len(found)} of "
            f"{len(mine)} cells, least {least:.2f}"
            + "".join(f"; {row['shape']} at {row['tokens']}: {row['ratio']}" for row in found if with_copy)
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["7168x18432", "4096x4096"], choices=[*SHAPES, "all"])
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="by itself 1 16 64 1024; with --bf16-copy 32 to 512"
    )
    parser.add_argument("--groups", nargs="+", type=int, default=[128], help="group sizes; -1: a scale a row")
    parser.add_argument("--seconds", type=float, help="measured per cell: 0.2; with --bf16-copy 0.03 in all")
    parser.add_argument("--no-fp8", dest="fp8", action="store_false", help="leave fp8_linear out")
    parser.add_argument("--bf16-copy", action="store_true", help="int4_linear with and without its bf16 copy")
    parser.add_argument("--machine", help="name for the machine column")
    parser.add_argument("--csv", type=Path, default=None, help=f"append to this file, e.g. {RESULTS}")
    arguments = parser.parse_args()
    if "all" in arguments.shapes:
        arguments.shapes = list(SHAPES)
    if arguments.tokens is None:
        arguments.tokens = [32, 64, 128, 256, 512] if arguments.bf16_copy else [1, 16, 64, 1024]
    if arguments.seconds is None:
        arguments.seconds = 0.03 if arguments.bf16_copy else 0.2
    rows = bench_copy(arguments) if arguments.bf16_copy else bench(arguments)
    if arguments.csv:
        record(rows, arguments.csv)


if __name__ == "__main__":
    main()
