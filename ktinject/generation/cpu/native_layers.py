"""The native twin of a model's decoder layers, built from their specs.

It takes layers whose spec is known (layer_spec.py) and whose matrices are in `cpu_linear`, `cpu_router` and experts on
the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import layer_spec, masks
from ktinject.generation.cache_layers import LayerKind, kinds_of
from ktinject.generation.cpu import native_ends
from ktinject.generation.cpu.native_feed_forward import feed_forward
from ktinject.generation.cpu.native_parts import UnknownLayer, child_of, known, linear, norm, wide
from ktinject.generation.cpu.native_rotation import Rotations
from ktinject.generation.indexer_spec import IndexerSpec
from ktinject.generation.layer_spec import GatedDeltaSpec, GroupedAttentionSpec, LatentAttentionSpec
from ktinject.generation.recurrent_spec import Mamba2Spec, ShortConvolutionSpec
from ktinject.hf import adapters
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.cpu_linear import CpuLinear

# The dtypes of models that are served, and a unit in their last place.
LAST_PLACE = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}


# How transformers computes attention, and so what masks it makes, in models that are served.
_ATTENTION = ("sdpa", "eager")
_WITH_STATES = (GatedDeltaSpec, Mamba2Spec, ShortConvolutionSpec)


class NativeLayers:
    """What a model is made of, and its native twin.

    masks    how the model is given the masks of a step
    copies   what the twin does not read where the model has it: its own, and the model's
    """

    def __init__(self, model: Any) -> None:
        implementation = model.config.get_text_config()._attn_implementation
        if implementation not in _ATTENTION:
            both = " and ".join(map(repr, _ATTENTION))
            raise UnknownLayer(f"attention runs as {implementation!r}; known are {both}")
        # Of a model of text and images, the part that a step of text runs; else the model without its output layer.
        self.path = native_ends.language_path(model)
        self.module = model.get_submodule(self.path)
        self.embed = child_of(self.module, "embed_tokens", nn.Embedding, "the model")
        self.layers = child_of(self.module, "layers", nn.ModuleList, "the model")
        rotary = "pos_emb" if hasattr(self.module, "pos_emb") else "rotary_emb"
        # None of a model that does without; that it has no such attribute may mean that it calls it otherwise.
        has_none = hasattr(self.module, rotary) and getattr(self.module, rotary) is None
        self.rotary = None if has_none else child_of(self.module, rotary, nn.Module, "the model")
        child_of(model, "lm_head", nn.Module, "the model")
        last = "embedding_norm" if hasattr(self.module, "embedding_norm") else "norm"
        extra = {name for name, _ in self.module.named_children()} - {"embed_tokens", "layers", rotary, last}
        if extra:
            raise UnknownLayer(f"the model also holds {', '.join(sorted(extra))}")
        weight = self.embed.weight
        if weight.dtype not in LAST_PLACE:
            raise UnknownLayer(f"the model is {weight.dtype}")
        last_norm = child_of(self.module, last, nn.Module, "the model")
        self.norm = norm(known(layer_spec.of_norm(last_norm)), last_norm, weight.dtype)
        self.decoder = _native.Decoder(weight.shape[1], str(weight.dtype).removeprefix("torch."))
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.kinds = kinds_of(model.config)
        if len(self.kinds) != len(self.layers):
            raise UnknownLayer(f"its cache has {len(self.kinds)} layers, the model {len(self.layers)}")
        self.rotations = Rotations(self.rotary, model.config, weight[:1, None])
        for index, (layer, kind) in enumerate(zip(self.layers, self.kinds)):
            try:
                angles = self.rotations.columns(index)
                self.decoder.add(*_layer(layer, kind, weight.dtype, self.copies, angles))
            except (UnknownLayer, ValueError) as error:
                raise UnknownLayer(f"layer {index}: {error}") from None
        self.masks = known(masks.of_model(model))
        self._read_as = native_ends.read_as(model, self.path, self.embed.num_embeddings)
        self._embedding_scale = native_ends.embedding_scale(self.module)
        self._logits_scale = native_ends.logits_scale(model)

    def embedded(self, ids: Tensor) -> Tensor:
        """[b, 1] ids → [b, 1, hidden], as the model's first layer gets them."""
        found: Tensor = self.embed(ids if self._read_as is None else self._read_as[ids])
        return self._embedding_scale(found)

    def logits(self, model: Any, x: Tensor) -> Tensor:
        """[..., hidden] behind the last norm → [..., v]"""
        found: Tensor = model.lm_head(x)
        return self._logits_scale(found)

    def __len__(self) -> int:
        return len(self.layers)


def _layer(
    layer: nn.Module,
    kind: LayerKind,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
    angles: tuple[int, int],
) -> tuple[Any, ...]:
    """What `_native.Decoder.add` takes for a layer. angles: the columns of the rotation that are its kind's."""
    spec = known(layer_spec.of_layer(layer))
    attention: Any = layer.get_submodule(spec.attention.path)
    chooses = isinstance(spec.attention, LatentAttentionSpec) and spec.attention.latent.chooses != "none"
    if isinstance(spec.attention, _WITH_STATES) != kind.is_state or kind.indexed != chooses:
        raise UnknownLayer(f"its cache is not what a {type(attention).__name__} needs")
    if kind.is_chunked:
        raise UnknownLayer("its attention is chunked")
    if isinstance(spec.attention, GatedDeltaSpec):
        native = _delta(spec.attention, attention, dtype, copies)
    elif isinstance(spec.attention, ShortConvolutionSpec):
        native = _convolution(attention, dtype)
    elif isinstance(spec.attention, Mamba2Spec):
        native = _mamba2(spec.attention, attention, dtype, copies)
    elif isinstance(spec.attention, LatentAttentionSpec):
        if kind.window is not None:
            raise UnknownLayer("its latent attention has a window")
        native = _latent(spec.attention, attention, dtype)
    else:
        native = _grouped(spec.attention, attention, kind.window, dtype, copies)
    turns_nothing = isinstance(spec.attention, GroupedAttentionSpec) and spec.attention.turning.is_none
    return (
        norm(spec.input_norm, layer, dtype),
        native,
        norm(spec.post_attention_norm, layer, dtype),
        feed_forward(spec.feed_forward, layer.get_submodule(spec.feed_forward.path), dtype, copies),
        spec.residual,
        *(norm(one, layer, dtype) for one in spec.norms_behind),
        *((0, 0) if turns_nothing else angles),
    )


def _grouped(
    spec: GroupedAttentionSpec,
    module: Any,
    window: int | None,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
) -> Any:
    """Attention with projections to heads, and maybe a norm of queries and keys by heads."""
    q, k = child_of(module, "q_proj", CpuLinear), child_of(module, "k_proj", CpuLinear)
    sinks = wide(module.get_parameter("sinks"), copies) if spec.has_sinks else None
    size = spec.head_size * (2 if spec.has_output_gate else 1)
    groups = k.out_features // spec.head_size
    return _native.GroupedAttention(
        q=q.native,
        k=k.native,
        v=linear(module, "v_proj"),
        o=linear(module, spec.output),
        q_norm=None if spec.q_norm is None else norm(spec.q_norm, module, dtype),
        k_norm=None if spec.k_norm is None else norm(spec.k_norm, module, dtype),
        heads=q.out_features // size,
        groups=groups,
        size=spec.head_size,
        scale=spec.scaling,
        window=window or 0,
        sinks=sinks,
        gated=spec.has_output_gate,
        neighbours=spec.turning.by_neighbours,
        norms_last=spec.turning.before_norms,
        value=child_of(module, "v_proj", CpuLinear).out_features // groups,
        value_scale=spec.outputs.scale,
        gate=linear(module, spec.gate) if spec.gate else None,
        has_softplus=spec.outputs.gate == "softplus",
    )


def _delta(spec: GatedDeltaSpec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Linear attention by the gated delta rule."""
    taps = module.conv1d.weight.detach()
    if taps.dtype != dtype or not taps.is_contiguous():
        raise UnknownLayer(f"the weight of its conv1d is {taps.dtype}")
    weight = module.norm.weight.detach()
    if weight.dtype != dtype or not weight.is_contiguous():
        raise UnknownLayer(f"a {type(module.norm).__name__} is no RMS norm of the model's dtype")
    in_two = spec.is_interleaved
    return _native.GatedDelta(
        qkv=linear(module, "in_proj_qkvz" if in_two else "in_proj_qkv"),
        ba=linear(module, "in_proj_ba" if in_two else "in_proj_b"),
        z=None if in_two else linear(module, "in_proj_z"),
        a=None if in_two else linear(module, "in_proj_a"),
        o=linear(module, "out_proj"),
        taps=taps[:, 0],
        a_log=wide(module.A_log, copies),
        dt_bias=wide(module.dt_bias, copies),
        norm=_native.Norm(weight, spec.norm_epsilon),
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        key_size=spec.key_size,
        value_size=spec.value_size,
    )


def _convolution(module: Any, dtype: torch.dtype) -> Any:
    """A short convolution between gates."""
    convolution, taps = module.conv, module.conv.weight.detach()
    if convolution.bias is not None or convolution.stride != (1,) or convolution.dilation != (1,):
        raise UnknownLayer("its convolution has a bias, strides or gaps")
    if taps.dtype != dtype or not taps.is_contiguous():
        raise UnknownLayer(f"the weight of its conv is {taps.dtype}")
    return _native.ShortConvolution(
        in_proj=linear(module, "in_proj"), out_proj=linear(module, "out_proj"), taps=taps[:, 0]
    )


def _mamba2(spec: Mamba2Spec, module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Mamba-2."""
    convolution = module.conv1d
    taps, bias, weight = convolution.weight.detach(), convolution.bias, module.norm.weight.detach()
    if convolution.stride != (1,) or convolution.dilation != (1,):
        raise UnknownLayer("its convolution has strides or gaps")
    for name, tensor in (("conv1d", taps), ("conv1d", bias), ("norm", weight)):
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            raise UnknownLayer(f"a tensor of its {name} is {tensor.dtype} or not contiguous")
    return _native.Mamba2(
        in_proj=linear(module, "in_proj"),
        out_proj=linear(module, "out_proj"),
        taps=taps[:, 0],
        taps_bias=None if bias is None else bias.detach(),
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


def _latent(spec: LatentAttentionSpec, module: AbsorbedMla, dtype: torch.dtype) -> Any:
    latent, low = spec.latent, spec.q_norm is not None
    if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.weight.dtype != dtype:
        raise UnknownLayer(f"its kv_b_proj is a {type(module.kv_b_proj).__name__} of another dtype")
    if not module.kv_b_proj.weight.is_contiguous():
        raise UnknownLayer("the weight of its kv_b_proj is not contiguous")
    if latent.rope not in ("halves", "neighbours", "complex"):
        raise UnknownLayer(f"it rotates by {latent.rope}")
    return _native.LatentAttention(
        q=None if low else linear(module, "q_proj"),
        q_a=linear(module, "q_a_proj") if low else None,
        q_norm=None if spec.q_norm is None else norm(spec.q_norm, module, dtype),
        q_b=linear(module, "q_b_proj") if low else None,
        kv=linear(module, "kv_a_proj_with_mqa"),
        kv_norm=norm(spec.kv_norm, module, dtype),
        expansion=module.kv_b_proj.weight.detach(),
        o=linear(module, "o_proj"),
        heads=latent.num_heads,
        rank=latent.kv_lora_rank,
        nope=latent.qk_nope_head_dim,
        rope=latent.qk_rope_head_dim,
        value=latent.v_head_dim,
        neighbours=latent.rope == "neighbours",
        scale=latent.scaling,
        stays=latent.rope == "complex",
        indexer=None if spec.indexer is None else _indexer(spec.indexer, module.indexer, dtype),
        chooses=latent.chooses != "none",
    )


def _indexer(spec: IndexerSpec, module: Any, dtype: torch.dtype) -> Any:
    """What chooses the places that latent attention attends to."""
    weight, bias = (tensor.detach() for tensor in (module.k_norm.weight, module.k_norm.bias))
    if weight.dtype != dtype or bias.dtype != dtype:
        raise UnknownLayer(f"the norm of its {type(module).__name__} is {weight.dtype}")
    return _native.Indexer(
        q=_projection(module, "wq_b"),
        k=_projection(module, "wk"),
        weights=_projection(module, "weights_proj"),
        norm_weight=weight,
        norm_bias=bias,
        epsilon=spec.epsilon,
        heads=spec.heads,
        size=spec.size,
        rotary=spec.rotary,
        top_k=spec.top_k,
        neighbours=spec.rope == "neighbours",
    )


def _projection(module: Any, name: str) -> Any:
    """A linear layer that is packed, or one of torch's."""
    layer = adapters.unadapted(getattr(module, name))
    if isinstance(layer, CpuLinear):
        return _native.Projection(linear=layer.native)
    if type(layer) is not nn.Linear or layer.bias is not None or not layer.weight.is_contiguous():
        raise UnknownLayer(f"its {name} is a {type(layer).__name__} that is not known")
    return _native.Projection(weight=layer.weight.detach())
