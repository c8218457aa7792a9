"""Captured decode steps on a GPU: the tokens of the same steps run one kernel at a time, request after request."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from double import Recorder, memory_in_use
from test_generate import PLAIN, STOCK, assert_stock, name_of, prompt, stock, swapped
from test_piecewise_graph import cut
from trained import trained_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from waiting import ctrl_c_ends

import ktinject
from ktinject.generation.graph_runner import SIZES
from ktinject.support import Support

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return swapped(request.param, device="cuda")


def captures(model: PreTrainedModel) -> int:
    return sum(runner.captures for runner in model.ktinject_decoding.runners.values())


@pytest.mark.parametrize("case", PLAIN, ids=name_of)
def test_graphs_give_the_stock_loop_s_tokens_from_the_same_seed(
    model: PreTrainedModel, case: dict[str, Any]
) -> None:
    for seed, batch in enumerate([1, 3, 8, 1]):
        arguments = {**prompt(batch, device="cuda"), **case}
        if arguments.get("num_return_sequences") and batch == 8:
            continue
        assert_stock(model, seed, arguments)
        if arguments["max_new_tokens"] > 1:
            assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("batch", [9, 12, 33, 64])
def test_batches_between_the_captured_sizes(model: PreTrainedModel, batch: int, sampled: bool) -> None:
    """Padded rows, and rows that end before others."""
    arguments = {**prompt(batch, device="cuda"), "max_new_tokens": 12, "do_sample": sampled}
    free = model.generate(**arguments, eos_token_id=None)
    ends = [*{int(token) for token in free[:, -8]}][:3]
    for end in (None, ends):
        given = {**arguments, "eos_token_id": end, "pad_token_id": 0}
        torch.manual_seed(batch)
        ours, state = model.generate(**given), torch.cuda.get_rng_state()
        torch.manual_seed(batch)
        theirs = stock(model, **given)
        # Experts of more rows may be computed by another kernel, whose sums are rounded in another order.
        assert ours.shape == theirs.shape and (ours == theirs).float().mean() > 0.99
        assert torch.equal(state, torch.cuda.get_rng_state())
        assert model.ktinject_decoding.last == "graph loop", model.ktinject_decoding.reason
    sizes = [size for size in model.ktinject_decoding.runners if size >= batch]
    assert min(sizes) == next(size for size in SIZES if size >= batch)


@pytest.mark.parametrize("case, how", STOCK, ids=[how + name_of(case) for case, how in STOCK])
def test_every_other_case_is_the_stock_loop_s(model: PreTrainedModel, case: dict[str, Any], how: str) -> None:
    arguments = {**prompt(1, padding=0, device="cuda"), **case}
    torch.manual_seed(1)
    ours = model.generate(**arguments)
    assert model.ktinject_decoding.last.startswith(how.replace("eager loop, ", "graph loop, "))
    torch.manual_seed(1)
    theirs = stock(model, **arguments)
    assert torch.equal(*(out if isinstance(out, torch.Tensor) else out.sequences for out in (ours, theirs)))


def test_one_capture_serves_every_later_request(model: PreTrainedModel) -> None:
    model.ktinject_decoding.release()
    for batch in (1, 2, 1, 2):
        for length in (9, 30, 60):
            model.generate(**prompt(batch, length, "cuda"))
    assert captures(model) == 4, "a forward pass and a choice for each of two batch sizes"


def test_a_long_answer_moves_to_longer_stretches(model: PreTrainedModel) -> None:
    arguments = {**prompt(2, 100, "cuda"), "max_new_tokens": 600, "eos_token_id": None}
    ours = model.generate(**arguments)
    assert model.ktinject_decoding.runners[2].cache.capacity == 1024
    eager = stock(model, **arguments)
    assert (ours == eager).float().mean() > 0.99 or (ours != eager).any(0).nonzero()[0] > 300


def test_a_thousand_requests_take_no_more_memory(model: PreTrainedModel) -> None:
    arguments = {**prompt(2, device="cuda"), "max_new_tokens": 6}

    for i in range(60):
        model.generate(**arguments, do_sample=True, temperature=0.5 + i % 40 / 100)
    before = memory_in_use()
    for i in range(1000):
        model.generate(**arguments, do_sample=bool(i % 2), temperature=0.5 + i % 40 / 100)
    after = memory_in_use()
    assert after[0] <= before[0] and after[1] <= before[1] + 2**21, (before, after)


@pytest.mark.parametrize("is_cut", [False, True], ids=["one graph", "several graphs"])
def test_a_dropped_model_gives_its_memory_back(is_cut: bool) -> None:
    def made() -> PreTrainedModel:
        model = swapped("qwen3_moe", device="cuda", num_hidden_layers=4)
        return cut(model) if is_cut else model

    made().generate(**prompt(device="cuda"))  # cuBLAS takes its workspace, once
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = made()
    model.generate(**prompt(device="cuda"))
    (runner,) = map(weakref.ref, model.ktinject_decoding.runners.values())
    del model
    gc.collect()
    assert runner() is None
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_what_cannot_be_captured_runs_eagerly_and_says_so() -> None:
    model = swapped("qwen3_moe", "looking_experts", "cuda")
    arguments = {**prompt(device="cuda"), "do_sample": True}
    for seed in range(2):
        torch.manual_seed(seed)
        ours = model.generate(**arguments)
        torch.manual_seed(seed)
        assert torch.equal(ours, stock(model, **arguments))
        assert model.ktinject_decoding.last == "eager loop"
        assert "captur" in model.ktinject_decoding.reason
    other = swapped("qwen3_moe", device="cuda")
    torch.manual_seed(0)
    ours = other.generate(**arguments)
    assert other.ktinject_decoding.last == "graph loop"
    torch.manual_seed(0)
    assert torch.equal(ours, stock(other, **arguments))


def test_out_of_memory_is_an_error_and_the_next_request_runs(model: PreTrainedModel) -> None:
    wanted = stock(model, **prompt(device="cuda"))
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model.generate(torch.full((64, 20_000), 5, device="cuda"), max_new_tokens=4)
        assert any("the next request can run" in note for note in caught.value.__notes__)
        del caught
        gc.collect()
        assert torch.equal(model.generate(**prompt(device="cuda")), wanted)
        too_long = {**prompt(device="cuda"), "max_new_tokens": 2**21, "eos_token_id": list(range(96))}
        model.generate(**too_long)
        assert "no room for a captured cache" in model.ktinject_decoding.reason
        assert torch.equal(model.generate(**prompt(device="cuda")), wanted)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del free


def test_ctrl_c_ends_a_request_at_once(model: PreTrainedModel) -> None:
    wanted = stock(model, **prompt(device="cuda"))
    for new_tokens in (50_000, 1):
        arguments = {**prompt(2, 60, "cuda"), "max_new_tokens": new_tokens, "eos_token_id": None}
        model.generate(**{**arguments, "max_new_tokens": 4})
        ctrl_c_ends(partial(model.generate, **arguments))
        assert torch.equal(model.generate(**prompt(device="cuda")), wanted)
        assert model.ktinject_decoding.last == "graph loop"


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_experts_on_the_cpu_within_the_graph(batch: int) -> None:
    """hybrid_experts through the handoff: the tokens of the same steps run eagerly, and of the experts on the CPU."""
    graphs, eager, cpu = (
        swapped("qwen3_moe", operator, "cuda", hidden_size=64, head_dim=32)
        for operator in ("hybrid_experts", "hybrid_experts", "cpu_experts")
    )
    eager.ktinject_decoding.graphs = Support.no("for comparison")
    arguments = prompt(batch, device="cuda")
    wanted = graphs.generate(**arguments)
    assert graphs.ktinject_decoding.last == "graph loop", graphs.ktinject_decoding.reason
    for _ in range(3):
        assert torch.equal(graphs.generate(**arguments), wanted)
    assert torch.equal(eager.generate(**arguments), wanted)
    assert eager.ktinject_decoding.last == "eager loop"
    assert torch.equal(cpu.generate(**arguments), wanted)
    assert "cpu_experts cannot be captured" in cpu.ktinject_decoding.reason


@pytest.fixture(scope="module", params=["tiny-deepseek-v3", "tiny-qwen3-moe"])
def folder(request: pytest.FixtureRequest) -> Path:
    return trained_model(request.param)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_trained_models_write_in_graphs_what_they_write_eagerly(folder: Path, batch: int) -> None:
    """In bf16, by the bundled rules: graphs may be as far from the model in fp32 as eager steps are."""
    steps = 32
    options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None}
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    lines = trained_model("prompts.jsonl").read_text("utf-8").splitlines()[:batch]
    texts = [json.loads(line)["prompt"][: 150 + 40 * i] for i, line in enumerate(lines)]
    prompts = dict(tokenizer(texts, return_tensors="pt", padding=True))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = ktinject.load(folder, devices=["cuda:0"], progress=False)
    assert model.dtype == torch.bfloat16

    graphs, model.ktinject_decoding.graphs = model.ktinject_decoding.graphs, Support.no("for comparison")
    tokens, logits = reference.write(model, prompts, steps)
    rounding = reference.Rounding.between(logits, reference.read(plain, prompts, tokens))
    model.ktinject_decoding.graphs = graphs

    given = {name: tensor.cuda() for name, tensor in prompts.items()}
    recorder = Recorder()
    found = model.generate(**given, **options, logits_processor=[recorder])[:, -steps:].cpu()
    assert model.ktinject_decoding.last.startswith("graph, stock loop")
    assert not model.ktinject_decoding.fused.refused
    logits = torch.stack(recorder.logits, 1).float().cpu()
    reference.same_text(found, logits, reference.read(plain, prompts, found), rounding)
    found = model.generate(**given, **options)[:, -steps:].cpu()
    assert model.ktinject_decoding.last == "graph loop"
    want = reference.read(plain, prompts, found)
    reference.same_text(found, want, want, rounding)
    for _ in range(3):
        assert torch.equal(model.generate(**given, **options)[:, -steps:].cpu(), found)
