"""The native twin of a model's decoder layers, built from their specs.

It takes layers whose spec is known (layer_spec.py) and whose matrices are in `cpu_linear`, `cpu_router` and experts on
the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import compressed_probe, layer_spec, masks, streams_spec
from ktinject.generation.attention_probes import GATE_BIAS
from ktinject.generation.block_index_spec import BlockIndexSpec
from ktinject.generation.cache_layers import LayerKind, kinds_of
from ktinject.generation.cpu import native_ends, native_indexers, native_streams
from ktinject.generation.cpu.native_feed_forward import feed_forward
from ktinject.generation.cpu.native_parts import (
    UnknownLayer,
    child_of,
    known,
    linear,
    norm,
    projection,
    wide,
)
from ktinject.generation.cpu.native_rotation import Rotations
from ktinject.generation.cpu.native_states import state_twin
from ktinject.generation.layer_spec import (
    AttentionSpec,
    GroupedAttentionSpec,
    LatentAttentionSpec,
    NormSpec,
    StateSpec,
)
from ktinject.generation.layer_sums import Sums
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.probes.latent_formula import GATE

# The dtypes of models that are served, and a unit in their last place.
LAST_PLACE = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}


# How transformers computes attention, and so what masks it makes, in models that are served.
_ATTENTION = ("sdpa", "eager")
# What the module that owns a model's layers calls its embeddings, rotary embedding and last norm.
_EMBEDDINGS = ("embed_tokens", "embeddings")
_ROTARIES = ("rotary_emb", "pos_emb")
_LAST_NORMS = ("norm", "embedding_norm", "norm_f", "final_layernorm")


class NativeLayers:
    """What a model is made of, and its native twin.

    masks    how the model is given the masks of a step
    copies   what the twin does not read where the model has it: its own, and the model's
    least_compared
             tokens behind which a step shows what all layers do
    """

    def __init__(self, model: Any) -> None:
        implementation = model.config.get_text_config()._attn_implementation
        if implementation not in _ATTENTION:
            both = " and ".join(map(repr, _ATTENTION))
            raise UnknownLayer(f"attention runs as {implementation!r}; known are {both}")
        # Of a model of text and images, the part that a step of text runs; else the model without its output layer.
        self.path = native_ends.language_path(model)
        self.module = model.get_submodule(self.path)
        held = {name for name, _ in self.module.named_children()}
        embed, rotary, last = (
            next((name for name in names if name in held), names[0])
            for names in (_EMBEDDINGS, _ROTARIES, _LAST_NORMS)
        )
        self.embed = child_of(self.module, embed, nn.Embedding, "the model")
        self.layers = child_of(self.module, "layers", nn.ModuleList, "the model")
        self._head_path = native_ends.head_path(model, self.path)
        self.streams = native_streams.count(self.layers)
        if extra := held - {embed, "layers", rotary, last, *native_streams.heads(self.streams)}:
            raise UnknownLayer(f"the model also holds {', '.join(sorted(extra))}")
        self.rotary = child_of(self.module, rotary, nn.Module, "the model") if rotary in held else None
        weight = self.embed.weight
        if weight.dtype not in LAST_PLACE:
            raise UnknownLayer(f"the model is {weight.dtype}")
        last_norm = child_of(self.module, last, nn.Module, "the model")
        self.norm = norm(known(layer_spec.of_norm(last_norm)), last_norm, weight.dtype)
        name = str(weight.dtype).removeprefix("torch.")
        self.decoder = _native.Decoder(weight.shape[1], name, self.streams)
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.head = native_streams.head(self.module, self.streams, weight.shape[1], self.copies)
        self.kinds = kinds_of(model.config)
        if len(self.kinds) != len(self.layers):
            raise UnknownLayer(f"its cache has {len(self.kinds)} layers, the model {len(self.layers)}")
        if any(kind.rate is not None for kind in self.kinds):
            if not (support := compressed_probe.support(model)):
                raise UnknownLayer(support.reason)
        turned = native_streams.rotations(self.layers)
        asks = self.rotary is not None and not turned
        widened = native_ends.widened_kinds(self.module, embed, rotary) if asks else ()
        self.rotations = Rotations(self.rotary, model.config, weight[:1, None], turned, widened)
        powers = native_ends.query_powers(self.module, embed, rotary)
        for index, (layer, kind) in enumerate(zip(self.layers, self.kinds)):
            try:
                given = Given(self.rotations.columns(index), self.rotations.interleaves(index), powers[index])
                self.decoder.add(**_layer(layer, kind, weight.dtype, self.copies, given))
            except (UnknownLayer, ValueError) as error:
                raise UnknownLayer(f"layer {index}: {error}") from None
        self.least_compared = native_streams.least_compared(self.layers, self.kinds)
        self.masks = known(masks.of_model(model))
        self._read_as = native_ends.read_as(model, self.path, embed, self.embed.num_embeddings)
        self._embedding_scale = native_ends.embedding_scale(self.module, embed, self.streams)
        self._logits_scale = native_ends.logits_scale(model, self.path)
        self._casts_for_head = native_ends.casts_for_head(model, self.path)

    def embedded(self, ids: Tensor) -> Tensor:
        """[b, 1] ids → [b, 1, hidden], as the model's first layer gets them."""
        found: Tensor = self.embed(ids if self._read_as is None else self._read_as[ids])
        return self._embedding_scale(found)

    def streamed(self, x: Tensor) -> Tensor:
        """[..., hidden] as the model's first layer gets it: [..., streams, hidden] where there are several."""
        return x if self.streams == 1 else x.unsqueeze(-2).repeat_interleave(self.streams, dim=-2)

    def logits(self, model: Any, x: Tensor) -> Tensor:
        """[..., hidden] behind the last norm → [..., v]"""
        head = model.get_submodule(self._head_path)
        found: Tensor = head(x.to(head.weight.dtype) if self._casts_for_head else x)
        return self._logits_scale(found)

    def plain_head(self, model: Any) -> Any:
        """The native output layer, where embeddings are rows of a table and logits what this layer gives; or None."""
        head = model.get_submodule(self._head_path)
        scales = self._embedding_scale, self._logits_scale
        is_plain = self.streams == 1 and self._read_as is None and not self._casts_for_head
        is_plain &= all(isinstance(scale, native_ends.Scale) and scale.by == 1.0 for scale in scales)
        is_plain &= (
            type(self.embed) is nn.Embedding and self.embed.max_norm is None and type(head) is CpuLinear
        )
        hooked = any(one._forward_hooks or one._forward_pre_hooks for one in (self.embed, head))
        return head.native if is_plain and not hooked else None

    def __len__(self) -> int:
        return len(self.layers)


class Given(NamedTuple):
    """What a model gives a layer that depends on positions.

    angles          the columns of the rotation that are its kind's
    is_interleaved  the two of an angle are beside each other
    power           that queries are multiplied with, as `native_ends.query_powers` has it
    """

    angles: tuple[int, int]
    is_interleaved: bool
    power: tuple[float, float]


def _layer(
    layer: nn.Module,
    kind: LayerKind,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
    given: Given,
) -> dict[str, Any]:
    """What `_native.Decoder.add` takes for a layer."""
    if streams_spec.is_layer(layer):
        return native_streams.layer(layer, kind, dtype, copies, given.angles)
    spec = known(layer_spec.of_layer(layer))

    def norm_of(found: NormSpec | None) -> Any:
        return None if found is None else norm(found, layer, dtype)

    unit = spec.feed_forward
    turns_nothing = isinstance(spec.attention, GroupedAttentionSpec) and spec.attention.turning.is_none
    turns_nothing |= isinstance(spec.attention, LatentAttentionSpec) and spec.attention.latent.rope == "none"
    first_angle, count = (0, 0) if turns_nothing else given.angles
    sums = spec.sums or Sums.of_residual(spec.residual)
    if isinstance(spec.attention, GroupedAttentionSpec) and not turns_nothing:
        if spec.attention.turning.interleaved != given.is_interleaved and given.angles != (0, 0):
            raise UnknownLayer("it takes cos and sin in another order than the model gives them")
    return {
        "before_attention": norm_of(spec.input_norm),
        "attention": _attention(spec.attention, layer, kind, dtype, copies, given.power),
        "behind_attention": norm_of(spec.attention_behind),
        "before_feed_forward": norm_of(spec.post_attention_norm),
        "feed_forward": None
        if unit is None
        else feed_forward(unit, layer.get_submodule(unit.path), dtype, copies),
        "behind_feed_forward": norm_of(spec.feed_forward_behind),
        "attention_sum": sums.attention,
        "feed_forward_sum": sums.feed_forward,
        "keeps_normed": sums.keeps_normed,
        "parallel": spec.is_parallel,
        "scale": wide(layer.get_buffer(spec.scale), copies) if spec.scale else None,
        "first_angle": first_angle,
        "angles": count,
    }


def _attention(
    spec: AttentionSpec | StateSpec | None,
    layer: nn.Module,
    kind: LayerKind,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
    power: tuple[float, float],
) -> Any:
    """The twin of a layer's attention, or of what has its place; None: there is none, and nothing is kept.

    power  as `Given` has it
    """
    chooses = isinstance(spec, LatentAttentionSpec) and spec.latent.chooses != "none"
    chooses |= isinstance(spec, GroupedAttentionSpec) and spec.index is not None
    if isinstance(spec, AttentionSpec) == kind.is_state or kind.indexed != chooses:
        what = "layer without attention" if spec is None else type(layer.get_submodule(spec.path)).__name__
        raise UnknownLayer(f"its cache is not what a {what} needs")
    takes_power = isinstance(spec, GroupedAttentionSpec) and spec.turning.scaled
    if power != native_ends.NO_POWER and not takes_power:
        raise UnknownLayer("its attention does not scale queries by what the model gives for that")
    if spec is None:
        return None
    module: Any = layer.get_submodule(spec.path)
    if isinstance(spec, LatentAttentionSpec):
        return _latent(spec, module, kind, dtype, copies)
    if isinstance(spec, GroupedAttentionSpec):
        return _grouped(spec, module, kind, dtype, copies, power)
    return state_twin(spec, module, dtype, copies)


def _grouped(
    spec: GroupedAttentionSpec,
    module: Any,
    kind: LayerKind,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
    power: tuple[float, float],
) -> Any:
    """Attention with projections to heads, and maybe a norm of queries and keys by heads."""
    q, k = child_of(module, "q_proj", CpuLinear), child_of(module, "k_proj", CpuLinear)
    sinks = wide(module.get_parameter("sinks"), copies) if spec.has_sinks else None
    size = spec.head_size * (2 if spec.has_output_gate else 1)
    groups = k.out_features // spec.head_size
    tuned = spec.turning.tuned or (0.0, 0.0)
    return _native.GroupedAttention(
        q=q.native,
        k=k.native,
        v=None if spec.outputs.keys else linear(module, "v_proj"),
        o=linear(module, spec.output),
        q_norm=None if spec.q_norm is None else norm(spec.q_norm, module, dtype),
        k_norm=None if spec.k_norm is None else norm(spec.k_norm, module, dtype),
        heads=q.out_features // size,
        groups=groups,
        size=spec.head_size,
        scale=spec.scaling,
        window=kind.window or 0,
        chunked=kind.is_chunked,
        keeps_prompt=kind.keeps_prompt,
        sinks=sinks,
        gated=spec.has_output_gate,
        neighbours=spec.turning.by_neighbours,
        norms_last=spec.turning.before_norms,
        v_norm=None if spec.v_norm is None else norm(spec.v_norm, module, dtype),
        value=(k if spec.outputs.keys else child_of(module, "v_proj", CpuLinear)).out_features // groups,
        value_scale=spec.outputs.scale,
        gate=linear(module, spec.gate) if spec.gate else None,
        has_softplus=spec.outputs.gate == "softplus",
        index=None if spec.index is None else _block_index(spec.index, module.indexer, dtype),
        tuned_every=tuned[0],
        tuned_factor=tuned[1],
        power=power,
        gate_bias=wide(module.get_parameter(GATE_BIAS), copies) if spec.outputs.biased else None,
    )


def _latent(
    spec: LatentAttentionSpec,
    module: AbsorbedMla,
    kind: LayerKind,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
) -> Any:
    latent, low = spec.latent, spec.q_norm is not None
    if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.weight.dtype != dtype:
        raise UnknownLayer(f"its kv_b_proj is a {type(module.kv_b_proj).__name__} of another dtype")
    if not module.kv_b_proj.weight.is_contiguous():
        raise UnknownLayer("the weight of its kv_b_proj is not contiguous")
    if kind.is_chunked or kind.keeps_prompt:
        raise UnknownLayer("its latent attention has chunks, or keeps the prompt beside a window")
    if latent.rope not in ("halves", "neighbours", "complex", "none"):
        raise UnknownLayer(f"it rotates by {latent.rope}")
    tuned = latent.tuned or (0.0, 0.0)
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
        indexer=None
        if spec.indexer is None
        else native_indexers.of_places(spec.indexer, module.indexer, dtype, copies),
        chooses=latent.chooses != "none",
        tuned_every=tuned[0],
        tuned_factor=tuned[1],
        **(native_indexers.growth(module.softmax_scaling, copies) if latent.grows else {}),
        low_factor=latent.factors[0],
        latent_factor=latent.factors[1],
        k_norm=None if spec.key_norm is None else norm(spec.key_norm, module, dtype),
        window=kind.window or 0,
        gate=linear(module, GATE) if latent.has_gate else None,
    )


def _block_index(spec: BlockIndexSpec, module: Any, dtype: torch.dtype) -> Any:
    """What chooses the blocks of places that grouped attention attends to."""
    return _native.BlockIndex(
        q=projection(module, "q_proj"),
        k=projection(module, "k_proj"),
        q_norm=norm(NormSpec("q_norm", spec.q_norm), module, dtype),
        k_norm=norm(NormSpec("k_norm", spec.k_norm), module, dtype),
        heads=spec.heads,
        size=spec.size,
        block=spec.block,
        top_k=spec.top_k,
        local=spec.local,
    )
