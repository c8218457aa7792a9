"""What taking outliers out of activations costs a layer of experts: calls with them, and left in, in turns.

    python benchmarks/bench_outliers.py                                    # a minute on 16 cores
    python benchmarks/bench_outliers.py --threads 1 --seconds 2 --cpu-time # on a machine with other load
    python benchmarks/bench_outliers.py --shapes qwen3-30b-a3b --tokens 512 2048 --large 0 2

Large channels of the input are 50 times as large as the others, in every token; the weights that read them are not
smaller. All experts are copies of one. A cell is the median of time with outliers taken out / time of the same rows
without large channels and with outliers left in, of calls in turns. In brackets the same rows with their outliers left
in: these are nearly all zeros once they are quantised, which tiles multiply in less time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch

from ktinject import _native

SHAPES = {"qwen3-30b-a3b": (128, 2048, 768), "deepseek-v3, 32 experts": (32, 7168, 2048)}
TOP_K = 8


def build(shape: str, weights: str, most: int) -> _native.Experts:
    count, hidden, inner = SHAPES[shape]
    experts = _native.Experts(
        experts=count, hidden_size=hidden, intermediate_size=inner, weights=weights,
        group_size=128 if weights == "int4" else 0, has_gate=True, has_bias=False, activation="silu", alpha=1.0,
        gate_max=math.inf, up_limit=math.inf, up_offset=0.0, kernel="auto",
    )  # fmt: skip
    experts.allocate()
    _native.allow_workspace(experts.workspace_bytes(most, TOP_K))
    for projection, (n, k) in {
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }.items():
        experts.load(projection, 0, (torch.randn(n, k) / math.sqrt(k)).bfloat16())
    experts.repeat(0)
    return experts


def measure(
    experts: _native.Experts, tokens: int, large: int, seconds: float, cpu_time: bool
) -> tuple[float, float, float]:
    """(median seconds of a call on even rows that leaves outliers in, median ratios of one on rows with `large`
    channels that takes them out to that, and to one on the same rows that leaves them in)."""
    clock = time.process_time if cpu_time else time.perf_counter
    even = torch.randn(tokens, experts.hidden_size)
    uneven = even.clone()
    uneven[:, torch.randperm(experts.hidden_size)[:large]] *= 50
    even, uneven = even.bfloat16(), uneven.bfloat16()
    out, ids = torch.empty_like(even), torch.rand(tokens, experts.count).topk(TOP_K).indices
    scores = torch.rand(tokens, TOP_K)
    calls = max(1, 32 // tokens)  # so that a turn is long beside the clock's step

    def timed(x: torch.Tensor, takes_out: bool) -> float:
        _native.take_outliers(takes_out)
        begun = clock()
        for _ in range(calls):
            experts.forward(x, ids, scores, out)
        return (clock() - begun) / calls

    timed(uneven, True)
    turns: list[list[float]] = []  # of each: even rows left in, uneven ones taken out, and left in
    begun = time.perf_counter()
    while len(turns) < 3 or time.perf_counter() - begun < seconds:
        order = [(even, False), (uneven, True), (uneven, False)]
        times = [timed(*each) for each in (order if len(turns) % 2 else order[::-1])]
        turns.append(times if len(turns) % 2 else times[::-1])
    _native.take_outliers(True)
    return (
        statistics.median(even_in for even_in, _, _ in turns),
        statistics.median(taken / even_in for even_in, taken, _ in turns),
        statistics.median(taken / left for _, taken, left in turns),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--weights", nargs="+", choices=("int8", "int4"), default=["int8", "int4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 32, 512, 2048])
    parser.add_argument("--large", nargs="+", type=int, default=[0, 2, 8], help="channels of the input")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a cell")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--cpu-time", action="store_true", help="of the process; with one thread")
    arguments = parser.parse_args()
    _native.set_threads(arguments.threads)
    torch.manual_seed(0)
    print(
        "| | tokens | even rows, left in, ms | "
        + " | ".join(f"{large} large" for large in arguments.large)
        + " |"
    )
    print("|---|---|---" + "|---" * len(arguments.large) + "|")
    for shape in arguments.shapes:
        for weights in arguments.weights:
            experts = build(shape, weights, max(arguments.tokens))
            for tokens in arguments.tokens:
                cells = [
                    measure(experts, tokens, large, arguments.seconds, arguments.cpu_time)
                    for large in arguments.large
                ]
                figures = " | ".join(f"{ratio:.3f} ({same:.3f})" for _, ratio, same in cells)
                print(f"| {shape}, {weights} | {tokens} | {cells[0][0] * 1e3:.2f} | {figures} |", flush=True)
            del experts


if __name__ == "__main__":
    main()
