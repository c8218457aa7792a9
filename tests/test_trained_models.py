"""The promise of the main job, on the two trained models: the same model, its experts in native kernels.

Limits are those of `ktinject eval`'s goal: against the unswapped model in fp32, mean KL divergence at most 1e-3 and 64
greedy tokens identical for at least 18 of 20 prompts with bf16 weights; perplexity within 0.5 % with int8 and within
3 % with int4 in groups of 32.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import trained_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import ktinject
from ktinject.generation.cache import FixedCache
from ktinject.model_class import stored_parameters
from ktinject.operators import Operator
from ktinject.tools import evaluate


class Trained:
    """One of the models, unswapped in fp32, with its tokenizer and held-out text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        text = trained_model("heldout.txt").read_text("utf-8")
        self.ids = torch.tensor(self.tokenizer(text)["input_ids"][:2048])

    @cached_property
    def perplexity(self) -> float:
        return evaluate.perplexity(self.model, self.ids)

    def swapped(self, **variables: object) -> PreTrainedModel:
        return ktinject.load(
            self.folder, variables=variables, devices=["cpu"], dtype=torch.float32, progress=False
        )


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def trained(request: pytest.FixtureRequest) -> Trained:
    return Trained(trained_model(request.param))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_bf16_experts_write_the_same(trained: Trained) -> None:
    """A greedy continuation is the unswapped model's own if that model, reading it, would have chosen each token."""
    swapped = trained.swapped(experts="bf16")
    found = evaluate.divergence(trained.model, swapped, trained.ids[:512])
    assert found.mean_nats <= 1e-3
    lines = trained_model("prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [torch.tensor(trained.tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines]
    assert len(prompts) == 20
    # One alone and whole, as `ktinject eval` has all of them written; of all, in one batch, what they end with.
    alone = torch.cat([prompts[0], torch.tensor(evaluate.greedy(swapped, prompts[0], 64))])[None]
    ends = torch.stack([prompt[-96:] for prompt in prompts])
    written = swapped.generate(ends, max_new_tokens=64, min_new_tokens=64, do_sample=False)
    assert alone.shape[1] > len(prompts[0]) and written.shape == (20, 96 + 64)
    assert agreeing(trained.model, alone, len(prompts[0])) == 1
    assert agreeing(trained.model, written, 96) >= 18


def agreeing(model: PreTrainedModel, rows: torch.Tensor, start: int) -> int:
    """In how many rows [B, T] each token from `start` on is the one that the model finds most likely."""
    with torch.inference_mode():
        chosen = model(input_ids=rows, use_cache=False).logits[:, start - 1 : -1].argmax(-1)
    return int((chosen == rows[:, start:]).all(1).sum())


@pytest.mark.parametrize(
    "variables,limit",
    [({"experts": "int8"}, 0.005), ({"experts": "int4", "group_size": 32}, 0.03)],
    ids=["int8", "int4"],
)
def test_quantised_experts_keep_the_perplexity(
    trained: Trained, variables: dict[str, object], limit: float
) -> None:
    found = evaluate.perplexity(trained.swapped(**variables), trained.ids)
    assert abs(found / trained.perplexity - 1) <= limit


def benchmark(name: str) -> Any:
    """A script of benchmarks/, as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"benchmarks/{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_wide_heads_change_no_logit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's kernels on a GPU are asked is the trained model."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    trained_model("tiny-qwen3-moe")
    script = benchmark("sglang_answers")
    folders, ids = (script.TRAINED, script.widened(tmp_path)), torch.tensor([[*range(40, 100)]])
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    with torch.no_grad():
        narrow, wide = (model(ids).logits for model in models)
    assert models[1].config.head_dim == script.WIDE != models[0].config.head_dim
    assert (narrow - wide).abs().max() < 1e-4 * narrow.abs().max()


@pytest.mark.parametrize("factor", [30.0, 100.0])
def test_large_channels_cost_little_beyond_the_weights(factor: float) -> None:
    """Of what experts and linear layers read, and of intermediates."""
    script = benchmark("large_channels")
    alone, found = script.measure(trained_model("tiny-qwen3-moe").name, factor, script.FORMATS["int8"], 512)
    assert found.mean_nats <= 1.5 * alone


def test_the_checkpoint_is_small_and_per_expert(trained: Trained) -> None:
    checkpoint = trained.folder / "model.safetensors"
    assert checkpoint.stat().st_size <= 20_000_000
    config = trained.model.config
    experts = getattr(config, "n_routed_experts", None) or config.num_experts
    assert config.num_hidden_layers >= 8 and experts >= 32 and config.num_experts_per_tok >= 6
    from safetensors import safe_open

    with safe_open(checkpoint, "pt") as file:
        names = list(file.keys())
    assert "model.layers.1.mlp.experts.0.gate_proj.weight" in names


def test_the_text_of_the_models_is_code(trained: Trained) -> None:
    """A token at random has a perplexity of the vocabulary's size, 2048."""
    assert trained.perplexity < 6


def test_a_plan_counts_what_is_resident(trained: Trained) -> None:
    """Weights and cache, to the byte: tensors by their storages, the operators' native memory as they report it."""
    formats = {"experts": "int4", "group_size": 32, "dense": "int8", "head": "fp8"}
    swapped = ktinject.load(trained.folder, variables=formats, devices="cpu", progress=False)
    plan = swapped.ktinject
    tensors = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*stored_parameters(swapped), *swapped.buffers())
    }
    assert plan.rest_bytes == {"cpu": sum(tensors.values())}
    held = {
        path: native_bytes(swapped.get_submodule(path)) for path in {one.path for one in plan.replacements}
    }
    planned = {one.path: sum(one.bytes.values()) for one in plan.replacements}
    assert planned == held and plan.bytes == {"cpu": sum(tensors.values()) + sum(held.values())}

    caches: list[FixedCache] = []
    begin = FixedCache.__init__

    def watched(cache: FixedCache, *args: object, **kwargs: object) -> None:
        begin(cache, *args, **kwargs)
        caches.append(cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedCache, "__init__", watched)
        swapped.generate(trained.ids[None, :300], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    (cache,) = caches
    found = sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in layer)
    assert cache.capacity == 512
    assert found == 512 * plan.runtime_memory["cpu"].kv_bytes_per_token


def native_bytes(operator: torch.nn.Module) -> int:
    """What an operator holds outside of torch, with all that it has inside."""
    inside = [operator, *(value for value in vars(operator).values() if isinstance(value, Operator))]
    return sum(one.native.bytes for one in inside if hasattr(one, "native"))
