"""Native decode steps of Mamba-2: Granite-4's hybrids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_generate import prompt
from test_native_decoder import (
    INT8_TOLERANCE,
    assert_as_exact_as_its_own,
    doubled,
    swapped,
    varied,
)
from test_native_windows import assert_native
from torch import Tensor, nn
from transformers import PreTrainedModel

import ktinject
from ktinject import _native
from ktinject.generation import cache_layers, layer_spec
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.recurrent_spec import Mamba2Spec
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig
from tests.models import AVAILABLE, tiny

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(
    "granitemoehybrid" not in AVAILABLE, reason="transformers has no granitemoehybrid"
)
# All experts are taken, so none can turn over.
SURE: dict[str, Any] = {
    "num_experts_per_tok": 6,
    "layer_types": ["mamba", "attention"],
    "residual_multiplier": 0.37,
    "mamba_d_state": 24,
}
SIZES: list[dict[str, Any]] = [
    {},
    {"layer_types": ["attention", "mamba"], "position_embedding_type": "rope"},
    {"mamba_n_groups": 2, "mamba_d_state": 16, "mamba_conv_bias": False},
    {"mamba_n_groups": 4, "mamba_d_conv": 2, "mamba_d_state": 40, "mamba_proj_bias": True},
    # Several tasks of the convolution, the last one smaller; heads on the pool.
    {"hidden_size": 272, "mamba_n_heads": 8, "mamba_d_head": 68, "mamba_d_state": 128},
]


def made(weights: str = "bf16", **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A swapped model, and the same before in fp32."""

    def one() -> PreTrainedModel:
        model = varied(doubled(tiny("granitemoehybrid", **SURE | changes).bfloat16()))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith((".D", ".A_log")):
                    parameter.copy_(torch.linspace(-1, 1.3, len(parameter)))
        return model

    model, truth = one(), one()
    variables = dict.fromkeys(("experts", "dense", "head"), weights)
    swapped = ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    return swapped, truth.float()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_steps_are_as_exact_as_the_model_s_own(sizes: dict[str, Any]) -> None:
    model, truth = made(**sizes)
    mixer = next(layer.mamba for layer in model.model.layers if layer.mamba is not None)
    if mixer.n_groups > 1 and not hasattr(mixer.norm, "group_size"):
        # In the oldest transformers the norm's mean is of all groups, and a spec says that it is of one.
        assert "a norm of other groups" in NativeDecoder(model).support.reason
    else:
        assert_as_exact_as_its_own(model, truth)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_formats(weights: str) -> None:
    assert_as_exact_as_its_own(*made(weights), INT8_TOLERANCE)


def test_parameters_in_fp32() -> None:
    """As from_pretrained may leave what decides decays."""
    model = varied(doubled(tiny("granitemoehybrid", **SURE).bfloat16()))
    mamba: Any = model.model.layers[0].mamba
    for name in ("A_log", "D", "dt_bias"):
        setattr(mamba, name, nn.Parameter(getattr(mamba, name).detach().float() * 0.931))
    variables = dict.fromkeys(("experts", "dense", "head"), "bf16")
    ktinject.optimize(model, "auto", devices=["cpu"], variables=variables, progress=False)
    model.generate(**prompt())
    assert_native(model)


def test_specs() -> None:
    model = tiny("granitemoehybrid", **SURE)
    spec = layer_spec.of_layer(model.model.layers[0])
    assert isinstance(spec, layer_spec.DecoderLayerSpec)
    epsilon = model.config.rms_norm_eps
    assert spec.attention == Mamba2Spec("mamba", 0, 4, 1, 20, 24, epsilon) and spec.residual == 0.37
    assert [kind.is_state for kind in cache_layers.kinds_of(model.config)] == [True, False]


class TestRefusals:
    def test_gaps(self) -> None:
        model = swapped("granitemoehybrid", **SURE)
        model.model.layers[0].mamba.conv1d.dilation = (2,)
        assert NativeDecoder(model).support.reason == "layer 0: its convolution has strides or gaps"

    def test_a_convolution_of_another_dtype(self) -> None:
        model = swapped("granitemoehybrid", **SURE)
        model.model.layers[0].mamba.conv1d.float()
        reason = "layer 0: a tensor of its conv1d is torch.float32 or not contiguous"
        assert NativeDecoder(model).support.reason == reason

    def test_sizes_that_do_not_fit(self) -> None:
        def linear(out: int, size: int) -> Any:
            like = nn.Linear(size, out, bias=False).bfloat16()
            return CpuLinear.build(like, CpuLinearConfig(device="cpu")).native

        def given(**changes: Any) -> dict[str, Any]:
            """Two heads of 20 values, a group, states of 8."""
            vectors = {name: torch.zeros(2) for name in ("a_log", "dt_bias", "d")}
            norm = _native.Norm(torch.ones(40).bfloat16(), 1e-6)
            sizes = {"heads": 2, "groups": 1, "head_size": 20, "state_size": 8}
            return {
                "in_proj": linear(40 + 56 + 2, 40), "out_proj": linear(40, 40), "norm": norm,
                "taps": torch.zeros(56, 4).bfloat16(), "taps_bias": torch.zeros(56).bfloat16(),
                "has_wide_d": False, **vectors, **sizes, **changes,
            }  # fmt: skip

        made = _native.Mamba2(**given())
        narrow = _native.Norm(torch.ones(20).bfloat16(), 1e-6)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"in_proj": linear(97, 40)}, "in_proj: expected 98 outputs"),
            (
                {"groups": 3, "taps": torch.zeros(88, 4).bfloat16(), "taps_bias": None},
                "heads must be a multiple of groups",
            ),
            ({"norm": narrow}, "the norm must be one of 40 values"),
            ({"d": torch.zeros(3)}, "one a_log, dt_bias and d a head"),
            ({"taps": torch.zeros(55, 4).bfloat16()}, r"must be \[56, taps\]"),
            ({"taps_bias": torch.zeros(55).bfloat16()}, r"must be \[56, taps\]"),
            ({"taps_bias": torch.zeros(56)}, r"must be \[56, taps\]"),
        ]
        for changes, why in wrong:
            with pytest.raises(ValueError, match=why):
                _native.Mamba2(**given(**changes))
        norm = _native.Norm(torch.ones(40).bfloat16(), 1e-6)
        decoder = _native.Decoder(40, "bfloat16")
        decoder.add(norm, made, norm, _native.GatedUnit(linear(40, 40), linear(40, 40), linear(40, 40)))
        x = torch.zeros(1, 40).bfloat16()
        first, second = torch.zeros(1, 56, 4).bfloat16(), torch.zeros(1, 2, 20, 8)

        def step(first: Tensor, second: Tensor) -> None:
            decoder.forward(
                x=x, cos=None, sin=None, mask=None, position=0, cache=_native.DecoderCache([first], [second]),
                first=0, last=1, final_norm=None, out=torch.zeros_like(x),
            )  # fmt: skip

        with pytest.raises(
            ValueError, match=r"inputs of the convolution, of the model's dtype, \[1, 56, 4\]"
        ):
            step(first[:, :, :3].contiguous(), second)
        for odd in (second[..., :7].contiguous(), second.bfloat16()):
            with pytest.raises(ValueError, match=r"expected states in fp32 \[1, 2, 20, 8\]"):
                step(first, odd)
