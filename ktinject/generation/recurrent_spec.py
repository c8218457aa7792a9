"""What layers compute whose tokens leave a state of fixed size: Mamba-2 and short convolutions.

Children are found by the names that transformers gives them. What they compute is compared in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ktinject.support import Support


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
class ShortConvolutionSpec:
    """C · convolution(B · x) between two linear layers, as LFM2 has it: in_proj gives B, C and x."""

    path: str
    layer_idx: int


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


def sizes_of(module: Any, names: Sequence[str]) -> tuple[list[int], float] | Support:
    """The whole numbers of these names that a module has, and the epsilon of its norm; or that one is missing."""
    sizes: list[Any] = [getattr(module, name, None) for name in names]
    epsilon = getattr(module.norm, "variance_epsilon", None)
    if not all(isinstance(size, int) for size in sizes) or not isinstance(epsilon, float):
        return Support.no(
            f"{type(module).__name__} has no {', '.join(names)}, or its norm no variance_epsilon"
        )
    return sizes, epsilon
