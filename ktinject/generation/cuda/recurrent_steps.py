"""Mamba-2 and short convolutions of a decode step with few kernels.

input projection | convolution, update of the state, norm | output projection
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ktinject.generation.cuda import delta_ops, recurrent_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.delta_ops import States
from ktinject.generation.cuda.delta_steps import states_of
from ktinject.generation.cuda.projections import Step, project, weight_of
from ktinject.generation.cuda.recurrent_ops import Mamba2Weights
from ktinject.generation.recurrent_spec import Mamba2Spec, ShortConvolutionSpec


def mamba2_step(spec: Mamba2Spec, module: Any, block_counts: Tensor) -> Step | None:
    taps = module.conv1d.weight
    if not recurrent_ops.mamba2_support(spec.head_size, spec.state_size, taps.shape[-1], taps.dtype):
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = states_of(spec.layer_idx, 2, hidden_states, args, kwargs)
        if states is None or len(hidden_states) * spec.groups > len(block_counts):
            return own(module, hidden_states, *args, **kwargs)
        norm = Norm(module.norm.weight, spec.norm_epsilon)
        convolution = module.conv1d.weight, module.conv1d.bias
        weights = Mamba2Weights(*convolution, module.A_log, module.dt_bias, module.D, norm)
        then = weight_of(module.out_proj)
        [projected] = project(hidden_states[:, 0].contiguous(), [module.in_proj], then=states[1])
        mixed = recurrent_ops.mamba2(projected, weights, States(*states), spec.groups, block_counts, then)
        [found] = project(mixed, [module.out_proj])
        return found[:, None]

    return step


def short_convolution_step(spec: ShortConvolutionSpec, module: Any) -> Step | None:
    taps = module.conv.weight
    if not delta_ops.convolution_support(taps.shape[-1], taps.dtype):
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states = states_of(spec.layer_idx, 1, hidden_states, args, kwargs)
        if states is None:
            return own(module, hidden_states, *args, **kwargs)
        then = weight_of(module.out_proj)
        [projected] = project(hidden_states[:, 0].contiguous(), [module.in_proj], then=then)
        mixed = recurrent_ops.short_convolution(projected, module.conv.weight, module.conv.bias, states[0])
        [found] = project(mixed, [module.out_proj])
        return found[:, None]

    return step
