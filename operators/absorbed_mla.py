"""Multi-head latent attention with its up-projections absorbed, so that decoding reads the cached latent as it is.

transformers expands the latent of every cached token to keys and values of all heads, at every step: at 32,768 tokens
of DeepSeek-V3 that is 1.1 TFLOP and 4 GB a layer and token. Here the query goes into the latent space instead,
and attention is that of many query heads over one key head:

    q_nope · (W_k latent) = (W_kᵀ q_nope) · latent          out = W_v (p · latent)

The cost of the two forms, a head, for m new tokens over s cached ones (n: nope, d: rope, v: value, r: rank):
    expanded   s r (n + v) + m s (n + d + v)
    absorbed   m r (n + v) + m s (2r + d)
so a long prompt takes the expanded one. W_k and W_v are views of kv_b_proj's weight, which stays as it is.

Where an indexer chooses the places that a token attends to (DeepSeek-V3.2, GLM-5), the others are masked.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.errors import OperatorError
from ktinject.hf import compat
from ktinject.operators.base import Config, Operator, register_operator
from ktinject.operators.probes import attention, latent_formula
from ktinject.operators.probes.latent_formula import EXPANSION, LatentSpec, Positions
from ktinject.operators.torch_ops import cpu_attention, packed_attention
from ktinject.operators.torch_ops.packed_attention import Packed
from ktinject.support import Support

if TYPE_CHECKING:
    from ktinject.machine import Machine

_MASKS = ("sdpa", "eager")  # attention implementations of transformers whose masks are dense
_SDPA = functional.scaled_dot_product_attention
_STOCK_SDPA = compat.sdpa_attention_forward  # transformers', which calls that
# Scores are fp32; more queries than fit into this are taken in turns.
_MOST_SCORE_BYTES = 256 << 20


@dataclass(frozen=True)
class AbsorbedMlaConfig(Config):
    """Arguments of `absorbed_mla` in a rule."""

    device: Literal["auto"] = "auto"  # always where the attention's own linears are
    # How several tokens at once are computed; auto: the cheaper form
    prefill: Literal["auto", "expanded", "absorbed"] = "auto"


@register_operator("absorbed_mla")
class AbsorbedMla(Operator):
    """DeepSeek's latent attention, also with an indexer that chooses the places to attend to (DeepSeek-V3.2, GLM-5),
    with queries that are multiplied with a function of their position (Mistral 4, Mistral Large 4), or with gates
    behind the heads (dots3-note).
    For each token it caches the latent and one rotary key, in transformers' caches, where an indexer keeps its own.

    The operator holds no weights. The attention's linears and norms stay under their names, and other rules may
    replace them. The exception is kv_b_proj: the operator reads its weight as two stacks of matrices. Sums and softmax
    are fp32.
    """

    Config = AbsorbedMlaConfig
    device_types = ("cuda", "cpu")
    capturable = True
    keeps = latent_formula.KEPT

    q_proj: nn.Module
    q_a_proj: nn.Module | None
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: nn.Module
    indexer: Any
    softmax_scaling: Any
    k_rope_only_layernorm: nn.Module
    g_proj: nn.Module

    def __init__(self, module: nn.Module, spec: LatentSpec, config: AbsorbedMlaConfig) -> None:
        super().__init__()
        self.spec = spec
        self.config = config
        # What says how transformers computes attention, which may change.
        self._model_config = getattr(module, "config", None)
        self._file = type(module).__module__
        self._eager = _eager_of(self._file)
        self.kv_values_per_token = spec.kv_lora_rank + spec.qk_rope_head_dim
        if spec.chooses == "own":
            self.kv_values_per_token += getattr(module.get_submodule(latent_formula.INDEXER), "head_dim", 0)
        self._dtype = getattr(module, EXPANSION).weight.dtype
        for name in latent_formula.CHILDREN:
            setattr(self, name, getattr(module, name, None))

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        spec = attention.probe(module)
        if isinstance(spec, Support):
            return spec.reason
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if implementation not in (*_MASKS, None):
            return f"the model uses {implementation!r} masks; build it with attn_implementation='sdpa'"
        return None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        spec = attention.probe(module)
        if isinstance(spec, Support):
            raise OperatorError(f"absorbed_mla: {type(module).__name__} cannot be replaced: {spec.reason}.")
        return cls(module, spec, config)

    def follow(self, module: nn.Module, name: str) -> str | None:
        spec = attention.probe(module)
        if isinstance(spec, Support):
            return spec.reason
        if spec == self.spec:
            return super().follow(module, name)
        self.spec = spec
        return None

    def describe(self) -> dict[str, Any]:
        prefill = {"auto": "expanded for long prompts", "expanded": "expanded for prompts", "absorbed": ""}
        note = prefill[self.config.prefill]
        return {
            "weights": "kept",
            "kernel": f"absorbed, {note}" if note else "absorbed",
            "cache": f"{self.cache_bytes} bytes a token a layer ({str(self._dtype).removeprefix('torch.')})",
        }

    @property
    def cache_bytes(self) -> int:
        """Bytes that a token adds to the cache in this layer."""
        return self.kv_values_per_token * self._dtype.itemsize

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: Positions = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None] | tuple[Tensor, None, Tensor]:
        """hidden_states [b, m, hidden] → ([b, m, hidden], None), and the chosen places, if it hands them on.

        position_embeddings  of these m tokens, as the model's rotary embedding gives them
        attention_mask       [b or 1, 1, m, s]: bool, True to attend, or floats to add; None: all of s for one token,
                             causal for several, which are then the first
        kwargs               the cache, any of transformers' with keys and values of their own widths; of packed
                             requests, what `Packed` reads: each half of a token's latent and key is cached as a head,
                             for the paged cache has keys and values of one width; for a layer that goes by another
                             one's choice, the places that this has chosen [b, m, k]; and where queries depend on them,
                             the tokens' position_ids [b or 1, m]
        Raises               OperatorError for another mask or another way of attention, for positions of another form,
                             if attention weights are asked for, if there is no mask or choice where places are chosen,
                             or no positions where queries depend on them
        """
        if not torch.compiler.is_compiling():
            self._check_attention()
        if kwargs.get("output_attentions"):
            raise OperatorError("absorbed_mla: attention weights are not kept. Leave output_attentions out.")
        spec = self.spec
        b, m, _ = hidden_states.shape
        low = latent_formula.low_query(self, spec, hidden_states)
        q = self.q_proj(hidden_states) if low is None else self.q_b_proj(low)
        q = q.view(b, m, spec.num_heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        latent, k_rope = latent_formula.cached(self, spec, hidden_states)
        _check_rotation(position_embeddings, m)
        both = latent_formula.rotate(spec.rope, torch.cat([q_rope, k_rope], 1), position_embeddings)
        q_rope, k_rope = both.split([spec.num_heads, 1], 1)
        if spec.by_position:
            q_nope, q_rope = self._at_positions((q_nope, q_rope), kwargs.get("position_ids"))
        packed = Packed.of(kwargs)
        if packed is not None:
            latent, k_rope = self._paged(packed, latent, k_rope)
        elif (cache := compat.cache_of(kwargs)) is not None:
            latent, k_rope = cache.update(latent, k_rope, spec.layer_idx)
        if packed is None and attention_mask is None and m > 1:
            # transformers leaves the mask out for the first tokens only; a static cache is longer than they are.
            latent, k_rope = latent[:, :, :m], k_rope[:, :, :m]
        chosen = None
        if packed is not None and attention_mask is None:
            out = self._of_texts(packed, q_nope, q_rope, latent, k_rope)
        else:
            _check_mask(attention_mask, b, m, latent.shape[2])
            if spec.chooses != "none":
                chosen = self._chosen(hidden_states, low, position_embeddings, attention_mask, kwargs)
                attention_mask = latent_formula.attended(attention_mask, chosen)  # type: ignore[arg-type]
            out = self._attend(q_nope, q_rope, latent, k_rope, attention_mask)
        if spec.has_gate:
            out = latent_formula.gated(self, spec, out.reshape(b, m, spec.num_heads, -1), hidden_states)
        out = self.o_proj(out.reshape(b, m, -1))
        return (out, None, chosen) if spec.hands_on and chosen is not None else (out, None)

    def _check_attention(self) -> None:
        """Raises OperatorError if transformers would call a function for attention that is none of its own."""
        name = getattr(self._model_config, "_attn_implementation", None)
        bare = None if name is None else name.removeprefix("paged|")  # of packed requests
        if bare is None or bare.startswith("ktinject_"):
            return
        if bare not in _MASKS:
            why = f"attention runs as {name!r}"
        elif bare == "eager" and _eager_of(self._file) is not self._eager:
            why = "eager_attention_forward of the model's file was replaced"
        elif bare == "sdpa" and _without_ours(compat.ALL_ATTENTION_FUNCTIONS[bare]) is not _STOCK_SDPA:
            why = "another function is registered as 'sdpa'"
        else:
            return
        raise OperatorError(
            f"absorbed_mla: {why}, and latent attention is computed here, by none of transformers' functions. Use "
            "model.set_attn_implementation('sdpa') or 'eager' with transformers' own functions, or keep the attention "
            "by a rule with `replace: keep`."
        )

    def _at_positions(self, parts: tuple[Tensor, Tensor], positions: Any) -> list[Tensor]:
        """Parts of queries [b, heads, m, …] times what their positions [b or 1, m] say."""
        b, _, m, _ = parts[0].shape
        if not isinstance(positions, Tensor) or positions.shape not in ((b, m), (1, m)):
            shape = tuple(positions.shape) if isinstance(positions, Tensor) else type(positions).__name__
            raise OperatorError(
                f"absorbed_mla: position_ids: found {shape}; allowed: a tensor {(b, m)}. Queries depend on them."
            )
        return [latent_formula.at_positions(self.spec, self, part, positions) for part in parts]

    def _chosen(
        self,
        hidden_states: Tensor,
        low: Tensor | None,
        position_embeddings: Positions,
        mask: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """[b, m, k]: the places that are attended to, beside others that the mask hides."""
        found: Tensor | None = kwargs.get(latent_formula.GIVEN)
        if mask is None or (found is None and self.indexer is None):
            lacks = "attention_mask" if mask is None else latent_formula.GIVEN
            raise OperatorError(
                f"absorbed_mla: {lacks}: found None; places are chosen, which needs a tensor."
            )
        if self.indexer is not None:
            others = (position_embeddings, mask[:, 0], kwargs.get("position_ids"))
            cache = compat.cache_of(kwargs)
            found = latent_formula.choice(self.indexer, hidden_states, low, *others, cache=cache)
        assert found is not None
        return found

    def _attend(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None
    ) -> Tensor:
        form = self.attend_latent if self.absorbs(q_nope.shape[2], latent.shape[2]) else self._expanded
        return form(q_nope, q_rope, latent, k_rope, mask)

    def _paged(self, packed: Packed, latent: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all packed texts, each [1, 1, all their tokens, …]; the new ones are in the paged cache then."""
        first, second = torch.cat([latent, k_rope], -1).chunk(2, -1)
        keys, values = packed.update(first, second, self.spec.layer_idx)
        latent, k_rope = torch.cat([keys, values], -1).split(
            [self.spec.kv_lora_rank, self.spec.qk_rope_head_dim], -1
        )
        return latent, k_rope

    def _of_texts(
        self, packed: Packed, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor
    ) -> Tensor:
        """[1, m, heads · v], each text by itself; on the CPU."""
        out = q_nope.new_empty(1, q_nope.shape[2], self.spec.num_heads * self.spec.v_head_dim)
        singles, others = packed.texts()
        if singles is not None:
            q, q_r = (part[0, :, singles.queries].transpose(0, 1)[:, :, None] for part in (q_nope, q_rope))
            k, k_r = singles.of_each(latent), singles.of_each(k_rope)
            out[0, singles.queries] = self._attend(q, q_r, k, k_r, singles.mask).reshape(len(q), -1)
        for text in others:
            q, q_r = q_nope[:, :, text.queries], q_rope[:, :, text.queries]
            k, k_r = latent[:, :, text.keys], k_rope[:, :, text.keys]
            m, s = q.shape[2], k.shape[2]
            mask = packed_attention.causal_mask(m, s, q.device) if 1 < m < s else None
            out[:, text.queries] = self._attend(q, q_r, k, k_r, mask).reshape(1, m, -1)
        return out

    def absorbs(self, m: int, s: int) -> bool:
        """Which form m new tokens over s take; decided by shapes alone, so that a captured graph holds."""
        spec = self.spec
        if functional.scaled_dot_product_attention is not _SDPA:
            return False  # another function was put in its place, to be called
        if type(self.kv_b_proj) is not nn.Linear:
            _warn_expansion(f"is a {type(self.kv_b_proj).__name__} now, which cannot be absorbed")
            return False
        if (
            self.kv_b_proj.weight.is_meta
        ):  # accelerate has offloaded it, and brings it back when the linear is called
            _warn_expansion("is offloaded, so its weight is not here to be absorbed")
            return False
        if self.training and spec.dropout:
            return False
        if m == 1 or self.config.prefill != "auto":
            return m == 1 or self.config.prefill == "absorbed"
        r, d = spec.kv_lora_rank, spec.qk_rope_head_dim
        inner = spec.qk_nope_head_dim + spec.v_head_dim
        # Scores of the absorbed form pass through memory, which on an H200 doubles what they cost.
        return m * r * inner + 2 * m * s * (2 * r + d) < s * r * inner + m * s * (inner + d)

    def attend_latent(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None
    ) -> Tensor:
        """[b, m, heads · v]; the heads' queries are rows of one matrix, so each product reads the cache once."""
        spec = self.spec
        b, h, m, _ = q_nope.shape
        s, r = latent.shape[2], spec.kv_lora_rank
        latent, k_rope = latent[:, 0], k_rope[:, 0]
        w = self.kv_b_proj.weight.view(h, -1, r)
        w_k, w_v = w[:, : spec.qk_nope_head_dim], w[:, spec.qk_nope_head_dim :]
        # [h, b · m, n] × [h, n, r]
        q = torch.bmm(q_nope.transpose(0, 1).reshape(h, b * m, -1), w_k).view(h, b, m, r).transpose(0, 1)
        given = mask
        if mask is None and m > 1:
            mask = torch.ones(m, s, dtype=torch.bool, device=q.device).tril()[None, None]
        step = max(1, _MOST_SCORE_BYTES // (b * h * s * 4))
        parts = []
        for first in range(0, m, step):
            rows = slice(first, min(first + step, m))
            scores = _scores(
                q[:, :, rows].reshape(b, -1, r), q_rope[:, :, rows].flatten(1, 2),
                latent, k_rope, spec.scaling,
            ).view(b, h, -1, s)  # fmt: skip
            if mask is not None:
                scores = cpu_attention.masked(scores, mask[:, :, rows])
            p = scores.softmax(-1).to(latent.dtype).view(b, -1, s)
            parts.append(torch.bmm(p, latent).view(b, h, -1, r))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        if given is not None and m > 1:  # a step's token sees itself
            out = cpu_attention.without_blind(out, given)
        # [h, b · m, r] × [h, r, v]
        out = torch.bmm(out.transpose(0, 1).reshape(h, b * m, r), w_v.mT)
        return out.view(h, b, m, -1).permute(1, 2, 0, 3).flatten(2)

    def _expanded(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None
    ) -> Tensor:
        """[b, m, heads, v]; keys and values of all heads, then torch's fused attention where that is the fastest."""
        spec = self.spec
        kv = self.kv_b_proj(latent[:, 0]).unflatten(-1, (spec.num_heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([spec.qk_nope_head_dim, spec.v_head_dim], -1)
        k = torch.cat([k_nope, k_rope.expand(-1, spec.num_heads, -1, -1)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        dropout = spec.dropout if self.training else 0.0
        is_torchs = functional.scaled_dot_product_attention is _SDPA
        if is_torchs and not dropout and cpu_attention.is_faster(q, k):
            return cpu_attention.attend(q, k, v, mask, spec.scaling).transpose(1, 2)
        if v.is_cpu and v.shape[-1] < k.shape[-1]:
            # On the CPU, torch's fused attention is for values as wide as keys; without it, scores pass through memory.
            v = functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
        is_causal = False
        if (
            mask is None and q.shape[2] > 1
        ):  # decided here: of a number of tokens that is traced, it would be a symbol
            is_causal = True
        out = functional.scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=is_causal, scale=spec.scaling
        )
        return out[..., : spec.v_head_dim].transpose(1, 2)

    def extra_repr(self) -> str:
        spec = self.spec
        return f"{spec.num_heads} heads, latent {spec.kv_lora_rank} + {spec.qk_rope_head_dim}, {self.config.prefill}"


def _scores(q: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, scaling: float) -> Tensor:
    """scaling · (q latentᵀ + q_rope k_ropeᵀ), [b, rows, s] in fp32, or fp64 of fp64."""
    exact = q.dtype in (torch.float32, torch.float64)
    if not q_rope.shape[2]:  # nothing is turned
        scores = torch.bmm(q, latent.mT)
        return (scores if exact else scores.float()) * scaling
    if exact or not q.is_cuda or torch.is_grad_enabled():
        scores = torch.baddbmm(torch.bmm(q, latent.mT), q_rope, k_rope.mT)
        return (scores if exact else scores.float()) * scaling
    scores = torch.bmm(q, latent.mT, out_dtype=torch.float32)
    return torch.baddbmm(scores, q_rope, k_rope.mT, beta=scaling, alpha=scaling, out_dtype=torch.float32)


def _check_rotation(given: Positions, m: int) -> None:
    """The model makes them of position_ids, whose first dimension they have."""
    for table in given if isinstance(given, tuple) else (given,):
        if isinstance(table, Tensor) and table.dim() != 3:
            raise OperatorError(
                f"absorbed_mla: position_ids: found {table.dim() - 1} dimensions; allowed: a tensor [b or 1, {m}]. "
                "Give position_ids[None]."
            )


def _check_mask(mask: Any, b: int, m: int, s: int) -> None:
    if mask is None:
        return
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if not isinstance(mask, Tensor) or len(shape) != 4 or shape not in {(b, 1, m, s), (1, 1, m, s)}:
        raise OperatorError(
            f"absorbed_mla: attention_mask: found {shape}; allowed: None or a tensor {(b, 1, m, s)}. "
            "Use attn_implementation='sdpa' or 'eager'."
        )


def _eager_of(file: str) -> Any:
    """The function that a modeling file of transformers calls for attention that is "eager"."""
    return _without_ours(getattr(sys.modules.get(file), "eager_attention_forward", None))


def _without_ours(function: Any) -> Any:
    """The function that one of ktinject's is put around."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("ktinject."):
        function = function.__wrapped__
    return function


def _warn_expansion(why: str) -> None:
    warnings.warn(
        f"absorbed_mla: kv_b_proj {why}; keys and values are expanded at every step. Leave kv_b_proj out of the target "
        "modules of an adapter, or merge it; and out of what is offloaded.",
        stacklevel=4,
    )
