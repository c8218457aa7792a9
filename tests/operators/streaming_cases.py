"""Experts that pass through a GPU, and a bus for tests without one."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import nullcontext
from typing import Any

import expert_cases
import pytest
import reference
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktinject.addresses import CODES
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.offload import ring, streaming

EXPERTS = 12


def leaf(hidden: int, inner: int) -> Qwen3MoeExperts:
    shape = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, num_experts=EXPERTS)
    shape._experts_implementation = "eager"
    return Qwen3MoeExperts(shape)


def filled(
    hidden: int, inner: int, seed: int = 0, operator: Any = CpuExperts, config: Any = None, **arguments: Any
) -> CpuExperts:
    module = leaf(hidden, inner)
    random = torch.Generator().manual_seed(seed)
    config = config or CpuExpertsConfig(device="cpu", **arguments)
    made = operator.build(module, config)
    for placement in operator.plan_placement(torch.nn.Module(), {"e": (module, config)}, {}).values():
        made.place(placement)
    made.allocate()
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=random) * parameter.shape[-1] ** -0.5
        expert_cases.load(made, name, values.bfloat16())
    made.finish()
    return made


def inputs(tokens: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=random).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=random).argsort(-1)[:, :4].contiguous()
    ids[0, 1], ids[1, :] = EXPERTS, -1  # what is to be skipped
    return x, ids, torch.rand(tokens, 4, generator=random)


def exact(operator: CpuExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """fp64, from the dequantised weights."""
    return reference.experts(x, ids, weights, expert_cases.unpacked(operator), operator.spec)


class Clock:
    """A stream or an event of CUDA, where everything happens at once."""

    cuda_stream = 0

    def __init__(self, device: Any = None, **more: Any) -> None:
        self.device_index = getattr(device, "index", None) or 0

    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Bus:
    """`_native.Streamed`: a slot holds the numbers of its experts, and so does what is said to be on the GPU."""

    asked: list[tuple[int, int]] = []  # whose copy began with which expert
    sent: list[int] = []  # all of these experts
    over: list[tuple[int, int, tuple[int, ...]]] = []  # over which device's link, whose, and which experts

    def __init__(self, native: Any, first: int) -> None:
        self.native = native

    def packed_bytes(self, count: int) -> int:
        return 64 * count

    def copy(self, experts: tuple[int, ...], slot: int, stream: tuple[int, int]) -> None:
        for at, expert in enumerate(experts):
            ctypes.c_int64.from_address(slot + 64 * at).value = expert
        Bus.asked.append((id(self.native), experts[0]))
        Bus.sent += experts
        Bus.over.append((stream[0], id(self.native), tuple(experts)))

    def activate(self, gate_up: int, dtype: int, rows: int, out: int, stream: tuple[int, int]) -> None:
        given = (ctypes.c_uint16 * (rows * 2 * 96)).from_address(gate_up)
        gate, up = torch.frombuffer(given, dtype=torch.bfloat16).view(rows, 192).float().chunk(2, dim=-1)
        found = (torch.nn.functional.silu(gate) * up).bfloat16().contiguous()
        ctypes.memmove(out, found.data_ptr(), 2 * found.numel())

    def sum(
        self, values: int, known: int, rows: int, weights: int, weights_dtype: int, tokens: int, slots: int,
        out: int, dtype: int, stream: tuple[int, int],
    ) -> None:  # fmt: skip
        def at(address: int, kind: Any, count: int) -> Tensor:
            return torch.frombuffer(
                (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address), dtype=kind
            )

        kinds = {code: kind for kind, code in CODES.items()}
        answers = at(values, torch.bfloat16, max(1, known) * 256).view(-1, 256).float()
        row = at(rows, torch.int64, tokens * slots).view(tokens, slots)
        weight = at(weights, kinds[weights_dtype], tokens * slots).view(tokens, slots).float()
        weight = torch.where(row < known, weight, 0)
        if not known:
            answers = torch.zeros(1, 256)
        found = (answers[row.clamp(max=max(1, known) - 1)] * weight[..., None]).sum(1).to(kinds[dtype])
        ctypes.memmove(out, found.data_ptr(), found.nbytes)

    def unpack(self, slot: int, count: int, gate_up: int, down: int, stream: tuple[int, int]) -> None:
        self.unpack_resident(None, slot, range(count), gate_up, down, stream)

    def unpack_resident(
        self, shapes: Any, memory: int, places: Any, gate_up: int, down: int, stream: tuple[int, int]
    ) -> None:
        for projections, at in ((("gate", "up"), gate_up), (("down",), down)):
            for place in places:
                expert = ctypes.c_int64.from_address(memory + 64 * place).value
                for projection in projections:
                    shape = (256, 96) if projection == "down" else (96, 256)
                    wide = torch.empty(shape)
                    self.native.unpack(projection, expert, wide)
                    narrow = wide.bfloat16()
                    ctypes.memmove(at, narrow.data_ptr(), 2 * narrow.numel())
                    at += 2 * narrow.numel()


def played_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream without a GPU from now on: by `Bus`, five experts of [256, 96] at a time."""
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Clock)
    monkeypatch.setattr(torch.cuda, "current_stream", Clock)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(streaming._native, "Streamed", Bus)
    monkeypatch.setattr(ring, "CHUNK_BYTES", 5 * 6 * 256 * 96)
    monkeypatch.setattr(ring, "_rings", weakref.WeakValueDictionary())  # another test's may still be there
    Bus.asked, Bus.sent, Bus.over = [], [], []
