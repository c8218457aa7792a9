"""What a decoder layer computes, found once for each layer for the captured step (cuda/) and the native decoder (cpu/).

    x ──► norm ──► attention ──► + x ──► norm ──► feed-forward ──► + ──►

A spec names children by their paths, so it serves a layer and its twins alike. Children are found by the names that
transformers gives them. What they compute is not believed but found by running them on twins (layer_probes.py). Only of
attention with projections to heads is nothing run here: both users compare it in the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ktinject.generation import (
    attention_probes,
    block_index_spec,
    compressed_spec,
    experts_beside,
    feed_forward_spec,
    indexer_spec,
    layer_probes,
    layer_sums,
    recurrent_spec,
    streams_spec,
)
from ktinject.generation.attention_probes import BY_HALVES, GATE_BIAS, PLAIN_OUTPUTS, Outputs, Turning
from ktinject.generation.block_index_spec import BlockIndexSpec
from ktinject.generation.compressed_spec import CompressorSpec, SharedKeyAttentionSpec
from ktinject.generation.cpu import openmp
from ktinject.generation.feed_forward_spec import FeedForwardSpec, MoeSpec, RouterSpec
from ktinject.generation.indexer_spec import IndexerSpec
from ktinject.generation.layer_probes import LayerNames
from ktinject.generation.layer_sums import Sums
from ktinject.generation.norm_spec import NormSpec, norm_at, of_norm
from ktinject.generation.recurrent_spec import (
    DecayingStateSpec,
    GatedDeltaSpec,
    KimiDeltaSpec,
    Mamba1Spec,
    Mamba2Spec,
    ShortConvolutionSpec,
)
from ktinject.generation.streams_spec import HyperConnectionSpec, StreamsLayerSpec, TokenRoutedSpec
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.probes.latent_formula import KEY_NORM, LatentSpec
from ktinject.support import Support


@dataclass(frozen=True)
class GroupedAttentionSpec:
    """Attention with q_proj, k_proj, v_proj and o_proj to heads and back.

    q_norm, k_norm  of queries and keys: a head's if `head_size` long, else of all heads at once
    has_sinks       the parameter `sinks` has a score a head that takes part in the softmax, without a value
    has_output_gate q_proj gives each head its query and a gate, whose sigmoid the head's output is multiplied with
    output          the name of o_proj
    turning         how queries and keys are turned, and whether before the norms
    gate            the name of a projection to gates, or none
    outputs         what is made of values, by these gates among others
    index           `indexer`, which chooses blocks of places that are attended to; None: there is none
    v_norm          of a head's values
    """

    path: str
    head_size: int
    scaling: float
    layer_idx: int
    q_norm: NormSpec | None
    k_norm: NormSpec | None
    has_sinks: bool = False
    has_output_gate: bool = False
    output: str = "o_proj"
    turning: Turning = BY_HALVES
    gate: str = ""
    outputs: Outputs = PLAIN_OUTPUTS
    index: BlockIndexSpec | None = None
    v_norm: NormSpec | None = None


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention to a cached latent, as `absorbed_mla` computes it.

    q_norm   of the low-rank query; None: the query has full rank
    key_norm of the rotary key; None: there is none
    indexer  what chooses the places that are attended to; None: nothing does, or a layer before (`latent.chooses`)
    """

    path: str
    latent: LatentSpec
    q_norm: NormSpec | None
    kv_norm: NormSpec
    indexer: IndexerSpec | None = None
    key_norm: NormSpec | None = None

    @property
    def layer_idx(self) -> int:
        return self.latent.layer_idx


AttentionSpec = GroupedAttentionSpec | LatentAttentionSpec


@dataclass(frozen=True)
class RotationSpec:
    """cos and sin of positions · inv_freq, twice side by side, times `scale`."""

    path: str
    scale: float


# Of layers whose tokens leave a state of fixed size.
StateSpec = (
    DecayingStateSpec | GatedDeltaSpec | KimiDeltaSpec | Mamba1Spec | Mamba2Spec | ShortConvolutionSpec
)
MixerSpec = AttentionSpec | StateSpec


@dataclass(frozen=True)
class DecoderLayerSpec:
    """y = x + r · attention(input_norm(x)), then y + r · feed_forward(post_attention_norm(y)). Paths are the layer's.

    attention, feed_forward  one of them may be missing, with its norms
    feed_forward             its path is empty where the layer itself adds shared experts to an MoE block, or routes
    is_parallel              the feed-forward part takes input_norm(x), too
    scale                    a buffer of one number that all is multiplied with in the end; or none
    residual                 r
    sums                     where both sides of a sum are multiplied with numbers: these
    *_behind                 norms of what attention and the feed-forward part give
    """

    input_norm: NormSpec | None
    attention: MixerSpec | None
    post_attention_norm: NormSpec | None
    feed_forward: FeedForwardSpec | None
    residual: float = 1.0
    attention_behind: NormSpec | None = None
    feed_forward_behind: NormSpec | None = None
    is_parallel: bool = False
    scale: str = ""
    sums: Sums | None = None


PartSpec = (
    DecoderLayerSpec
    | NormSpec
    | MixerSpec
    | RouterSpec
    | MoeSpec
    | RotationSpec
    | HyperConnectionSpec
    | StreamsLayerSpec
    | TokenRoutedSpec
    | SharedKeyAttentionSpec
    | CompressorSpec
)


def _usual(attention: str, feed_forward: str, norms: tuple[str, str], shared: str = "") -> LayerNames:
    return LayerNames(attention, feed_forward, *norms, shared=shared)


_NORMS = ("input_layernorm", "post_attention_layernorm")
_LAYER = _usual("self_attn", "mlp", _NORMS)
_LINEAR_LAYER = _usual("linear_attn", "mlp", _NORMS)
_LFM2_NORMS = ("operator_norm", "ffn_norm")
_JAMBA_NORMS = ("input_layernorm", "pre_ff_layernorm")
_LAYERS = (
    _LAYER,
    _LINEAR_LAYER,
    *(_usual(attention, "feed_forward", _LFM2_NORMS) for attention in ("self_attn", "conv")),
    *(_usual(attention, "feed_forward", _JAMBA_NORMS) for attention in ("self_attn", "mamba")),
    *(
        _usual(attention, "block_sparse_moe", _NORMS, shared)
        for attention in ("self_attn", "mamba")
        for shared in ("", "shared_mlp")
    ),
    # OLMo has its norms behind the parts.
    LayerNames(
        "self_attn", "mlp", behind_attention=_NORMS[1], behind_feed_forward="post_feedforward_layernorm"
    ),
    # AFMoE and BEAM have them before and behind.
    LayerNames("self_attn", "mlp", _NORMS[0], "pre_mlp_layernorm", _NORMS[1], "post_mlp_layernorm"),
    LayerNames(
        "self_attn", "mlp", _NORMS[0], "pre_feedforward_layernorm", _NORMS[1], "post_feedforward_layernorm"
    ),
    _usual("self_attn", "feed_forward", _NORMS),
    # Cohere's parts have one norm.
    LayerNames("self_attn", "mlp", _NORMS[0]),
)
# What Nemotron-H's layers hold, each a part of its own.
_ALONE = {"norm", "mixer"}
_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATES = {"gate_proj", "g_proj"}
# And the norms that may be there; the last ones as Hunyuan and LFM2 call them.
_ATTENTIONS = (
    (_HEADS, ("q_norm", "k_norm")),
    (_HEADS, ("query_layernorm", "key_layernorm")),
    (("q_proj", "k_proj", "v_proj", "out_proj"), ("q_layernorm", "k_layernorm")),
    # One for both, as Llama 4 has it.
    (_HEADS, ("qk_norm", "qk_norm")),
)


@openmp.one_thread()
def of_layer(layer: nn.Module) -> DecoderLayerSpec | Support:
    """The spec of a decoder layer, or why it has none."""
    names = _names_of(layer)
    if isinstance(names, Support):
        return names
    attention: MixerSpec | None = None
    if names.attention:
        module = layer.get_submodule(names.attention)
        mixer: MixerSpec | Support = (recurrent_spec.finder(module) or of_attention)(module)
        if isinstance(mixer, Support):
            return Support.no(f"{names.attention}: {mixer.reason}")
        attention = replace(mixer, path=names.attention)
    norms: list[NormSpec | None] = []
    for name in (
        names.before_attention,
        names.before_feed_forward,
        names.behind_attention,
        names.behind_feed_forward,
    ):
        found = norm_at(layer, name) if name else None
        if isinstance(found, Support):
            return found
        norms.append(found)
    hands_on = isinstance(attention, LatentAttentionSpec) and attention.latent.hands_on
    gives_more = isinstance(attention, (AttentionSpec, DecayingStateSpec))
    residual: float | Support
    feed_forward: FeedForwardSpec | None = None
    scale, sums = "", None
    if names == experts_beside.NAMES:
        residual = experts_beside.residual(layer)
        feed_forward, scale = experts_beside.feed_forward(layer), experts_beside.SCALE
    else:
        residual = layer_probes.residual_factor(layer, names, gives_more, hands_on)
    if isinstance(residual, Support):
        weighted = layer_sums.of_layer(layer, names, gives_more)
        if isinstance(weighted, Support):
            return residual
        residual, sums = 1.0, weighted
    if names.feed_forward:
        part = layer.get_submodule(names.feed_forward)
        feed_forward = replace(feed_forward_spec.of_feed_forward(part), path=names.feed_forward)
    if names.shared and feed_forward is not None:
        shared = feed_forward_spec.of_dense(layer.get_submodule(names.shared))
        feed_forward = feed_forward_spec.with_shared(feed_forward, shared, names.shared)
    if isinstance(feed_forward, MoeSpec) and feed_forward.norm is not None:
        within = norm_at(layer, f"{feed_forward.path}.{feed_forward.norm}")
        if isinstance(within, Support) or norms[3] is not None:
            return within if isinstance(within, Support) else Support.no("two norms are behind its experts")
        norms[3] = within
    return DecoderLayerSpec(
        norms[0],
        attention,
        norms[1],
        feed_forward,
        residual,
        norms[2],
        norms[3],
        names.is_parallel,
        scale,
        sums,
    )


def _names_of(layer: nn.Module) -> LayerNames | Support:
    children = {name for name, _ in layer.named_children()}
    if children == experts_beside.CHILDREN:
        return experts_beside.NAMES
    if children == _ALONE:
        mixer: nn.Module = layer.get_submodule("mixer")
        if recurrent_spec.finder(mixer) or hasattr(mixer, "q_proj"):
            return LayerNames(attention="mixer", before_attention="norm")
        return LayerNames(feed_forward="mixer", before_feed_forward="norm")
    found = next((names for names in _LAYERS if children == {*filter(None, names)}), None)
    if found is not None:
        return found
    known = _LINEAR_LAYER if "linear_attn" in children else _LAYER
    return Support.no(
        f"it holds {', '.join(sorted(children))}; known is {', '.join(sorted(filter(None, known)))}"
    )


def of_attention(module: nn.Module) -> AttentionSpec | Support:
    """The spec of an attention, with an empty path; those of its norms are relative to it."""
    if isinstance(module, AbsorbedMla):
        return _of_latent(module)
    children = {name: child for name, child in module.named_children() if child is not None}
    blocks: BlockIndexSpec | Support | None = None
    if "indexer" in children and block_index_spec.is_one(children["indexer"]):
        blocks = block_index_spec.of_index(children.pop("indexer"))
    # Keys may be what values are made of, too.
    missing = {name for name in ("v_proj",) if getattr(module, name, module) is None}
    heads, norm_names = next(
        (
            known
            for known in _ATTENTIONS
            if {*known[0]} - missing <= children.keys() <= {*known[0], *known[1], *_GATES, "v_norm"}
        ),
        (None, ()),
    )
    gate = "".join(sorted(_GATES & children.keys()))
    if heads is None:
        return Support.no(
            f"{type(module).__name__} holds {', '.join(sorted(children))}; known is {', '.join(_HEADS)}"
        )
    if isinstance(blocks, Support):
        return blocks
    if getattr(module, "attn_logit_softcapping", None):
        return Support.no("its attention has a cap")
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        return Support.no("it clips queries, keys and values (clip_qkv)")  # a first step may not reach it
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if parameters - {"sinks", GATE_BIAS if gate else ""}:
        return Support.no(f"{type(module).__name__} itself holds {', '.join(sorted(parameters))}")
    size, scaling, index = (getattr(module, name, None) for name in ("head_dim", "scaling", "layer_idx"))
    if not isinstance(size, int) or not isinstance(scaling, float) or not isinstance(index, int):
        return Support.no(f"{type(module).__name__} has no head_dim, scaling and layer_idx")
    norms: list[NormSpec | None] = []
    for name in (*norm_names, "v_norm"):
        found = norm_at(module, name, size) if name in children else None
        if isinstance(found, Support):
            return found
        norms.append(found)
    there = sorted({name for name in norm_names if name in children})
    turning = attention_probes.turning(module, heads, there, gate)
    if isinstance(turning, Support):
        # Norms may be such that their place does not show in the first step.
        if any(norms):
            return turning
        turning = BY_HALVES
    # What an index chooses of two keys is none of them.
    tuned = attention_probes.tuned_queries(module, heads, there, gate) if blocks is None else None
    if isinstance(tuned, Support):
        return tuned
    scaled = attention_probes.scaled_queries(module, heads, there, gate)
    if isinstance(scaled, Support):
        return scaled
    turning = replace(turning, tuned=tuned, scaled=scaled)
    made = {name: getattr(children.get(name), "out_features", 0) for name in heads[:3]}
    q, k, v = (made[name] for name in (heads[0], heads[1], heads[1] if missing else heads[2]))
    o = getattr(module.get_submodule(heads[3]), "in_features", 0)
    outputs: Outputs | Support = PLAIN_OUTPUTS
    if gate or k != v or missing or norms[2] or hasattr(module, "v_scale"):
        outputs = attention_probes.outputs(module, heads, there, gate)
    if isinstance(outputs, Support):
        return outputs
    return GroupedAttentionSpec(
        "",
        size,
        scaling,
        index,
        norms[0],
        norms[1],
        "sinks" in parameters,
        q == 2 * o > 0 and k == v and not gate,
        heads[3],
        turning,
        gate,
        outputs,
        blocks,
        norms[2],
    )


def _of_latent(module: AbsorbedMla) -> LatentAttentionSpec | Support:
    query = None if module.q_a_proj is None else norm_at(module, "q_a_layernorm")
    latent = norm_at(module, "kv_a_layernorm")
    indexer = indexer_spec.of_indexer(module.indexer) if module.spec.chooses == "own" else None
    key = norm_at(module, KEY_NORM) if module.spec.has_key_norm else None
    for found in (query, latent, indexer, key):
        if isinstance(found, Support):
            return found
    return LatentAttentionSpec("", module.spec, query, latent, indexer, key)  # type: ignore[arg-type]


def of_rotation(module: Any) -> RotationSpec | Support:
    """The spec of a rotary embedding whose angles do not depend on the length."""
    kind = getattr(module, "rope_type", None)
    frequencies, scale = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, (int, float)):
        return Support.no("it has no inv_freq and attention_scaling")
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return Support.no("its frequencies change with the length")
    support = layer_probes.is_rotation(module, frequencies, float(scale))
    return RotationSpec("", float(scale)) if support else support


def parts(model: nn.Module) -> Iterator[tuple[str, PartSpec]]:
    """Path and spec of all that is known in a model, layers and what is in them. Paths in a spec are relative to it."""
    for path, module in model.named_modules():
        if "forward" in vars(module):
            continue
        children = {name for name, _ in module.named_children()}
        found: PartSpec | Support | None = None
        finder = recurrent_spec.finder(module)
        if streams_spec.is_layer(module):
            found = streams_spec.of_layer(module)
        elif streams_spec.is_block(module):
            found = streams_spec.of_block(module)
        elif streams_spec.is_connection(module):
            found = streams_spec.of_connection(module)
        elif compressed_spec.is_attention(module):
            found = compressed_spec.of_attention(module)
            if isinstance(found, SharedKeyAttentionSpec):
                for below, compressor in compressed_spec.compressors(module, found.layer_idx):
                    yield f"{path}.{below}", compressor
        elif {*_NORMS, "mlp"} <= children and children & {_LAYER.attention, _LINEAR_LAYER.attention}:
            found = of_layer(module)
        elif finder is not None:
            found = finder(module)
        elif isinstance(module, AbsorbedMla) or {*_HEADS} <= children:
            found = of_attention(module)
        elif {"gate", "experts"} <= children:
            found = feed_forward_spec.of_moe(module)
            if isinstance(found, MoeSpec):
                yield f"{path}.{found.router.path}", replace(found.router, path="")
        elif hasattr(module, "inv_freq"):
            found = of_rotation(module)
        elif not children and [name for name, _ in module.named_parameters()] == ["weight"]:
            found = of_norm(module)
        if found is not None and not isinstance(found, Support):
            yield path, found
