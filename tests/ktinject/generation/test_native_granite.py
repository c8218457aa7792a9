"""Native decode steps of Granite: multipliers, shared experts that the layer adds, layers that turn nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import made
from test_generate import prompt, stock
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    assert_same_tokens,
    swapped,
)
from test_native_windows import assert_native
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import layer_spec
from ktinject.generation.cpu import native_ends
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cpu.native_ends import Scale
from ktinject.generation.feed_forward_spec import DenseSpec, MoeSpec, OtherFeedForward
from ktinject.generation.layer_spec import DecoderLayerSpec
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig
from ktinject.support import Support
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
FAMILIES = [name for name in ("granitemoe", "granitemoeshared", "granitemoehybrid") if name in AVAILABLE]
# All experts are taken, so none can turn over. Multipliers of no power of two, so that it shows where they are rounded.
SCALED: dict[str, Any] = {
    "num_experts_per_tok": 6,
    "embedding_multiplier": 3.1,
    "residual_multiplier": 0.37,
    "attention_multiplier": 0.23,
    "logits_scaling": 1.7,
}
ROTARY = {"position_embedding_type": "rope"}
CASES: list[tuple[str, dict[str, Any]]] = [(name, SCALED) for name in FAMILIES]
CASES += [(name, {"num_experts_per_tok": 6}) for name in FAMILIES]
CASES += [("granitemoehybrid", SCALED | ROTARY), ("granitemoe", SCALED | {"attention_bias": True})]


@pytest.mark.parametrize("family, changes", CASES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(family: str, changes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(family, **changes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made("granitemoeshared", weights, **SCALED), INT8_TOLERANCE)


@pytest.mark.parametrize("case", [{}, {"cache_implementation": "static"}, {"max_time": 1e6}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_stock_loop_s(family: str, case: dict[str, Any]) -> None:
    model = swapped(family, **SCALED)
    for batch in (3, 1):
        assert_same_tokens(model, {**prompt(batch), "eos_token_id": None, **case})
        assert_native(model)


# Of what the steps were made of: a holder, an attribute of it, and another value.
CHANGES = [
    ("model", "embedding_multiplier", 0.4),
    ("model.layers.1", "residual_multiplier", 2.9),
    ("model.layers.1.self_attn", "scaling", 3.0),
]


@pytest.mark.parametrize("path, name, value", CHANGES)
def test_a_multiplier_that_is_changed_is_seen(path: str, name: str, value: float) -> None:
    model = swapped("granitemoeshared", **SCALED)
    arguments = {**prompt(), "eos_token_id": None}
    before = model.generate(**arguments)
    assert_native(model)
    setattr(model.get_submodule(path), name, value)
    assert not torch.equal(before, model.generate(**arguments))
    assert_same_tokens(model, arguments)
    assert_native(model)


def test_a_scale_of_logits_that_is_changed_is_seen() -> None:
    model = swapped("granitemoe", **SCALED)
    arguments = {**prompt(1), "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}
    before = model.generate(**arguments)
    assert_native(model)
    model.config.logits_scaling = 3.4
    after = model.generate(**arguments)
    assert_native(model)
    assert torch.equal(before.sequences, after.sequences)
    for one, other in zip(before.logits, after.logits, strict=True):
        torch.testing.assert_close(one, 2 * other, rtol=1e-2, atol=1e-2)


def test_specs() -> None:
    spec = layer_spec.of_layer(tiny("granitemoeshared", **SCALED).model.layers[0])
    assert isinstance(spec, DecoderLayerSpec) and isinstance(spec.feed_forward, MoeSpec)
    assert spec.residual == 0.37
    assert getattr(spec.attention, "scaling", None) == 0.23
    found = spec.feed_forward
    assert (found.path, found.router.path, found.experts) == (
        "", "block_sparse_moe.router", "block_sparse_moe.experts"
    )  # fmt: skip
    assert found.shared == DenseSpec("shared_mlp", ("input_linear", "output_linear"))
    assert found.router.is_normed and found.router.rounds and found.router.rounds_logits


class TestScales:
    def test_of_a_model(self) -> None:
        model = tiny("granitemoe", **SCALED)
        assert native_ends.embedding_scale(model.model, "embed_tokens") == Scale(3.1)
        assert native_ends.logits_scale(model, "model") == Scale(1.7, divides=True)
        plain = tiny("qwen3_moe")
        assert (
            native_ends.embedding_scale(plain.model, "embed_tokens")
            == native_ends.logits_scale(plain, "model")
            == Scale()
        )

    @pytest.mark.parametrize(
        "scale", [Scale(), Scale(0.1), Scale(7.3), Scale(40**0.5), Scale(6.0, True), Scale(-2.0)]
    )
    def test_is_found_between_values(self, scale: Scale) -> None:
        x = torch.linspace(-3, 3, 16, dtype=torch.float64)
        assert Scale.between(x, scale(x)) == scale

    def test_what_is_none(self) -> None:
        x = torch.linspace(-3, 3, 16, dtype=torch.float64)
        for other in (x + 1e-9, x.tanh(), torch.zeros_like(x)):
            assert Scale.between(x, other) is None


def derived(module: Any, forward: Any) -> None:
    module.__class__ = type("Odd", (type(module),), {"forward": forward, "capturable": True})


class TestRefusals:
    def test_embeddings_that_are_shifted(self) -> None:
        model = swapped("granitemoe", **SCALED)
        own = type(model.model).forward

        def forward(self: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
            if input_ids is not None:
                kwargs["inputs_embeds"] = self.embed_tokens(input_ids) + 0.25
            return own(self, **kwargs)

        derived(model.model, forward)
        assert NativeDecoder(model).support.reason == "the model changes embeddings before its first layer"
        assert torch.equal(model.generate(**prompt()), stock(model, **prompt()))
        assert model.ktinject_decoding.last == "eager loop"

    def test_logits_that_are_shifted(self) -> None:
        model = swapped("granitemoe", **SCALED)
        own = type(model).forward

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = own(self, *args, **kwargs)
            out.logits = out.logits + torch.arange(96.0)
            return out

        derived(model, forward)
        model.generate(**prompt())
        assert model.ktinject_decoding.last == "eager loop"
        assert "logits: the model does more than lm_head" in model.ktinject_decoding.reason

    def test_a_residual_that_is_scaled_in_one_place_alone(self) -> None:
        layer = tiny("granitemoe", **SCALED).model.layers[0]
        own = type(layer).forward

        def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            found: Tensor = own(self, hidden_states, **kwargs)
            return found + self.block_sparse_moe(hidden_states)

        derived(layer, forward)
        found = layer_spec.of_layer(layer)
        assert isinstance(found, Support) and "it is not x + attention(norm(x))" in found.reason

    def test_shared_experts_with_their_halves_exchanged(self) -> None:
        layer = tiny("granitemoeshared").model.layers[0]

        def forward(self: Any, x: Tensor) -> Tensor:
            up, gate = self.input_linear(x).chunk(2, dim=-1)
            return self.output_linear(nn.functional.silu(gate) * up)

        derived(layer.shared_mlp, forward)
        found = layer_spec.of_layer(layer)
        assert isinstance(found, DecoderLayerSpec) and isinstance(found.feed_forward, OtherFeedForward)
        assert "is no gated unit with SiLU" in found.feed_forward.reason

    def test_gates_and_ups_of_another_width(self) -> None:
        def linear(out: int, size: int = 40) -> Any:
            like = nn.Linear(size, out, bias=False).bfloat16()
            return CpuLinear.build(like, CpuLinearConfig(device="cpu")).native

        _native.GatedUnit(linear(48), None, linear(40, 24))
        for gate, up in ((linear(24), None), (linear(48), linear(48)), (linear(48), linear(24))):
            with pytest.raises(ValueError, match="gate, up and down do not fit together"):
                _native.GatedUnit(gate, up, linear(40, 24))
