"""Decode speed by the number of deferred experts, with what GPU and CPU do meanwhile; needs a GPU.

    python benchmarks/bench_deferral.py --shape qwen3-30b-a3b --layers 8 --weights int4 --deferred 0 2 4 6 8

A model of random weights under the bundled rules of its family, with `deferred_moe` in place of `hybrid_experts`; batch
1, as `ktinject bench` measures: tokens a second, and from a profile of other steps the shares of a step in which GPU
and CPU are busy. Rounds alternate between the depths; the best of each counts. Besides the depths given, the two that
`schedule: auto` chooses are measured: by itself, and with all of top-k allowed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import time
from pathlib import Path
from typing import Any

import rows
import torch
import yaml
from transformers import PreTrainedModel

import ktinject
from ktinject import optimize_rules
from ktinject.hf import models
from ktinject.operators.deferred_moe import DeferredMoe
from ktinject.tools import benchmark, random_models

BLOCKS = {"qwen3-30b-a3b": "Qwen3MoeSparseMoeBlock", "deepseek-v3": "DeepseekV3MoE"}
COLUMNS = ("date,commit,machine,threads,shape,layers,weights,deferred,us_step,tokens_s,gain,gpu_busy,cpu_busy,gpu_us,"
           "cpu_us").split(",")  # fmt: skip


def rules(shape: str, model_type: str, weights: str, **arguments: Any) -> dict[str, Any]:
    """The bundled rules with deferred experts."""
    name = ktinject.rules.choose(model_type)
    document = yaml.safe_load((Path(optimize_rules.__file__).parent / f"{name}.yaml").read_text("utf-8"))
    (experts,) = (rule for rule in document["rules"] if rule["name"] == "routed experts")
    experts["match"] = {"class": BLOCKS[shape]}
    experts["replace"] = {"operator": "deferred_moe", "weights": weights, **arguments}
    return document


def chosen(planned: ktinject.Plan) -> list[int]:
    """How many each layer defers by a plan."""
    runs = [
        replacement.runs["deferred"]
        for replacement in planned.replacements
        if replacement.operator == "deferred_moe"
    ]
    print("  auto:", *dict.fromkeys(runs), sep="\n    ")
    return [int(run.split()[0]) for run in runs]


def defer(model: PreTrainedModel, schedule: list[int]) -> None:
    """Change the depths of a model that stands; its graphs are captured anew."""
    blocks = [module for module in model.modules() if isinstance(module, DeferredMoe)]
    for block, count in zip(blocks, schedule, strict=True):
        block.get_submodule("experts").defers = count
    model.ktinject_decoding.release()


def measure(shape: str, layers: int, weights: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    config = random_models.config(shape, layers)
    with_rules = functools.partial(rules, shape, config.model_type, weights)
    began = time.perf_counter()
    model = random_models.build(config, with_rules(deferred=1))
    print(f"{shape}, {layers} layers, {weights}: built in {time.perf_counter() - began:.0f} s", flush=True)
    top_k = config.num_experts_per_tok
    depths = {f"{n}": [n] * (layers - 1) + [0] for n in arguments.deferred if n <= top_k}
    for name, most in (("auto", 0), (f"auto, {top_k}", top_k)):
        asked = with_rules(schedule="auto", deferred=most)
        depths[name] = chosen(ktinject.plan(models.meta_model(config, torch.bfloat16), asked))
    rates = dict.fromkeys(depths, 0.0)
    found: dict[str, Any] = {}
    for turn in range(arguments.rounds):
        for name, schedule in depths.items():
            defer(model, schedule)
            best = max(benchmark.decode(model, arguments.tokens, arguments.repetitions).rates)
            rates[name] = max(best, rates[name])
            if turn == arguments.rounds - 1:
                file = f"{shape}-{layers}-{weights}-{name.replace(', ', '-')}.json"
                trace = arguments.traces and name in arguments.trace and arguments.traces / file
                found[name] = benchmark.profile(model, 8, trace=trace or None)
    print(f"runs as: {model.ktinject_decoding.last} {model.ktinject_decoding.reason}")
    print("deferred  step us  tokens/s    gain  GPU busy  CPU busy  GPU us  CPU us  handoff us")
    rows = []
    for name, rate in rates.items():
        where, gain = found[name], rate / rates[next(iter(rates))]
        gpu, cpu = where.gpu / where.step, where.cpu / where.step
        print(
            f"{name:8} {1e6 / rate:8.0f} {rate:9.1f} {gain:7.3f} {gpu:9.1%} {cpu:9.1%} {where.gpu:7.0f} "
            f"{where.cpu:7.0f} {where.handoff:11.0f}",
            flush=True,
        )
        figures = [1e6 / rate, rate, gain, gpu, cpu, where.gpu, where.cpu]
        about = [datetime.date.today(), os.environ.get("KTINJECT_COMMIT", ""), arguments.machine]
        about += [ktinject._native.threads(), shape, layers, weights, name]
        rows.append(dict(zip(COLUMNS, [*about, *(round(figure, 3) for figure in figures)], strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=BLOCKS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--weights", nargs="+", default=["int4"])
    parser.add_argument("--deferred", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--machine", default="")
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    parser.add_argument("--traces", type=Path, help="a folder for Chrome traces")
    parser.add_argument("--trace", nargs="+", default=["0", "4", "8"], help="of these depths")
    arguments = parser.parse_args()
    for layers in arguments.layers:
        for weights in arguments.weights:
            measured = measure(arguments.shape, layers, weights, arguments)
            torch.cuda.empty_cache()
            if arguments.csv:
                rows.record(measured, arguments.csv, COLUMNS)


if __name__ == "__main__":
    main()
