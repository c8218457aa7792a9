"""Latent attention of a decode step in the native core at DeepSeek-V3's shape: 128 heads over a cache in bf16.

    python benchmarks/bench_attention.py [--contexts 8192 32768] [--against OTHER/_native….so]

Projections are as small as they can be, so that the time is that of the attention itself. Prints GFLOP/s, counting two
operations for each product of a query with a cached value or of a weight with one. With --against, another build of
the native core runs in turns with this one, each in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

HEADS, RANK, ROPE, NOPE, VALUE, HIDDEN = 128, 512, 64, 128, 128, 64
ROUNDS = 5


def native_of(path: str | None) -> Any:
    if path is None:
        from ktinject import _native

        return _native
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def layer(native: Any) -> Any:
    """A decoder of one layer whose projections read and write HIDDEN values."""

    def linear(out: int, inputs: int) -> Any:
        one = native.Linear(
            out_features=out, in_features=inputs, weights="bf16", group_size=0, has_bias=False, kernel="auto"
        )
        one.allocate()
        one.load(torch.randn(out, inputs) * inputs**-0.5)
        return one

    attention = native.LatentAttention(
        q=linear(HEADS * (NOPE + ROPE), HIDDEN), q_a=None, q_norm=None, q_b=None, kv=linear(RANK + ROPE, HIDDEN),
        kv_norm=native.Norm(torch.ones(RANK), 1e-6),
        expansion=(torch.randn(HEADS * (NOPE + VALUE), RANK) * RANK**-0.5).bfloat16(), o=linear(HIDDEN, HEADS * VALUE),
        heads=HEADS, rank=RANK, nope=NOPE, rope=ROPE, value=VALUE, neighbours=False, scale=(NOPE + ROPE) ** -0.5,
    )  # fmt: skip
    norm = native.Norm(torch.ones(HIDDEN).bfloat16(), 1e-6)
    unit = native.GatedUnit(linear(32, HIDDEN), linear(32, HIDDEN), linear(HIDDEN, 32))
    decoder = native.Decoder(HIDDEN, "bfloat16")
    decoder.add(norm, attention, norm, unit)
    return decoder


def serve(path: str | None) -> None:
    """For each context that comes in, the seconds of a step."""
    native = native_of(path)
    torch.manual_seed(0)
    decoder = layer(native)
    x = torch.randn(1, HIDDEN).bfloat16()
    out = torch.empty_like(x)
    for line in sys.stdin:
        context = int(line)
        keys = torch.randn(1, 1, context, RANK).bfloat16()
        values = torch.randn(1, 1, context, ROPE).bfloat16()
        cache = native.DecoderCache([keys], [values])
        times = []
        for _ in range(3):
            start = time.perf_counter()
            decoder.forward(
                x=x, position=context - 1, cache=cache, out=out, cos=None, sin=None, mask=None, first=0, last=1,
                final_norm=None,
            )  # fmt: skip
            times.append(time.perf_counter() - start)
        print(json.dumps(min(times[1:])), flush=True)


def ask(process: subprocess.Popen[str], context: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    print(context, file=process.stdin, flush=True)
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--against", default=None, help="another build of the native core")
    parser.add_argument("--serve", nargs="?", const="", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve or None)
    builds = [None] if arguments.against is None else [arguments.against, None]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", *([path] if path else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for path in builds
    ]  # fmt: skip
    for context in arguments.contexts:
        work = 2e-9 * HEADS * context * (2 * RANK + ROPE)
        rounds = [[ask(process, context) for process in processes] for _ in range(ROUNDS)]
        found = [f"{work / statistics.median(times):.1f}" for times in zip(*rounds)]
        ratio = statistics.median(row[0] / row[-1] for row in rounds)
        print(
            f"{context} positions: {' → '.join(found)} GFLOP/s"
            + (f", {ratio:.2f} times" if builds[1:] else "")
        )
    for process in processes:
        process.communicate()


if __name__ == "__main__":
    main()
