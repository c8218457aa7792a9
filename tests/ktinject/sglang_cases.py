"""A checkpoint of two layers of experts, the objects that SGLang would make for it, and what they should give."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import reference
import torch
from safetensors.torch import save_file
from torch import Tensor

from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.sglang import KTMoEWrapper, failures

LAYERS, EXPERTS, TOP_K, HIDDEN, INNER = 3, 8, 4, 64, 32
EACH = "model.layers.{}.mlp.experts.{}.{}.weight"


def tensors(seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return {
        EACH.format(layer, expert, name): (
            torch.randn(shape, generator=random) * 1.5 * shape[1] ** -0.5
        ).bfloat16()
        for layer, expert in itertools.product(range(LAYERS), range(EXPERTS))
        for name, shape in shapes.items()
    }


def saved(values: dict[str, Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(values, folder / "model.safetensors")
    return folder


@functools.cache
def checkpoint() -> Path:
    kept = tempfile.TemporaryDirectory()
    path = saved(tensors(), Path(kept.name) / "model")
    _kept.append(kept)
    return path


_kept: list[Any] = []


def arguments(layer: int = 0, **others: Any) -> dict[str, Any]:
    """The arguments by SGLang's names."""
    return {
        "layer_idx": layer,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "num_gpu_experts": 0,
        "cpuinfer_threads": None,
        "threadpool_count": 2,
        "weight_path": str(checkpoint()),
        "chunked_prefill_size": 8192,
        "method": "BF16",
        "max_deferred_experts_per_token": 0,
    } | others


def filled(layer: int = 0, order: Tensor | None = None, **others: Any) -> KTMoEWrapper:
    made = KTMoEWrapper(**arguments(layer, **others))
    made.load_weights(torch.arange(EXPERTS, dtype=torch.int64) if order is None else order)
    return made


def inputs(
    m: int,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    ids: torch.dtype = torch.int32,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(m, HIDDEN, generator=random).to(dtype)
    chosen = torch.rand(m, EXPERTS, generator=random).argsort(-1)[:, :TOP_K].to(ids).contiguous()
    weights = torch.rand(m, TOP_K, generator=random)
    return x.to(device), chosen.to(device), (weights / weights.sum(-1, keepdim=True)).to(device)


@functools.cache
def stacks(layer: int = 0) -> dict[str, Tensor]:
    """Projection → [experts, outputs, inputs]."""
    values = tensors()

    def stack(name: str) -> Tensor:
        return torch.stack([values[EACH.format(layer, expert, name)] for expert in range(EXPERTS)])

    return {name: stack(f"{name}_proj").double() for name in ("gate", "up", "down")}


SPEC = ExpertsSpec(
    EXPERTS, HIDDEN, INNER, True, False, False, True, "silu", 1.0, float("inf"), float("inf"), 0.0
)


def expected(
    x: Tensor, ids: Tensor, weights: Tensor, layer: int = 0, on_gpu: set[int] | None = None
) -> Tensor:
    """The CPU's part, in fp64."""
    ids = ids.cpu().long()
    skipped = (ids < 0) | (ids >= EXPERTS)
    for expert in on_gpu or ():
        skipped |= ids == expert
    return reference.experts(x.cpu(), ids.masked_fill(skipped, -1), weights.cpu(), stacks(layer), SPEC)


def is_near(found: Tensor, want: Tensor, of: str = "bf16") -> bool:
    if not want.any():
        return not found.any()
    return reference.relative_error(found.cpu(), want) < reference.TOLERANCE[of]


def forward(made: KTMoEWrapper, call: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    stream = torch.cuda.current_stream(call[0].device).cuda_stream if call[0].is_cuda else 0
    made.submit_forward(*call, stream)
    return made.sync_forward(call[0], stream)


def drop_failures() -> None:
    failures.take()
    failures._are_kept = False
