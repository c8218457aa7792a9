"""Native decode steps of Kimi Linear: the delta rule by channels, beside latent attention that turns nothing.

What layers with states have in common is in test_native_states.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_native_decoder import INT8_TOLERANCE, assert_as_exact_as_its_own, doubled, varied
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import layer_spec, recurrent_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.recurrent_spec import KimiDeltaSpec
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif("kimi_linear" not in AVAILABLE, reason="transformers has no kimi_linear")
# All experts are taken, so none can turn over.
SURE: dict[str, Any] = {"num_experts_per_tok": 6, "layer_types": ["linear_attention", "full_attention"]}
SIZES: list[dict[str, Any]] = [
    {},
    {"layer_types": ["full_attention", "linear_attention"], "q_lora_rank": None},
    {"linear_head_dim": 12, "linear_num_heads": 5, "linear_conv_kernel_dim": 2},
    # Vectors with a rest, several tasks of the convolution, heads on the pool.
    {"linear_head_dim": 136, "linear_num_heads": 3, "hidden_size": 72},
]


def made(
    weights: str = "bf16", wide: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: with what from_pretrained leaves in fp32."""

    def one() -> PreTrainedModel:
        model = varied(doubled(tiny("kimi_linear", **SURE | changes).bfloat16()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".dt_bias", ".A_log")):
                    values = torch.linspace(-2.5, 1.3, parameter.numel())
                    parameter.copy_(values.view_as(parameter))
        return model.to(dtype)

    model, truth = one(), one()
    if wide:
        for path, module in model.named_modules():
            if path.endswith(".gate"):
                module.float()
            elif path.endswith("forget_gate"):
                module.dt_bias = nn.Parameter(module.dt_bias.detach().float())
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth.float()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(sizes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(**sizes))


def test_what_from_pretrained_leaves_in_fp32() -> None:
    assert_as_exact_as_its_own(*made(wide=True))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(weights), INT8_TOLERANCE)


@pytest.mark.parametrize("sizes", [SIZES[0], pytest.param(SIZES[1], marks=pytest.mark.nightly)], ids=str)
def test_models_in_fp32(sizes: dict[str, Any]) -> None:
    """Whose gates stay as they are: no operator of the CPU computes in fp32."""
    model, truth = made("int8", dtype=torch.float32, **sizes)
    attention = next(layer.self_attn for layer in model.model.layers if hasattr(layer.self_attn, "b_proj"))
    assert type(attention.b_proj) is type(attention.forget_gate.f_a_proj) is nn.Linear
    assert_as_exact_as_its_own(model, truth, INT8_TOLERANCE)


def test_specs() -> None:
    model = tiny("kimi_linear", **SURE)
    spec = layer_spec.of_layer(model.model.layers[0])
    assert isinstance(spec, layer_spec.DecoderLayerSpec)
    assert spec.attention == KimiDeltaSpec("self_attn", 0, 2, 8, model.config.rms_norm_eps)


class TestRefusals:
    def test_of_another_gate(self) -> None:
        """Such as one with a bound that a first step may not reach."""
        attention = tiny("kimi_linear", **SURE).model.layers[0].self_attn
        gate = attention.forget_gate
        own = type(gate).forward
        bounded = {"forward": lambda self, x: own(self, x).clamp(min=-5.0)}
        gate.__class__ = type("Bounded", (type(gate),), bounded)
        assert (
            recurrent_spec.of_kimi_delta(attention).reason
            == "its Bounded is no softplus with a rate a head, and no bounded sigmoid"
        )
        attention.forget_gate.scale = nn.Parameter(torch.ones(1))
        found = recurrent_spec.of_kimi_delta(attention).reason
        assert found == "its Bounded holds A_log, dt_bias, f_a_proj, f_b_proj, scale"

    def test_of_another_norm(self) -> None:
        attention = tiny("kimi_linear", **SURE).model.layers[0].self_attn
        attention.o_norm.activation = "silu"
        found = recurrent_spec.of_kimi_delta(attention).reason
        assert found == "its KimiLinearRMSNormGated is no RMS norm times a sigmoid, rounded once"

    def test_of_other_parts(self) -> None:
        attention = tiny("kimi_linear", **SURE).model.layers[0].self_attn
        attention.conv1d.bias = nn.Parameter(torch.ones(48))
        assert "has a conv1d with a bias" in recurrent_spec.of_kimi_delta(attention).reason
        attention = tiny("kimi_linear", **SURE).model.layers[0].self_attn
        attention.temperature = nn.Parameter(torch.ones(1))
        assert "known is Kimi Linear's delta attention" in recurrent_spec.of_kimi_delta(attention).reason

    def test_of_gaps(self) -> None:
        model, _ = made()
        model.model.layers[0].self_attn.conv1d.dilation = (2,)
        assert NativeDecoder(model).support.reason == "layer 0: its convolution has strides or gaps"


def linear(out: int, size: int) -> tuple[Any, Tensor]:
    """A packed layer, and its weight in fp32."""
    native = _native.Linear(
        out_features=out, in_features=size, weights="bf16", group_size=0, has_bias=False, kernel="auto"
    )
    weight = (torch.randn(out, size) * size**-0.5).bfloat16()
    native.allocate()
    native.load(weight)
    return native, weight.float()


def given(**changes: Any) -> dict[str, Any]:
    """Two heads of 8 values, from 40."""
    norm = _native.Norm(torch.ones(8), 1e-6, rounds_first=False)
    heads = {"key_heads": 2, "value_heads": 2, "key_size": 8, "value_size": 8, "by_channels": True}
    arguments = {
        **{name: linear(16, 40)[0] for name in ("qkv", "k", "v")},
        **{name: linear(12, 40)[0] for name in ("z_low", "a_low")},
        **{name: linear(16, 12)[0] for name in ("z", "a")},
        "ba": linear(2, 40)[0], "o": linear(40, 16)[0], "taps": torch.zeros(48, 4).bfloat16(),
        "a_log": torch.zeros(2), "dt_bias": torch.zeros(16), "norm": norm, **heads, **changes,
    }  # fmt: skip
    for name in ("ba", "a", "a_low"):
        if arguments[name] is not None:
            arguments[name] = _native.Projection(linear=arguments[name])
    return arguments


class TestNative:
    def test_the_formula(self) -> None:
        """A step in fp32, as tensors give it."""
        weights = {name: linear(out, size) for name, out, size in (
            ("qkv", 16, 40), ("k", 16, 40), ("v", 16, 40), ("ba", 2, 40), ("z_low", 12, 40), ("a_low", 12, 40),
            ("z", 16, 12), ("a", 16, 12), ("o", 40, 16),
        )}  # fmt: skip
        taps, rates, bias, scale = torch.randn(48, 4), torch.randn(2), torch.randn(16), torch.rand(8) + 0.5
        norm = _native.Norm(scale, 1e-6, rounds_first=False)
        native = {name: layer for name, (layer, _) in weights.items()}
        ours = _native.GatedDelta(**given(**native, taps=taps, a_log=rates, dt_bias=bias, norm=norm))
        decoder = _native.Decoder(40, "float32")
        decoder.add(None, ours, None, None)
        x, inputs, states = torch.randn(2, 40), torch.randn(2, 48, 4), torch.randn(2, 2, 8, 8)
        w = {name: weight for name, (_, weight) in weights.items()}
        mixed = torch.cat([x @ w[name].T for name in ("qkv", "k", "v")], -1)
        last = torch.cat([inputs[..., 1:], mixed[..., None]], -1)
        q, k, v = functional.silu((last * taps).sum(-1)).view(2, 3, 2, 8).unbind(1)
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        decay = functional.softplus(x @ w["a_low"].T @ w["a"].T + bias).view(2, 2, 8)
        want = states * torch.exp(-rates.exp()[:, None] * decay)[..., None]
        beta = (x @ w["ba"].T).sigmoid()[..., None]
        want = want + k[..., None] * (beta * (v - (want * k[..., None]).sum(-2)))[..., None, :]
        out = (want * q[..., None]).sum(-2) / 8**0.5
        out = (
            functional.rms_norm(out, (8,), scale, 1e-6)
            * (x @ w["z_low"].T @ w["z"].T).view(2, 2, 8).sigmoid()
        )
        found = torch.empty_like(x)
        decoder.forward(
            x=x, cos=None, sin=None, mask=None, position=0, cache=_native.DecoderCache([inputs], [states]), first=0,
            last=1, final_norm=None, out=found,
        )  # fmt: skip
        # Products of cpu_linear take their inputs in bf16.
        torch.testing.assert_close(inputs, last, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(states, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found - x, out.flatten(1) @ w["o"].T, rtol=3e-2, atol=3e-2)

    @pytest.mark.parametrize(
        "changes, why",
        [
            ({"dt_bias": torch.zeros(2)}, "by channels one dt_bias each"),
            ({"norm": _native.Norm(torch.ones(8).bfloat16(), 1e-6)}, "the norm's weight must be fp32"),
            ({"taps": torch.zeros(47, 4).bfloat16()}, r"must be \[48, taps\]"),
            ({"k": linear(15, 40)[0]}, "k_proj: expected 16 outputs"),
            ({"v": None}, "v_proj: expected 16 outputs"),
            ({"a": linear(2, 12)[0]}, "in_proj_a: expected 16 outputs"),
            ({"z_low": linear(11, 40)[0]}, "what z or a is made of: expected 12 outputs"),
            ({"z": None, "a": None}, "in_proj_qkvz: expected 64 outputs"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_does_not_fit(self, changes: dict[str, Any], why: str) -> None:
        _native.GatedDelta(**given())
        with pytest.raises(ValueError, match=why):
            _native.GatedDelta(**given(**changes))

    def test_projections_of_another_width(self) -> None:
        decoder = _native.Decoder(40, "bfloat16")
        for name, out in (("k", 16), ("z_low", 12), ("a_low", 12)):
            with pytest.raises(ValueError, match="attention: expected 40 values in and out"):
                decoder.add(None, _native.GatedDelta(**given(**{name: linear(out, 39)[0]})), None, None)
