"""Linear attention of a decode step with few kernels: the gated delta rule.

norm, input projections | convolution, gates, update of the state, gated norm | output projection
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ktinject.generation.cache import KVBucket
from ktinject.generation.consecutive import alone, in_rows, is_of_one_text
from ktinject.generation.cuda import delta_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.delta_ops import Projected, States, Weights
from ktinject.generation.cuda.projections import Step, project, weight_of
from ktinject.generation.layer_spec import GatedDeltaSpec
from ktinject.hf import compat

# (x [b, hidden], the layer's states, the step's cache) → what a mixer gives before its output projection [b, n].
Mix = Callable[[Tensor, "tuple[Tensor, ...]", KVBucket], Tensor]


class GatedDelta:
    """Linear attention by the gated delta rule."""

    def __init__(self, spec: GatedDeltaSpec, module: Any, block_counts: Tensor) -> None:
        self.spec, self.module, self.block_counts = spec, module, block_counts

    @classmethod
    def of(cls, spec: GatedDeltaSpec, module: Any, block_counts: Tensor) -> GatedDelta | None:
        """None for what the kernel does not serve. A norm and gates in fp32 are served, projections are not."""
        weight = module.conv1d.weight
        served = delta_ops.support(spec.key_size, spec.value_size, weight.shape[-1], weight.dtype)
        return cls(spec, module, block_counts) if served else None

    def __call__(self, x: Tensor, norm: Norm | None, states: States, cache: KVBucket) -> Tensor:
        """x [b, hidden] → the heads' outputs [b, heads · size], before the output projection.

        cache  of the step
        """
        module, spec = self.module, self.spec
        keys = spec.key_heads * spec.key_size
        if spec.is_interleaved:
            both = project(x, (module.in_proj_qkvz, module.in_proj_ba), norm, then=states.states)
            projected = Projected.of_groups(both[0], both[1], spec.key_size, spec.key_heads)
        else:
            linears = (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
            qkv, z, b, a = project(x, linears, norm, then=states.states)
            projected = Projected.of_parts(qkv, z, b, a, keys, spec.key_heads)
        gated_norm = Norm(module.norm.weight, spec.norm_epsilon)
        weights = Weights(module.conv1d.weight, module.A_log, module.dt_bias, gated_norm)
        then = weight_of(module.out_proj)

        def compute(rows: slice) -> Tensor:
            return delta_ops.gated_delta(projected.of_rows(rows), weights, states, self.block_counts, then)

        mixed: Tensor = in_rows(cache, spec.layer_idx, len(x), compute)
        return mixed


def states_of(
    layer_idx: int, count: int, hidden_states: Tensor, args: Any, kwargs: Any
) -> tuple[Tensor, ...] | None:
    """The `count` states of a layer of a captured step; None if the call is not one of a captured step."""
    held = compat.cache_of(kwargs)
    if not isinstance(held, KVBucket) or kwargs.get("attention_mask") is not None:
        return None
    if hidden_states.shape[1] != 1 or args:
        return None
    found = held.states_of(layer_idx)
    return found if len(found) == count else None


def state_step(module: Any, layer_idx: int, count: int, most: int | None, mix: Mix) -> Step:
    """The step of a mixer with so many states.

    most  rows that it computes at once; None: any number
    """
    own = functools.partial(type(module).forward, module)

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        states, cache = states_of(layer_idx, count, hidden_states, args, kwargs), compat.cache_of(kwargs)
        if states is None or (most is not None and len(hidden_states) > most):
            forward = alone(own, cache, layer_idx) if is_of_one_text(cache) else own
            return forward(hidden_states, *args, **kwargs)
        mixed = mix(hidden_states[:, 0].contiguous(), states, cache)
        [found] = project(mixed, [module.out_proj])
        return found[:, None]

    return step


def delta_step(spec: GatedDeltaSpec, module: Any, block_counts: Tensor) -> Step | None:
    attention = GatedDelta.of(spec, module, block_counts)
    if attention is None:
        return None

    def mix(x: Tensor, states: tuple[Tensor, ...], cache: KVBucket) -> Tensor:
        return attention(x, None, States(*states), cache)

    return state_step(module, spec.layer_idx, 2, len(block_counts) // spec.key_heads, mix)
