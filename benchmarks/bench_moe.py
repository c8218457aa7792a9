"""One routed-experts layer: ktinject's kernels beside the machine's ceilings and other implementations, in one process.

    python benchmarks/bench_moe.py                                # a minute: what `make bench` runs
    python benchmarks/bench_moe.py --sweep --csv out.csv          # every shape, format and number of tokens: an hour
    python benchmarks/bench_moe.py --shapes deepseek-v3-256 --tokens 64 1024 8192 --peer-tokens 0
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
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from moe_cells import (
    BYTES_A_WEIGHT,
    HEADER,
    SHAPES,
    Ceilings,
    Cell,
    Problem,
    Shape,
    cpu_name,
    line,
    random_weights,
    routing_sets,
    rows_of,
    summary,
    unit_of,
)
from moe_peers import KtKernel, KtLayer, load_kt_kernel, quiet, torch_layer
from rows import RESULTS, commit, record
from torch import Tensor

from ktinject import _native

SWEEP_TOKENS = [1, 4, 16, 64, 128, 256, 1024, 4096]
# Tokens of a prompt that a layer may compute in one pass, as in a loaded model.
PASS_TOKENS = 8192


def build(shape: Shape, weights: str, kernel: str, gate_up: Tensor, down: Tensor) -> _native.Experts:
    """Packed experts from gate_up [e, 2i, h] and down [e, h, i] in bf16."""
    name, _, group = weights.partition("-g")
    experts = _native.Experts(
        experts=shape.experts,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        weights=name.removesuffix("z"),
        group_size=int(group or 0),
        symmetric=not name.endswith("z"),
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
    _native.allow_workspace(experts.workspace_bytes(PASS_TOKENS, shape.top_k))
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


def kernels_for(weights: str, asked: list[str]) -> list[str]:
    """`all` means every fast kernel this CPU runs; the reference and modelled ones are for tests."""
    if asked != ["all"]:
        return asked
    rows = [
        k
        for k in _native.kernels()
        if k["available"] and k["weights"] == weights.split("-")[0].removesuffix("z")
    ]
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
    kernel = layers[0].kernel_for(round(problem.tokens * problem.shape.top_k / problem.distinct))
    cell = Cell(problem, weights, asked, kernel, times.pop(""))
    if problem.torch_us is not None:
        cell.peers[f"torch {torch.__version__} bf16"] = problem.torch_us
    cell.peers |= {name: statistics.median(taken) for name, taken in times.items()}
    return cell


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
        if error > 0.5:
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
    ceilings.measure(_native.multiply_units())
    print(f"# {ceilings}")
    hot, woken = (_native.empty_call_us(1000, pause, everyone=True) for pause in (0, 150))
    print(
        f"# a call of an empty task for each thread: {hot:.1f} µs at once, {woken:.1f} µs after a pause of 150"
    )
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
            peers: dict[str, list[KtLayer]] = {}
            for position, kernel in enumerate(kernels_for(weights, arguments.kernels)):
                layers = [build(shape, weights, kernel, gate_up, down)]
                layers += [
                    build(shape, weights, kernel, gate_up, down) for _ in range(1, copies(layers[0].bytes))
                ]
                ceilings.measure(map(unit_of, layers[0].kernels))
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
        arguments.shapes = [name for name in SHAPES if name != "deepseek-v3-256"]
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
