"""Mamba-2 and short convolutions of a decode step with few kernels.

input projection | convolution, update of the state, norm | output projection
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ktinject.generation.cache import KVBucket
from ktinject.generation.consecutive import in_rows
from ktinject.generation.cuda import delta_ops, recurrent_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.delta_ops import States
from ktinject.generation.cuda.delta_steps import state_step
from ktinject.generation.cuda.projections import Step, project, weight_of
from ktinject.generation.cuda.recurrent_ops import Mamba2Weights
from ktinject.generation.recurrent_spec import Mamba2Spec, ShortConvolutionSpec


def mamba2_step(spec: Mamba2Spec, module: Any, block_counts: Tensor) -> Step | None:
    taps = module.conv1d.weight
    if not recurrent_ops.mamba2_support(spec.head_size, spec.state_size, taps.shape[-1], taps.dtype):
        return None

    def mix(x: Tensor, states: tuple[Tensor, ...], cache: KVBucket) -> Tensor:
        norm = Norm(module.norm.weight, spec.norm_epsilon)
        convolution = module.conv1d.weight, module.conv1d.bias
        weights = Mamba2Weights(*convolution, module.A_log, module.dt_bias, module.D, norm)
        then = weight_of(module.out_proj)
        [projected] = project(x, [module.in_proj], then=states[1])

        def compute(rows: slice) -> Tensor:
            part, held = projected[rows], States(*states)
            return recurrent_ops.mamba2(part, weights, held, spec.groups, block_counts, then)

        mixed: Tensor = in_rows(cache, spec.layer_idx, len(x), compute)
        return mixed

    return state_step(module, spec.layer_idx, 2, len(block_counts) // spec.groups, mix)


def short_convolution_step(spec: ShortConvolutionSpec, module: Any) -> Step | None:
    taps = module.conv.weight
    if not delta_ops.convolution_support(taps.shape[-1], taps.dtype):
        return None

    def mix(x: Tensor, states: tuple[Tensor, ...], cache: KVBucket) -> Tensor:
        [projected] = project(x, [module.in_proj], then=weight_of(module.out_proj))

        def compute(rows: slice) -> Tensor:
            weight, bias = module.conv.weight, module.conv.bias
            return recurrent_ops.short_convolution(projected[rows], weight, bias, states[0])

        mixed: Tensor = in_rows(cache, spec.layer_idx, len(x), compute)
        return mixed

    return state_step(module, spec.layer_idx, 1, None, mix)
