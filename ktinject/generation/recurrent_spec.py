"""What layers compute whose tokens leave a state of fixed size: the gated delta rule, Mamba and short convolutions.

Children are found by the names that transformers gives them. What they compute is compared in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktinject.generation import layer_probes
from ktinject.support import Support


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Linear attention by the gated delta rule, with the formula of native/attention/gated_delta.hpp.

    key_size, value_size  of a head
    norm_epsilon          of the gated norm of a head's values
    is_interleaved        in_proj_qkvz and in_proj_ba give one head of keys after the other (Qwen3-Next); else there are
                          in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5)
    """

    path: str
    layer_idx: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    norm_epsilon: float
    is_interleaved: bool


@dataclass(frozen=True)
class KimiDeltaSpec:
    """The same by channels: each value of a key has a decay of its own (Kimi Linear, GLM-5.3-Flash).

    head_size     of keys and of values
    norm_epsilon  of the gated norm of a head's values
    bound         of the logarithm of decays, as native/attention/gated_delta.hpp has it; 0.0: there is none
    """

    path: str
    layer_idx: int
    heads: int
    head_size: int
    norm_epsilon: float
    bound: float = 0.0


@dataclass(frozen=True)
class Mamba1Spec:
    """Mamba with norms of dt, B and C, as Jamba has it: the formula of native/attention/mamba1.hpp.

    values      channels, each of which has a state of `state_size` values and a time step of its own
    rank        of what gives the time steps
    """

    path: str
    layer_idx: int
    values: int
    rank: int
    state_size: int


@dataclass(frozen=True)
class Mamba2Spec:
    """Mamba-2, with the formula of native/cuda/decode_recurrent.hpp.

    groups        of heads, which share B, C and the mean of the norm
    head_size     values of a head; each has a state of `state_size` values
    norm_epsilon  of the gated norm
    """

    path: str
    layer_idx: int
    heads: int
    groups: int
    head_size: int
    state_size: int
    norm_epsilon: float


@dataclass(frozen=True)
class DecayingStateSpec:
    """Linear attention whose heads forget at fixed rates, with the formula of native/attention/decaying_state.hpp.

    head_size  of queries, keys and values
    """

    path: str
    layer_idx: int
    heads: int
    head_size: int


@dataclass(frozen=True)
class ShortConvolutionSpec:
    """C · convolution(B · x) between two linear layers, as LFM2 has it: in_proj gives B, C and x."""

    path: str
    layer_idx: int


_DELTA = [
    {"conv1d", "norm", "out_proj", *projections}
    for projections in (
        ("in_proj_qkvz", "in_proj_ba"),
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    )
]
_KIMI_DELTA = {"conv1d", "forget_gate", "o_norm", "b_proj", "g_a_proj", "g_b_proj"} | {
    f"{name}_proj" for name in "qkvo"
}


def of_linear_attention(module: Any) -> GatedDeltaSpec | Support:
    """The spec of linear attention, with an empty path. Its users compare it in the first step."""
    children, parameters = held(module)
    if children not in _DELTA or parameters != {"A_log", "dt_bias"}:
        return not_known(module, "the gated delta rule")
    names = ("layer_idx", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    found = sizes_of(module, names)
    if isinstance(found, Support):
        return found
    convolution = module.conv1d
    is_known = type(convolution) is nn.Conv1d and convolution.bias is None
    if not is_known or [name for name, _ in module.norm.named_parameters()] != ["weight"]:
        return Support.no(f"{type(module).__name__} has a conv1d with a bias, or a norm that is not known")
    (index, key_heads, value_heads, key_size, value_size), epsilon = found
    return GatedDeltaSpec(
        "", index, key_heads, value_heads, key_size, value_size, epsilon, children == _DELTA[0]
    )


def of_kimi_delta(module: Any) -> KimiDeltaSpec | Support:
    """The spec of Kimi Linear's delta attention, with an empty path."""
    children, parameters = held(module)
    if children != _KIMI_DELTA or parameters:
        return not_known(module, "Kimi Linear's delta attention")
    found = sizes_of(module, ("layer_idx", "num_heads", "head_dim"), module.o_norm)
    if isinstance(found, Support):
        return found
    (index, heads, head_size), epsilon = found
    if type(module.conv1d) is not nn.Conv1d or module.conv1d.bias is not None:
        return Support.no(f"{type(module).__name__} has a conv1d with a bias, or another convolution")
    bound = layer_probes.forget_gate(module.forget_gate, heads, head_size)
    if isinstance(bound, Support):
        return bound
    gated = layer_probes.is_norm_gated_by_sigmoid(module.o_norm, head_size, epsilon)
    return KimiDeltaSpec("", index, heads, head_size, epsilon, bound) if gated else gated


_MAMBA1 = {"conv1d", "in_proj", "x_proj", "dt_proj", "out_proj", "dt_layernorm", "b_layernorm", "c_layernorm"}


def of_mamba1(module: Any) -> Mamba1Spec | Support:
    """The spec of a Mamba mixer, with an empty path."""
    children, parameters = held(module)
    if children - {"act"} != _MAMBA1 or parameters != {"A_log", "D"}:
        return not_known(module, "Mamba with norms of dt, B and C")
    names = ("layer_idx", "intermediate_size", "time_step_rank", "ssm_state_size")
    sizes: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return Support.no(f"{type(module).__name__} has no {', '.join(names)}")
    if type(module.conv1d) is not nn.Conv1d:
        return Support.no(f"{type(module).__name__} has another convolution")
    return Mamba1Spec("", *sizes)


def of_mamba2(module: Any) -> Mamba2Spec | Support:
    """The spec of a Mamba-2 mixer, with an empty path."""
    children, parameters = held(module)
    if children - {"act"} != {"conv1d", "in_proj", "norm", "out_proj"} or parameters != {
        "A_log",
        "D",
        "dt_bias",
    }:
        return not_known(module, "Mamba-2")
    found = sizes_of(module, ("layer_idx", "num_heads", "n_groups", "head_dim", "ssm_state_size"))
    if isinstance(found, Support):
        return found
    (index, heads, groups, head_size, state_size), epsilon = found
    norm, values = module.norm, heads * head_size
    is_grouped = getattr(norm, "group_size", values) * groups == values
    if type(module.conv1d) is not nn.Conv1d or held(norm) != (set(), {"weight"}) or not is_grouped:
        return Support.no(f"{type(module).__name__} has another convolution, or a norm of other groups")
    return Mamba2Spec("", index, heads, groups, head_size, state_size, epsilon)


_DECAYING = {"qkv_proj", "out_proj", "output_gate", "norm"}


def of_decaying_state(module: Any) -> DecayingStateSpec | Support:
    """The spec of lightning attention, with an empty path."""
    children, parameters = held(module)
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    known = {"slope_rate", "query_decay", "key_decay", "diagonal_decay"}
    if children - {"act_fn"} != _DECAYING or parameters or not {"slope_rate"} <= buffers <= known:
        return not_known(module, "attention whose heads decay at fixed rates")
    names = ("layer_idx", "num_attention_heads", "head_dim")
    sizes: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(size, int) for size in sizes) or module.slope_rate.shape != (sizes[1], 1, 1):
        return Support.no(f"{type(module).__name__} has no {', '.join(names)}, or not one rate of each head")
    return DecayingStateSpec("", *sizes)


def finder(module: nn.Module) -> Callable[[Any], Any] | None:
    """What finds the spec of a layer that a module looks like; None: it does not look like one with states."""
    children, _ = held(module)
    if {"qkv_proj", "output_gate"} <= children:
        return of_decaying_state
    if "forget_gate" in children:
        return of_kimi_delta
    if "in_proj_qkvz" in children or "in_proj_qkv" in children:
        return of_linear_attention
    if {"in_proj", "x_proj", "dt_proj"} <= children:
        return of_mamba1
    if "in_proj" in children and children & {"conv1d", "conv"}:
        return of_mamba2 if "conv1d" in children else of_short_convolution
    return None


def of_short_convolution(module: Any) -> ShortConvolutionSpec | Support:
    """The spec of a short convolution, with an empty path."""
    children, parameters = held(module)
    index = getattr(module, "layer_idx", None)
    if children != {"conv", "in_proj", "out_proj"} or parameters or not isinstance(index, int):
        return not_known(module, "a short convolution")
    if type(module.conv) is not nn.Conv1d or module.conv.groups != module.conv.in_channels:
        return Support.no(f"{type(module).__name__} has another convolution than one of each channel")
    return ShortConvolutionSpec("", index)


def held(module: nn.Module) -> tuple[set[str], set[str]]:
    """The names of a module's own children and parameters."""
    return (
        {name for name, _ in module.named_children()},
        {name for name, _ in module.named_parameters(recurse=False)},
    )


def not_known(module: nn.Module, known: str) -> Support:
    """That a module holds something else than what is known."""
    children, parameters = held(module)
    names = ", ".join(sorted(children | parameters))
    return Support.no(f"{type(module).__name__} holds {names}; known is {known}")


def sizes_of(module: Any, names: Sequence[str], norm: Any = None) -> tuple[list[int], float] | Support:
    """The whole numbers of these names that a module has, and the epsilon of its norm; or that one is missing."""
    sizes: list[Any] = [getattr(module, name, None) for name in names]
    epsilon = getattr(module.norm if norm is None else norm, "variance_epsilon", None)
    if not all(isinstance(size, int) for size in sizes) or not isinstance(epsilon, float):
        return Support.no(
            f"{type(module).__name__} has no {', '.join(names)}, or its norm no variance_epsilon"
        )
    return sizes, epsilon
