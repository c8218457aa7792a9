"""Decode steps with few kernels, one for each kind of spec. `fused.py` compares them with the modules and uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.generation.compressed_spec import CompressorSpec, SharedKeyAttentionSpec
from ktinject.generation.cuda import compressed_steps, decode_ops, delta_steps
from ktinject.generation.cuda.attention_steps import attention_of, attention_step, cache_of
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.generation.cuda.delta_ops import States
from ktinject.generation.cuda.delta_steps import GatedDelta, delta_step
from ktinject.generation.cuda.feed_forward_steps import Routed, moe_step, router_step
from ktinject.generation.cuda.projections import Step, norm_of, project
from ktinject.generation.cuda.recurrent_steps import mamba2_step, short_convolution_step
from ktinject.generation.cuda.streams_steps import connection_step, streams_layer_step, token_routed_step
from ktinject.generation.feed_forward_spec import MoeSpec, RouterSpec
from ktinject.generation.layer_spec import (
    AttentionSpec,
    DecoderLayerSpec,
    GatedDeltaSpec,
    GroupedAttentionSpec,
    LatentAttentionSpec,
    NormSpec,
    PartSpec,
    RotationSpec,
)
from ktinject.generation.recurrent_spec import (
    DecayingStateSpec,
    KimiDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    ShortConvolutionSpec,
)
from ktinject.generation.streams_spec import HyperConnectionSpec, StreamsLayerSpec, TokenRoutedSpec
from ktinject.hf import compat


def step_of(spec: PartSpec, module: Any, block_counts: Tensor) -> Step | None:
    """A function that replaces a module's forward in a captured decode step; None if there are no kernels for it.

    spec          what the module computes
    block_counts  as `decode_ops.attend`, `delta_ops.gated_delta` and `recurrent_ops.mamba2` take them
    """
    if isinstance(spec, NormSpec):
        return _norm_step(spec, module)
    if isinstance(spec, (GroupedAttentionSpec, LatentAttentionSpec)):
        return attention_step(spec, module, block_counts)
    if isinstance(spec, GatedDeltaSpec):
        return delta_step(spec, module, block_counts)
    if isinstance(spec, Mamba2Spec):
        return mamba2_step(spec, module, block_counts)
    if isinstance(spec, ShortConvolutionSpec):
        return short_convolution_step(spec, module)
    if isinstance(spec, RouterSpec):
        return router_step(spec, module)
    if isinstance(spec, RotationSpec):
        return _rotation_step(spec, module)
    if isinstance(spec, HyperConnectionSpec):
        return connection_step(spec, module, block_counts)
    if isinstance(spec, SharedKeyAttentionSpec):
        return compressed_steps.attention_step(spec, module)
    if isinstance(spec, CompressorSpec):
        make = compressed_steps.indexer_step if spec.name == "indexer" else compressed_steps.compressor_step
        return make(spec, module)
    if isinstance(spec, TokenRoutedSpec):
        return token_routed_step(spec, module)
    if isinstance(spec, StreamsLayerSpec):
        return streams_layer_step(module)
    if isinstance(spec, DecoderLayerSpec):
        return LayerStep.of(spec, module, block_counts)
    return moe_step(spec, module) if isinstance(spec, MoeSpec) else None


def _rotation_step(spec: RotationSpec, module: Any) -> Step:
    own = type(module).forward

    def step(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() == 3 and position_ids.stride(0) == 0:
            position_ids = position_ids[0]  # one position for all axes, as a recorded step has it
        if position_ids.shape[-1] != 1 or position_ids.dim() != 2 or args or kwargs:
            return own(module, x, position_ids, *args, **kwargs)
        return decode_ops.rotation(position_ids.contiguous(), module.inv_freq.float(), spec.scale, x.dtype)

    return step


def _norm_step(spec: NormSpec, module: nn.Module) -> Step | None:
    norm = norm_of(spec, module)
    if norm is None:
        return None

    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a gate
            return own(module, hidden_states, *args, **kwargs)
        if not norm.takes(hidden_states.dtype):
            raise ValueError(f"found {hidden_states.dtype}, the weight is {norm.weight.dtype}")
        return decode_ops.rms_norm(hidden_states, norm)

    return step


# (hidden_states [b, 1, hidden], the norm before, other arguments of the layer) → what a layer's attention gives before
# its output projection [b, n], and this projection; None if the call is not one of a captured step.
_Mixer = Callable[[Tensor, Norm, Any, Any], "tuple[Tensor, nn.Module] | None"]


def _mixer_of(spec: AttentionSpec | GatedDeltaSpec, module: Any, block_counts: Tensor) -> _Mixer | None:
    if isinstance(spec, GatedDeltaSpec):
        delta = GatedDelta.of(spec, module, block_counts)

        def by_states(hidden_states: Tensor, norm: Norm, args: Any, kwargs: Any) -> Any:
            assert delta is not None
            states = delta_steps.states_of(spec.layer_idx, 2, hidden_states, args, kwargs)
            if states is None:
                return None
            x = hidden_states[:, 0].contiguous()
            return delta(x, norm, States(*states), compat.cache_of(kwargs)), module.out_proj

        return None if delta is None else by_states
    attention = attention_of(spec, module, block_counts)

    def by_keys(hidden_states: Tensor, norm: Norm, args: Any, kwargs: Any) -> Any:
        assert attention is not None
        cache = cache_of(spec, module, hidden_states, args, kwargs)
        if cache is None:
            return None
        x = hidden_states[:, 0].contiguous()
        return attention(x, norm, kwargs["position_embeddings"], cache), module.o_proj

    return None if attention is None else by_keys


class LayerStep:
    """The step of a whole decoder layer: norm, attention, residual, norm, MoE block or dense layers, residual.

    routed   its MoE block, if that has a step of its own
    behind   the norm before the block
    """

    def __init__(
        self, module: Any, mlp: Any, mixer: _Mixer, before: Norm, behind: Norm, routed: Routed | None
    ) -> None:
        self._module, self._mlp, self._mixer, self._before = module, mlp, mixer, before
        self.behind, self.routed = behind, routed

    @classmethod
    def of(cls, spec: DecoderLayerSpec, module: Any, block_counts: Tensor) -> LayerStep | None:
        attention, unit = spec.attention, spec.feed_forward
        if attention is None or unit is None or spec.input_norm is None or spec.post_attention_norm is None:
            return None
        if isinstance(
            attention, (DecayingStateSpec, KimiDeltaSpec, Mamba1Spec, Mamba2Spec, ShortConvolutionSpec)
        ):
            return None  # it has a step of its own, or none
        if spec.residual != 1.0 or spec.sums is not None or not unit.path:
            return None
        if isinstance(unit, MoeSpec) and "." in unit.experts:
            return None  # a block in a block, which gives logits along
        if spec.attention_behind or spec.feed_forward_behind:
            return None
        before, behind = norm_of(spec.input_norm, module), norm_of(spec.post_attention_norm, module)
        mixer = _mixer_of(attention, module.get_submodule(attention.path), block_counts)
        mlp = module.get_submodule(unit.path)
        if before is None or behind is None or mixer is None or before.weight.dtype == torch.float32:
            return None
        routed = Routed.of(unit, mlp) if isinstance(unit, MoeSpec) else None
        return cls(module, mlp, mixer, before, behind, routed)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed = None
        if len(hidden_states) <= decode_ops.MOST_ROWS:
            mixed = self._mixer(hidden_states, self._before, args, kwargs)
        if mixed is None:
            return type(self._module).forward(self._module, hidden_states, *args, **kwargs)
        x, then = hidden_states[:, 0].contiguous(), None if self.routed is None else self.routed.gate.weight
        [x] = project(mixed[0], [mixed[1]], residual=x, then=then)
        if self.routed is not None and x.shape[1] % 32 == 0:
            return self.routed(x, self.behind)[:, None]
        return x[:, None] + self._mlp(decode_ops.rms_norm(x, self.behind)[:, None])


def connect(steps: Iterable[Step]) -> None:
    """Tell each MoE block of these steps, in the order of the layers, which one follows, if it chooses by softmax."""
    layers = [step for step in steps if isinstance(step, LayerStep) and step.routed is not None]
    for one, then in pairwise(layers):
        assert one.routed is not None and then.routed is not None
        if then.routed.router is None:
            one.routed.next = then.routed, then.behind
