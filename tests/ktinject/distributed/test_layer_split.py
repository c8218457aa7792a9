"""Decoder layers on two devices: the same results, and nothing crosses twice."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from double import EXPERTS, saved
from test_generate import GatheredExperts, prompt
from test_piecewise_graph import assert_a_failure_crosses
from torch import Tensor, nn

import ktinject
from ktinject.distributed import layer_split
from ktinject.operators.hybrid_experts import HybridExperts


class Layer(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        self.devices = (hidden.device, mask.device, rotation[1].device)
        self.mask = mask
        return hidden + mask + rotation[0]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(5)])

    def forward(self, hidden: Tensor) -> Tensor:
        mask, rotation = torch.ones(1), (torch.ones(1), torch.ones(1))
        for layer in self.layers:
            hidden = layer(hidden, mask=mask, rotation=rotation)
        return hidden


def test_what_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta, which stands for another device."""
    stack, paths = Stack(), [f"layers.{n}" for n in range(5)]
    layer_split.install(stack, paths, {"": "cpu", "layers.2": "meta", "layers.3": "meta", "layers.4": "meta"})
    moves = []
    to = Tensor.to
    monkeypatch.setattr(
        Tensor,
        "to",
        lambda self, device, **kw: (moves.append(self.device != device), to(self, device, **kw))[1],
    )
    with pytest.raises(NotImplementedError, match="meta"):
        stack(torch.zeros(3))  # what is on meta cannot come back
    kinds = [{device.type for device in layer.devices} for layer in stack.layers]
    assert kinds == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}, {"meta"}]
    assert stack.layers[2].mask is stack.layers[3].mask is stack.layers[4].mask
    assert sum(moves) == 5, "hidden states, the mask and two of the rotation go once; hidden states come back"


def test_one_device_has_no_stage_boundaries() -> None:
    stack = Stack()
    layer_split.install(stack, ["layers.0"], {"": "cpu"})
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in stack.layers)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("operator", ["gathered_experts", "hybrid_experts"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_two_gpus_give_the_same_tokens(name: str, operator: str, tmp_path: Path) -> None:
    assert GatheredExperts.capturable
    original = models.tiny(name, num_hidden_layers=4)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(4)
    folder = saved(original, tmp_path)
    rules = [{**EXPERTS, "replace": {"operator": operator}}]
    one, two = (
        ktinject.load(folder, rules, devices=devices, progress=False)
        for devices in (["cuda:0"], ["cuda:0", "cuda:1"])
    )
    assert {str(parameter.device) for parameter in two.parameters()} == {"cuda:0", "cuda:1"}
    for batch in (1, 3):
        arguments = prompt(batch, device="cuda")
        wanted = one.generate(**arguments)
        for _ in range(3):
            assert torch.equal(two.generate(**arguments), wanted)
            assert two.ktinject_decoding.last == "graph loop", two.ktinject_decoding.reason
        sampled = []
        for model in (one, two):
            torch.manual_seed(batch)
            sampled.append(model.generate(**arguments, do_sample=True, temperature=0.7))
        assert torch.equal(*sampled)
    runner = two.ktinject_decoding.runners[3]
    assert {str(keys.device) for keys, _ in runner.cache.layers} == {"cuda:0", "cuda:1"}
    assert runner.replays > runner.captures and {len(step.parts) for step in runner._steps.values()} == {3}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_decode_kernels_on_two_gpus(tmp_path: Path) -> None:
    """In bfloat16, by the bundled rules: whole layers in few kernels, on each GPU; requests take no more memory."""
    original = models.tiny("qwen3_moe", num_hidden_layers=4, hidden_size=64, head_dim=32)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(4)
    folder = saved(original.bfloat16(), tmp_path)
    rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts", "gpu_experts": 2}}]
    one, two = (
        ktinject.load(folder, rules, devices=devices, progress=False)
        for devices in (["cuda:0"], ["cuda:0", "cuda:1"])
    )
    arguments = prompt(2, device="cuda")
    assert torch.equal(one.generate(**arguments), two.generate(**arguments))
    assert two.ktinject_decoding.last == "graph loop", two.ktinject_decoding.reason
    fused = two.ktinject_decoding.fused
    assert fused._steps.keys() == one.ktinject_decoding.fused._steps.keys() and not fused.refused

    def used() -> list[int]:
        gc.collect()
        torch.cuda.synchronize()
        return [torch.cuda.memory_allocated(device) for device in range(2)]

    two.generate(**arguments, do_sample=True)
    before = used()
    for number in range(60):
        two.generate(**arguments, do_sample=bool(number % 2))
    assert used() <= before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("fails_on", [0, 1])
def test_a_failure_in_a_worker_on_two_gpus(fails_on: int, tmp_path: Path) -> None:
    original = models.tiny("qwen3_moe", num_hidden_layers=4)
    rules = [{**EXPERTS, "replace": {"operator": "hybrid_experts"}}]
    model = ktinject.load(
        saved(original, tmp_path), rules, devices=["cuda:0", "cuda:1"], dtype=torch.float32, progress=False
    )
    experts: Any = [module for module in model.modules() if isinstance(module, HybridExperts)][-fails_on]
    assert_a_failure_crosses(model, experts, f"cuda:{fails_on}")
