"""Steps of several tokens of one text, of which the last are taken back, for all kinds of layers.

On a CPU they run on the tensors of a graph, and nothing that a graph could not hold may be in them; on a GPU they are
captured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_fused import layered
from test_layer_kinds import CASES, TWO_KINDS, WINDOW, HostDecisions, model_of
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation import consecutive
from ktinject.generation.cuda import delta_ops, fused, recurrent_ops, recurrent_steps
from ktinject.generation.graph_runner import GraphRunner
from ktinject.generation.recurrent_spec import ShortConvolutionSpec
from ktinject.generation.several import SeveralTokens
from ktinject.support import SUPPORTED

torch.set_num_threads(1)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# A ring for each window, and states of several kinds, of which one layer has none beside its experts.
ON_CPU = [case for case in CASES if case[0] in ("gpt_oss", "kimi_linear", "nemotron_h", "qwen3_next")]
SERVED = [
    case
    for case in CASES
    if case[0] not in ("deepseek_v4", "glm_moe_dsa", "llama4_text", "minimax_m3_vl_text")
]
ON_GPU = [
    *SERVED,
    ("exaone_moe", WINDOW),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    ("laguna", TWO_KINDS),
    ("qwen3_moe", {}),
]
PROMPT = 14  # tokens, of which the first ones are padding; more than a window has


@dataclass(frozen=True)
class Text:
    """A text whose first tokens a model has read.

    first  logits [1, v] behind them
    """

    model: PreTrainedModel
    ids: Tensor
    mask: Tensor
    cache: DynamicCache
    first: Tensor
    runner: GraphRunner

    @classmethod
    def of(cls, model: PreTrainedModel) -> Text:
        decoding, device = model.ktinject_decoding, model.device
        decoding.graphs = decoding.graphs or SUPPORTED
        ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(0)).to(device)
        mask = torch.ones_like(ids)[:, :PROMPT]
        mask[:, :2] = 0
        cache = DynamicCache(config=model.config)
        assert decoding.model_support(), decoding.model_support().reason
        with torch.no_grad():
            first = model(ids[:, :PROMPT], attention_mask=mask, past_key_values=cache).logits[:, -1].float()
        runner, support = decoding.runner(cache, first, 60)
        assert runner is not None, support.reason
        return cls(model, ids, mask, cache, first, runner)

    def again(self) -> None:
        self.runner.begin(self.cache, PROMPT, self.mask, None)

    def steps(self) -> SeveralTokens:
        steps = SeveralTokens(self.runner, None, self.model.ktinject_decoding.several_forwards)
        self.again()
        with torch.no_grad():
            steps.prove(self.first, self.again)
        assert steps.support, steps.support.reason
        return steps

    def single(self, count: int) -> Tensor:
        """Logits of so many steps of one token."""
        self.again()
        found = []
        for at in range(PROMPT, PROMPT + count):
            self.runner.put(self.ids[:, at : at + 1])
            self.runner.step()
            found.append(self.runner.found.clone())
        return torch.cat(found)

    def with_wrong(self, steps: SeveralTokens, other: int) -> Tensor:
        """Logits of 9 tokens, of steps that read others behind them."""
        self.again()
        found = []
        for at, kept, wrong in ((0, 2, 3), (2, 1, 4), (3, 0, 2), (3, 3, 0), (6, 3, 1)):
            begin = PROMPT + at
            taken_back = (self.ids[:, begin + kept : begin + kept + wrong] + other) % 90
            ids = torch.cat([self.ids[:, begin : begin + kept], taken_back], dim=1)
            found.append(steps.step(ids, min(kept, 1))[:kept])
            steps.keep(kept)
        return torch.cat(found)

    def greedy(self, count: int) -> list[int]:
        """The likeliest token behind the prompt, and those of so many steps of one token."""
        self.again()
        tokens = [int(self.first.argmax())]
        for _ in range(count):
            self.runner.put(torch.tensor([tokens[-1:]]))
            self.runner.step()
            tokens.append(int(self.runner.found.argmax()))
        return tokens

    def verified(self, steps: SeveralTokens, tokens: list[int], other: int) -> None:
        """The same in steps with candidates, of which the first ones are right and some others are not."""
        self.again()
        at = 0
        for right, wrong in ((2, 2), (0, 4), (0, 0), (3, 0)):
            rest = tokens[at + 1 :]
            candidates = rest[:right] + [(token + other) % 90 for token in rest[right : right + wrong]]
            found = steps.verify([tokens[at], *candidates], has_hidden=False, has_logits=False)
            assert found is not None and steps.read(found[0]) == rest[: right + 1]
            assert self.runner.ids.tolist() == [[rest[right]]], "a step of one token goes on"
            at += right + 1

    def left(self) -> list[list[Tensor]]:
        """What 9 tokens have left in each layer, and where the next one goes."""
        cache, end = self.runner.cache, PROMPT + 9
        whole = [kind.window is None and not kind.is_state for kind in cache.kinds]
        held = [
            [(tensor[:, :, :end] if all_ else tensor).clone() for tensor in tensors]
            for tensors, all_ in zip(cache.layers, whole)
        ]
        counters = [cache.positions, cache.cache_position, cache.mask, *cache.rings.values()]
        return [*held, [tensor.clone() for tensor in (*counters, *cache.places.values())]]


@functools.cache
def rows_are_independent() -> bool:
    """Whether torch's products give a row the same bits beside any other rows. Some CPUs have kernels for few rows."""
    random = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(8, 64, generator=random), torch.randn(40, 64, generator=random)
    whole = functional.linear(rows, weight)
    return all(torch.equal(functional.linear(rows[:m], weight), whole[:m]) for m in range(1, 9))


def assert_same(mine: Tensor, theirs: Tensor) -> None:
    """To the bit, but for roundings where the number of rows of an expert decides how they are summed."""
    if rows_are_independent() or not mine.is_floating_point():
        assert torch.equal(mine, theirs)
    else:
        largest = float(theirs[theirs.isfinite()].abs().max())
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5 * largest)


def check(model: PreTrainedModel, *, in_rows: bool = False) -> None:
    """Compare with steps of one token.

    in_rows  layers with states project all rows at once, and sums may be in another order
    """
    text = Text.of(model)
    steps = text.steps()
    most = 5e-3 if text.ids.is_cuda else 1e-4
    with torch.no_grad():
        wanted = text.single(9)
        kept = text.left()
        found = text.with_wrong(steps, 1)
        ours = text.left()
        assert text.runner.cache.used == PROMPT + 9
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert (error < most).all(), error
        for layer, others in zip(ours, kept):
            for mine, theirs in zip(layer, others):
                assert torch.equal(mine.isfinite(), theirs.isfinite())
                difference = (mine.float() - theirs.float()).norm()
                assert difference <= most * theirs.float().norm() + 1e-6, difference
        # To the bit, no trace is left of the tokens that were taken back. On a GPU, transformers' experts add up a
        # token's sums in an order that depends on the others of the step, which says nothing about the cache.
        after = text.with_wrong(steps, 7)
        if not text.ids.is_cuda:
            assert_same(after, found)
            for layer, others in zip(text.left(), ours):
                for mine, theirs in zip(layer, others):
                    assert_same(mine, theirs)
        assert ((after - wanted).norm(dim=-1) < most * wanted.norm(dim=-1)).all()
        # Nor do states depend on how many rows are computed at once, given what their layer is given.
        if text.runner.cache.kinds[0].is_state and not in_rows:
            for mine, theirs in zip(ours[0], kept[0]):
                assert_same(mine, theirs)
        if not text.ids.is_cuda:
            check_verified(text, steps, most)


def check_verified(text: Text, steps: SeveralTokens, most: float) -> None:
    """Nor does it matter that the device decides what is kept."""
    tokens = text.greedy(9)
    by_one, left = text.left(), []
    for other in (1, 7):
        text.verified(steps, tokens, other)
        left.append(text.left())
        assert text.runner.cache.used == PROMPT + 9
    for mine, others, theirs in zip(*left, by_one):
        for a, b in zip(mine, others):
            assert_same(a, b)
        for a, b in zip(mine, theirs):
            assert (a.float() - b.float()).norm() <= most * b.float().norm() + 1e-6
    assert all(map(torch.equal, left[0][-1], by_one[-1])), "positions and masks"
    text.again()
    steps.begin(tokens[2:3])
    found = steps.verify(tokens[:4], has_hidden=False, has_logits=False)
    assert found is not None and steps.read(found[0]) == tokens[1:3], "the text ends there"
    steps.begin(())


@pytest.mark.parametrize("family, changes", ON_CPU, ids=[family for family, _ in ON_CPU])
def test_on_a_graph_s_tensors(family: str, changes: dict[str, Any]) -> None:
    model = model_of(family, changes)
    check(model)
    text = Text.of(model)
    steps: Any = text.runner.several
    text.again()
    with torch.no_grad(), HostDecisions() as decisions:
        steps._compute(text.runner.cache.capacity, 3, True, None)
        steps.settler._choose(steps._logits[:3], None)
        steps.settler._settle(3, None)
    assert not decisions.found


@torch.no_grad()
def test_a_change_is_seen_by_the_step_after_the_one_that_runs() -> None:
    """Where the model is compared while the device computes, and by none of another request."""
    text = Text.of(model_of(*ON_CPU[0]))
    steps, runner = text.steps(), text.runner
    candidates = text.greedy(3)
    for begins_again in (False, True):
        text.again()
        runner.look()
        if begins_again:
            text.again()
        text.model.config.rms_norm_eps *= 2
        found = steps.verify(candidates, has_hidden=False, has_logits=False)
        assert (found is None) == begins_again
        if found is not None:
            assert steps.read(found[0])
            assert steps.verify(candidates, has_hidden=False, has_logits=False) is None
            assert "rms_norm_eps" in runner.changed
        text.model.config.rms_norm_eps /= 2


def test_projections_are_of_all_tokens_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what mixes them takes one after the other. Here torch stands in for the kernel."""

    def convolution(projected: Tensor, taps: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
        assert bias is None
        b, c, x = projected.chunk(3, dim=1)
        inputs.copy_(torch.cat([inputs[:, :, 1:], (b * x)[:, :, None]], dim=2))
        return c * (inputs * taps[:, 0]).sum(2)

    read: list[tuple[int, int]] = []
    real = recurrent_steps.project

    def project(x: Tensor, linears: Any, **kwargs: Any) -> list[Tensor]:
        read.append((len(x), len(linears)))
        return real(x, linears, **kwargs)

    def step_of(spec: Any, module: Any, _: Tensor) -> Any:
        is_served = isinstance(spec, ShortConvolutionSpec)
        return recurrent_steps.short_convolution_step(spec, module) if is_served else None

    monkeypatch.setattr(fused, "step_of", step_of)
    monkeypatch.setattr(delta_ops, "convolution_support", lambda *_: SUPPORTED)
    monkeypatch.setattr(recurrent_ops, "short_convolution", convolution)
    monkeypatch.setattr(recurrent_steps, "project", project)
    model = model_of("lfm2_moe", {"layer_types": ["conv", "full_attention"]})
    decoding = model.ktinject_decoding
    decoding.graphs = SUPPORTED
    assert decoding.model_support()
    decoding.fused = fused.Fused(model, None, consecutive.modules_with_states(model))
    check(model, in_rows=True)
    assert "model.layers.0.conv" in decoding.fused._steps
    assert len(decoding.runners[1].several._forwards) == 2, "the first way is taken"
    assert {count for count, _ in read} >= {1, 3, 5}


FUSED: list[tuple[str, dict[str, Any]]] = [
    ("granitemoehybrid", {}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"]}),
    ("nemotron_h", {}),
    ("qwen3_5_moe_text", {}),
    ("qwen3_moe", {}),
    ("qwen3_next", {}),
]


@pytest.mark.parametrize("family, changes", FUSED, ids=[family for family, _ in FUSED])
class TestFewKernels:
    pytestmark = gpu

    def test_on_a_gpu(self, family: str, changes: dict[str, Any]) -> None:
        """Of bf16, which the kernels of whole layers and of mixers serve. A rounding may choose another expert."""
        model = layered("auto", family=family, **changes)
        text = Text.of(model)
        steps = text.steps()
        several: Any = text.runner.several
        assert len(several._forwards) == 2, "the first way is taken"
        with torch.no_grad():
            wanted = text.single(9)
            kept = text.left()
            found = text.with_wrong(steps, 1)
            ours = text.left()
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert (error < 8e-2).sum() >= 6, error
        for mine, theirs in zip(ours[0], kept[0]):  # before the first experts
            assert (mine.float() - theirs.float()).norm() <= 2e-2 * theirs.float().norm()
        assert all(map(torch.equal, ours[-1], kept[-1]))
        assert several._graphs and all(several._graphs.values())
        assert not model.ktinject_decoding.fused.refused


@pytest.mark.parametrize("family, changes", ON_GPU, ids=[family for family, _ in ON_GPU])
class TestInGraphs:
    pytestmark = gpu

    def test_on_a_gpu(self, family: str, changes: dict[str, Any]) -> None:
        model = model_of(family, changes, "cuda")
        check(model)
        runner = model.ktinject_decoding.runners[1]
        assert runner.several._graphs and all(runner.several._graphs.values())
