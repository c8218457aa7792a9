"""`deferred_moe` on a GPU against the definition, eagerly and in CUDA graphs, on one GPU and two."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import deferred
import models
import pytest
import reference
import torch
from deferred import CHANGED, Run, blocks, decode, exact, random_case, rules, tokens
from torch import Tensor
from transformers import PreTrainedModel

import ktinject
from ktinject import _native

pytestmark = pytest.mark.gpu

# The rest of the model computes on the GPU in fp32, which is another order of sums: more crosses a rounding boundary.
SAME_ON_GPU = 1e-2


def on_gpu(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return ktinject.optimize(copy.deepcopy(model).to("cuda:0"), rules(model, **arguments), progress=False)


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
    definition = reference.Deferral(model, schedule)
    ids = tokens(batch, 9, seed=seed)
    want = decode(Run(model, definition), ids, 4)
    found = decode(Run(swapped), ids.cuda(), 4).cpu()
    assert reference.relative_error(found, want) < SAME_ON_GPU
    change = reference.relative_error(decode(Run(plain), ids.cuda(), 4).cpu(), want)
    assert change > CHANGED if any(schedule) else change < SAME_ON_GPU


@pytest.mark.parametrize("resident", [1, 3, 6])
def test_where_an_expert_lies_does_not_matter(deepseek: PreTrainedModel, resident: int) -> None:
    swapped = on_gpu(deepseek, deferred=2, gpu_experts=resident)
    definition = reference.Deferral(model := copy.deepcopy(deepseek), [2, 2, 2, 0])
    ids = tokens(3, 9)
    found = decode(Run(swapped), ids.cuda(), 4).cpu()
    assert reference.relative_error(found, decode(Run(model, definition), ids, 4)) < SAME_ON_GPU


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["qwen", "deepseek"])
@pytest.mark.parametrize("mode", ["flags", "host_func"])
def test_graphs_write_what_the_definition_does(
    request: pytest.FixtureRequest, family: str, batch: int, mode: str
) -> None:
    """The second request replays what the first one captured; a third runs eagerly."""
    model = copy.deepcopy(request.getfixturevalue(family))
    swapped = on_gpu(model, deferred=3, handoff=mode)
    definition = reference.Deferral(model, [3] * (len(blocks(model)) - 1) + [0])
    for seed in range(3):
        ids = tokens(batch, 7, seed=seed)
        run = Run(model, definition)
        logits, want = run(ids), ids
        for _ in range(10):
            want = torch.cat([want, logits.argmax(-1, keepdim=True)], 1)
            logits = run(want[:, -1:])
        arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        if seed == 2:
            arguments["return_dict_in_generate"] = True
        found = swapped.generate(ids.cuda(), attention_mask=torch.ones_like(ids).cuda(), **arguments)
        found = found.sequences if seed == 2 else found
        assert torch.equal(found.cpu(), want)
        assert ("graph" in swapped.ktinject_decoding.last) == (seed < 2), swapped.ktinject_decoding.reason


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


def written(model: PreTrainedModel, schedule: list[int], ids: Tensor, count: int) -> Tensor:
    """What the definition writes greedily, [batch, prompt + count]."""
    model = copy.deepcopy(model)
    run = Run(model, reference.Deferral(model, schedule))
    logits = run(ids)
    for _ in range(count):
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        logits = run(ids[:, -1:])
    return ids


def generate(model: PreTrainedModel, ids: Tensor, count: int = 10, **arguments: Any) -> Tensor:
    mask = torch.ones_like(ids).cuda()
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": count, **arguments}
    return model.generate(ids.cuda(), attention_mask=mask, **options).cpu()


def test_requests_in_graphs_keep_apart(qwen: PreTrainedModel) -> None:
    """Requests of several batch sizes, in turns and from two threads."""
    swapped = on_gpu(qwen, deferred=3)
    texts = [tokens(batch, 7, seed=batch) for batch in (1, 3, 4)]
    want = [written(qwen, [3, 3, 3, 0], ids, 10) for ids in texts]
    for ids, expected in [*zip(texts, want)] * 2:
        assert torch.equal(generate(swapped, ids), expected)
        assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason
    found: dict[int, list[Tensor]] = {0: [], 2: []}

    def work(which: int) -> None:
        for _ in range(4):
            found[which].append(generate(swapped, texts[which]))

    threads = [threading.Thread(target=work, args=(which,)) for which in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, results in found.items():
        assert len(results) == 4 and all(torch.equal(result, want[which]) for result in results)


def test_a_prompt_in_chunks_before_graphs(qwen: PreTrainedModel) -> None:
    swapped = on_gpu(qwen, deferred=2)
    for length, chunk in ((8, 4), (7, 3)):  # the last chunk has four tokens, or one: a decode step
        ids = tokens(2, length)
        run = Run(model := copy.deepcopy(qwen), reference.Deferral(model, [2, 2, 2, 0]))
        logits, want = [run(part) for part in ids.split(chunk, 1)], ids
        for _ in range(10):
            want = torch.cat([want, logits[-1].argmax(-1, keepdim=True)], 1)
            logits.append(run(want[:, -1:]))
        assert torch.equal(generate(swapped, ids, prefill_chunk_size=chunk), want)
        assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason


def test_rows_of_a_graph_that_end_early(qwen: PreTrainedModel) -> None:
    swapped = on_gpu(qwen, deferred=3)
    ids = tokens(4, 6)
    end = int(generate(swapped, ids, 14, pad_token_id=0)[1, 8])
    found = generate(swapped, ids, 14, eos_token_id=end, pad_token_id=0)
    assert swapped.ktinject_decoding.last == "graph loop", swapped.ktinject_decoding.reason
    lengths = set()
    for row in range(4):
        alone = generate(swapped, ids[row : row + 1], 14, eos_token_id=end, pad_token_id=0)[0]
        assert torch.equal(found[row, : len(alone)], alone) and not found[row, len(alone) :].any()
        lengths.add(len(alone))
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

    swapped, ids = on_gpu(qwen, deferred=3), tokens(1, 7)
    want = written(qwen, [3, 3, 3, 0], ids, 10)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            generate(swapped, tokens(1, 9, seed=5), 40, streamer=Aborting())
        assert torch.equal(generate(swapped, ids), want)


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
    schedule = [2] * (len(blocks(model)) - 1) + [0]
    for batch in (1, 3):
        ids, run = tokens(batch, 9), Run(copied := copy.deepcopy(model), reference.Deferral(copied, schedule))
        found = decode(Run(swapped), ids.cuda(), 4).cpu()
        assert reference.relative_error(found, decode(run, ids, 4)) < SAME_ON_GPU
        assert torch.equal(generate(swapped, ids), written(model, schedule, ids, 10))
