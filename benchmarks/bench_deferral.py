"""Decode speed by the number of deferred experts, with what GPU and CPU do meanwhile; needs a GPU.

    python benchmarks/bench_deferral.py --shape qwen3-30b-a3b --layers 8 --weights int4 --deferred 0 2 4 6 8

A model of random weights with its real attention; batch 1, greedy, in CUDA graphs. Rounds alternate between the depths,
the best of each is taken. A step is (time of the long answer - time of the short one) / tokens between. GPU busy: time
in all kernels but those that wait for the CPU, from torch's profiler. CPU busy: time of a token's experts alone, all
layers, measured before with the GPU idle.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ktinject
from ktinject.operators.deferred_moe import DeferredMoe

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "block": "Qwen3MoeSparseMoeBlock",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "norm_topk_prob": True,
        "vocab_size": 151936,
    },
    # All layers with experts; of 256 a token sees 8, so 64 give the same decode step.
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "block": "DeepseekV3MoE",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "intermediate_size": 18432,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 0,
        "vocab_size": 129280,
    },
}


def build(shape: str, layers: int, weights: str, group_size: int) -> PreTrainedModel:
    values = dict(SHAPES[shape])
    block = values.pop("block")
    config = AutoConfig.for_model(values.pop("model_type"), num_hidden_layers=layers, **values)
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    arguments = {"weights": weights, "group_size": group_size, "deferred": 1}
    rule = {"name": "e", "match": {"class": block}, "replace": {"operator": "deferred_moe", **arguments}}
    ktinject.optimize(model, [rule], progress=False)
    torch.cuda.empty_cache()
    return model


def blocks(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, DeferredMoe)]


def defer(model: PreTrainedModel, count: int) -> None:
    """Change the depth of a model that stands; its graphs are captured anew."""
    for block in blocks(model)[:-1]:
        block._leaf.defers = count
    model.ktinject_decoding.release()


def seconds(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    torch.cuda.synchronize()
    return time.perf_counter() - start


def experts_us(model: PreTrainedModel) -> float:
    """A token's experts alone, summed over the layers, on the CPU."""
    leaves = [block._experts for block in blocks(model)]
    hidden, top_k = leaves[0].spec.hidden_size, blocks(model)[0].spec.top_k
    times = []
    for _ in range(40):
        x = torch.randn(1, hidden).bfloat16()
        ids = torch.randperm(leaves[0].num_experts)[None, :top_k].contiguous()
        weights, out = torch.full((1, top_k), 1 / top_k), torch.empty_like(x)
        start = time.perf_counter()
        for leaf in leaves:
            leaf.native.forward(x, ids, weights, out)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:]) * 1e6


def gpu_us(model: PreTrainedModel, prompt: torch.Tensor, short: int, long: int) -> tuple[float, float]:
    """Per step: time in kernels that do not wait for the CPU, and in those that do."""
    from torch.profiler import ProfilerActivity, profile

    totals = []
    for tokens in (short, long):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds(model, prompt, tokens)
        kernels = [event for event in profiler.events() if "CUDA" in str(event.device_type)]
        waits = sum(e.device_time for e in kernels if "wait_kernel" in e.name)
        totals.append((sum(e.device_time for e in kernels) - waits, waits))
    (a, b), (c, d) = totals
    return (c - a) / (long - short), (d - b) / (long - short)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", nargs="+", default=["int4"])
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--deferred", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--csv", type=Path, help="append the figures to this file")
    arguments = parser.parse_args()
    short, long = 8, 8 + arguments.tokens
    for weights in arguments.weights:
        began = time.perf_counter()
        model = build(arguments.shape, arguments.layers, weights, arguments.group_size)
        prompt = torch.randint(3, 1000, (1, 16), device="cuda:0")
        alone = experts_us(model)
        print(
            f"{arguments.shape}, {arguments.layers} layers, {weights}: ready after "
            f"{time.perf_counter() - began:.0f} s; experts alone {alone:.0f} us a token",
            flush=True,
        )
        best: dict[int, float] = {}
        busy: dict[int, tuple[float, float]] = {}
        for turn in range(arguments.rounds):
            for count in arguments.deferred:
                defer(model, count)
                seconds(model, prompt, long)  # captures
                step = (seconds(model, prompt, long) - seconds(model, prompt, short)) / (long - short) * 1e6
                best[count] = min(step, best.get(count, step))
                if turn == arguments.rounds - 1:
                    busy[count] = gpu_us(model, prompt, short, short + 16)
        print(f"runs as: {model.ktinject_decoding.last}; {model.ktinject_decoding.reason}")
        print("deferred  step us  tokens/s    gain  GPU busy  CPU busy  waits us")
        for count, step in best.items():
            gain = best[arguments.deferred[0]] / step
            gpu, waits = busy[count]
            print(
                f"{count:8}  {step:7.0f}  {1e6 / step:8.1f}  {gain:6.3f}  {gpu / step:8.1%}  {alone / step:8.1%}"
                f"  {waits:8.0f}",
                flush=True,
            )
            if arguments.csv:
                with arguments.csv.open("a", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerow(
                        [
                            datetime.date.today(),
                            os.environ.get("KTINJECT_COMMIT", ""),
                            torch.cuda.get_device_name(0),
                            arguments.shape,
                            arguments.layers,
                            weights,
                            count,
                            round(step, 1),
                            round(1e6 / step, 1),
                            round(gain, 3),
                            round(gpu / step, 3),
                            round(alone / step, 3),
                        ]
                    )
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
