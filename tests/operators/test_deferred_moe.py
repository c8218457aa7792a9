"""`deferred_moe` against the definition written out (`reference.Deferral`), which computes one expert at a time.

Both round activations to bf16 in the same places; what remains are sums of fp32 in another order.
"""

from __future__ import annotations

import copy
from typing import Any

import deferred
import models
import pytest
import reference
import torch
from deferred import (
    CHANGED,
    PROMPT,
    SAME,
    WRITTEN,
    Run,
    at_once,
    decided,
    decode,
    random_case,
    rules,
    swap,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

import ktinject
from ktinject.errors import OperatorError, PlanError, RuleError
from ktinject.operators.deferred_moe import DeferredMoe, DeferredMoeConfig


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return deferred.qwen()


@pytest.mark.parametrize("seed", range(12))
def test_the_definition(seed: int) -> None:
    model, schedule, batch = random_case(seed)
    swapped = swap(model, schedule=schedule)
    plain = swap(model)
    definition = reference.Deferral(model, schedule)
    ids = tokens(batch, 9, seed=seed)
    want = decode(Run(model, definition), ids, 4)
    found = decode(Run(swapped), ids, 4)
    assert reference.relative_error(found, want) < SAME
    undeferred = decode(Run(plain), ids, 4)
    assert torch.equal(undeferred[0], found[0]), "a prompt defers nothing"
    change = reference.relative_error(undeferred, want)
    assert change > CHANGED if any(schedule) else change < SAME


def test_a_fixed_schedule_leaves_the_last_layer_alone(qwen: PreTrainedModel) -> None:
    swapped = swap(qwen, deferred=3)
    runs = [replacement.runs["deferred"] for replacement in swapped.ktinject.replacements]
    assert runs == ["3 of 4", "3 of 4", "3 of 4", "0 of 4 (it is the last)"]
    assert "experts: deferred: 0 of 4 (it is the last)" in str(swapped.ktinject)
    ids = tokens(3, 12)
    same = decode(Run(swap(qwen, schedule=[3, 3, 3, 0])), ids, 4)
    assert torch.equal(decode(Run(swapped), ids, 4), same)


def test_each_run_of_neighbours_ends_undeferred(qwen: PreTrainedModel) -> None:
    """Where the next Mixture-of-Experts layer is none of ours, nobody would add what was deferred."""
    model = copy.deepcopy(qwen)
    (rule,) = rules(qwen, deferred=2)
    rule["match"]["layers"] = "0-3,6"
    other = {"name": "plain", "match": {"path": r".*\.experts"}, "replace": {"operator": "cpu_experts"}}
    ktinject.optimize(model, [rule, other | {"match": {"path": r".*\.4\.mlp\.experts"}}], progress=False)
    runs = [replacement.runs.get("deferred") for replacement in model.ktinject.replacements]
    assert runs == ["2 of 4", "0 of 4 (the next is not deferred_moe)", None, "0 of 4 (it is the last)"]
    definition = reference.Deferral(qwen_copy := copy.deepcopy(qwen), [2, 0, 0, 0])
    ids = tokens(2, 8)
    found, want = decode(Run(model), ids, 4), decode(Run(qwen_copy, definition), ids, 4)
    assert reference.relative_error(found, want) < SAME


def test_none_deferred_is_the_experts_operator(qwen: PreTrainedModel) -> None:
    plain = [{"name": "plain", "match": {"path": r".*\.experts"}, "replace": {"operator": "hybrid_experts"}}]
    other = ktinject.optimize(copy.deepcopy(qwen), plain, progress=False)
    swapped = swap(qwen)
    ids = tokens(3, 12)
    assert torch.equal(decode(Run(swapped), ids, 4), decode(Run(other), ids, 4))
    arguments = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(swapped.generate(ids, **arguments), other.generate(ids, **arguments))


@pytest.fixture(scope="module")
def texts(qwen: PreTrainedModel) -> dict[int | None, Tensor]:
    """By how many tokens of the prompt are read at a time."""
    return {chunk: decided(qwen, (2, 2, 2, 0), chunk=chunk)[0] for chunk in (None, 4)}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_writes_what_the_definition_does(
    qwen: PreTrainedModel, texts: dict[int | None, Tensor], batch: int, cache: str
) -> None:
    """Also with a prompt in chunks, whose last one here is a single token: a decode step by definition."""
    swapped = swap(qwen, deferred=2)
    for chunk, decisive in texts.items():
        text = decisive[:batch]
        ids = text[:, :PROMPT]
        found = swapped.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=WRITTEN,
            eos_token_id=None,
            do_sample=False,
            prefill_chunk_size=chunk,
            cache_implementation=cache,
        )
        assert torch.equal(found, text)


def test_rows_that_end_early(qwen: PreTrainedModel) -> None:
    """Each row writes what it would write alone, up to its own end, whatever the others do."""
    swapped = swap(qwen, deferred=3)
    ids = tokens(4, 6)
    arguments: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    free = swapped.generate(ids, eos_token_id=None, **arguments)
    end = int(free[1, 8])
    written = swapped.generate(ids, eos_token_id=end, **arguments)
    lengths = set()
    for row in range(4):
        alone = swapped.generate(ids[row : row + 1], eos_token_id=end, **arguments)[0]
        assert torch.equal(written[row, : len(alone)], alone) and not written[row, len(alone) :].any()
        lengths.add(len(alone))
    assert len(lengths) > 1


def test_requests_that_take_turns(qwen: PreTrainedModel) -> None:
    swapped = swap(qwen, deferred=2)
    mine, theirs = tokens(1, 12, seed=1), tokens(3, 12, seed=2)
    want = [decode(Run(swapped), ids, 4) for ids in (mine, theirs)]
    first, second = Run(swapped), Run(swapped)
    found: list[list[Tensor]] = [[first(mine[:, :4])], [second(theirs[:, :4])]]
    for at in range(4, 12):
        found[0].append(first(mine[:, at : at + 1]))
        found[1].append(second(theirs[:, at : at + 1]))
    for one, other in zip(found, want):
        assert torch.equal(torch.stack(one), other)


def test_requests_of_two_threads(qwen: PreTrainedModel) -> None:
    swapped = swap(qwen, deferred=2)
    texts = [tokens(2, 24, seed=seed) for seed in range(2)]
    want = [decode(Run(swapped), ids, 4) for ids in texts]
    found = at_once(*(lambda ids=ids: decode(Run(swapped), ids, 4) for ids in texts))
    assert all(torch.equal(one, expected) for ones, expected in zip(found, want) for one in ones)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_aborted_pass_leaves_nothing(qwen: PreTrainedModel, error: type[BaseException]) -> None:
    """Stopped between two layers, when the first has handed something on."""
    swapped = swap(qwen, deferred=3)
    ids = tokens(2, 10)
    want = decode(Run(swapped), ids, 4)

    def stop(*_: Any) -> None:
        raise error("stopped")

    for shape in (2, 1):  # the next request has the same number of rows, or another
        run = Run(swapped)
        run(ids[:, :4])
        hook = swapped.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(error):
            run(ids[:, 4:5])
        hook.remove()
        assert torch.equal(decode(Run(swapped), ids[:shape], 4), decode(Run(swapped), ids[:shape], 4))
        assert torch.equal(decode(Run(swapped), ids, 4), want)


@torch.no_grad()
def test_what_is_no_decode_step(qwen: PreTrainedModel) -> None:
    """One token without a cache, with an empty one, or as a prompt of its own; several tokens with a full one."""
    swapped, plain = swap(qwen, deferred=4), swap(qwen)
    one, four = tokens(2, 1), tokens(2, 4)
    assert torch.equal(swapped(one, use_cache=False).logits, plain(one, use_cache=False).logits)
    for model_input in (one, four):
        runs = [Run(swapped), Run(plain)]
        for ids in (model_input, four):
            assert torch.equal(runs[0](ids), runs[1](ids))
        assert not torch.equal(runs[0](one), runs[1](one)), "and this is one"
    caches = [StaticCache(config=qwen.config, max_cache_len=16) for _ in range(2)]
    step = [m(one, past_key_values=c).logits for m, c in zip((swapped, plain), caches)]
    assert torch.equal(*step)
    step = [m(one, past_key_values=c).logits for m, c in zip((swapped, plain), caches)]
    assert not torch.equal(*step)


def test_the_router_and_its_hooks_stay(qwen: PreTrainedModel) -> None:
    swapped = swap(qwen, deferred=2)
    assert type(swapped.model.layers[0].mlp.gate) is type(qwen.model.layers[0].mlp.gate)
    ids = tokens(2, 5)
    with torch.no_grad():
        found = swapped(ids, output_router_logits=True).router_logits
        want = qwen(ids, output_router_logits=True).router_logits
    assert len(found) == len(want) == 4
    assert all(reference.relative_error(a, b) < 0.05 for a, b in zip(found, want))
    assert torch.equal(found[0], want[0])


def test_other_rules_may_replace_what_is_kept() -> None:
    model = models.tiny("deepseek_v3", num_hidden_layers=3)
    rule = {"name": "gate", "match": {"path": r".*\.mlp\.gate"}, "replace": "keep"}
    swapped = ktinject.optimize(model, [rule, *rules(model, deferred=1)], progress=False)
    assert len(swapped.ktinject.matched["gate"]) == 2


def test_gradients_pass_through(qwen: PreTrainedModel) -> None:
    """A decode step outside of no_grad: the deferred experts have their share in the gradient."""
    swapped = swap(qwen, deferred=2)
    run = Run(swapped)
    run(tokens(1, 4))
    inputs = swapped.get_input_embeddings()(tokens(1, 1)).detach().requires_grad_()
    swapped(inputs_embeds=inputs, past_key_values=run.cache).logits.sum().backward()
    assert inputs.grad is not None and inputs.grad.isfinite().all() and inputs.grad.abs().sum() > 0


def test_saving_gives_the_checkpoint_back(tmp_path: Any) -> None:
    model = models.tiny("deepseek_v3", num_hidden_layers=3).bfloat16()
    swapped = swap(model, deferred=1)
    swapped.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_a_swap_that_fails_leaves_no_hook(qwen: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(qwen)
    connect = DeferredMoe.connect.__func__  # type: ignore[attr-defined]

    def connect_and_fail(*args: Any) -> None:
        connect(DeferredMoe, *args[-2:])
        assert model.model._forward_pre_hooks
        raise RuntimeError("now")

    monkeypatch.setattr(DeferredMoe, "connect", connect_and_fail)
    with pytest.raises(OperatorError, match="deferred_moe: RuntimeError: now"):
        ktinject.optimize(model, rules(model, deferred=2), progress=False)
    assert not model.model._forward_pre_hooks and not hasattr(model, "ktinject")
    ids = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, qwen(ids).logits)


def refused(model: PreTrainedModel, kind: type[Exception], **arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        ktinject.plan(model, rules(model, **arguments))
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        ({"deferred": -1}, RuleError, "deferred is -1; it is 0 or more"),
        ({"deferred": "2"}, RuleError, "a whole number"),
        ({"deferred": 5}, PlanError, "5 experts are to be deferred, and a token has 4"),
        ({"schedule": [1, 1]}, PlanError, "its schedule has 2 numbers for 4 layers"),
        ({"schedule": [1, 1, 1, 1]}, PlanError, "defers 1 experts in a layer that cannot: it is the last"),
        ({"schedule": [1, -1, 1, 0]}, RuleError, "its numbers are 0 or more"),
        ({"schedule": [1, 1, 1, 0], "deferred": 1}, RuleError, "contradict each other"),
        ({"schedule": "never"}, RuleError, "fixed"),
        ({"weights": "int3"}, RuleError, "int3"),
    ],
)
def test_refusals(qwen: PreTrainedModel, arguments: dict[str, Any], kind: type[Exception], says: str) -> None:
    assert says in refused(qwen, kind, **arguments)


def test_modules_that_are_no_block(qwen: PreTrainedModel) -> None:
    rule = {"name": "all", "match": {"path": r".*\.mlp"}, "replace": {"operator": "deferred_moe"}}
    with pytest.raises(PlanError) as caught:
        ktinject.plan(qwen, [rule])
    assert "deferred_moe cannot replace a Qwen3MoeMLP" in str(caught.value)
    assert "matched model.layers.1.mlp, model.layers.3.mlp, model.layers.5.mlp." in str(caught.value)
    with pytest.raises(OperatorError, match="cannot be replaced"):
        DeferredMoe.build(qwen.model.layers[1].mlp, DeferredMoeConfig(device="cpu"))
