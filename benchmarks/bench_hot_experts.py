"""Experts on the GPU beside the others on the CPU: what decoding gains, and what a layer costs by where they lie.

    python benchmarks/bench_hot_experts.py                        # a layer: 0 to 8 of 8 experts on the GPU
    python benchmarks/bench_hot_experts.py --decode 0 0.1 0.25 --skew 0.05 0.6    # whole models

Routing is skewed by giving the rows of each router norms that fall off as rank ** -skew; experts are numbered by rank,
so those on the GPU are the most used. With 0.05, a quarter of them takes 30 % of the traffic, as in the trained models
of examples/models; 0.6 comes near Zipf's law (a tenth 48 %, a quarter 78 %). Beside each gain stands what the CPU's
bytes allow: its time goes down with the traffic that leaves, and the rest of a step stays.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rows import about, add_arguments, of_model, record
from torch.nn import functional

from ktinject import _native, rules
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload import handoff
from ktinject.tools import benchmark, random_models

DRAWS = 60


def built(shape: str, layers: int, weights: str, share: float) -> torch.nn.Module:
    variables = rules.parse_overrides([f"experts={weights}", f"gpu_experts={share}"])
    return random_models.build(random_models.config(shape, layers), variables=variables)


def operators_of(model: torch.nn.Module) -> list[HybridExperts]:
    return [module for module in model.modules() if isinstance(module, HybridExperts)]


class Layers:
    """A graph of all layers of a model's experts, one token each."""

    def __init__(self, operators: list[HybridExperts], top_k: int) -> None:
        device, experts = torch.device("cuda:0"), operators[0].num_experts
        self.count, self.experts, self.resident = len(operators), experts, len(operators[0].resident)
        self.ids = torch.full((self.count, 1, top_k), experts, dtype=torch.int64, device=device)
        weights = torch.full((1, top_k), 1 / top_k, device=device, dtype=torch.bfloat16)
        x = torch.randn(1, operators[0].spec.hidden_size, device=device, dtype=torch.bfloat16)
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph):
            for ids, operator in zip(self.ids, operators):
                operator(x, ids, weights)

    def time(self, here: int, there: int) -> tuple[float, float]:
        """µs a layer, and of it on the CPU: `here` experts on the GPU, `there` on the CPU, the rest skipped."""
        _native.trace_start()
        times = []
        for _ in range(DRAWS):
            ids = torch.full(self.ids.shape, self.experts)
            for row in ids:
                row[0, :here] = torch.randperm(self.resident)[:here]
                row[0, here : here + there] = (
                    self.resident + torch.randperm(self.experts - self.resident)[:there]
                )
            self.ids.copy_(ids)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            handoff.wake()
            start.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / self.count)
        spans = sorted(end - begin for begin, end, *_ in _native.trace_stop())
        return sorted(times)[DRAWS // 2], spans[len(spans) // 2] / 1e3 if spans else 0.0


def skew(model: Any, exponent: float) -> None:
    for name, rows in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            ranks = torch.arange(1, len(rows) + 1, device=rows.device, dtype=torch.float32)
            with torch.no_grad():
                rows.copy_(functional.normalize(rows.float(), dim=1) * ranks[:, None] ** -exponent)


def traffic(model: Any) -> float:
    """The part of the routing that went to experts on the GPU, in decode steps so far."""
    here, total = 0.0, 0.0
    for operator in operators_of(model):
        if operator.on_gpu is not None:
            counts = operator.on_gpu.traffic.cpu().double()
            here += float(counts[operator.on_gpu.resident].sum())
            total += float(counts.sum())
    return here / max(total, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=random_models.SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", nargs="+", default=["bf16", "int4"])
    parser.add_argument("--decode", type=float, nargs="*", default=[], metavar="SHARE")
    parser.add_argument("--skew", type=float, nargs="+", default=[0.05, 0.6])
    parser.add_argument("-n", "--write", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    base: dict[tuple[str, float], tuple[float, float]] = {}

    for weights in arguments.weights:
        if not arguments.decode:
            model = built(arguments.shape, arguments.layers, weights, 0.5)
            top_k = model.config.num_experts_per_tok
            layers = Layers(operators_of(model), top_k)
            layers.time(top_k, 0)
            layers.time(0, top_k)
            print(
                f"{weights}: µs a layer (of it on the CPU) with j of {top_k} experts on the GPU", flush=True
            )
            for name, parts in (
                ("both", [(j, top_k - j) for j in range(top_k + 1)]),
                ("GPU alone", [(j, 0) for j in range(top_k + 1)]),
                ("CPU alone", [(0, j) for j in range(top_k + 1)]),
            ):
                found = [layers.time(*part) for part in parts]
                print(f"  {name:9} " + "  ".join(f"{us:.1f} ({cpu:.1f})" for us, cpu in found), flush=True)
            del model, layers
        for share in arguments.decode:
            model = built(arguments.shape, arguments.layers, weights, share)
            for exponent in arguments.skew:
                skew(model, exponent)
                for operator in operators_of(model):
                    if operator.on_gpu:
                        operator.on_gpu.traffic.zero_()
                result = benchmark.decode(model, arguments.write, arguments.repetitions)
                part = traffic(model)
                us = 1e6 / result.mean
                if (weights, exponent) not in base:  # the first share, 0 by default
                    where = benchmark.profile(model, steps=16)
                    base[weights, exponent] = us, where.cpu
                    print(
                        f"{weights:5} skew {exponent}: a step of {where.step:.0f} µs: GPU {where.gpu:.0f}, experts "
                        f"{where.cpu:.0f}, handoff {where.handoff:.0f}, neither {where.idle:.0f}"
                    )
                # The CPU's bytes go down with the traffic, and what else a step takes stays: that is the bound.
                none_us, cpu_us = base[weights, exponent]
                bound_us = none_us - part * cpu_us
                lines.append(
                    of_model(
                        about(arguments, arguments.shape, arguments.layers),
                        result,
                        routing=f"rows ~ rank^-{exponent}",
                        weights=weights,
                        kernel=f"hybrid_experts, {share:.0%} on the GPU",
                        roofline_us=round(bound_us, 1),
                        share=round(bound_us / us, 3),
                        bound="CPU bytes left",
                        peer="none on the GPU",
                        peer_us=round(none_us, 1),
                        ratio=round(none_us / us, 2),
                    )
                )
                print(
                    f"{weights:5} skew {exponent}: {share:4.0%} on the GPU take {part:.2f} of the traffic, "
                    f"{result.mean:7.1f} ± {result.deviation:.1f} t/s, {none_us / us:.2f} times none (the CPU's bytes "
                    f"allow {none_us / bound_us:.2f})",
                    flush=True,
                )
            del model
        torch.cuda.empty_cache()
    if arguments.csv and lines:
        record(lines, arguments.csv)


if __name__ == "__main__":
    main()
