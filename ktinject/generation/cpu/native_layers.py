"""The native twin of a model's decoder layers, built from their specs.

It takes layers whose spec is known (layer_spec.py) and whose matrices are in `cpu_linear`, `cpu_router` and experts on
the CPU.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.generation import layer_spec, masks
from ktinject.generation.cache_layers import LayerKind, kinds_of
from ktinject.generation.layer_spec import (
    DenseSpec,
    GatedDeltaSpec,
    GroupedAttentionSpec,
    LatentAttentionSpec,
    MoeSpec,
    NormSpec,
    OtherFeedForward,
    RouterSpec,
)
from ktinject.generation.recurrent_spec import ShortConvolutionSpec
from ktinject.hf import adapters
from ktinject.hf.layers import Layers
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.cpu_router import CpuRouter
from ktinject.operators.probes import twin
from ktinject.support import Support

# The dtypes of models that are served, and a unit in their last place.
LAST_PLACE = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}


# How transformers computes attention, and so what masks it makes, in models that are served.
_ATTENTION = ("sdpa", "eager")


class UnknownLayer(Exception):
    """Something is not as it has to be; says why."""


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
        self.path = _language_path(model)
        self.module = model.get_submodule(self.path)
        self.embed = _of(self.module, "embed_tokens", nn.Embedding, "the model")
        self.layers = _of(self.module, "layers", nn.ModuleList, "the model")
        rotary = "pos_emb" if hasattr(self.module, "pos_emb") else "rotary_emb"
        self.rotary = _of(self.module, rotary, nn.Module, "the model")
        _of(model, "lm_head", nn.Module, "the model")
        last = "embedding_norm" if hasattr(self.module, "embedding_norm") else "norm"
        known = {"embed_tokens", "layers", rotary, last}
        extra = {name for name, _ in self.module.named_children()} - known
        if extra:
            raise UnknownLayer(f"the model also holds {', '.join(sorted(extra))}")
        weight = self.embed.weight
        if weight.dtype not in LAST_PLACE:
            raise UnknownLayer(f"the model is {weight.dtype}")
        norm = _of(self.module, last, nn.Module, "the model")
        self.norm = _norm(_known(layer_spec.of_norm(norm)), norm, weight.dtype)
        self.decoder = _native.Decoder(weight.shape[1], str(weight.dtype).removeprefix("torch."))
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.kinds = kinds_of(model.config)
        if len(self.kinds) != len(self.layers):
            raise UnknownLayer(f"its cache has {len(self.kinds)} layers, the model {len(self.layers)}")
        for index, (layer, kind) in enumerate(zip(self.layers, self.kinds)):
            try:
                self.decoder.add(*_layer(layer, kind, weight.dtype, self.copies))
            except (UnknownLayer, ValueError) as error:
                raise UnknownLayer(f"layer {index}: {error}") from None
        self.masks = _known(masks.of_model(model))
        self._read_as = _read_as(model, self.path, self.embed.num_embeddings)
        self._frequencies = getattr(self.rotary, "inv_freq", torch.empty(0)).shape[-1]
        self._axes = 0
        try:
            self._find_axes(weight[:1, None])
        except TypeError as error:  # some have angles for each kind of layer
            name = type(self.rotary).__name__
            raise UnknownLayer(f"its {name} is called in another way: {error}") from None

    def _find_axes(self, x: Tensor) -> None:
        """How the rotary embedding takes positions: that of text and images needs three in some versions."""
        try:
            self.rotation(x, torch.zeros(1, 1, dtype=torch.int64))
        except IndexError:
            self._axes = 3
            self.rotation(x, torch.zeros(1, 1, dtype=torch.int64))

    def rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [b, 1], as the model gives them to its layers."""
        if self._axes:
            positions = positions.expand(self._axes, *positions.shape)
        found: tuple[Tensor, Tensor] = self.rotary(x, positions)
        return found

    def embedded(self, ids: Tensor) -> Tensor:
        """[b, 1] ids → [b, 1, hidden], as the model's first layer gets them."""
        found: Tensor = self.embed(ids if self._read_as is None else self._read_as[ids])
        return found

    def __len__(self) -> int:
        return len(self.layers)

    def turned(self, rotation: Tensor) -> Tensor:
        """cos or sin [b, n], as the model's rotary embedding gives it, twice side by side if it gives each one once."""
        if rotation.shape[-1] == self._frequencies:
            rotation = torch.cat([rotation, rotation], dim=-1)
        return rotation.contiguous()


def _language_path(model: Any) -> str:
    """The path of the module that owns embeddings, decoder layers and the last norm."""
    layers = Layers(model)
    if not layers.count:
        raise UnknownLayer("the model has no decoder layers that can be told")
    return layers.paths[0].rpartition(".")[0].rpartition(".")[0]


class _Reached(Exception):
    """Ends a forward that has got as far as the language part. Its argument is what that is given."""


def _read_as(model: Any, path: str, vocabulary: int) -> Tensor | None:
    """The ids that a model of text and images embeds for all ids of text; None: those that it is given.

    Kimi-K2.5, for one, reads the ids that stand for images as 0 before it puts the images there.
    """
    if path == model.base_model_prefix:
        return None

    def embed(ids: Tensor) -> Tensor:
        return ids[..., None].double()

    def stop(*_: Any, **kwargs: Any) -> None:
        raise _Reached(kwargs.get("inputs_embeds"))

    module: Any = model.get_submodule(path)
    stub = twin.of(module.embed_tokens, hooks=False)
    vars(stub)["forward"] = embed
    language = twin.of(module, {"embed_tokens": stub}, hooks=False)
    vars(language)["forward"] = stop
    ids = torch.arange(vocabulary)[None]
    try:
        with torch.no_grad():
            twin.around(model, path, language, without=("ktinject_decoding",), hooks=False)(
                input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False
            )
    except _Reached as reached:
        (found,) = reached.args
    except Exception as error:  # transformers' own code, given what it may not be made for
        raise UnknownLayer(f"what it embeds cannot be tried out: {type(error).__name__}: {error}") from error
    else:
        found = None
    if not isinstance(found, Tensor) or found.shape != (1, vocabulary, 1):
        raise UnknownLayer("the model gives its language part something else than embeddings")
    read = found[0, :, 0].long()
    if not torch.equal(embed(read), found[0]) or not bool(((read >= 0) & (read < vocabulary)).all()):
        raise UnknownLayer("the model changes embeddings before its first layer")
    return None if torch.equal(read, ids[0]) else read


Spec = TypeVar("Spec")


def _known(found: Spec | Support) -> Spec:
    if isinstance(found, Support):
        raise UnknownLayer(found.reason)
    return found


def _of(module: Any, name: str, kind: type, owner: str = "") -> Any:
    """A child of some type, which must be there; within adapters that add nothing, as they may be switched off."""
    found = adapters.unadapted(getattr(module, name, None))
    if isinstance(found, kind):
        return found
    shown = "nothing" if found is None else f"a {type(found).__name__}"
    raise UnknownLayer(f"{owner or type(module).__name__} has {shown} as {name}, not a {kind.__name__}")


def _linear(module: Any, name: str) -> Any:
    return _of(module, name, CpuLinear).native


def _norm(spec: NormSpec, owner: nn.Module, dtype: torch.dtype) -> Any:
    """The norm at the spec's path below its owner."""
    module = owner.get_submodule(spec.path)
    weight = module.get_parameter("weight").detach()
    rms = spec.rms
    if weight.dtype != dtype or not weight.is_contiguous():
        raise UnknownLayer(f"a {type(module).__name__} is no RMS norm of the model's dtype")
    if rms.has_unit_offset and rms.rounds_before_weight and dtype != torch.float32:
        raise UnknownLayer(f"a {type(module).__name__} rounds the sum of its weight and 1")
    rounds_first = rms.rounds_before_weight and not rms.has_unit_offset
    return _native.Norm(weight, rms.epsilon, unit_offset=rms.has_unit_offset, rounds_first=rounds_first)


def _layer(
    layer: nn.Module, kind: LayerKind, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]
) -> tuple[Any, Any, Any, Any]:
    spec = _known(layer_spec.of_layer(layer))
    attention: Any = layer.get_submodule(spec.attention.path)
    if isinstance(spec.attention, (GatedDeltaSpec, ShortConvolutionSpec)) != kind.is_state or kind.indexed:
        raise UnknownLayer(f"its cache is not what a {type(attention).__name__} needs")
    if kind.is_chunked:
        raise UnknownLayer("its attention is chunked")
    if isinstance(spec.attention, GatedDeltaSpec):
        native = _delta(spec.attention, attention, dtype, copies)
    elif isinstance(spec.attention, ShortConvolutionSpec):
        native = _convolution(attention, dtype)
    elif isinstance(spec.attention, LatentAttentionSpec):
        if kind.window is not None:
            raise UnknownLayer("its latent attention has a window")
        native = _latent(spec.attention, attention, dtype)
    else:
        native = _grouped(spec.attention, attention, kind.window, dtype, copies)
    return (
        _norm(spec.input_norm, layer, dtype),
        native,
        _norm(spec.post_attention_norm, layer, dtype),
        _feed_forward(spec.feed_forward, layer.get_submodule(spec.feed_forward.path), dtype, copies),
    )


def _grouped(
    spec: GroupedAttentionSpec,
    module: Any,
    window: int | None,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
) -> Any:
    """Attention with projections to heads, and maybe a norm of queries and keys by heads."""
    q, k = _of(module, "q_proj", CpuLinear), _of(module, "k_proj", CpuLinear)
    sinks = _wide(module.get_parameter("sinks"), copies) if spec.has_sinks else None
    size = spec.head_size * (2 if spec.has_output_gate else 1)
    return _native.GroupedAttention(
        q=q.native,
        k=k.native,
        v=_linear(module, "v_proj"),
        o=_linear(module, spec.output),
        q_norm=None if spec.q_norm is None else _norm(spec.q_norm, module, dtype),
        k_norm=None if spec.k_norm is None else _norm(spec.k_norm, module, dtype),
        heads=q.out_features // size,
        groups=k.out_features // spec.head_size,
        size=spec.head_size,
        scale=spec.scaling,
        window=window or 0,
        sinks=sinks,
        gated=spec.has_output_gate,
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
        qkv=_linear(module, "in_proj_qkvz" if in_two else "in_proj_qkv"),
        ba=_linear(module, "in_proj_ba" if in_two else "in_proj_b"),
        z=None if in_two else _linear(module, "in_proj_z"),
        a=None if in_two else _linear(module, "in_proj_a"),
        o=_linear(module, "out_proj"),
        taps=taps[:, 0],
        a_log=_wide(module.A_log, copies),
        dt_bias=_wide(module.dt_bias, copies),
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
        in_proj=_linear(module, "in_proj"), out_proj=_linear(module, "out_proj"), taps=taps[:, 0]
    )


def _latent(spec: LatentAttentionSpec, module: AbsorbedMla, dtype: torch.dtype) -> Any:
    latent, low = spec.latent, spec.q_norm is not None
    if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.weight.dtype != dtype:
        raise UnknownLayer(f"its kv_b_proj is a {type(module.kv_b_proj).__name__} of another dtype")
    if not module.kv_b_proj.weight.is_contiguous():
        raise UnknownLayer("the weight of its kv_b_proj is not contiguous")
    if latent.rope not in ("halves", "neighbours"):
        raise UnknownLayer(f"it rotates by {latent.rope}")
    return _native.LatentAttention(
        q=None if low else _linear(module, "q_proj"),
        q_a=_linear(module, "q_a_proj") if low else None,
        q_norm=None if spec.q_norm is None else _norm(spec.q_norm, module, dtype),
        q_b=_linear(module, "q_b_proj") if low else None,
        kv=_linear(module, "kv_a_proj_with_mqa"),
        kv_norm=_norm(spec.kv_norm, module, dtype),
        expansion=module.kv_b_proj.weight.detach(),
        o=_linear(module, "o_proj"),
        heads=latent.num_heads,
        rank=latent.kv_lora_rank,
        nope=latent.qk_nope_head_dim,
        rope=latent.qk_rope_head_dim,
        value=latent.v_head_dim,
        neighbours=latent.rope == "neighbours",
        scale=latent.scaling,
    )


def _feed_forward(
    spec: DenseSpec | MoeSpec | OtherFeedForward,
    module: Any,
    dtype: torch.dtype,
    copies: list[tuple[Tensor, Tensor]],
) -> Any:
    if isinstance(spec, OtherFeedForward):
        raise UnknownLayer(spec.reason)
    if isinstance(spec, DenseSpec):
        return _gated_unit(module, spec.names)
    chosen, router = spec.router, _of(module, spec.router.path, CpuRouter)
    return _native.Mixture(
        router=router.linear.native,
        scores=chosen.scores,
        correction=_correction(chosen, module if chosen.of_block else router, copies),
        top_k=chosen.top_k,
        groups=chosen.groups,
        top_groups=chosen.top_groups,
        normed=chosen.is_normed,
        factor=chosen.factor,
        rounds_logits=chosen.rounds_logits,
        rounds_scores=chosen.rounds_scores,
        rounds_weights=chosen.rounds,
        experts=_of(module, spec.experts, CpuExperts).native,
        shared=None
        if spec.shared is None
        else _gated_unit(module.get_submodule(spec.shared.path), spec.shared.names),
        gate=None if spec.shared_gate is None else _gate(module.get_submodule(spec.shared_gate), dtype),
    )


def _correction(spec: RouterSpec, owner: Any, copies: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """What is added to the scores for the choice, [experts] in fp32."""
    return _wide(owner.get_buffer(spec.correction), copies) if spec.is_corrected else None


def _wide(tensor: Tensor, copies: list[tuple[Tensor, Tensor]]) -> Tensor:
    """In fp32: itself, or a copy."""
    wide = tensor.detach().float()
    if tensor.dtype != torch.float32:
        copies.append((wide, tensor.detach()))
    return wide


def _gate(module: Any, dtype: torch.dtype) -> Tensor:
    """The weight [1, hidden] of the factor that a shared expert has."""
    is_plain = type(module) is nn.Linear and module.bias is None and module.weight.is_contiguous()
    if not is_plain or module.weight.dtype != dtype:
        raise UnknownLayer(f"its shared expert's gate is a {type(module).__name__} that is not known")
    weight: Tensor = module.weight.detach()
    return weight


def _gated_unit(module: Any, names: tuple[str, str, str]) -> Any:
    return _native.GatedUnit(*(_linear(module, name) for name in names))
