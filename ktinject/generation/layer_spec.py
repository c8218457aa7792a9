"""What a decoder layer computes, found once for each layer for the captured step (cuda/) and the native decoder (cpu/).

    x ──► norm ──► attention ──► + x ──► norm ──► feed-forward ──► + ──►

A spec names children by their paths, so it serves a layer and its twins alike. Children are found by the names that
transformers gives them. What they compute is not believed but found by running them on twins (layer_probes.py). Only of
attention with projections to heads is nothing run here: both users compare it in the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from ktinject.generation import feed_forward_spec, indexer_spec, layer_probes, recurrent_spec
from ktinject.generation.cpu import openmp
from ktinject.generation.feed_forward_spec import FeedForwardSpec, MoeSpec, RouterSpec
from ktinject.generation.indexer_spec import IndexerSpec
from ktinject.generation.layer_probes import BY_HALVES, PLAIN_OUTPUTS, Outputs, Turning
from ktinject.generation.recurrent_spec import Mamba2Spec, ShortConvolutionSpec
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.probes import norm
from ktinject.operators.probes.attention import LatentSpec
from ktinject.operators.probes.norm import RmsNormSpec
from ktinject.support import Support


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm and what it computes."""

    path: str
    rms: RmsNormSpec


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


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention to a cached latent, as `absorbed_mla` computes it.

    q_norm   of the low-rank query; None: the query has full rank
    indexer  what chooses the places that are attended to; None: nothing does, or a layer before (`latent.chooses`)
    """

    path: str
    latent: LatentSpec
    q_norm: NormSpec | None
    kv_norm: NormSpec
    indexer: IndexerSpec | None = None

    @property
    def layer_idx(self) -> int:
        return self.latent.layer_idx


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


AttentionSpec = GroupedAttentionSpec | LatentAttentionSpec


@dataclass(frozen=True)
class RotationSpec:
    """cos and sin of positions · inv_freq, twice side by side, times `scale`."""

    path: str
    scale: float


MixerSpec = AttentionSpec | GatedDeltaSpec | Mamba2Spec | ShortConvolutionSpec


@dataclass(frozen=True)
class DecoderLayerSpec:
    """y = x + r · attention(input_norm(x)), then y + r · feed_forward(post_attention_norm(y)). Paths are the layer's.

    feed_forward  its path is empty where the layer itself adds shared experts to an MoE block
    residual      r
    norms_behind  of what attention and the feed-forward part give, where there are such; with them, the other two may
                  be missing
    """

    input_norm: NormSpec | None
    attention: MixerSpec
    post_attention_norm: NormSpec | None
    feed_forward: FeedForwardSpec
    residual: float = 1.0
    norms_behind: tuple[NormSpec | None, NormSpec | None] = (None, None)


PartSpec = DecoderLayerSpec | NormSpec | MixerSpec | RouterSpec | MoeSpec | RotationSpec

_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
_LINEAR_LAYER = ("input_layernorm", "linear_attn", "post_attention_layernorm", "mlp")
_GRANITE_LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "block_sparse_moe")
_MAMBA_LAYER = ("input_layernorm", "mamba", "post_attention_layernorm", "block_sparse_moe")
# Norm, attention or what has its place, norm, feed-forward part; and what the layer adds to that of the same input. The
# last ones as LFM2 and Granite call them.
_LAYERS: tuple[tuple[str, ...], ...] = (
    _LAYER,
    _LINEAR_LAYER,
    ("operator_norm", "self_attn", "ffn_norm", "feed_forward"),
    ("operator_norm", "conv", "ffn_norm", "feed_forward"),
    _GRANITE_LAYER,
    (*_GRANITE_LAYER, "shared_mlp"),
    _MAMBA_LAYER,
    (*_MAMBA_LAYER, "shared_mlp"),
)
# Layers that norm what their parts give, too: as above, and the names of these norms. AFMoE's, and FlexOlmo's.
_NORMED_LAYERS: tuple[tuple[tuple[str, ...], tuple[str, str]], ...] = (
    (
        ("input_layernorm", "self_attn", "pre_mlp_layernorm", "mlp"),
        ("post_attention_layernorm", "post_mlp_layernorm"),
    ),
    (("", "self_attn", "", "mlp"), ("post_attention_layernorm", "post_feedforward_layernorm")),
)
_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATES = {"gate_proj", "g_proj"}
# And the norms that may be there; the last ones as Hunyuan and LFM2 call them.
_ATTENTIONS = (
    (_HEADS, ("q_norm", "k_norm")),
    (_HEADS, ("query_layernorm", "key_layernorm")),
    (("q_proj", "k_proj", "v_proj", "out_proj"), ("q_layernorm", "k_layernorm")),
)
_DELTA = [
    {"conv1d", "norm", "out_proj", *projections}
    for projections in (
        ("in_proj_qkvz", "in_proj_ba"),
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    )
]


@openmp.one_thread()
def of_layer(layer: nn.Module) -> DecoderLayerSpec | Support:
    """The spec of a decoder layer, or why it has none."""
    children = {name for name, _ in layer.named_children()}
    names, behind = next(
        (
            (names, behind)
            for names, behind in (*((names, ("", "")) for names in _LAYERS), *_NORMED_LAYERS)
            if children == {*names, *behind} - {""}
        ),
        (None, ("", "")),
    )
    if names is None:
        known = _LINEAR_LAYER if "linear_attn" in children else _LAYER
        return Support.no(f"it holds {', '.join(sorted(children))}; known is {', '.join(sorted(known))}")
    modules = [layer.get_submodule(name) for name in names]
    norms: list[NormSpec | None] = []
    attention = _MIXERS[names[1]](modules[1])
    if isinstance(attention, Support):
        return Support.no(f"{names[1]}: {attention.reason}")
    for name in (names[0], names[2], *behind):
        found = _norm_at(layer, name) if name else None
        if isinstance(found, Support):
            return found
        norms.append(found)
    hands_on = isinstance(attention, LatentAttentionSpec) and attention.latent.hands_on
    residual = layer_probes.residual_factor(layer, names, hands_on, behind)
    if isinstance(residual, Support):
        return residual
    feed_forward = replace(feed_forward_spec.of_feed_forward(modules[3]), path=names[3])
    if len(names) > 4:
        shared = feed_forward_spec.of_dense(modules[4])
        feed_forward = feed_forward_spec.with_shared(feed_forward, shared, names[4])
    before, again, first, last = norms
    return DecoderLayerSpec(
        before, replace(attention, path=names[1]), again, feed_forward, residual, (first, last)
    )


@openmp.one_thread()
def of_norm(module: nn.Module) -> NormSpec | Support:
    """The spec of an RMS norm, with an empty path."""
    found = norm.probe(module)
    return found if isinstance(found, Support) else NormSpec("", found)


def of_attention(module: nn.Module) -> AttentionSpec | Support:
    """The spec of an attention, with an empty path; those of its norms are relative to it."""
    if isinstance(module, AbsorbedMla):
        return _of_latent(module)
    children = {name: child for name, child in module.named_children() if child is not None}
    heads, norm_names = next(
        (known for known in _ATTENTIONS if {*known[0]} <= children.keys() <= {*known[0], *known[1], *_GATES}),
        (None, ()),
    )
    gate = "".join(sorted(_GATES & children.keys()))
    if heads is None:
        return Support.no(
            f"{type(module).__name__} holds {', '.join(sorted(children))}; known is {', '.join(_HEADS)}"
        )
    if getattr(module, "attn_logit_softcapping", None):
        return Support.no("its attention has a cap")
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        return Support.no("it clips queries, keys and values (clip_qkv)")  # a first step may not reach it
    parameters = {name for name, _ in module.named_parameters(recurse=False)}
    if parameters - {"sinks"}:
        return Support.no(f"{type(module).__name__} itself holds {', '.join(sorted(parameters))}")
    size, scaling, index = (getattr(module, name, None) for name in ("head_dim", "scaling", "layer_idx"))
    if not isinstance(size, int) or not isinstance(scaling, float) or not isinstance(index, int):
        return Support.no(f"{type(module).__name__} has no head_dim, scaling and layer_idx")
    norms: list[NormSpec | None] = []
    for name in norm_names:
        found = _norm_at(module, name) if name in children else None
        if isinstance(found, Support):
            return found
        norms.append(found)
    there = [name for name in norm_names if name in children]
    turning = layer_probes.turning(module, heads, there, gate)
    if isinstance(turning, Support):
        # Norms may be such that their place does not show in the first step.
        if any(norms):
            return turning
        turning = BY_HALVES
    q, k, v = (getattr(module.get_submodule(name), "out_features", 0) for name in heads[:3])
    o = getattr(module.get_submodule(heads[3]), "in_features", 0)
    outputs: Outputs | Support = PLAIN_OUTPUTS
    if gate or k != v or hasattr(module, "v_scale"):
        outputs = layer_probes.outputs(module, heads, there, gate)
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
    )


def of_linear_attention(module: Any) -> GatedDeltaSpec | Support:
    """The spec of linear attention, with an empty path. Its users compare it in the first step."""
    children, parameters = recurrent_spec.held(module)
    if children not in _DELTA or parameters != {"A_log", "dt_bias"}:
        return recurrent_spec.not_known(module, "the gated delta rule")
    names = ("layer_idx", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    found = recurrent_spec.sizes_of(module, names)
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


def _of_latent(module: AbsorbedMla) -> LatentAttentionSpec | Support:
    query = None if module.q_a_proj is None else _norm_at(module, "q_a_layernorm")
    latent = _norm_at(module, "kv_a_layernorm")
    indexer = indexer_spec.of_indexer(module.indexer) if module.spec.chooses == "own" else None
    for found in (query, latent, indexer):
        if isinstance(found, Support):
            return found
    return LatentAttentionSpec("", module.spec, query, latent, indexer)  # type: ignore[arg-type]


def _norm_at(module: nn.Module, name: str) -> NormSpec | Support:
    found = of_norm(module.get_submodule(name))
    return Support.no(f"{name}: {found.reason}") if isinstance(found, Support) else replace(found, path=name)


_MIXERS: dict[str, Callable[[Any], Any]] = {
    "self_attn": of_attention,
    "linear_attn": of_linear_attention,
    "conv": recurrent_spec.of_short_convolution,
    "mamba": recurrent_spec.of_mamba2,
}


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
        if {*_LAYER} <= children or {*_LINEAR_LAYER} <= children:
            found = of_layer(module)
        elif children in _DELTA:
            found = of_linear_attention(module)
        elif {"conv1d", "in_proj"} <= children:
            found = recurrent_spec.of_mamba2(module)
        elif {"conv", "in_proj"} <= children:
            found = recurrent_spec.of_short_convolution(module)
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
