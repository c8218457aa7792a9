"""The native twins of layers whose tokens leave states of fixed size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import layer_spec
from ktinject.generation.cpu.native_parts import UnknownLayer, known, linear, norm, projection, wide
from ktinject.generation.layer_spec import StateSpec
from ktinject.generation.recurrent_spec import (
    DecayingStateSpec,
    GatedDeltaSpec,
    KimiDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
)


def state_twin(spec: StateSpec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """The twin of a layer's part with states. copies: as `NativeLayers` has them."""
    if isinstance(spec, GatedDeltaSpec):
        return _delta(spec, module, dtype, copies)
    if isinstance(spec, DecayingStateSpec):
        return _decaying(spec, module, dtype, copies)
    if isinstance(spec, KimiDeltaSpec):
        return _kimi_delta(spec, module, dtype, copies)
    if isinstance(spec, Mamba1Spec):
        return _mamba1(module, dtype, copies)
    if isinstance(spec, Mamba2Spec):
        return _mamba2(spec, module, dtype, copies)
    return _convolution(module, dtype)


def _taps(convolution: nn.Conv1d, name: str, *dtypes: torch.dtype) -> Tensor:
    """The weight of a convolution of each channel, [channels, taps], in one of these dtypes."""
    weight = convolution.weight.detach()
    if convolution.stride != (1,) or convolution.dilation != (1,):
        raise UnknownLayer("its convolution has strides or gaps")
    if weight.dtype not in dtypes or not weight.is_contiguous():
        raise UnknownLayer(f"a tensor of its {name} is {weight.dtype} or not contiguous")
    return weight[:, 0]


def _delta(spec: GatedDeltaSpec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Linear attention by the gated delta rule."""
    weight = module.norm.weight.detach()
    if weight.dtype != dtype or not weight.is_contiguous():
        raise UnknownLayer(f"a {type(module.norm).__name__} is no RMS norm of the model's dtype")
    in_two = spec.is_interleaved
    return _native.GatedDelta(
        qkv=linear(module, "in_proj_qkvz" if in_two else "in_proj_qkv"),
        ba=projection(module, "in_proj_ba" if in_two else "in_proj_b"),
        z=None if in_two else linear(module, "in_proj_z"),
        a=None if in_two else projection(module, "in_proj_a"),
        o=linear(module, "out_proj"),
        taps=_taps(module.conv1d, "conv1d", dtype),
        a_log=wide(module.A_log, copies),
        dt_bias=wide(module.dt_bias, copies),
        norm=_native.Norm(weight, spec.norm_epsilon),
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_size=spec.key_size,
        value_size=spec.value_size,
    )


def _kimi_delta(
    spec: KimiDeltaSpec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]
) -> Any:
    """The same by channels."""
    gate = module.forget_gate
    return _native.GatedDelta(
        qkv=linear(module, "q_proj"),
        k=linear(module, "k_proj"),
        v=linear(module, "v_proj"),
        ba=projection(module, "b_proj"),
        z_low=linear(module, "g_a_proj"),
        z=linear(module, "g_b_proj"),
        a_low=projection(gate, "f_a_proj"),
        a=projection(gate, "f_b_proj"),
        o=linear(module, "o_proj"),
        taps=_taps(module.conv1d, "conv1d", dtype, torch.float32),
        a_log=wide(gate.A_log, copies).flatten(),
        dt_bias=wide(gate.dt_bias, copies),
        norm=_native.Norm(wide(module.o_norm.weight, copies), spec.norm_epsilon, rounds_first=False),
        key_heads=spec.heads,
        value_heads=spec.heads,
        key_size=spec.head_size,
        value_size=spec.head_size,
        by_channels=True,
        bound=spec.bound,
    )


def _decaying(
    spec: DecayingStateSpec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]
) -> Any:
    """Linear attention whose heads decay at fixed rates."""
    if module.slope_rate.dtype != dtype:
        raise UnknownLayer(f"the rates of its {type(module).__name__} are {module.slope_rate.dtype}")
    return _native.DecayingState(
        qkv=linear(module, "qkv_proj"),
        gate=linear(module, "output_gate"),
        o=linear(module, "out_proj"),
        norm=norm(known(layer_spec.of_norm(module.norm)), module.norm, dtype),
        slopes=wide(module.slope_rate.flatten(), copies),
        heads=spec.heads,
        size=spec.head_size,
    )


def _convolution(module: Any, dtype: torch.dtype) -> Any:
    """A short convolution between gates."""
    if module.conv.bias is not None:
        raise UnknownLayer("its convolution has a bias")
    return _native.ShortConvolution(
        in_proj=linear(module, "in_proj"),
        out_proj=linear(module, "out_proj"),
        taps=_taps(module.conv, "conv", dtype),
    )


def _bias(module: Any, dtype: torch.dtype) -> Tensor | None:
    """That of a mixer's convolution, [channels]."""
    bias = module.conv1d.bias
    if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
        raise UnknownLayer(f"a tensor of its conv1d is {bias.dtype} or not contiguous")
    return None if bias is None else bias.detach()


def _mamba1(module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Mamba with norms of dt, B and C."""

    def norm_at(name: str) -> Any:
        child = module.get_submodule(name)
        return norm(known(layer_spec.of_norm(child)), child, dtype)

    return _native.Mamba1(
        **{name: linear(module, name) for name in ("in_proj", "out_proj")},
        **{name: projection(module, name) for name in ("x_proj", "dt_proj")},
        taps=_taps(module.conv1d, "conv1d", dtype),
        taps_bias=_bias(module, dtype),
        a_log=wide(module.A_log, copies),
        d=wide(module.D, copies),
        has_wide_d=module.D.dtype == torch.float32,
        dt_norm=norm_at("dt_layernorm"),
        b_norm=norm_at("b_layernorm"),
        c_norm=norm_at("c_layernorm"),
    )


def _mamba2(spec: Mamba2Spec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Mamba-2."""
    weight = module.norm.weight.detach()
    if weight.dtype != dtype or not weight.is_contiguous():
        raise UnknownLayer(f"a tensor of its norm is {weight.dtype} or not contiguous")
    return _native.Mamba2(
        in_proj=linear(module, "in_proj"),
        out_proj=linear(module, "out_proj"),
        taps=_taps(module.conv1d, "conv1d", dtype),
        taps_bias=_bias(module, dtype),
        a_log=wide(module.A_log, copies),
        dt_bias=wide(module.dt_bias, copies),
        d=wide(module.D, copies),
        has_wide_d=module.D.dtype == torch.float32,
        norm=_native.Norm(weight, spec.norm_epsilon),
        heads=spec.heads,
        groups=spec.groups,
        head_size=spec.head_size,
        state_size=spec.state_size,
    )
