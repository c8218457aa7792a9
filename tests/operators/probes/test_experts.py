"""`probe` and `views` on experts modules of our own: gates, refusals, and parameters in every layout."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_cases import PLAIN, assert_reference_is, described, refusal
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from ktinject.errors import OperatorError
from ktinject.operators.probes.experts import parameter_shapes, views

# --- gates of all descriptions ---


@use_experts_implementation
class Experts(nn.Module):
    """An experts module of this file's own, as in transformers' docstring of the decorator."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 56, 20))
        self.down_proj = nn.Parameter(torch.randn(4, 20, 28))
        self.act_fn = ACT2FN[config.hidden_act] if isinstance(config.hidden_act, str) else config.hidden_act

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in top_k_index.unique().tolist():
            if e < self.num_experts:
                token, slot = torch.where(top_k_index == e)
                h = self._apply_gate(hidden[token] @ self.gate_up_proj[e].T) @ self.down_proj[e].T
                out.index_add_(0, token, h * top_k_weights[token, slot, None])
        return out


def own(act: Any = "silu", class_: type[nn.Module] = Experts) -> Any:
    return class_(SimpleNamespace(hidden_act=act, _experts_implementation="eager"))


@pytest.mark.parametrize(
    "act,activation,alpha,gate_max",
    [
        ("silu", "silu", 1.0, inf),
        ("swish", "silu", 1.0, inf),
        ("quick_gelu", "silu", 1.702, inf),
        (lambda x: x * torch.sigmoid(0.3331 * x), "silu", 0.3331, inf),
        (lambda x: x * torch.sigmoid(1.5957691216 * x), "silu", 1.5957691216, inf),
        ("gelu", "gelu", 1.0, inf),
        ("gelu_10", "gelu", 1.0, 10.0),
        ("gelu_new", "gelu_tanh", 1.0, inf),
        ("gelu_fast", "gelu_tanh", 1.0, inf),
        ("gelu_pytorch_tanh", "gelu_tanh", 1.0, inf),
        ("relu", "relu", 1.0, inf),
        ("relu6", "relu", 1.0, 6.0),
        ("relu2", "relu2", 1.0, inf),
        (lambda x: torch.relu(x).clamp(max=3.0) ** 2, "relu2", 1.0, 3.0),
        ("linear", "identity", 1.0, inf),
    ],
)
def test_activation_is_recognised(act: Any, activation: str, alpha: float, gate_max: float) -> None:
    module = own(act)
    spec = described(module)
    assert spec.activation == activation
    assert spec.alpha == pytest.approx(alpha, rel=1e-6)
    assert spec.gate_max == pytest.approx(gate_max, rel=1e-6)
    assert (spec.up_limit, spec.up_offset) == (inf, 0.0)
    assert_reference_is(module, spec)


@pytest.mark.parametrize(
    "act", ["tanh", "sigmoid", "mish", "hardswish", "leaky_relu", "laplace", "sqrtsoftplus"]
)
def test_activation_is_refused(act: str) -> None:
    assert "its gate is none of" in refusal(own(act))


@use_experts_implementation(has_gate=False)
class NoGate(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.num_experts = 4
        self.up_proj = nn.Parameter(torch.randn(4, 28, 20))
        self.down_proj = nn.Parameter(torch.randn(4, 20, 28))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == e)
            h = self.act_fn(hidden[token] @ self.up_proj[e].T) @ self.down_proj[e].T
            out.index_add_(0, token, h * top_k_weights[token, slot, None])
        return out


@pytest.mark.parametrize(
    "act,activation", [("silu", "silu"), ("gelu", "gelu"), ("relu2", "relu2"), ("linear", "identity")]
)
def test_activation_without_a_gate(act: str, activation: str) -> None:
    module = own(act, NoGate)
    spec = described(module)
    assert (spec.has_gate, spec.activation, spec.hidden_size, spec.intermediate_size) == (
        False,
        activation,
        20,
        28,
    )
    assert_reference_is(module, spec)


@pytest.mark.parametrize("act", ["relu6", "tanh"])
def test_activation_without_a_gate_is_refused(act: str) -> None:
    assert "its gate is none of" in refusal(own(act, NoGate))


def softcapped(x: Tensor) -> Tensor:
    return 30 * torch.tanh(x / 30)


GATES = {
    "clamps far apart": (
        lambda g, u: torch.relu(g.clamp(max=0.5)) * (u.clamp(-300, 300) - 2),
        (0.5, 300.0, -2.0),
    ),
    "a limit of 1000": (lambda g, u: torch.relu(g) * u.clamp(-1000, 1000), (inf, 1000.0, 0.0)),
    "fp32 inside": (
        lambda g, u: (torch.relu(g.float().clamp(max=7)) * (u.float().clamp(-7, 7) + 1)).to(g.dtype),
        (7.0, 7.0, 1.0),
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_limits_and_offset_are_read_off_the_answers(name: str) -> None:
    gate, (gate_max, up_limit, up_offset) = GATES[name]

    class Own(Experts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            return gate(*gate_up.chunk(2, dim=-1))

    module = own("silu", Own)
    spec = described(module)
    assert (spec.activation, spec.gate_max, spec.up_limit, spec.up_offset) == (
        "relu",
        gate_max,
        up_limit,
        up_offset,
    )
    assert_reference_is(module, spec)


OTHER_GATES = {
    "up first": lambda g, u: torch.nn.functional.silu(u) * g,
    "gate clamped below": lambda g, u: torch.nn.functional.silu(g.clamp(-7, 7)) * u,
    "up clamped above only": lambda g, u: torch.nn.functional.silu(g) * u.clamp(max=7),
    "up clamped after the offset": lambda g, u: torch.nn.functional.silu(g) * (u + 1).clamp(-7, 7),
    "softcapped": lambda g, u: torch.nn.functional.silu(softcapped(g)) * u,
    "gated twice": lambda g, u: torch.nn.functional.silu(g) * u * torch.sigmoid(u),
    "scaled": lambda g, u: 2 * torch.nn.functional.silu(g) * u,
    "interleaved": None,
    "not a number": lambda g, u: g * float("nan"),
    "nothing": lambda g, u: g * 0,
}


@pytest.mark.parametrize("name", OTHER_GATES)
def test_other_gates_are_refused(name: str) -> None:
    class Own(Experts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            if name == "interleaved":
                return torch.nn.functional.silu(gate_up[..., ::2]) * gate_up[..., 1::2]
            return OTHER_GATES[name](*gate_up.chunk(2, dim=-1))

    assert "its gate is none of" in refusal(own("silu", Own))


# --- refusals ---


class Scaled(Experts):
    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden, top_k_index, top_k_weights) + hidden


class Normalised(Experts):
    """Standard for one expert of weight one, and for nothing else."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden, top_k_index, top_k_weights / top_k_weights.sum(-1, keepdim=True))


class Cached(Experts):
    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, cache: Any) -> Tensor:
        return hidden


class Twice(Experts):
    """Eager forward and the other implementations disagree: one of them is not what was trained."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for e in top_k_index.unique().tolist():
            token, slot = torch.where(top_k_index == e)
            gate, up = (hidden[token] @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            out.index_add_(
                0, token, (torch.relu(gate) * up) @ self.down_proj[e].T * top_k_weights[token, slot, None]
            )
        return out


class Broken(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        raise RuntimeError("no gate today")


@pytest.mark.parametrize(
    "class_,reason",
    [
        (Scaled, "its gate is none of"),
        (Normalised, "its forward does more than route, project and gate"),
        (Cached, "forward takes"),
        (Twice, "its forward and its _apply_gate differ by"),
        (Broken, "fails on a small copy of itself: RuntimeError: no gate today"),
    ],
)
def test_other_forwards_are_refused(class_: type[nn.Module], reason: str) -> None:
    assert reason in refusal(own("silu", class_))


def test_changed_modules_are_refused() -> None:
    module = own()
    module.scale = nn.Parameter(torch.ones(4))
    assert "also holds scale" in refusal(module)

    module = own()
    module.register_buffer("gate_up_scale", torch.ones(4))
    assert "also holds gate_up_scale" in refusal(module)

    assert "also holds act_fn.weight" in refusal(own("prelu"))

    module = own()
    module.down_proj = nn.Parameter(torch.randn(4, 20, 27))
    assert "gate_up_proj is [4, 56, 20], but with down_proj [4, 20, 27] it should be [4, 54, 20]" in refusal(
        module
    )

    module = own()
    del module.down_proj
    assert "no parameter down_proj" in refusal(module)

    module = own()
    module.has_bias = True
    assert "no parameter gate_up_proj_bias" in refusal(module)

    module = own()
    module.has_post_expert_norm = True
    assert "has_post_expert_norm" in refusal(module)

    module = own()
    module.num_experts = 8
    assert "it says it has 8 experts" in refusal(module)

    module = own()
    module.gate_up_proj = nn.Parameter(torch.zeros(4, 56, 20, dtype=torch.int8), requires_grad=False)
    assert "torch.int8" in refusal(module)

    assert "no parameter gate_up_proj" in refusal(nn.ModuleList()) or "forward takes" in refusal(
        nn.ModuleList()
    )


def test_probing_leaves_the_module_alone() -> None:
    module = own()
    before = {name: (id(p), p.clone()) for name, p in module.named_parameters()}
    attributes = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    with torch.device("meta"):
        described(module)
    assert {key: value for key, value in vars(module).items() if not key.startswith("_")} == attributes
    for name, parameter in module.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


# --- views ---

LAYOUTS = {
    "plain": PLAIN,
    "transposed": replace(PLAIN, is_transposed=True),
    "interleaved with bias": replace(PLAIN, has_bias=True, is_transposed=True, is_concatenated=False),
    "with bias": replace(PLAIN, has_bias=True),
    "no gate": replace(PLAIN, has_gate=False),
    "no gate with bias": replace(PLAIN, has_gate=False, has_bias=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_copy_nothing_and_cover_everything(layout: str) -> None:
    spec = LAYOUTS[layout]
    for name, shape in parameter_shapes(spec).items():
        tensor = torch.randn(shape)
        whole = views(spec, name, tensor, None, None)
        assert sum(view.numel() for _, _, view in whole) == tensor.numel()
        for projection, expert, view in whole:
            assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            n = spec.hidden_size if "down" in projection else spec.intermediate_size
            k = spec.intermediate_size if "down" in projection else spec.hidden_size
            assert list(view.shape) == ([n] if projection.endswith("_bias") else [n, k])
            assert 0 <= expert < spec.num_experts
        # Adding one through the views reaches every element exactly once.
        expected = tensor + 1
        for _, _, view in whole:
            view += 1
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_pieces_are_those_of_the_whole(layout: str) -> None:
    spec = LAYOUTS[layout]
    for name, shape in parameter_shapes(spec).items():
        tensor = torch.randn(shape)
        whole = {(projection, e): view for projection, e, view in views(spec, name, tensor, None, None)}
        pieces = {}
        for e in range(spec.num_experts):
            pieces |= {(p, e): view for p, e, view in views(spec, name, tensor[e], e, None)}
        assert pieces.keys() == whole.keys()
        assert all(torch.equal(pieces[key], whole[key]) for key in whole)
        if not name.startswith("gate_up_proj") or not spec.is_concatenated:
            continue
        dimension = 2 if spec.is_transposed and not name.endswith("_bias") else 1
        for part, half in enumerate(tensor.chunk(2, dimension)):
            for expert in [None, *range(spec.num_experts)]:
                piece = half if expert is None else half[expert]
                for projection, e, view in views(spec, name, piece, expert, part):
                    assert projection.startswith(("gate", "up")[part])
                    assert torch.equal(view, whole[projection, e])


@pytest.mark.parametrize(
    "name,shape,expert,part,message",
    [
        ("gate_up_proj", (6, 48, 41), None, None, r"expected shape \[6, 48, 40\], found \[6, 48, 41\]"),
        ("gate_up_proj", (48, 41), 2, None, r"of expert 2: expected shape \[48, 40\], found \[48, 41\]"),
        ("gate_up_proj", (48, 40), 2, 0, r"expected shape \[24, 40\]"),
        ("gate_up_proj", (24, 40), 2, None, r"expected shape \[48, 40\]"),
        ("gate_up_proj", (40, 48), 2, None, r"expected shape \[48, 40\]"),
        ("gate_up_proj", (24, 40), 2, 2, "found part 2"),
        ("down_proj", (40, 24), 2, 0, "found part 0"),
        ("down_proj", (40, 24), 6, None, "found expert 6; there are 0 to 5"),
        ("down_proj", (40, 24), -1, None, "found expert -1"),
        ("down_proj", (40, 24, 1), 0, None, "expected shape"),
        ("up_proj", (24, 40), 0, None, "no such parameter; it has gate_up_proj, down_proj"),
        ("gate_up_proj_bias", (48,), 0, None, "no such parameter"),
    ],
)
def test_wrong_pieces_are_refused(
    name: str, shape: tuple[int, ...], expert: int | None, part: int | None, message: str
) -> None:
    with pytest.raises(OperatorError, match=message):
        views(PLAIN, name, torch.empty(shape), expert, part)


def test_interleaved_parameters_have_no_parts() -> None:
    with pytest.raises(OperatorError, match="take turns"):
        views(LAYOUTS["interleaved with bias"], "gate_up_proj", torch.empty(40, 24), 0, 1)
