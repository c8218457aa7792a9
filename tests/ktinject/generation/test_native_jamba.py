"""Native decode steps of Jamba: Mamba, whose channels have states and time steps of their own.

What layers with states have in common is in test_native_states.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt
from test_native_decoder import INT8_TOLERANCE, assert_as_exact_as_its_own, doubled, varied
from test_native_windows import assert_native
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import layer_spec, recurrent_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.recurrent_spec import Mamba1Spec
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif("jamba" not in AVAILABLE, reason="transformers has no jamba")
# All experts are taken, so none can turn over.
SURE: dict[str, Any] = {"num_experts_per_tok": 6}
SIZES: list[dict[str, Any]] = [
    {},
    {"attn_layer_offset": 0, "mamba_d_state": 16},
    {"mamba_d_state": 37, "mamba_dt_rank": 5, "mamba_conv_bias": False, "mamba_d_conv": 2},
    # Several tasks of the states, the last one smaller; on the pool.
    {"hidden_size": 136, "mamba_d_state": 32, "mamba_expand": 4, "mamba_proj_bias": True},
]


def made(
    weights: str = "bf16", wide: bool = False, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32. wide: decays and what is skipped are in fp32."""

    def one() -> PreTrainedModel:
        model = varied(doubled(tiny("jamba", **SURE | changes).bfloat16()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".D", ".A_log")):
                    parameter.copy_(torch.linspace(-1, 1.3, parameter.numel()).view_as(parameter))
        return model.to(dtype)

    model, truth = one(), one()
    for name, module in model.named_modules():
        if wide and name.endswith(".mamba"):
            for parameter in ("A_log", "D"):
                setattr(module, parameter, nn.Parameter(getattr(module, parameter).detach().float()))
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth.float()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(sizes: dict[str, Any]) -> None:
    assert_as_exact_as_its_own(*made(**sizes))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(weights), INT8_TOLERANCE)


def test_models_in_fp32() -> None:
    """What gives time steps stays as it is, with a bias: no operator of the CPU computes in fp32."""
    model, truth = made("int8", dtype=torch.float32)
    assert type(model.model.layers[0].mamba.dt_proj) is nn.Linear
    assert_as_exact_as_its_own(model, truth, INT8_TOLERANCE)
    model.model.layers[0].mamba.dt_proj.bfloat16()
    assert NativeDecoder(model).support.reason == "layer 0: its dt_proj has a bias and is not in fp32"


def test_parameters_in_fp32() -> None:
    model, _ = made(wide=True)
    model.generate(**prompt())
    assert_native(model)


def test_specs() -> None:
    spec = layer_spec.of_layer(tiny("jamba", **SURE).model.layers[0])
    assert isinstance(spec, layer_spec.DecoderLayerSpec)
    assert spec.attention == Mamba1Spec("mamba", 0, 80, 8, 8)
    assert spec.post_attention_norm is not None and spec.post_attention_norm.path == "pre_ff_layernorm"


class TestRefusals:
    def test_of_other_parts(self) -> None:
        mixer = tiny("jamba").model.layers[0].mamba
        mixer.z_layernorm = nn.Identity()
        assert "known is Mamba with norms of dt, B and C" in recurrent_spec.of_mamba1(mixer).reason
        mixer = tiny("jamba").model.layers[0].mamba
        del mixer.time_step_rank
        assert "has no layer_idx, intermediate_size, time_step_rank" in recurrent_spec.of_mamba1(mixer).reason

    def test_of_gaps(self) -> None:
        model, _ = made()
        model.model.layers[0].mamba.conv1d.dilation = (2,)
        assert NativeDecoder(model).support.reason == "layer 0: its convolution has strides or gaps"


def linear(out: int, size: int, bias: Tensor | None = None) -> tuple[Any, Tensor]:
    """A packed layer, and its weight in fp32."""
    native = _native.Linear(
        out_features=out,
        in_features=size,
        weights="bf16",
        group_size=0,
        has_bias=bias is not None,
        kernel="auto",
    )
    weight = (torch.randn(out, size) * size**-0.5).bfloat16()
    native.allocate()
    native.load(weight)
    if bias is not None:
        native.load_bias(bias)
    return native, weight.float()


def given(**changes: Any) -> dict[str, Any]:
    """24 channels with states of 20, from 40."""
    norms = {
        f"{name}_norm": _native.Norm(torch.ones(size), 1e-6)
        for name, size in (("dt", 6), ("b", 20), ("c", 20))
    }
    arguments = {
        "in_proj": linear(48, 40)[0], "x_proj": linear(46, 24)[0], "dt_proj": linear(24, 6, torch.zeros(24))[0],
        "out_proj": linear(40, 24)[0], "taps": torch.zeros(24, 4), "taps_bias": torch.zeros(24),
        "a_log": torch.zeros(24, 20), "d": torch.zeros(24), "has_wide_d": True, **norms, **changes,
    }  # fmt: skip
    projections = {name: _native.Projection(linear=arguments[name]) for name in ("x_proj", "dt_proj")}
    return arguments | projections


class TestNative:
    def test_the_formula(self) -> None:
        """A step in fp32, as tensors give it."""
        bias = torch.randn(24)
        (into, w_in), (proj, w_x), (out, w_out) = linear(48, 40), linear(46, 24), linear(40, 24)
        dt, w_dt = linear(24, 6, bias)
        taps, taps_bias, rates, d = torch.randn(24, 4), torch.randn(24), torch.randn(24, 20), torch.randn(24)
        layers = {"in_proj": into, "x_proj": proj, "dt_proj": dt, "out_proj": out}
        ours = _native.Mamba1(**given(**layers, taps=taps, taps_bias=taps_bias, a_log=rates, d=d))
        decoder = _native.Decoder(40, "float32")
        decoder.add(None, ours, None, None)
        x, inputs, states = torch.randn(2, 40), torch.randn(2, 24, 4), torch.randn(2, 24, 20)
        mixed, z = (x @ w_in.T).chunk(2, -1)
        last = torch.cat([inputs[..., 1:], mixed[..., None]], -1)
        mixed = functional.silu((last * taps).sum(-1) + taps_bias)
        parts = (mixed @ w_x.T).split([6, 20, 20], -1)
        t, b, c = (functional.rms_norm(part, part.shape[-1:], None, 1e-6) for part in parts)
        step = functional.softplus(t @ w_dt.T + bias)[..., None]
        want = states * torch.exp(-rates.exp() * step) + step * mixed[..., None] * b[:, None]
        y = ((want * c[:, None]).sum(-1) + d * mixed) * functional.silu(z)
        found = torch.empty_like(x)
        decoder.forward(
            x=x, cos=None, sin=None, mask=None, position=0, cache=_native.DecoderCache([inputs], [states]), first=0,
            last=1, final_norm=None, out=found,
        )  # fmt: skip
        # Products of cpu_linear take their inputs in bf16.
        torch.testing.assert_close(inputs, last, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(states, want, rtol=5e-2, atol=5e-2)
        torch.testing.assert_close(found - x, y @ w_out.T, rtol=5e-2, atol=5e-2)

    @pytest.mark.parametrize(
        "changes, why",
        [
            ({"a_log": torch.zeros(24, 19)}, r"a_log must be \[24, 20\]"),
            ({"d": torch.zeros(23)}, "and d as long"),
            ({"c_norm": _native.Norm(torch.ones(19), 1e-6)}, "of one size"),
            ({"c_norm": _native.Norm(torch.ones(20).bfloat16(), 1e-6)}, "norms of another dtype"),
            ({"taps_bias": torch.zeros(23)}, "its bias as long"),
            ({"taps": torch.zeros(23, 4)}, r"must be \[24, taps\]"),
            ({"in_proj": linear(47, 40)[0]}, "in_proj: expected 40 inputs and 48 outputs"),
            ({"x_proj": linear(45, 24)[0]}, "x_proj: expected 24 inputs and 46 outputs"),
            ({"dt_proj": linear(24, 7)[0]}, "dt_proj: expected 6 inputs and 24 outputs"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_what_does_not_fit(self, changes: dict[str, Any], why: str) -> None:
        _native.Mamba1(**given())
        with pytest.raises(ValueError, match=why):
            _native.Mamba1(**given(**changes))

    def test_another_cache(self) -> None:
        decoder = _native.Decoder(40, "float32")
        decoder.add(None, _native.Mamba1(**given()), None, None)
        x, first, second = torch.zeros(1, 40), torch.zeros(1, 24, 4), torch.zeros(1, 24, 20)
        for inputs, states, why in (
            (first[:, :, :3].contiguous(), second, r"inputs of the convolution, .*\[1, 24, 4\]"),
            (first, second[..., :19].contiguous(), r"expected states in fp32 \[1, 24, 20\]"),
            (first, second.bfloat16(), r"expected states in fp32 \[1, 24, 20\]"),
        ):
            with pytest.raises(ValueError, match=why):
                decoder.forward(
                    x=x, cos=None, sin=None, mask=None, position=0, cache=_native.DecoderCache([inputs], [states]),
                    first=0, last=1, final_norm=None, out=torch.zeros_like(x),
                )  # fmt: skip
