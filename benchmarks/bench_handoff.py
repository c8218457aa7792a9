"""What the way from the GPU to the CPU's experts and back costs a layer, the experts' own work left out.

A captured graph of many layers, each a small kernel, a submit and a wait, against the same graph without the last two.
Every id is -1, so the CPU finds no expert to compute and answers with zeros.

    python benchmarks/bench_handoff.py [--csv benchmarks/results.csv --machine "…"]
"""

from __future__ import annotations

import argparse
from typing import Any

import rows
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.offload import handoff

LAYERS = 48


def layers(hidden: int, mode: handoff.Mode) -> list[handoff.Handoff]:
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=16, num_experts=8)
    config._experts_implementation = "eager"
    operator = CpuExperts.build(Qwen3MoeExperts(config), CpuExpertsConfig(device="cpu"))
    operator.allocate()
    for name, shape in operator.parameter_shapes().items():
        operator.load(name, torch.zeros(shape), None, None)
    operator.finish()
    made = [handoff.Handoff(operator.native, hidden, mode) for _ in range(LAYERS)]
    for layer in made:
        layer.prepare(torch.device("cuda:0"))
    layer.keep_alive = operator  # type: ignore[attr-defined]
    return made


def best_us(step, repeats: int = 60) -> float:
    """The median over replays, a layer."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(LAYERS):
            step(layer)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        handoff.wake()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAYERS)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    rows.add_arguments(parser)
    arguments = parser.parse_args()
    measured = []
    for hidden in (2048, 7168):
        for tokens in (1, 8):
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            ids = torch.full((tokens, 8), -1, device="cuda")
            weights = torch.rand(tokens, 8, device="cuda")
            out = torch.empty_like(x)
            base = best_us(lambda _, x=x: x.mul_(1.0))
            for mode in ("flags", "host_func"):
                made = layers(hidden, mode)

                def step(layer: int, made=made, x=x, ids=ids, weights=weights, out=out) -> None:
                    x.mul_(1.0)
                    made[layer].wait(made[layer].submit(x, ids, weights), out)

                added = best_us(step) - base
                made[0].check()
                assert not out.any()
                print(
                    f"hidden {hidden:5}  tokens {tokens}  {mode:9}  {added:6.2f} µs added a layer", flush=True
                )
                measured.append((hidden, tokens, mode, added))
    if arguments.csv:
        rows.record(lines(arguments.commit or rows.commit(), arguments.machine, measured), arguments.csv)


def lines(commit: str, machine: str, measured: list[tuple[int, int, str, float]]) -> list[dict[str, Any]]:
    """Lines of a results file: of (hidden, tokens, mode, µs added a layer)."""
    host = {(hidden, tokens): added for hidden, tokens, mode, added in measured if mode == "host_func"}
    return [
        rows.of_peer(
            *(commit, machine, "handoff", added),
            *("host functions" if mode == "flags" else "", host[hidden, tokens], 2),
            shape=f"hidden {hidden}",
            kernel=mode,
            tokens=tokens,
        )
        for hidden, tokens, mode, added in measured
    ]


if __name__ == "__main__":
    main()
