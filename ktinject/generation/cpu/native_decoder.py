"""Decode steps of a model on the CPU: all decoder layers in one call of the native core (native/decode/).

At one token, transformers runs some sixty tensor operations a layer, each microseconds of dispatch around nanoseconds
of work; beside experts and linears of the native core that is most of a step. `NativeDecoder` knows layers by what they
hold: norms, attention and a feed-forward part made of `cpu_linear`, `cpu_router` and experts on the CPU. Whether it
computes what they compute is not believed: before the first request's first step, `prove` runs both on that request's
cache, until every layer has agreed with the model's own; a model with one that does not keeps transformers' steps. So
all steps of all requests run the same kernels.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ktinject import _native
from ktinject.generation import loop, twin
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.cpu_router import CpuRouter
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

# Of what a layer adds to its input: intermediate results that a sum in another order rounds to the other side, which
# activations in int8 make larger.
_TOLERANCE = 3e-2
# Of the output itself: a unit in the last place.
_LAST_PLACE = {torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-11}
# Steps that a layer may differ in: of two experts that tie, both are right.
_TRIES = 4


class _Unknown(Exception):
    """Something is not as it has to be; says why."""


class _Call:
    """One step. cache_position: of its tokens."""

    def __init__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> None:
        self.ids, self.mask, self.positions, self.cache = ids, mask, positions, cache
        self.cache_position = int(cache.layers[0].cache_position)

    def kept(self, index: int) -> list[Tensor]:
        """What a layer has left in the cache."""
        layer = self.cache.layers[index]
        return [tensor[:, :, self.cache_position].clone() for tensor in (layer.keys, layer.values)]


class NativeDecoder:
    """The model on one token a row, as `graph.Forward`.

    is_proven  whether all layers have agreed, so that steps run natively
    support    whether they may: no, and why, once a layer is unknown or has disagreed

    Until it is proven, a step is the model's own, and layers are compared.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._caches: weakref.WeakKeyDictionary[Cache, Any] = weakref.WeakKeyDictionary()
        self.is_proven, self.support = False, SUPPORTED
        try:
            self._layers = _Layers(model)
        except _Unknown as error:
            self.support = Support.no(str(error))
            return
        self._unproven = dict.fromkeys(range(len(self._layers)), _TRIES)  # layer → tries left

    def __call__(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """ids [b, 1], mask [b, 1, 1, n] bool, positions [b, 1], a runner's `KVBucket` → logits [b, v]."""
        model: Any = self._model()
        assert model is not None
        call = _Call(ids, mask, positions, cache)
        if self.is_proven:
            layers = self._layers
            x = layers.embed(ids)
            out = self._run(call, x[:, 0], layers.rotary(x, positions), 0, len(layers), layers.norm)
            head: Tensor = model.lm_head(out)
            return head
        model = self._comparing(model, call) if self.support else model
        return loop.logits_of(model, ids, mask, positions, cache)

    def prove(self, step: Callable[[], None], again: Callable[[], None]) -> None:
        """Settle whether steps run natively, if that is open.

        step    makes a step on a request's cache, each time with other tokens
        again   puts the cache back to what it was before
        """
        for _ in range(_TRIES):
            if self.is_proven or not self.support:
                return
            step()
            again()
        if not self.is_proven:
            self._refuse("its layers could not be compared")

    def refresh(self) -> None:
        """Read anew what the native layers hold a copy of; for each request."""
        if self.support:
            for copy, source in self._layers.copies:
                copy.copy_(source)

    def _run(
        self, call: _Call, x: Tensor, rotation: tuple[Tensor, Tensor], first: int, last: int, norm: Any = None
    ) -> Tensor:
        """x [b, hidden] through layers first to last - 1."""
        if call.cache not in self._caches:
            layers = call.cache.layers
            self._caches[call.cache] = _native.DecoderCache(
                [layer.keys for layer in layers], [layer.values for layer in layers]
            )
        cos, sin = rotation
        out = torch.empty_like(x)
        self._layers.decoder.forward(
            x=x,
            cos=cos[:, 0].contiguous(),
            sin=sin[:, 0].contiguous(),
            mask=call.mask[:, 0, 0],
            place=call.cache_position,
            cache=self._caches[call.cache],
            first=first,
            last=last,
            final_norm=norm,
            out=out,
        )
        return out

    def _comparing(self, model: Any, call: _Call) -> nn.Module:
        """A twin of the model that computes the same; what each layer makes of its input is compared with ours."""
        layers = self._layers
        expected = layers.embed(call.ids)
        rotation = layers.rotary(expected, call.positions)

        def after_layer(index: int, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal expected
            x = args[0] if args else kwargs["hidden_states"]
            given = kwargs["position_embeddings"]
            if not torch.equal(x, expected):
                raise _Unknown("it is given something else than the layer before it gave")
            if not isinstance(given, tuple) or not all(map(torch.equal, given, rotation)):
                raise _Unknown("it is given another rotation than the model's own")
            expected = output[0] if isinstance(output, tuple) else output
            if index in self._unproven:
                kept = call.kept(index)
                ours = self._run(call, x[:, 0], rotation, index, index + 1)
                why = _difference(ours, expected[:, 0], x[:, 0])
                for a, b in zip(call.kept(index), kept):
                    why = why or _difference(a, b, torch.zeros_like(b))
                self._note(index, why)

        def after_norm(args: Any, kwargs: Any, output: Any) -> None:
            nonlocal expected
            ours = self._run(call, expected[:, 0], rotation, len(layers), len(layers), layers.norm)
            expected = output.last_hidden_state
            why = _difference(ours, expected[:, 0], torch.zeros_like(ours))
            if why:
                raise _Unknown(why)

        def after_head(args: Any, kwargs: Any, output: Any) -> None:
            if not torch.equal(output.logits, model.lm_head(expected)):
                raise _Unknown("the model does more than lm_head")
            if not self._unproven:
                self.is_proven = True

        def hook(where: str, work: Any) -> Any:
            def run(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                try:
                    work(args, kwargs, output)
                except (_Unknown, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
                    self._refuse(f"{where}: {error}")

            return run

        twins = []
        for i, layer in enumerate(layers.layers):
            twins.append(twin.of(layer))
            compare = hook(f"layer {i}", functools.partial(after_layer, i))
            twins[i].register_forward_hook(compare, with_kwargs=True)
        stack = twin.of(layers.layers, {str(i): layer for i, layer in enumerate(twins)})
        inner = twin.of(layers.module, {"layers": stack})
        inner.register_forward_hook(hook("the last norm", after_norm), with_kwargs=True)
        found = twin.of(model, {model.base_model_prefix: inner}, without=("ktinject_decoding",))
        found.register_forward_hook(hook("logits", after_head), with_kwargs=True)
        return found

    def _note(self, index: int, why: str) -> None:
        if not why:
            self._unproven.pop(index)
            return
        self._unproven[index] -= 1
        if not self._unproven[index]:
            raise _Unknown(why)

    def _refuse(self, why: str) -> None:
        if self.support:
            self.is_proven, self.support = False, Support.no(why)
            logger.info("decode steps keep transformers' own operations: %s", why)


def _difference(ours: Tensor, theirs: Tensor, x: Tensor) -> str:
    """How what was made of x differs; "" if it is the same but for rounding."""
    wide = theirs.float()
    error = (ours.float() - wide).norm()
    allowed = _TOLERANCE * (wide - x.float()).norm() + _LAST_PLACE[theirs.dtype] * wide.norm()
    return "" if error <= allowed else f"relative difference {(error / wide.norm()).item():.2g}"


class _Layers:
    """What a model is made of, and its native twin.

    copies   what the twin does not read where the model has it: its own, and the model's
    """

    def __init__(self, model: Any) -> None:
        implementation = model.config.get_text_config()._attn_implementation
        if implementation != "sdpa":
            raise _Unknown(f"attention runs as {implementation!r}; known is 'sdpa'")
        self.module = _of(model, model.base_model_prefix, nn.Module, "the model")
        self.embed = _of(self.module, "embed_tokens", nn.Embedding, "the model")
        self.layers = _of(self.module, "layers", nn.ModuleList, "the model")
        self.rotary = _of(self.module, "rotary_emb", nn.Module, "the model")
        _of(model, "lm_head", nn.Module, "the model")
        extra = {name for name, _ in self.module.named_children()} - {
            "embed_tokens",
            "layers",
            "rotary_emb",
            "norm",
        }
        if extra:
            raise _Unknown(f"the model also holds {', '.join(sorted(extra))}")
        weight = self.embed.weight
        if weight.dtype not in _LAST_PLACE:
            raise _Unknown(f"the model is {weight.dtype}")
        self.norm = _norm(_of(self.module, "norm", nn.Module, "the model"), weight.dtype)
        self.decoder = _native.Decoder(weight.shape[1], str(weight.dtype).removeprefix("torch."))
        self.copies: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.layers):
            try:
                self.decoder.add(*_layer(layer, weight.dtype, self.copies))
            except (_Unknown, ValueError) as error:
                raise _Unknown(f"layer {index}: {error}") from None

    def __len__(self) -> int:
        return len(self.layers)


def _of(module: Any, name: str, kind: type, owner: str = "") -> Any:
    """A child of some type, which must be there."""
    found = getattr(module, name, None)
    if isinstance(found, kind):
        return found
    shown = "nothing" if found is None else f"a {type(found).__name__}"
    raise _Unknown(f"{owner or type(module).__name__} has {shown} as {name}, not a {kind.__name__}")


def _linear(module: Any, name: str) -> Any:
    return _of(module, name, CpuLinear).native


def _norm(module: nn.Module, dtype: torch.dtype) -> Any:
    names = ("variance_epsilon", "eps", "epsilon")
    epsilon = next((e for n in names if isinstance(e := getattr(module, n, None), float)), None)
    weight = getattr(module, "weight", None)
    fits = (
        isinstance(weight, Tensor) and weight.dim() == 1 and weight.dtype == dtype and weight.is_contiguous()
    )
    if epsilon is None or not isinstance(weight, Tensor) or not fits:
        raise _Unknown(f"a {type(module).__name__} is no RMS norm of the model's dtype")
    return _native.Norm(weight.detach(), epsilon)


def _layer(
    layer: nn.Module, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]
) -> tuple[Any, Any, Any, Any]:
    wanted = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    found = {name for name, _ in layer.named_children()}
    if found != wanted:
        raise _Unknown(f"it holds {', '.join(sorted(found))}; known is {', '.join(sorted(wanted))}")
    attention: Any = layer.get_submodule("self_attn")
    return (
        _norm(layer.get_submodule("input_layernorm"), dtype),
        (_latent if isinstance(attention, AbsorbedMla) else _grouped)(attention, dtype),
        _norm(layer.get_submodule("post_attention_layernorm"), dtype),
        _feed_forward(layer.get_submodule("mlp"), dtype, copies),
    )


def _grouped(module: Any, dtype: torch.dtype) -> Any:
    """Attention with projections to heads, and maybe a norm of queries and keys by heads."""
    if getattr(module, "sinks", None) is not None or getattr(module, "attn_logit_softcapping", None):
        raise _Unknown("its attention has sinks or a cap")
    size, scale = getattr(module, "head_dim", None), getattr(module, "scaling", None)
    if not isinstance(size, int) or not isinstance(scale, float):
        raise _Unknown(f"{type(module).__name__} has no head_dim and scaling")
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    q, k = _of(module, "q_proj", CpuLinear), _of(module, "k_proj", CpuLinear)
    return _native.GroupedAttention(
        q=q.native,
        k=k.native,
        v=_linear(module, "v_proj"),
        o=_linear(module, "o_proj"),
        q_norm=None if norms[0] is None else _norm(norms[0], dtype),
        k_norm=None if norms[1] is None else _norm(norms[1], dtype),
        heads=q.out_features // size,
        groups=k.out_features // size,
        size=size,
        scale=scale,
    )


def _latent(module: AbsorbedMla, dtype: torch.dtype) -> Any:
    spec = module.spec
    if type(module.kv_b_proj) is not nn.Linear or module.kv_b_proj.weight.dtype != dtype:
        raise _Unknown(f"its kv_b_proj is a {type(module.kv_b_proj).__name__} of another dtype")
    if not module.kv_b_proj.weight.is_contiguous():
        raise _Unknown("the weight of its kv_b_proj is not contiguous")
    if spec.rope not in ("halves", "neighbours"):
        raise _Unknown(f"it rotates by {spec.rope}")
    low = module.q_a_proj is not None
    return _native.LatentAttention(
        q=None if low else _linear(module, "q_proj"),
        q_a=_linear(module, "q_a_proj") if low else None,
        q_norm=_norm(module.q_a_layernorm, dtype) if low else None,
        q_b=_linear(module, "q_b_proj") if low else None,
        kv=_linear(module, "kv_a_proj_with_mqa"),
        kv_norm=_norm(module.kv_a_layernorm, dtype),
        expansion=module.kv_b_proj.weight.detach(),
        o=_linear(module, "o_proj"),
        heads=spec.num_heads,
        rank=spec.kv_lora_rank,
        nope=spec.qk_nope_head_dim,
        rope=spec.qk_rope_head_dim,
        value=spec.v_head_dim,
        neighbours=spec.rope == "neighbours",
        scale=spec.scaling,
    )


def _feed_forward(module: Any, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> Any:
    names = {name for name, _ in module.named_children()}
    if "gate_proj" in names:
        return _unit(module)
    shared = names & {"shared_experts", "shared_expert"}
    gated = names & {"shared_expert_gate"}
    if names - shared - gated != {"gate", "experts"} or len(shared) > 1 or len(gated) > len(shared):
        raise _Unknown(f"its {type(module).__name__} holds {', '.join(sorted(names))}")
    router: Any = _of(module, "gate", CpuRouter)
    sigmoid = isinstance(getattr(router, "e_score_correction_bias", None), Tensor)
    return _native.Mixture(
        router=router.linear.native,
        scores="sigmoid" if sigmoid else "softmax",
        correction=_wide(router.e_score_correction_bias, copies) if sigmoid else None,
        top_k=router.top_k,
        groups=getattr(router, "num_group", 1) if sigmoid else 1,
        top_groups=getattr(router, "topk_group", 1) if sigmoid else 1,
        normed=bool(getattr(router, "norm_topk_prob", True)),
        factor=float(getattr(router, "routed_scaling_factor", 1.0)),
        experts=_of(module, "experts", CpuExperts).native,
        shared=_unit(getattr(module, *shared)) if shared else None,
        gate=_gate(module.shared_expert_gate, dtype) if gated else None,
    )


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
        raise _Unknown(f"its shared expert's gate is a {type(module).__name__} that is not known")
    return module.weight.detach()


def _unit(module: Any) -> Any:
    if type(getattr(module, "act_fn", None)).__name__ not in ("SiLU", "SiLUActivation"):
        raise _Unknown(f"its {type(module).__name__} has no SiLU as act_fn")
    return _native.GatedUnit(*(_linear(module, f"{name}_proj") for name in ("gate", "up", "down")))
