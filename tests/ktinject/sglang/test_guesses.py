"""Which layers of SGLang's guess at the next one's experts, and what they guess."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_cases import EXPERTS, HIDDEN, LAYERS, TOP_K, arguments, filled
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation.cuda import decode_ops
from ktinject.operators.offload import handoff
from ktinject.sglang import KTMoEWrapper, guesses, routers


class RMSNorm(nn.Module):
    """By the name of SGLang's, as the next one."""

    offset = 0.0

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden) + 1 - self.offset, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        scaled = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return (scaled * (self.weight.float() + self.offset)).bfloat16()


class GemmaRMSNorm(RMSNorm):
    offset = 1.0


class Block(nn.Module):
    def __init__(self, made: KTMoEWrapper) -> None:
        super().__init__()
        given = made.arguments
        self.gate = nn.Linear(given.hidden_size, given.num_experts, bias=False, dtype=torch.bfloat16)
        self.topk = SimpleNamespace(topk_config=SimpleNamespace(top_k=given.top_k, scoring_func="softmax"))
        self.experts = nn.Identity()
        self.experts.quant_method = SimpleNamespace(wrapper=made)


class DecoderLayer(nn.Module):
    def __init__(self, made: KTMoEWrapper, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.post_attention_layernorm = norm(made.arguments.hidden_size)
        self.mlp = Block(made)


def model(layers: list[KTMoEWrapper], norm: type[RMSNorm] = RMSNorm) -> Any:
    torch.manual_seed(0)
    built = nn.Module()
    built.layers = nn.ModuleList(DecoderLayer(made, norm) for made in layers)
    return built.requires_grad_(False)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers here are too small for guesses to pay."""
    monkeypatch.setattr(handoff, "_LEAST_FORESEEN", 0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the GPU's kernels, the same in torch."""

    def linear(x: Tensor, weights: list[Tensor], *, norm: Any) -> Tensor:
        scaled = x.double() * (x.double().square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return (scaled * (norm.weight.double() + norm.offset)) @ weights[0].double().T

    def route(logits: Tensor, top_k: int, normed: bool) -> tuple[Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(top_k)
        return weights, ids

    monkeypatch.setattr(decode_ops, "linear", linear)
    monkeypatch.setattr(decode_ops, "route", route)


def guess_of(made: KTMoEWrapper) -> Any:
    return made._layer.guess


@pytest.mark.parametrize("norm", [RMSNorm, GemmaRMSNorm])
@pytest.mark.usefixtures("small", "plain")
def test_a_guess_is_the_next_routers_choice_for_the_same_residual_stream(norm: type[RMSNorm]) -> None:
    made = [filled(layer) for layer in range(LAYERS)]
    built = model(made, norm)
    built.layers[0].post_attention_layernorm.weight[3] = -norm.offset  # this value is hidden
    built.layers[1].mlp.gate.weight[:, 3] = 0
    guesses.connect(built)
    assert [guess_of(one) is None for one in made] == [False] * (LAYERS - 1) + [True]
    same = 0
    for seed in range(50):
        x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(seed))
        for index in range(LAYERS - 1):
            here, there = built.layers[index], built.layers[index + 1]
            guess = guess_of(made[index])
            ids = guess.choose(here.post_attention_layernorm(x))
            assert guess.layer is made[index + 1]._layer and ids.shape == (1, TOP_K)
            logits = there.post_attention_layernorm(x).double() @ there.mlp.gate.weight.double().T
            same += len({*ids[0].tolist()} & {*logits.topk(TOP_K).indices[0].tolist()})
    # bf16 lets two experts that are nearly as likely change places.
    assert same >= 0.97 * 50 * (LAYERS - 1) * TOP_K
    assert guess_of(made[0]).choose(torch.randn(1, HIDDEN)) is None  # of another dtype than the router


def change(built: Any, index: int, what: str) -> None:
    """Make a layer one that cannot be guessed at."""
    layer = built.layers[index]
    chosen = layer.mlp.topk.topk_config
    match what:
        case "another function":
            chosen.scoring_func = "tanh"
        case "groups":
            chosen.use_grouped_topk, chosen.num_expert_group, chosen.topk_group = True, 4, 2
        case "groups of unknown number":
            chosen.use_grouped_topk = True
        case "correction":
            chosen.correction_bias = torch.zeros(EXPERTS)
        case "function":
            chosen.custom_routing_function = print
        case "shared":
            chosen.num_fused_shared_experts = 1
        case "more":
            chosen.top_k = 33
        case "bias":
            layer.mlp.gate.bias = nn.Parameter(torch.zeros(EXPERTS))
        case "fp32":
            layer.mlp.gate.float()
        case "wide":
            layer.mlp.gate = nn.Linear(HIDDEN, EXPERTS + 1, bias=False, dtype=torch.bfloat16)
        case "no router":
            del layer.mlp.gate
        case "no choice":
            del layer.mlp.topk
        case "another norm":
            layer.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        case "a norm of heads":
            layer.post_attention_layernorm = RMSNorm(HIDDEN // 2)
        case _:
            raise AssertionError(what)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "what",
    [
        "another function",
        "groups",
        "groups of unknown number",
        "correction",
        "function",
        "shared",
        "more",
        "bias",
    ]
    + ["fp32", "wide", "no router", "no choice", "another norm", "a norm of heads"],
)
def test_layers_beside_an_unknown_one_do_not_guess(what: str) -> None:
    made = [filled(layer) for layer in range(LAYERS)]
    built = model(made)
    change(built, LAYERS - 1, what)
    guesses.connect(built)
    assert [guess_of(one) is None for one in made] == [False] * (LAYERS - 2) + [True, True]


@pytest.mark.usefixtures("small")
def test_the_log_says_which_layers_are_guessed_at_and_why_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = [filled(layer) for layer in range(LAYERS)]
    built = model(made)
    change(built, LAYERS - 1, "correction")
    with caplog.at_level("INFO", "ktinject"):
        guesses.connect(built)
    assert [record.message for record in caplog.records] == [
        "experts of layers 1 are guessed at: Block",
        "experts of layers 2 are not guessed at: Block: it chooses with correction_bias",
    ]
    assert routers.spans([5, 0, 1, 2, 7, 8]) == "0 to 2, 5, 7 to 8"


def rename(built: Any, what: str) -> None:
    """As other model files of SGLang have it."""
    for layer in built.layers:
        norm, chosen = layer.post_attention_layernorm, layer.mlp.topk.topk_config
        match what:
            case "router":  # DBRX, gpt-oss, Llama 4
                layer.mlp.router = layer.mlp.gate
                del layer.mlp.gate
            case "ffn_norm":  # LFM2
                layer.ffn_norm = norm
                del layer.post_attention_layernorm
            case "pre_mlp_layernorm":  # AFMoE, which has the other one behind its attention
                layer.pre_mlp_layernorm, layer.post_attention_layernorm = norm, RMSNorm(HIDDEN)
            case "one group":  # DeepSeek-V2-Lite
                chosen.use_grouped_topk, chosen.num_expert_group, chosen.topk_group = True, 1, 1
            case "sigmoid":  # greater for greater logits
                chosen.scoring_func = "sigmoid"


@pytest.mark.usefixtures("small", "plain")
@pytest.mark.parametrize("what", ["router", "ffn_norm", "pre_mlp_layernorm", "one group", "sigmoid"])
def test_other_names_are_known(what: str) -> None:
    made = [filled(layer) for layer in range(2)]
    built, x = model(made), torch.randn(1, HIDDEN)
    guesses.connect(built)
    want = guess_of(made[0]).choose(built.layers[0].post_attention_layernorm(x))
    here = built.layers[0].post_attention_layernorm
    rename(built, what)
    guesses.connect(built)
    assert torch.equal(guess_of(made[0]).choose(here(x)), want)


@pytest.mark.usefixtures("small")
def test_layers_whose_experts_are_elsewhere_or_in_other_places_do_not_guess() -> None:
    for other in (filled(1, num_gpu_experts=1), filled(1, torch.arange(EXPERTS).flip(0))):
        made = [filled(0), other, filled(2)]
        guesses.connect(model(made))
        assert [guess_of(one) for one in made] == [None] * 3
    other.load_weights(torch.arange(EXPERTS))
    guesses.connect(model(made))
    assert guess_of(made[0]) is not None


def test_small_layers_do_not_guess() -> None:
    made = [filled(layer) for layer in range(2)]
    guesses.connect(model(made))
    assert guess_of(made[0]) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not _native.cuda_built(), reason="no CUDA device")
def test_layers_in_a_graph_guess_right_and_change_nothing() -> None:
    hidden, inner, experts, top_k, device = 2048, 768, 16, 4, "cuda:0"
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * shape[-1] ** -0.5).bfloat16()

    sizes = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
    }
    made = [KTMoEWrapper(**arguments(layer, **sizes, weight_path="")) for layer in range(3)]
    for one in made:
        both = (matrix(experts, inner, hidden) for _ in range(2))
        one.load_weights_from_tensors(*both, matrix(experts, hidden, inner))
    built = model(made).to(device)
    residual = torch.zeros(1, hidden, device=device)

    def step() -> list[Tensor]:
        """Each layer adds a little to the residual stream."""
        stream, outs, x = torch.cuda.current_stream().cuda_stream, [], residual.clone()
        for layer, one in zip(built.layers, made):
            normed = layer.post_attention_layernorm(x)
            weights, ids = layer.mlp.gate(normed).float().softmax(-1).topk(top_k)
            one.submit_forward(normed, ids.int(), weights, stream)
            outs.append(one.sync_forward(normed, stream))
            x = x + 0.2 * outs[-1]
        return outs

    def recorded() -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            outs = step()
        return graph, outs

    without, want = recorded()
    guesses.connect(built)
    graph, found = recorded()
    native = [one._layer._experts.native for one in made]
    before = [one.guesses for one in native]
    for seed in range(40):
        residual.copy_(torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed)))
        for one in (without, graph):
            _native.handoff_wake()
            one.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, want))
    gained = [(a[0] - b[0], a[1] - b[1]) for a, b in zip([one.guesses for one in native], before)]
    assert gained[0] == (0, 0), "nobody guesses at the first layer"
    for right, asked in gained[1:]:
        assert asked > 0 and right > 0.5 * asked
