"""Whole models at full size, all layers and experts with random weights: memory as planned, decode and a long prompt.

    python benchmarks/bench_full_size.py deepseek-v3 q2_k                  # 61 layers of 256 experts, 200 GiB of RAM
    python benchmarks/bench_full_size.py qwen3-235b-a22b int4 --set gpu_experts=auto
    python benchmarks/bench_full_size.py qwen3-30b-a3b q4_k --layers 2 --prompt 512 --device cpu

Resident: in RAM the process's memory beyond that before the model was made, on GPUs what torch has handed out. The
bound of decode is as in bench_families.py.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import psutil
import torch
from bench_families import Counter
from rows import about, add_arguments, record

from ktinject import _native, rules
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.tools import benchmark, random_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("shape", choices=random_models.SHAPES)
    parser.add_argument("weights", help="of the experts: int4, q2_k, ...")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of the rules")
    parser.add_argument("-p", "--prompt", type=int, default=8192)
    parser.add_argument("-n", "--write", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=2)
    parser.add_argument("--device", help="instead of what the plan chooses, such as cpu or cuda:0")
    arguments = parser.parse_args()
    before = _resident()
    start = time.perf_counter()
    model = random_models.build(
        random_models.config(arguments.shape, arguments.layers),
        devices=arguments.device,
        variables={
            "gpu_experts": 0,
            **rules.parse_overrides([f"experts={arguments.weights}", *arguments.set]),
        },
    )
    seconds = time.perf_counter() - start
    gc.collect()
    planned, resident = model.ktinject.bytes, _resident()
    print(
        f"{arguments.shape}, {model.config.num_hidden_layers} layers, {arguments.weights}: made in {seconds:.1f} s"
    )
    for device, size in planned.items():
        found = (resident.get(device, 0) - before.get(device, 0)) / 2**30
        print(f"    {device:8} planned {size / 2**30:7.1f} GiB   resident {found:7.1f} GiB", flush=True)
    rows = [_decode(model, arguments), _prefill(model, arguments)]
    print(f"    resident at the end: {', '.join(f'{d} {b / 2**30:.1f} GiB' for d, b in _resident().items())}")
    if arguments.csv:
        record(rows, arguments.csv)


def _resident() -> dict[str, int]:
    """Device → bytes."""
    found = {
        f"cuda:{index}": torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())
    }
    return {"cpu": psutil.Process().memory_info().rss, **found}


def _decode(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    found = benchmark.decode(model, arguments.write, arguments.repetitions)
    how = found.how
    counter = Counter(model)
    read = counter.of_a_step(model)
    counter.remove()
    read += sum(module.native.bytes for module in model.modules() if isinstance(module, CpuLinear))
    bandwidth = statistics.median(_native.read_bandwidth(256 << 20) for _ in range(3))
    bound = bandwidth / read
    print(
        f"    decode {found.mean:.2f} tokens/s of {bound:.2f} ({found.mean / bound:.2f}): {read / 1e9:.2f} GB a token, "
        f"{bandwidth / 1e9:.0f} GB/s; {how}",
        flush=True,
    )
    return {
        **_about(model, arguments, how),
        **{"benchmark": "full size", "tokens": 1, "us": round(1e6 / found.mean, 1)},
        **{"gb_s": round(read * found.mean / 1e9, 2), "roofline_us": round(1e6 / bound, 1)},
        **{"share": round(found.mean / bound, 3), "bound": "memory"},
    }


def _prefill(model: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    found = benchmark.prefill(model, arguments.prompt, 1)
    seconds = arguments.prompt / found.mean
    print(f"    prompt of {arguments.prompt}: {seconds:.2f} s, {found.mean:.0f} tokens/s", flush=True)
    return {
        **_about(model, arguments, "prefill"),
        **{"benchmark": "full size", "tokens": arguments.prompt, "us": round(1e6 * seconds, 1)},
    }


def _about(model: Any, arguments: argparse.Namespace, how: str) -> dict[str, Any]:
    layers = model.config.num_hidden_layers
    kernel = next((each.runs["kernel"] for each in model.ktinject.replacements if "expert" in each.path), "")
    return {
        **about(arguments, arguments.shape, layers, weights=arguments.weights, kernel=kernel),
        "routing": how,
    }


if __name__ == "__main__":
    main()
