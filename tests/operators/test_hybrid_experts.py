"""`hybrid_experts` against `cpu_experts` on the same weights: eagerly, in graphs, and in the trained models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import ktinject
from ktinject import _native
from ktinject.errors import OperatorError
from ktinject.operators import handoff
from ktinject.operators.cpu_experts import CpuExperts, CpuExpertsConfig
from ktinject.operators.hybrid_experts import HybridExperts, HybridExpertsConfig

EXPERTS, HIDDEN = 16, 128
MODELS = Path(__file__).parents[2] / "examples/models"
gpu = pytest.mark.gpu


@cache
def module() -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=96, num_experts=EXPERTS)
    config._experts_implementation = "eager"
    made = Qwen3MoeExperts(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=random)
    return made


def filled(operator: CpuExperts) -> CpuExperts:
    operator.allocate()
    for name, parameter in module().named_parameters():
        operator.load(name, parameter.detach(), None, None)
    operator.finish()
    return operator


def hybrid(device: str, **arguments: Any) -> HybridExperts:
    made = filled(HybridExperts.build(module(), HybridExpertsConfig(device=device, **arguments)))
    assert isinstance(made, HybridExperts)
    return made


@cache
def plain(**arguments: Any) -> CpuExperts:
    return filled(CpuExperts.build(module(), CpuExpertsConfig(device="cpu", **arguments)))


def inputs(tokens: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(tokens, EXPERTS, generator=random).argsort(-1)[:, :4].contiguous()
    return x.to(device), ids.to(device), torch.rand(tokens, 4, generator=random).to(device)


# --- without a GPU ---


def test_without_a_gpu_it_is_cpu_experts() -> None:
    made, arguments = hybrid("cpu"), inputs(5)
    assert torch.equal(made(*arguments), plain()(*arguments))
    assert "no GPU is used" in made.describe()["handoff"]
    assert made.capturable and not plain().capturable


def test_a_plan_without_a_gpu_says_so(tiny_qwen3_moe: Path) -> None:
    rules = [{"name": "e", "match": {"path": r".*\.experts"}, "replace": {"operator": "hybrid_experts"}}]
    model = ktinject.load(tiny_qwen3_moe, rules, devices=["cpu"], progress=False)
    assert "hybrid_experts computes as cpu_experts does" in str(model.ktinject)
    ids = torch.arange(12)[None]
    both = ktinject.load(tiny_qwen3_moe, devices=["cpu"], progress=False)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, both(ids).logits)


def test_gradients_are_those_of_cpu_experts() -> None:
    x, ids, weights = inputs(3)
    grads = []
    for operator in (hybrid("cpu"), plain()):
        leaf = x.float().requires_grad_()
        operator(leaf, ids, weights).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1])


# --- on a GPU ---


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return "cuda:0"


@gpu
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 100])
def test_eager(cuda: str, tokens: int, weights: str) -> None:
    made, arguments = hybrid(cuda, weights=weights), inputs(tokens, device=cuda)
    with torch.inference_mode():
        for _ in range(2):
            out = made(*arguments)
            assert out.device == arguments[0].device
            assert torch.equal(out.cpu(), plain(weights=weights)(*inputs(tokens)))


@gpu
@pytest.mark.parametrize("mode", ["flags", "host_func"])
def test_replays(cuda: str, mode: str) -> None:
    made = hybrid(cuda, handoff=mode)
    assert mode in made.describe()["handoff"]
    arguments = inputs(3, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        with torch.cuda.graph(graph):
            out = made(*arguments)
        for seed in range(20):
            for to, value in zip(arguments, inputs(3, seed)):
                to.copy_(value)
            handoff.wake()
            graph.replay()
            assert torch.equal(out.cpu(), plain()(*inputs(3, seed)))


@gpu
def test_gradients_on_the_gpu(cuda: str) -> None:
    x, ids, weights = inputs(3)
    want = x.float().requires_grad_()
    plain()(want, ids, weights).sum().backward()
    leaf = x.to(cuda).float().requires_grad_()
    hybrid(cuda)(leaf, ids.to(cuda), weights.to(cuda)).sum().backward()
    assert want.grad is not None and leaf.grad is not None
    assert (leaf.grad.cpu() - want.grad).abs().max() <= 1e-4 * want.grad.abs().max()


@gpu
def test_a_bad_id_is_raised_by_the_next_call(cuda: str) -> None:
    made = hybrid(cuda)
    x, ids, weights = inputs(2, device=cuda)
    with torch.inference_mode(), pytest.raises(OperatorError, match="routed to expert"):
        made(x, ids + EXPERTS + 1, weights)
        torch.cuda.synchronize()
        made(x, ids, weights)
    with torch.inference_mode():
        assert torch.equal(made(x, ids, weights).cpu(), plain()(*inputs(2)))


def written(
    folder: Path, operator: dict[str, Any], devices: list[str], prompts: list[str]
) -> list[list[int]]:
    rules = [{"name": "e", "match": {"path": r".*\.experts"}, "replace": operator}]
    model = ktinject.load(folder, rules, devices=devices, dtype=torch.float32, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=32, do_sample=False)
    return out[:, batch["input_ids"].shape[1] :].tolist()


@gpu
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["tiny-deepseek-v3", "tiny-qwen3-moe"])
def test_the_trained_models_write_the_same(cuda: str, name: str, batch: int) -> None:
    folder = MODELS / name
    lines = (MODELS / "prompts.jsonl").read_text("utf-8").splitlines()[:batch]
    prompts = [json.loads(line)["prompt"] for line in lines]
    want = written(folder, {"operator": "cpu_experts"}, [cuda], prompts)
    assert written(folder, {"operator": "hybrid_experts"}, [cuda], prompts) == want
