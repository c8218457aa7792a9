"""`deferred_moe` against the definition written out (`reference.Deferral`), which computes one token at a time.

Both round activations to bf16 in the same places; what remains are sums of fp32 in another order.
"""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import models
import pytest
import reference
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import ktinject
from ktinject import _native
from ktinject.errors import OperatorError, PlanError, RuleError
from ktinject.operators import moe_block
from ktinject.operators.deferred_moe import DeferredMoe, DeferredMoeConfig

# Relative, of logits. Seen: 2e-7, and 5e-4 where an intermediate is carried across a rounding boundary.
SAME = 2e-3
# What the definition changes must be far above that, or the comparison shows nothing. Seen at the least: 9e-2.
CHANGED = 2e-2

VOCABULARY = models.COMMON["vocab_size"]


def rules(model: PreTrainedModel, **arguments: Any) -> list[dict[str, Any]]:
    block = type(blocks(model)[-1]).__name__
    return [
        {"name": "experts", "match": {"class": block}, "replace": {"operator": "deferred_moe", **arguments}}
    ]


def blocks(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "forward")]


def swap(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    return ktinject.optimize(copy.deepcopy(model), rules(model, **arguments), progress=False)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Run:
    """One request: its cache, and one forward pass after the other. Tells a reference what is a decode step."""

    def __init__(self, model: PreTrainedModel, definition: reference.Deferral | None = None) -> None:
        self.model, self.definition = model, definition
        self.cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        if self.definition is not None:
            self.definition.decodes = ids.shape[1] == 1 and self.cache.get_seq_length() > 0
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits[:, -1]


def decode(run: Run, ids: Tensor, prompt: int) -> Tensor:
    """Logits [steps, batch, vocabulary]: the prompt at once, then token by token."""
    logits = [run(ids[:, :prompt])]
    return torch.stack(logits + [run(ids[:, at : at + 1]) for at in range(prompt, ids.shape[1])])


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """With weights that packing does not round."""
    return model.bfloat16().float()


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    """Dense layers stand between its Mixture-of-Experts layers 0, 2, 4 and 6."""
    return exact(
        models.tiny("qwen3_moe", num_hidden_layers=7, num_experts_per_tok=4, mlp_only_layers=[1, 3, 5])
    )


def random_case(seed: int) -> tuple[PreTrainedModel, list[int], int]:
    choose = random.Random(seed)
    family = ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "qwen2_moe", "minimax_m2"][seed % 6]
    count, top_k = choose.randint(2, 5), choose.randint(1, 4)
    changes: dict[str, Any] = {"num_hidden_layers": count, "num_experts_per_tok": top_k}
    if family == "deepseek_v3":
        changes |= {"topk_group": 2}
    if family == "qwen3_moe":
        changes |= {"mlp_only_layers": choose.sample(range(count), count // 3)}
    model = exact(models.tiny(family, seed=seed, **changes))
    layers = len(blocks(model))
    return model, [choose.randint(0, top_k) for _ in range(layers - 1)] + [0], choose.randint(1, 4)


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
    runs = [entry.runs["deferred"] for entry in swapped.ktinject.entries]
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
    runs = [entry.runs.get("deferred") for entry in model.ktinject.entries]
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


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_writes_what_the_definition_does(qwen: PreTrainedModel, batch: int, cache: str) -> None:
    """Also with a prompt in chunks, whose last one here is a single token: a decode step by definition."""
    definition = reference.Deferral(model := copy.deepcopy(qwen), [2, 2, 2, 0])
    swapped = swap(qwen, deferred=2)
    ids = tokens(batch, 7)
    for chunk in (None, 4):
        run = Run(model, definition)
        logits = [run(part) for part in ids.split(chunk or 7, 1)]
        want = ids
        for _ in range(10):
            want = torch.cat([want, logits[-1].argmax(-1, keepdim=True)], 1)
            logits.append(run(want[:, -1:]))
        found = swapped.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=10,
            eos_token_id=None,
            do_sample=False,
            prefill_chunk_size=chunk,
            cache_implementation=cache,
        )
        assert torch.equal(found, want)


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
    found: dict[int, list[Tensor]] = {0: [], 1: []}

    def work(which: int) -> None:
        for _ in range(4):
            found[which].append(decode(Run(swapped), texts[which], 4))

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, results in found.items():
        assert len(results) == 4 and all(torch.equal(result, want[which]) for result in results)


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
    with pytest.raises(RuntimeError, match="now"):
        ktinject.optimize(model, rules(model, deferred=2), progress=False)
    assert not model.model._forward_pre_hooks and not hasattr(model, "ktinject")
    ids = tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, qwen(ids).logits)


# --- on a GPU ---

gpu = pytest.mark.gpu
# The rest of the model computes on the GPU in fp32, which is another order of sums: more crosses a rounding boundary.
SAME_ON_GPU = 1e-2


def on_gpu(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    if not torch.cuda.is_available() or not _native.cuda_built():
        pytest.skip("no CUDA device, or built without CUDA")
    return ktinject.optimize(copy.deepcopy(model).to("cuda:0"), rules(model, **arguments), progress=False)


@pytest.fixture(scope="module")
def deepseek() -> PreTrainedModel:
    """With a dense first layer and shared experts, which the GPU computes while it waits."""
    return exact(models.tiny("deepseek_v3", num_hidden_layers=5, num_experts_per_tok=4, topk_group=2))


@gpu
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


@gpu
@pytest.mark.parametrize("resident", [1, 3, 6])
def test_where_an_expert_lies_does_not_matter(deepseek: PreTrainedModel, resident: int) -> None:
    swapped = on_gpu(deepseek, deferred=2, gpu_experts=resident)
    definition = reference.Deferral(model := copy.deepcopy(deepseek), [2, 2, 2, 0])
    ids = tokens(3, 9)
    found = decode(Run(swapped), ids.cuda(), 4).cpu()
    assert reference.relative_error(found, decode(Run(model, definition), ids, 4)) < SAME_ON_GPU


@gpu
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


@gpu
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


@gpu
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


@gpu
def test_deferral_across_gpus(qwen: PreTrainedModel) -> None:
    """What a layer on one GPU deferred is added on another."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    swapped = on_gpu(qwen, deferred=2)
    ids = tokens(2, 1)
    first, second = (layer.mlp for layer in swapped.model.layers[:3:2])
    x = torch.randn(2, 1, qwen.config.hidden_size, device="cuda:0")
    stack, outputs = swapped.model, []
    for at in (0, 1):
        second.gate.to(f"cuda:{at}")
        next(iter(stack._forward_pre_hooks.values()))(
            stack, (), {"input_ids": ids[:, :1], "past_key_values": Full()}
        )
        with torch.no_grad():
            first(x)
            outputs.append(second(x.to(f"cuda:{at}")).cpu())
    assert torch.equal(*outputs)


class Full:
    """A cache that holds a token."""

    def get_seq_length(self) -> int:
        return 1


# Why a family's block is refused; all others are served.
NOT_A_SUM = {
    "axk1": "does more with its experts' output than add to it",
    "beam": "does more with its experts' output than add to it",
    "minimax_m3_vl_text": "does more with its experts' output than add to it",
    "nemotron_h": "its forward fails",
    "gemma4_text": "its forward fails",
}


@pytest.mark.parametrize("family", models.AVAILABLE)
def test_families(family: str) -> None:
    """What the probe says of a block is true of the block: what its leaf returns comes out, plus what it adds."""
    model = models.tiny(family)
    path, leaf = models.leaf(model)
    block = model.get_submodule(path.rpartition(".")[0])
    found = moe_block.describe(block)
    if family in NOT_A_SUM:
        assert isinstance(found, str) and NOT_A_SUM[family] in found
        return
    if family == "aria_text" and not hasattr(leaf, "is_transposed"):
        pytest.skip("this transformers routes inside AriaExperts")
    assert (found.leaf, found.top_k) == ("experts", 1 if family == "zaya" else 2)
    outputs = []
    hook = leaf.register_forward_hook(lambda *arguments: outputs.append(arguments[-1]))
    x = torch.randn(2, 1, model.config.hidden_size)
    with torch.no_grad():
        whole = block(x)
    hook.remove()
    whole = whole[0] if isinstance(whole, tuple) else whole
    assert torch.allclose(whole.view_as(outputs[0]), outputs[0], atol=1e-6) != found.adds


class Wrapped(torch.nn.Module):
    """A block with a factor behind its experts that is one for a zero input, and one that calls them twice."""

    def __init__(self, block: Any, twice: bool) -> None:
        super().__init__()
        self.gate, self.experts, self.twice = block.gate, block.experts, twice

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        _, weights, index = self.gate(flat)
        out = self.experts(flat, index, weights)
        if self.twice:
            return out.view_as(x) + 0 * self.experts(flat, index, weights).view_as(x)
        return (out * (1 + 0.01 * flat.mean(-1, keepdim=True))).view_as(x)


def test_blocks_that_are_no_sum(qwen: PreTrainedModel) -> None:
    block = blocks(qwen)[0]
    assert "add to it" in str(moe_block.describe(Wrapped(block, twice=False)))
    assert "calls its experts 2 times" in str(moe_block.describe(Wrapped(block, twice=True)))
    assert "one child that computes routed experts; found: none" in str(moe_block.describe(block.gate))


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
