"""Whole models of random weights: tokens a second, as share of what memory allows, llama.cpp beside them.

    python benchmarks/bench_generate.py                                   # 8 layers of Qwen3-30B-A3B, every format
    python benchmarks/bench_generate.py --shape deepseek-v3 --layers 6 --weights int4 --csv benchmarks/results.csv
    python benchmarks/bench_generate.py --vocab 32768 --llama-bench ./llama-bench --gguf bf16=a.gguf int4=b.gguf
    python benchmarks/bench_generate.py --device cpu …                                       # no GPU, for both

gguf_file.py writes such files.

The bound of decode is what the CPU must read for a token, the chosen experts of every layer and, without a GPU, all
linear layers, over the read bandwidth measured in this process; what the GPU does in the same time is not counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rows import about, add_arguments, of_model, record

from ktinject import _native, rules
from ktinject.cli.bench import llama_rows
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.tools import benchmark, random_models

BYTES_A_WEIGHT = {"bf16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
# Where llama.cpp is fastest: page-locked weights and long chunks for the way to the GPU. A busy core can slow all.
LLAMA_OPTIONS = {True: "-t 15,16 -lm none -ub 512,2048", False: "-t 15,16"}


def expert_bytes(config: Any, weights: str) -> float:
    """Bytes of the experts that one token uses, in all layers."""
    dense = getattr(config, "first_k_dense_replace", 0)
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    layers = config.num_hidden_layers - dense
    return layers * config.num_experts_per_tok * 3 * config.hidden_size * inner * BYTES_A_WEIGHT[weights]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=random_models.SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, help="instead of the shape's own, as of a GGUF to compare with")
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8", "int4"], choices=BYTES_A_WEIGHT)
    parser.add_argument("-p", "--prompt", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("-n", "--write", type=int, nargs="*", default=[128])
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="other variables of the rules"
    )
    parser.add_argument("--device", help="instead of the first GPU, such as cpu")
    parser.add_argument("--breakdown", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--llama-options", help="of several ways to run a test, the fastest counts")
    parser.add_argument("--gguf", nargs="*", default=[], metavar="WEIGHTS=FILE")
    arguments = parser.parse_args()
    files = dict(item.split("=", 1) for item in arguments.gguf)
    changes = {"vocab_size": arguments.vocab} if arguments.vocab else {}
    config = random_models.config(arguments.shape, arguments.layers, **changes)
    for weights in arguments.weights:
        lines = []
        # As in a GGUF file, attention has the experts' format; on a GPU it is not what takes the time.
        dense = [f"dense={weights}"] if arguments.device == "cpu" else []
        variables = {
            "gpu_experts": 0,
            **rules.parse_overrides([f"experts={weights}", *dense, *arguments.set]),
        }
        model = random_models.build(config, devices=arguments.device, variables=variables)
        on_gpu = model.device.type == "cuda"
        shown = about(
            arguments,
            arguments.shape,
            config.num_hidden_layers,
            routing="random tokens",
            weights=weights,
            kernel=next(e.runs["kernel"] for e in model.ktinject.replacements if "expert" in e.path),
        )
        linears = sum(module.native.bytes for module in model.modules() if isinstance(module, CpuLinear))
        found = benchmark.run(model, arguments.prompt, arguments.write, arguments.repetitions)
        where = benchmark.profile(model) if arguments.breakdown else None
        read = max(_native.read_bandwidth(256 << 20) for _ in range(3))
        del model
        torch.cuda.empty_cache()
        peers = {}
        if arguments.llama_bench and weights in files:
            rows = llama_rows(
                arguments.llama_bench,
                Path(files[weights]),
                arguments.prompt,
                arguments.write,
                arguments.repetitions,
                on_gpu,
                (arguments.llama_options or LLAMA_OPTIONS[on_gpu]).split(),
            )
            peers = {peer["test"]: peer for peer in rows}
        for result in found:
            line = of_model(shown, result, on_gpu, (expert_bytes(config, weights) + linears, read))
            if peer := peers.get(result.test):
                line["peer"] = f"{peer['backend'].split(',')[0]} {peer['experts']}"
                line["peer_us"] = round((line["us"] * result.mean) / peer["tokens_per_second"], 1)
                line["ratio"] = round(result.mean / peer["tokens_per_second"], 2)
            lines.append(line)
            share = f"  {line['share']:.2f} of the bound" if line["share"] != "" else ""
            beside = f"  {line['ratio']} x {peer['tokens_per_second']:.1f} of {line['peer']}" if peer else ""
            print(
                f"{weights:5} {result.test:7} {result.mean:9.1f} ± {result.deviation:.1f} t/s{share}{beside}",
                flush=True,
            )
        if where is not None:
            print(
                f"      a step of {where.step:.0f} µs: GPU {where.gpu:.0f}, experts {where.cpu:.0f}, "
                f"handoff {where.handoff:.0f}, neither {where.idle:.0f}; read {read / 1e9:.0f} GB/s",
                flush=True,
            )
        if arguments.csv:
            record(lines, arguments.csv)


if __name__ == "__main__":
    main()
