"""Experts to hand work to, inputs, what one plain call gives, and a GPU for plans."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktinject import _native, machine
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.offload import handoff
from ktinject.operators.offload.handoff import Handoff

EXPERTS, HIDDEN = 8, 64


@cache
def operator(seed: int = 0, hidden: int = HIDDEN) -> CpuExperts:
    return filled(seed, hidden)


def filled(
    seed: int = 0, hidden: int = HIDDEN, experts: int = EXPERTS, of_nan: int | None = None
) -> CpuExperts:
    """Random experts; of_nan: one whose weights are all NaN."""
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=48, num_experts=experts)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config)
    random = torch.Generator().manual_seed(seed)
    made = CpuExperts.build(module, CpuExpertsConfig(device="cpu"))
    made.allocate()
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5
        if of_nan is not None:
            values[of_nan] = torch.nan
        made.load(name, values, None, None)
    made.finish()
    return made


def way(seed: int = 0, mode: handoff.Mode = "auto", hidden: int = HIDDEN) -> Handoff:
    return Handoff(operator(seed, hidden).native, hidden, mode)


def inputs(
    tokens: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    top_k: int = 2,
    device: str = "cpu",
    hidden: int = HIDDEN,
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    ids = torch.rand(tokens, EXPERTS, generator=random).argsort(-1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=random)
    return x.to(device), ids.to(device), weights.to(device)


def plain(arguments: tuple[Tensor, Tensor, Tensor], seed: int = 0) -> Tensor:
    return operator(seed, arguments[0].shape[1]).compute(*(tensor.cpu() for tensor in arguments))


RANKS = [(0, 1), (0, 3), (1, 4), (2, 2), (0, 4), (3, 4)]


def by_rank(ids: Tensor, weights: Tensor, ranks: tuple[int, int]) -> Tensor:
    kept = torch.full_like(ids, -1)
    for row, (theirs, weight) in enumerate(zip(ids.tolist(), weights.abs().tolist())):
        order = sorted(range(len(theirs)), key=lambda slot: (-weight[slot], slot))
        for slot in order[slice(*ranks)]:
            kept[row, slot] = theirs[slot]
    return kept


def make_up_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans find a GPU of 16 GiB, where flags work."""
    detect = machine.detect

    def with_gpu(**how: Any) -> machine.Machine:
        gpu = machine.Gpu(0, "made up", 1 << 34, 1 << 34, (9, 0))
        return dataclasses.replace(detect(), gpus=(gpu,), no_gpu="")

    monkeypatch.setattr(machine, "detect", with_gpu)
    monkeypatch.setattr(_native, "why_no_flags", lambda device: "")
