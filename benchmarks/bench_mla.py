"""One decode step of one latent attention layer at DeepSeek-V3's shape: absorbed_mla beside transformers' attention.

Both read the same full static cache and own the same weights; the whole layer is timed, all its linears included. On a
GPU both are replayed from a CUDA graph. The relative errors are against the layer in fp32.

    python benchmarks/bench_mla.py [--device cuda] [--csv benchmarks/results.csv --machine "…"]
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import rows
import torch
import transformers
from torch import Tensor, nn
from transformers import DeepseekV3Config, StaticCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from ktinject.hf import compat
from ktinject.operators.absorbed_mla import AbsorbedMla, AbsorbedMlaConfig

REPLAYS = 10


def attention(device: str) -> tuple[DeepseekV3Config, nn.Module]:
    config = DeepseekV3Config(num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        layer = DeepseekV3Attention(config, 0).bfloat16().eval().requires_grad_(False)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return config, layer


def filled(config: DeepseekV3Config, latent: Tensor, rope: Tensor) -> StaticCache:
    """A cache that holds these; the layer's next token overwrites the last of them."""
    cache = StaticCache(config=config, max_cache_len=latent.shape[2])
    cache.update(latent[:, :, :1], rope[:, :, :1], 0)
    cache.layers[0].keys.copy_(latent)
    cache.layers[0].values.copy_(rope)
    return cache


def median_us(step: Callable[[], Any], is_cuda: bool, repeats: int = 20) -> float:
    if is_cuda:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    for _ in range(3):
        step()
    times = []
    for _ in range(repeats):
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(REPLAYS):
            step()
        if is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / REPLAYS)
    return sorted(times)[len(times) // 2]


@torch.inference_mode()
def measure(device: str, context: int) -> tuple[float, float, float, float]:
    """µs of ours and of transformers' own, and the relative errors of both."""
    torch.manual_seed(0)
    config, theirs = attention(device)
    ours = AbsorbedMla.build(theirs, AbsorbedMlaConfig()).eval()
    latent = torch.randn(1, 1, context, config.kv_lora_rank, device=device).bfloat16()
    rope = torch.randn(1, 1, context, config.qk_rope_head_dim, device=device).bfloat16()
    x = torch.randn(1, 1, config.hidden_size, device=device).bfloat16()
    angles = torch.rand(1, 1, config.qk_rope_head_dim // 2, device=device) * 6
    positions = tuple(torch.cat([t, t], -1).bfloat16() for t in (angles.cos(), angles.sin()))
    mask = torch.ones(1, 1, 1, context, dtype=torch.bool, device=device)
    cache = filled(config, latent, rope)

    def step(layer: nn.Module, held: StaticCache = cache, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        held.layers[0].cumulative_length.fill_(context - 1)
        places = tuple(t.to(dtype) for t in positions)
        out: Tensor = layer(
            hidden_states=x.to(dtype), position_embeddings=places, attention_mask=mask, **{compat.CACHE: held}
        )[0]
        return out

    exact = step(copy.deepcopy(theirs).float(), filled(config, latent.float(), rope.float()), torch.float32)
    errors = [((step(layer).float() - exact).norm() / exact.norm()).item() for layer in (ours, theirs)]
    is_cuda = device.startswith("cuda")
    us = [median_us(lambda layer=layer: step(layer), is_cuda) for layer in (ours, theirs)]
    return us[0], us[1], errors[0], errors[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, action="append")
    rows.add_arguments(parser)
    arguments = parser.parse_args()
    measured = []
    for context in arguments.context or (1024, 4096, 32768):
        ours, theirs, error, their_error = measure(arguments.device, context)
        print(
            f"context {context:6}  absorbed {ours:9.1f} µs  transformers {theirs:9.1f} µs  {theirs / ours:5.1f}×  "
            f"relative error {error:.1e} and {their_error:.1e}",
            flush=True,
        )
        measured.append((context, ours, theirs))
    if arguments.csv:
        rows.record(lines(arguments.commit or rows.commit(), arguments.machine, measured), arguments.csv)


def lines(commit: str, machine: str, measured: list[tuple[int, float, float]]) -> list[dict[str, Any]]:
    """Lines of a results file: of (context, µs of absorbed_mla, µs of transformers)."""
    return [
        rows.of_peer(
            *(
                commit,
                machine,
                "mla_decode",
                ours,
                f"transformers {transformers.__version__} sdpa",
                theirs,
                1,
            ),
            shape=f"deepseek-v3 attention, context {context}",
            tokens=1,
            weights="bf16",
            kernel="absorbed",
        )
        for context, ours, theirs in measured
    ]


if __name__ == "__main__":
    main()
