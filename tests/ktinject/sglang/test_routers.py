"""The choice of experts that SGLang leaves to a submit, with a module that stands for its topk.py."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from sglang_cases import EXPERTS, HIDDEN, TOP_K, drop_failures, expected, filled, is_near
from torch import Tensor, nn

from ktinject.operators.offload.submits import MOST_TOKENS
from ktinject.sglang import KTMoEWrapper, combine, routers

NAME = "topk_that_stands_in"


class Standard(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor


class Format(enum.Enum):
    STANDARD = enum.auto()
    BYPASSED = enum.auto()


class Bypassed(NamedTuple):
    hidden_states: Tensor
    router_logits: Tensor
    topk_config: Any
    num_token_non_padded: Any = None
    expert_location_dispatch_info: Any = None

    def to_standard(self, layer_id: int | None = None) -> Standard:
        """Choose, as SGLang does where nobody else has."""
        assert layer_id is not None
        return Standard(*chosen(self.router_logits, self.topk_config.renormalize))


@dataclass
class TopKConfig:
    top_k: int = TOP_K
    renormalize: bool = True
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    num_fused_shared_experts: int = 0
    custom_routing_function: Any = None
    correction_bias: Any = None
    scoring_func: str = "softmax"
    output_format: Format | None = None


class TopK(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.topk_config = TopKConfig()


class StandardDispatcher:
    pass


def chosen(logits: Tensor, normed: bool) -> tuple[Tensor, Tensor]:
    weights, ids = logits.float().softmax(-1).topk(TOP_K)
    return (weights / weights.sum(-1, keepdim=True) if normed else weights), ids.int()


@pytest.fixture
def topk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's module; `recorded` has the ids that it was told of, `is_noop` whether it has nothing else to do."""
    made = ModuleType(NAME)
    recorded: list[tuple[int, Tensor]] = []
    state = SimpleNamespace(recorded=recorded, is_noop=True, module=made)
    vars(made).update(
        TopKOutputFormat=Format,
        BypassedTopKOutput=Bypassed,
        precomputed_topk_postprocess_is_noop=lambda config, padded, info: (
            state.is_noop and padded is None and info is None
        ),
        build_precomputed_topk_output=lambda weights, ids, config, layer_id: recorded.append((layer_id, ids)),
    )
    monkeypatch.setitem(sys.modules, NAME, made)
    for kind in (TopK, Bypassed):
        monkeypatch.setattr(kind, "__module__", NAME)
    drop_failures()
    yield state
    drop_failures()


def model(made: KTMoEWrapper) -> Any:
    block = nn.Module()
    block.topk, block.experts = TopK(), nn.Module()
    block.experts.quant_method, block.experts.dispatcher = SimpleNamespace(wrapper=made), StandardDispatcher()
    built = nn.Module()
    built.mlp = block
    return built


def test_a_block_that_chooses_by_softmax_leaves_it(topk: Any) -> None:
    made = filled()
    built = model(made)
    assert routers.leave_choice(built, "mlp.experts", made._layer) == ""
    assert built.mlp.topk.topk_config.output_format is Format.BYPASSED and made._layer.chooses
    assert routers.leave_choice(built, "mlp.experts", made._layer) == "", "not a second time"


@pytest.mark.parametrize(
    "change, why",
    [
        ({"scoring_func": "sigmoid"}, "by sigmoid"),
        ({"correction_bias": torch.zeros(EXPERTS)}, "correction_bias"),
        ({"custom_routing_function": print}, "function"),
        ({"num_fused_shared_experts": 1}, "shared"),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}, "2 of 4 groups"),
        ({"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}, "among groups"),
        ({"output_format": Format.STANDARD}, "another format"),
        ({"top_k": 33}, "too many"),
    ],
)
def test_another_choice_stays_with_sglang(topk: Any, change: dict[str, Any], why: str) -> None:
    made = filled()
    built = model(made)
    vars(built.mlp.topk.topk_config).update(change)
    before = built.mlp.topk.topk_config.output_format
    assert why in routers.leave_choice(built, "mlp.experts", made._layer)
    assert built.mlp.topk.topk_config.output_format is before and not made._layer.chooses


@pytest.mark.parametrize(
    "what", ["names", "layer_id", "dispatcher", "experts on the GPU", "deferred", "places"]
)
def test_what_is_not_there_is_not_relied_on(topk: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = filled()
    built = model(made)
    match what:
        case "names":
            del topk.module.build_precomputed_topk_output
        case "layer_id":
            monkeypatch.setattr(Bypassed, "to_standard", lambda self: None)
        case "dispatcher":
            built.mlp.experts.dispatcher = SimpleNamespace()
        case "experts on the GPU":
            made = filled(num_gpu_experts=1)
        case "deferred":
            made = filled(max_deferred_experts_per_token=1)
        case "places":
            made = filled(0, torch.arange(EXPERTS).flip(0))
    assert routers.leave_choice(built, "mlp.experts", made._layer)
    assert built.mlp.topk.topk_config.output_format is None


def test_the_log_says_who_chooses(
    topk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ktinject.sglang.layer import Layer

    monkeypatch.setattr(Layer, "is_on_gpu", True)
    built = nn.Module()
    built.layers = nn.ModuleList(model(filled(layer)) for layer in range(3))
    built.layers[2].mlp.topk.topk_config.scoring_func = "sigmoid"
    with caplog.at_level("INFO", "ktinject"):
        routers.leave_choices(built)
    assert [record.message for record in caplog.records] == [
        "experts of layers 0 to 1 are chosen by the submit: Module",
        "experts of layers 2 are chosen by SGLang: Module: it chooses by sigmoid",
    ]


class Dispatched(NamedTuple):
    hidden_states: Tensor
    topk_output: Any


def apply(made: KTMoEWrapper, x: Tensor, logits: Tensor, normed: bool = True, chooses: bool = True) -> Tensor:
    """As SGLang's method does without experts of its own."""
    made._layer.chooses = chooses
    method = SimpleNamespace(wrapper=made, kt_config=SimpleNamespace(layer_idx=made.layer_idx))
    given = Dispatched(x, Bypassed(x, logits, TopKConfig(renormalize=normed)))
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    with combine._without_padding(x):
        combine.Combine(ModuleType("none"))._submit(method, given, stream)
    return made.sync_forward(x, stream)


def inputs(
    m: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Tokens and logits, of which no two of a token are alike."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(m, HIDDEN, generator=random)
    logits = torch.stack([torch.randperm(EXPERTS, generator=random) for _ in range(m)]) / 4
    return x.bfloat16().to(device), logits.to(dtype).to(device)


def test_without_cuda_sglang_chooses(topk: Any) -> None:
    made, (x, logits) = filled(), inputs(3)
    weights, ids = chosen(logits, True)
    assert is_near(apply(made, x, logits), expected(x, ids, weights))
    assert not topk.recorded  # to_standard has told SGLang already


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normed", [True, False])
def test_a_submit_chooses_as_sglang_does(topk: Any, normed: bool, dtype: torch.dtype) -> None:
    made = filled()
    for m in (1, 7, MOST_TOKENS):
        x, logits = inputs(m, m, "cuda:0", dtype)
        out = apply(made, x, logits, normed)
        weights, ids = chosen(logits, normed)
        assert is_near(out, expected(x, ids, weights))
        layer, told = topk.recorded.pop()
        assert layer == 0 and not topk.recorded
        assert torch.equal(told.sort().values, ids.long().sort().values)


@pytest.mark.gpu
def test_more_tokens_or_more_to_do_are_chosen_by_sglang(topk: Any) -> None:
    made = filled()
    x, logits = inputs(MOST_TOKENS + 1, 1, "cuda:0")
    weights, ids = chosen(logits, True)
    assert is_near(apply(made, x, logits), expected(x, ids, weights))
    topk.is_noop = False
    assert is_near(apply(made, x[:2], logits[:2]), expected(x[:2], ids[:2], weights[:2]))
    topk.is_noop = True  # but somebody else has asked SGLang for the logits, and the choice may be another
    assert is_near(apply(made, x[:2], logits[:2], chooses=False), expected(x[:2], ids[:2], weights[:2]))
    assert not topk.recorded


@pytest.mark.gpu
def test_replays_choose_anew_and_leave_padding_out(topk: Any) -> None:
    made, (x, logits) = filled(), inputs(8, 0, "cuda:0")
    tokens = torch.full((1,), 8, dtype=torch.int32, device="cuda:0")

    def run() -> Tensor:
        combine._within.tokens = tokens
        try:
            return apply(made, x, logits)
        finally:
            combine._within.tokens = combine._within.live = None

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, count in enumerate((8, 5, 1, 7)):
        tokens.fill_(count)
        for held, value in zip((x, logits), inputs(8, seed, "cuda:0")):
            held.copy_(value)
        graph.replay()
        weights, ids = chosen(logits, True)
        want = expected(x, ids, weights)
        want[count:] = 0
        assert is_near(out, want)
        assert torch.equal(topk.recorded[-1][1].sort().values, ids.long().sort().values)
