"""`deferred_moe` on a GPU against the definition, eagerly and in CUDA graphs, on one GPU and two."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import deferred
import models
import pytest
import reference
import torch
from deferred import (
    CHANGED,
    PROMPT,
    WRITTEN,
    Run,
    at_once,
    decided,
    decode,
    exact,
    random_case,
    rules,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.distributed import layer_split

pytestmark = pytest.mark.gpu

# The rest of the model computes on the GPU in fp32, which is another order of sums: more crosses a rounding boundary.
# Choices that this could change are avoided: all texts are `decided`.
SAME_ON_GPU = 1e-2


def on_gpu(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return ktinject.optimize(copy.deepcopy(model).to("cuda:0"), rules(model, **arguments), progress=False)


def generate(model: PreTrainedModel, ids: Tensor, count: int = WRITTEN, **arguments: Any) -> Tensor:
    mask = torch.ones_like(ids).cuda()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count, **arguments}
    found = model.generate(ids.cuda(), attention_mask=mask, **options)
    return getattr(found, "sequences", found).cpu()


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return deferred.qwen()


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    """With a dense first layer and shared experts, which the GPU computes while it waits."""
    return exact(models.tiny("deepseek_v3", num_hidden_layers=5, num_experts_per_tok=4, topk_group=2))


@pytest.mark.parametrize("seed", range(12))
def test_the_definition_on_a_gpu(seed: int) -> None:
    model, schedule, batch = random_case(seed)
    swapped = on_gpu(model, schedule=schedule)
    plain = on_gpu(model)
    ids, want = decided(model, tuple(schedule), prompt=4, count=5, seed=seed)
    ids, want = ids[:batch], want[:, :batch]
    found = decode(Run(swapped), ids.cuda(), 4).cpu()
    assert reference.relative_error(found, want) < SAME_ON_GPU
    change = reference.relative_error(decode(Run(plain), ids.cuda(), 4).cpu(), want)
    assert change > CHANGED if any(schedule) else change < SAME_ON_GPU
    for _ in range(2):  # captures, and replays
        assert torch.equal(generate(swapped, ids[:, :4], 5), ids)
        assert "graph" in swapped.ktinject_decoding.last, swapped.ktinject_decoding.reason


@pytest.mark.parametrize("resident", [1, 3, 6])
def test_where_an_expert_lies_does_not_matter(deepseek: PreTrainedModel, resident: int) -> None:
    swapped = on_gpu(deepseek, deferred=2, gpu_experts=resident)
    ids, want = decided(deepseek, (2, 2, 2, 0))
    found = decode(Run(swapped), ids[:3].cuda(), PROMPT).cpu()
    assert reference.relative_error(found, want[:, :3]) < SAME_ON_GPU


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
@pytest.mark.parametrize("mode", ["flags", "host_func"])
def test_graphs_write_what_the_definition_does(
    request: pytest.FixtureRequest, family: str, batch: int, mode: str
) -> None:
    """The second request replays what the first one captured; a third, with a hook on the model, runs eagerly."""
    model = request.getfixturevalue(family)
    swapped = on_gpu(model, deferred=3, handoff=mode)
    texts, _ = decided(model, (3, 3, 3, 0))
    for number in range(3):
        text = texts[number * batch : (number + 1) * batch]
        if number == 2:
            swapped.lm_head.register_forward_hook(lambda *_: None)
        assert torch.equal(generate(swapped, text[:, :PROMPT]), text)
        assert ("graph" in swapped.ktinject_decoding.last) == (number < 2), swapped.ktinject_decoding.reason


@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_none_deferred_on_a_gpu_is_hybrid_experts(request: pytest.FixtureRequest, family: str) -> None:
    model = request.getfixturevalue(family)
    plain = [{"name": "plain", "match": {"path": r".*\.experts"}, "replace": {"operator": "hybrid_experts"}}]
    swapped = on_gpu(model)
    other = ktinject.optimize(copy.deepcopy(model).to("cuda:0"), plain, progress=False)
    ids = tokens(3, 12).cuda()
    assert torch.equal(decode(Run(swapped), ids, 4), decode(Run(other), ids, 4))
    arguments = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(swapped.generate(ids, **arguments), other.generate(ids, **arguments))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_aborted_pass_on_a_gpu_leaves_nothing(
    deepseek: PreTrainedModel, error: type[BaseException]
) -> None:
    """In a layer between two, and between a block's experts and its shared experts."""
    swapped = on_gpu(deepseek, deferred=3)
    ids = tokens(2, 10).cuda()
    want = decode(Run(swapped), ids, 4)

    def stop(*_: Any) -> None:
        raise error("stopped")

    for _ in range(4):  # more often than a layer has slots
        for place in (swapped.model.layers[3], swapped.model.layers[2].mlp.shared_experts):
            run = Run(swapped)
            run(ids[:, :4])
            hook = place.register_forward_pre_hook(stop)
            with pytest.raises(error):
                run(ids[:, 4:5])
            hook.remove()
            assert torch.equal(decode(Run(swapped), ids, 4), want)


def test_requests_in_graphs_keep_apart(qwen: PreTrainedModel) -> None:
    """Requests of several batch sizes, in turns and from two threads."""
    swapped = on_gpu(qwen, deferred=3)
    want = decided(qwen, (3, 3, 3, 0))[0][:8].split((1, 3, 4))
    texts = [text[:, :PROMPT] for text in want]
    for ids, expected in [*zip(texts, want)] * 2:
        assert torch.equal(generate(swapped, ids), expected)
        assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason
    found = at_once(*(partial(generate, swapped, texts[which]) for which in (0, 2)))
    for which, results in zip((0, 2), found):
        assert all(torch.equal(result, want[which]) for result in results)


def test_a_prompt_in_chunks_before_graphs(qwen: PreTrainedModel) -> None:
    swapped = on_gpu(qwen, deferred=2)
    for length, chunk in ((8, 4), (7, 3)):  # the last chunk has four tokens, or one: a decode step
        text = decided(qwen, (2, 2, 2, 0), prompt=length, chunk=chunk)[0][:2]
        assert torch.equal(generate(swapped, text[:, :length], prefill_chunk_size=chunk), text)
        assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason


def test_rows_of_a_graph_that_end_early(qwen: PreTrainedModel) -> None:
    swapped = on_gpu(qwen, deferred=3)
    text = decided(qwen, (3, 3, 3, 0))[0][:4]
    end = int(text[1, PROMPT + 2])
    found = generate(swapped, text[:, :PROMPT], eos_token_id=end, pad_token_id=0)
    assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason
    lengths = set()
    for row, want in zip(found[:, PROMPT:].tolist(), text[:, PROMPT:].tolist()):
        length = want.index(end) + 1 if end in want else len(want)
        assert row == want[:length] + [0] * (len(row) - length)
        lengths.add(length)
    assert len(lengths) > 1


def test_a_request_aborted_between_graphs_leaves_nothing(qwen: PreTrainedModel) -> None:
    class Aborting:
        heard = 0

        def put(self, _: Tensor) -> None:
            self.heard += 1
            if self.heard == 5:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    swapped, want = on_gpu(qwen, deferred=3), decided(qwen, (3, 3, 3, 0))[0][:1]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            generate(swapped, tokens(1, 9, seed=5), 40, streamer=Aborting())
        assert torch.equal(generate(swapped, want[:, :PROMPT]), want)


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_deferral_across_stage_boundaries(request: pytest.FixtureRequest, family: str, resident: int) -> None:
    """What layers before a stage boundary deferred is added behind it, eagerly and in a graph for each side."""
    model = request.getfixturevalue(family)
    swapped = on_gpu(model, deferred=2, gpu_experts=resident)
    layers = list(swapped.model.layers)
    for run in (layers[2:4], layers[4:]):
        layer_split.StageBoundary("cuda:0", layer_split.pending_outputs(swapped)).install_on(run)
    same_as_defined(swapped, model)


def same_as_defined(swapped: PreTrainedModel, model: PreTrainedModel) -> None:
    texts, logits = decided(model, (2, 2, 2, 0))
    for rows in (slice(1), slice(1, 4)):
        found = decode(Run(swapped), texts[rows].cuda(), PROMPT).cpu()
        assert reference.relative_error(found, logits[:, rows]) < SAME_ON_GPU
        for _ in range(2):
            assert torch.equal(generate(swapped, texts[rows, :PROMPT]), texts[rows])
            assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason
    steps = [*swapped.ktinject_decoding.runners[3]._steps.values()]
    assert all(len(step.parts) == 3 for step in steps), "on both sides of each stage boundary"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
def test_deferral_across_gpus(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, resident: int
) -> None:
    """What a layer on one GPU deferred is added on another."""
    model = request.getfixturevalue(family)
    model.save_pretrained(tmp_path)
    swapped = ktinject.load(
        tmp_path,
        rules(model, deferred=2, gpu_experts=resident),
        devices=["cuda:0", "cuda:1"],
        dtype=torch.float32,
        progress=False,
    )
    assert {str(parameter.device) for parameter in swapped.parameters()} == {"cuda:0", "cuda:1"}
    same_as_defined(swapped, model)
