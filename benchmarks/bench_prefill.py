"""Long prompts under `generate`: experts on the CPU, streamed through the GPU, and as `prefill: auto` decides.

    python benchmarks/bench_prefill.py --weights bf16 int4 --csv benchmarks/results.csv
    python benchmarks/bench_prefill.py --set gpu_experts=0.25 --ways bus gpu   # what those on the GPU spare the bus
    python benchmarks/bench_prefill.py --devices cuda:0 cuda:1 --ways gpu links     # one link against all of them

One model for each format, whose operators are told where to compute before each test, in turns; the first prompt, which
pays for the measurement and the ring, is shown beside the others. With --scattered each nth expert is on the GPU, as
after many exchanges, and not the first ones. With several --devices the decoder layers lie on all of them, and
experts come over the link of their layer's GPU (gpu), over all links (links), or as was measured to be faster (auto).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rows import about, add_arguments, of_model, record

from ktinject import rules
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload import gpu_experts
from ktinject.tools import benchmark, random_models

# The part of the experts that passes through the GPU; other parts are given as numbers.
WAYS = {"cpu": "0", "gpu": "1", "bus": "1", "links": "1"}


def choose(model: torch.nn.Module, way: str) -> None:
    """Tell all operators where to compute prompts."""
    for operator in model.modules():
        if isinstance(operator, HybridExperts):
            operator.__dict__.pop("_streams", None)
            if operator.streamed is not None:  # by the bus come also those that are on the GPU
                here = operator.streamed.__dict__.setdefault("_at_hand", operator.streamed.here)
                operator.streamed.here = None if way == "bus" else here
                operator.streamed.linked = None if way == "auto" else way == "links"
            if way != "auto":
                passing = round(float(WAYS.get(way, way)) * operator.num_experts)
                operator._streams = lambda tokens, top_k, n=passing: n  # type: ignore[method-assign]


def once(model: Any, tokens: int) -> float:
    """Seconds of one prompt."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    torch.cuda.synchronize()
    return time.perf_counter() - start


def show_profile(model: Any, tokens: int) -> None:
    """Where the GPU's time goes, and what the host waits for."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        seconds = once(model, tokens)
    rows = sorted(profiler.key_averages(), key=lambda r: -r.self_device_time_total)
    print(f"      pp{tokens}: {1e3 * seconds:.1f} ms under the profiler")
    for r in rows[:14]:
        print(f"      {r.self_device_time_total / 1e3:8.2f} ms {r.count:5} x {r.key[:90]}")
    for r in sorted(rows, key=lambda r: -r.self_cpu_time_total)[:6]:
        print(f"      host {r.self_cpu_time_total / 1e3:8.2f} ms {r.count:5} x {r.key[:80]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=random_models.SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["auto", "cpu", "gpu"],
        help="auto, cpu, gpu, bus (gpu, and those on the GPU are sent as well), links (gpu, over the links of all "
        "devices), or the part of the experts that passes through the GPU",
    )
    parser.add_argument(
        "--devices", nargs="+", help="GPUs over which the layers are spread; default: the first"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of the rules")
    parser.add_argument("--scattered", action="store_true")
    parser.add_argument("-p", "--prompt", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--profile", type=int, nargs="*", default=[], metavar="TOKENS")
    arguments = parser.parse_args()
    config = random_models.config(arguments.shape, arguments.layers)
    if arguments.scattered:
        gpu_experts.hottest = lambda counts, n: tuple(i * len(counts) // n for i in range(n))
    lines = []
    # By name: a few layers may all lie on one of the GPUs.
    shared = {} if arguments.devices is None else {"routed experts.links": arguments.devices}
    for weights in arguments.weights:
        model = random_models.build(
            config,
            devices=arguments.devices,
            variables={
                "gpu_experts": 0,
                **shared,
                **rules.parse_overrides([f"experts={weights}", *arguments.set]),
            },
        )
        shown = about(
            arguments, arguments.shape, config.num_hidden_layers, routing="random tokens", weights=weights
        )
        once(model, 64)
        first = once(model, max(arguments.prompt))
        operator = next(m for m in model.modules() if isinstance(m, HybridExperts))
        parts = {
            tokens: operator._streams(tokens, model.config.num_experts_per_tok) for tokens in arguments.prompt
        }
        print(
            f"{weights:5} the first prompt of {max(arguments.prompt)} takes {1e3 * first:.0f} ms; experts of "
            f"{operator.num_experts} that pass the GPU, by tokens: {parts}; {operator._rates}",
            flush=True,
        )
        if operator.streamed is not None and operator.streamed.helpers:
            helped = {tokens: operator.streamed.links_for(tokens) for tokens in arguments.prompt}
            print(
                f"{weights:5} links of the first layer, None: the own one alone is faster: {helped}",
                flush=True,
            )
        for tokens in arguments.prompt:
            found: dict[str, list[float]] = {way: [] for way in arguments.ways}
            for _ in range(arguments.repetitions):
                for way in arguments.ways:
                    choose(model, way)
                    found[way] += benchmark.prefill(model, tokens, 1).rates
            for way, rates in found.items():
                result = benchmark.Result(f"pp{tokens}", tokens, tuple(rates), "prefill")
                how = f"prefill {way}"
                if way == "auto":
                    how += f", {parts[tokens]} of {operator.num_experts} experts on the GPU"
                if arguments.devices is not None:
                    how += f", layers on {len(arguments.devices)} GPUs"
                lines.append(of_model(shown, result, kernel=how))
                print(
                    f"{weights:5} {result.test:7} {way:4} {result.mean:9.1f} ± {result.deviation:.1f} t/s, "
                    f"{1e3 * tokens / result.mean:.1f} ms, {max(rates) / max(found[arguments.ways[0]]):.2f} times "
                    f"{arguments.ways[0]} at best",
                    flush=True,
                )
        for tokens in arguments.profile:
            for way in arguments.ways:
                choose(model, way)
                print(f"      prefill {way}")
                show_profile(model, tokens)
        del model, operator
        torch.cuda.empty_cache()
    if arguments.csv:
        record(lines, arguments.csv)


if __name__ == "__main__":
    main()
