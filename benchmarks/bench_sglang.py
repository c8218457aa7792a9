"""What a layer of experts on the CPU costs within SGLang's graphs, by the object that SGLang hands them to.

A captured graph of some layers, each a submit and a sync, as SGLang captures decode steps, and prompts from 0.5.17 on.
The weights are random, and all experts of a layer alike, each with memory of its own.

    python benchmarks/bench_sglang.py [--methods AMXINT4 BF16] [--tokens 1 8 64 2048] [--layers 4]
"""

from __future__ import annotations

import argparse
import statistics

import torch

from ktinject import _native
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.sglang import KTMoEWrapper
from ktinject.sglang.layer import Layer
from ktinject.sglang.weights import on_cpu, plain_config, spec_of

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768  # Qwen3-30B-A3B


def made(method: str, layer: int) -> KTMoEWrapper:
    one = KTMoEWrapper(
        layer_idx=layer,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_gpu_experts=0,
        method=method,
    )
    fill(one._layer)
    return one


def fill(layer: Layer) -> None:
    """Pack one random expert, and copy it."""

    with on_cpu():
        experts = CpuExperts(spec_of(layer.given), plain_config(layer.given, 0))
        experts.allocate()
        for name, part, shape in (
            ("gate_up_proj", 0, (INNER, HIDDEN)),
            ("gate_up_proj", 1, (INNER, HIDDEN)),
            ("down_proj", None, (HIDDEN, INNER)),
        ):
            experts.load(name, torch.randn(shape) * shape[1] ** -0.5, 0, part)
        experts.repeat(0)
        layer._take(experts)


def microseconds(layers: list[KTMoEWrapper], m: int, repeats: int) -> float:
    """The median over replays, a layer; other experts for each layer."""
    device = torch.device("cuda:0")
    x = torch.randn(m, HIDDEN, device=device, dtype=torch.bfloat16)
    calls = [
        (
            torch.rand(m, EXPERTS, device=device).argsort(-1)[:, :TOP_K].int().contiguous(),
            torch.full((m, TOP_K), 1 / TOP_K, device=device),
        )
        for _ in layers
    ]

    def step() -> torch.Tensor:
        hidden = x
        for layer, (ids, weights) in zip(layers, calls):
            stream = torch.cuda.current_stream().cuda_stream
            layer.submit_forward(hidden, ids, weights, stream)
            hidden = layer.sync_forward(hidden, stream)
        return hidden

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    times = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(layers))
    assert torch.isfinite(out).all()
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=["AMXINT4", "BF16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 2048])
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    print(f"{_native.threads()} threads, {given.layers} layers of {EXPERTS} experts, µs a layer in a graph")
    for method in given.methods:
        layers = [made(method, index) for index in range(given.layers)]
        weights = layers[0]._layer._experts.describe()  # type: ignore[union-attr]
        for m in given.tokens:
            print(f"{method} ({weights['weights']}, {weights['kernel']}), {m} tokens: ", end="", flush=True)
            print(f"{microseconds(layers, m, 200 if m <= 64 else 20):.1f}", flush=True)
        del layers


if __name__ == "__main__":
    main()
