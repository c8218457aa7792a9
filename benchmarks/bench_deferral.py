"""Decode speed by the number of deferred experts, with what GPU and CPU do meanwhile; needs a GPU.

    python benchmarks/bench_deferral.py --shape qwen3-30b-a3b --layers 8 --weights int4 --deferred 0 2 4 6 8

A model of random weights with its real attention, batch 1, as `ktinject bench` measures: tokens a second, and from a
profile of other steps the shares of a step in which GPU and CPU are busy. Rounds alternate between the depths; the best
of each counts. What `schedule: auto` would choose is said first.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import ktinject
from ktinject import benchmark, hf, shapes
from ktinject.operators.deferred_moe import DeferredMoe

BLOCKS = {"qwen3-30b-a3b": "Qwen3MoeSparseMoeBlock", "deepseek-v3": "DeepseekV3MoE"}
COLUMNS = ("date,commit,machine,threads,shape,layers,weights,deferred,us_step,tokens_s,gain,gpu_busy,cpu_busy,gpu_us,"
           "cpu_us").split(",")  # fmt: skip


def rules(shape: str, weights: str, **arguments: Any) -> list[dict[str, Any]]:
    replace = {"operator": "deferred_moe", "weights": weights, **arguments}
    return [{"name": "experts", "match": {"class": BLOCKS[shape]}, "replace": replace}]


def defer(model: PreTrainedModel, count: int) -> None:
    """Change the depth of a model that stands; its graphs are captured anew."""
    for block in [module for module in model.modules() if isinstance(module, DeferredMoe)][:-1]:
        block.get_submodule("experts").defers = count
    model.ktinject_decoding.release()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=BLOCKS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", nargs="+", default=["int4"])
    parser.add_argument("--deferred", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--machine", default="")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--traces", type=Path, help="a folder for a Chrome trace of each depth")
    arguments = parser.parse_args()
    shape, layers = arguments.shape, arguments.layers
    config = shapes.config(shape, layers)
    for weights in arguments.weights:
        planned = ktinject.plan(
            hf.meta_model(config, torch.bfloat16), rules(shape, weights, schedule="auto", deferred=8)
        )
        began = time.perf_counter()
        model = shapes.build(config, rules(shape, weights, deferred=1))
        print(f"{shape}, {layers} layers, {weights}: built in {time.perf_counter() - began:.0f} s")
        print("auto, at most 8:", *dict.fromkeys(e.runs["deferred"] for e in planned.entries), sep="\n  ")
        rates: dict[int, float] = {}
        for _ in range(arguments.rounds):
            for count in arguments.deferred:
                defer(model, count)
                best = max(benchmark.decode(model, arguments.tokens, 1).rates)
                rates[count] = max(best, rates.get(count, 0.0))
        print(f"runs as: {model.ktinject_decoding.last} {model.ktinject_decoding.reason}")
        print(
            "deferred  step us  tokens/s    gain  GPU busy  CPU busy  GPU us  CPU us  handoff us", flush=True
        )
        for count, rate in rates.items():
            defer(model, count)
            trace = arguments.traces and arguments.traces / f"{shape}-{layers}-{weights}-{count}.json"
            found = benchmark.profile(model, 8, trace=trace)
            gain, gpu, cpu = (
                rate / rates[arguments.deferred[0]],
                found.gpu / found.step,
                found.cpu / found.step,
            )
            print(
                f"{count:8} {1e6 / rate:8.0f} {rate:9.1f} {gain:7.3f} {gpu:9.1%} {cpu:9.1%} {found.gpu:7.0f} "
                f"{found.cpu:7.0f} {found.handoff:11.0f}",
                flush=True,
            )
            if arguments.csv:
                is_new = not arguments.csv.exists()
                with arguments.csv.open("a", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    if is_new:
                        writer.writerow(COLUMNS)
                    figures = [1e6 / rate, rate, gain, gpu, cpu, found.gpu, found.cpu]
                    about = [datetime.date.today(), os.environ.get("KTINJECT_COMMIT", ""), arguments.machine]
                    about += [ktinject._native.threads(), shape, layers, weights, count]
                    writer.writerow([*about, *(round(figure, 3) for figure in figures)])
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
