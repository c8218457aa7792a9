"""Decode steps of few kernels: norms, attention, routing and what lies between them as native/cuda computes it.

Between two layers of experts, transformers runs some fifty kernels on tensors of a single token; nearly all of that
time is launches. While a step is captured, `Fused.applied` lets the modules that it knows by what they hold compute
with few kernels instead:

    a decoder layer   norm and projections to heads | attention | output projection and residual
                      | norm and router | choice of experts and submit | wait and residual
    its parts         a norm, attention, a router, where the layer around them is not known
    before            angles of rotation

Whether one computes what its module computes is not believed: the first step runs both, on the model's own numbers, and
a module that differs stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ktinject import decode_ops
from ktinject.decode_ops import Cache, Norm
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.team import Team

logger = logging.getLogger("ktinject")

# Rounding to a dtype of the intermediate results, which differ by the order of a sum: a few units in the last place.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Of a whole layer, whose parts have been compared: only how they are put together. Where two experts are nearly as
# likely, rounding decides, and a layer with the other one differs by more than rounding.
_LAYER_TOLERANCE = 0.1

Step = Callable[..., Any]


class Fused:
    """The modules of a model whose decode step is known, and which of them were found to compute the same.

    refused   path → why a module that looked known keeps its own forward
    """

    def __init__(self, model: nn.Module, team: Team | None = None) -> None:
        self._team = team
        self.refused: dict[str, str] = {}
        self._checked = False
        self._steps: dict[str, tuple[nn.Module, Step]] = {}
        # Blocks of attention count themselves here; requests of one model take turns.
        heads = max((getattr(m, "num_attention_heads", 0) for m in _configs(model)), default=0)
        arrived: dict[torch.device, Tensor] = {}
        for path, module in model.named_modules():
            device = _device(module)
            if device not in arrived:
                arrived[device] = torch.zeros(decode_ops.MOST_ROWS * heads, dtype=torch.int32, device=device)
            step = _known(module, arrived[device])
            if step is not None and "forward" not in vars(module):
                self._steps[path] = (module, step)

    def __len__(self) -> int:
        return len(self._steps)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the known modules compute with few kernels; the first time, they compare and compute as ever."""
        checking = not self._checked
        try:
            for path, (module, step) in self._steps.items():
                module.__dict__["forward"] = self._comparing(path, module, step) if checking else step
            yield
            self._checked = True
        finally:
            for module, _ in self._steps.values():
                module.__dict__.pop("forward", None)
            for path in self.refused:
                self._steps.pop(path, None)

    def _comparing(self, path: str, module: nn.Module, step: Step) -> Step:
        own = type(module).forward
        tolerance = {"": _LAYER_TOLERANCE} if _is_layer(module) else _TOLERANCE

        def forward(*args: Any, **kwargs: Any) -> Any:
            theirs = own(module, *args, **kwargs)
            try:
                parts = [p for p in self.refused if _is_layer(module) and p.startswith(f"{path}.")]
                reason = f"{parts[0]} does" if parts else ""
                reason = reason or _difference(step(*args, **kwargs), theirs, tolerance)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if self._team is not None:
                # Parts exchange what they compute: all processes must compare and replace the same ones.
                reason = next((said for said in self._team.tell(reason) if said), "")
            if reason:
                self.refused[path] = reason
                logger.info("%s: its decode step keeps its own kernels: %s", path, reason)
            return theirs

        return forward


def _difference(ours: Any, theirs: Any, tolerance: dict[Any, float]) -> str:
    """How two outputs differ; "" if they are the same but for rounding."""
    if isinstance(ours, tuple) != isinstance(theirs, tuple):
        return f"{type(ours).__name__}, not {type(theirs).__name__}"
    ours = [t for t in (ours if isinstance(ours, tuple) else (ours,)) if t is not None]
    theirs = [t for t in (theirs if isinstance(theirs, tuple) else (theirs,)) if t is not None]
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs, not {len(theirs)}"
    for a, b in zip(ours, theirs):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return f"an output is {list(a.shape)} {a.dtype}, not {list(b.shape)} {b.dtype}"
        if not b.dtype.is_floating_point:
            continue  # ids may change places where weights tie; the weights tell
        error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)
        if not error <= tolerance.get("", tolerance.get(b.dtype, 0.0)):
            return f"relative difference {error.item():.2g}"
    return ""


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    return [] if config is None else [config, config.get_text_config()]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


def _known(module: nn.Module, arrived: Tensor) -> Step | None:
    """The decode step of a module by what it is made of, or None."""
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return _norm_step(module)
    if name.endswith("Attention"):
        return _attention_step(module, arrived)
    if name.endswith("Router"):
        return _router_step(module) or _grouped_router_step(module)
    if name.endswith("RotaryEmbedding"):
        return _rotation_step(module)
    if _is_layer(module):
        return _layer_step(module, arrived)
    return _shared_step(module)


def _rotation_step(module: Any) -> Step | None:
    kind = getattr(module, "rope_type", None)
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return None  # frequencies that change with the length
    frequencies, scale = getattr(module, "inv_freq", None), getattr(module, "attention_scaling", None)
    if not isinstance(frequencies, Tensor) or not isinstance(scale, (int, float)):
        return None
    own = type(module).forward

    def step(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.shape[-1] != 1 or position_ids.dim() != 2 or args or kwargs:
            return own(module, x, position_ids, *args, **kwargs)
        return decode_ops.rotation(position_ids.contiguous(), module.inv_freq.float(), scale, x.dtype)

    return step


def _norm_of(module: Any) -> Norm | None:
    """A norm by its weight and what it adds to the mean square, by the names that is known under."""
    if not type(module).__name__.lower().endswith("rmsnorm"):
        return None
    weight = getattr(module, "weight", None)
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    eps = next((eps for eps in found if isinstance(eps, float)), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        return None
    return Norm(weight, eps)


def _norm_step(module: nn.Module) -> Step | None:
    norm = _norm_of(module)
    if norm is None:
        return None

    def step(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != norm.weight.dtype:
            raise ValueError(f"found {hidden_states.dtype}, the weight is {norm.weight.dtype}")
        return decode_ops.rms_norm(hidden_states, norm)

    return step


def _is_router(module: Any) -> bool:
    has = all(hasattr(module, name) for name in ("weight", "top_k", "num_experts", "norm_topk_prob"))
    return has and getattr(module, "bias", None) is None and not hasattr(module, "e_score_correction_bias")


def _router_step(module: Any) -> Step | None:
    if not _is_router(module):
        return None

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(hidden_states, module.weight)
        return (logits, *decode_ops.route(logits, module.top_k, module.norm_topk_prob))

    return step


def _grouped_router_step(module: Any) -> Step | None:
    """A router by sigmoids, of groups of experts, with a correction of its choice, as DeepSeek-V3's."""
    needed = ("weight", "top_k", "num_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    bias, weight = getattr(module, "e_score_correction_bias", None), getattr(module, "weight", None)
    if not all(hasattr(module, name) for name in needed) or not isinstance(bias, Tensor):
        return None
    if not isinstance(weight, Tensor) or weight.dtype == torch.float32 or weight.shape[1] % 32:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if len(x) > decode_ops.MOST_ROWS or x.dtype != module.weight.dtype:
            return own(module, hidden_states)
        # Products of two such values are exact in fp32, so nothing has to be widened before.
        logits = decode_ops.linear(x, [module.weight], wide=True)
        chosen = decode_ops.route_grouped(
            logits,
            module.e_score_correction_bias.float(),
            module.top_k,
            module.num_group,
            module.topk_group,
            bool(module.norm_topk_prob),
            module.routed_scaling_factor,
        )
        return (logits, *chosen)

    return step


def _shared_step(module: Any) -> Step | None:
    """A block with shared experts on the GPU, which compute while the CPU computes the others."""
    if {name for name, _ in module.named_children()} != {"gate", "experts", "shared_experts"}:
        return None
    if not isinstance(module.experts, HybridExperts) or not type(module.gate).__name__.endswith("Router"):
        return None

    def step(hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = module.gate(x)
        started = module.experts.start(x, ids, weights)
        found = module.experts.complete(started, residual=module.shared_experts(x))
        return found.view_as(hidden_states)

    return step


def _is_plain(module: Any, k: int, dtype: torch.dtype) -> bool:
    """Whether `decode_ops.linear` can take a linear layer's place."""
    if type(module) is not nn.Linear or dtype == torch.float32 or k % 32:
        return False
    return module.weight.dtype == dtype and module.weight.is_contiguous() and not module._forward_hooks


def _project(
    x: Tensor,
    linears: Sequence[nn.Module],
    norm: Norm | None = None,
    residual: Tensor | None = None,
    then: Tensor | None = None,
) -> list[Tensor]:
    """x [m, k], normed where there is a norm, through each of up to three layers, + residual; each [m, n]."""
    if all(_is_plain(linear, x.shape[1], x.dtype) for linear in linears):
        parts: list[Any] = list(linears)
        out = decode_ops.linear(
            x, [p.weight for p in parts], [p.bias for p in parts], norm=norm, residual=residual, then=then
        )
        return list(out.split([p.out_features for p in parts], dim=1))
    x = x if norm is None else decode_ops.rms_norm(x, norm)
    found = [linear(x) for linear in linears]
    return found if residual is None else [residual + y for y in found]


class _Attention:
    """Attention with projections to heads, rotation by halves and, maybe, a norm of queries and keys by heads."""

    _NEEDED = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "head_dim",
        "scaling",
        "layer_idx",
        "num_key_value_groups",
    )

    def __init__(self, module: Any, norms: tuple[Norm | None, Norm | None], arrived: Tensor) -> None:
        self.module, self.norms, self.arrived = module, norms, arrived

    @classmethod
    def of(cls, module: Any, arrived: Tensor) -> _Attention | None:
        if not all(hasattr(module, name) for name in cls._NEEDED) or hasattr(module, "sinks"):
            return None
        if getattr(module, "attn_logit_softcapping", None):
            return None
        if any(p.dtype == torch.float32 for p in module.parameters()):
            return None  # tensor cores would round what it computes with
        present = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
        norms = [None if norm is None else _norm_of(norm) for norm in present]
        for norm, found in zip(present, norms):
            if norm is not None and (found is None or found.weight.shape != (module.head_dim,)):
                return None
        if norms[0] is not None and norms[1] is not None and norms[0].eps != norms[1].eps:
            return None
        return cls(module, (norms[0], norms[1]), arrived)

    def cache(self, hidden_states: Tensor, args: Any, kwargs: Any) -> Cache | None:
        """What a captured step attends to; None for any other call, for others may call the model meanwhile."""
        held, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        layer: Any = held.layers[self.module.layer_idx] if held is not None else None
        if hidden_states.shape[1] != 1 or args or kwargs.get("position_embeddings") is None:
            return None
        if mask is None or not hasattr(layer, "place"):
            return None
        return Cache(layer.keys, layer.values, layer.place, mask)

    def __call__(self, x: Tensor, norm: Norm | None, rotation: Any, cache: Cache) -> Tensor:
        """x [b, hidden] → what the heads found [b, heads · size]; the output projection is left."""
        module = self.module
        then = module.o_proj.weight if type(module.o_proj) is nn.Linear else None
        q, k, v = (
            part.view(len(x), -1, module.head_dim)
            for part in _project(x, (module.q_proj, module.k_proj, module.v_proj), norm, then=then)
        )
        return decode_ops.attend(q, k, v, self.norms, rotation, cache, module.scaling, self.arrived).flatten(
            1
        )


def _attention_step(module: Any, arrived: Tensor) -> Step | None:
    attention = _Attention.of(module, arrived)
    if attention is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = attention.cache(hidden_states, args, kwargs)
        if cache is None:
            return own(module, hidden_states, *args, **kwargs)
        found = attention(hidden_states[:, 0], None, kwargs["position_embeddings"], cache)
        return module.o_proj(found)[:, None], None

    return step


class _Routed:
    """A block of a router and experts behind a handoff, and nothing else."""

    def __init__(self, block: Any) -> None:
        self.gate, self.experts = block.gate, block.experts

    @classmethod
    def of(cls, block: Any) -> _Routed | None:
        children = dict(block.named_children())
        if set(children) != {"gate", "experts"} or not isinstance(children["experts"], HybridExperts):
            return None
        gate: Any = children["gate"]
        if not type(gate).__name__.endswith("Router") or not _is_router(gate):
            return None
        return cls(block) if children["experts"].routes(gate.num_experts, gate.top_k) else None

    def __call__(self, x: Tensor, norm: Norm) -> Tensor:
        """x [b, hidden] + the experts of the normed x."""
        normed = torch.empty_like(x)
        logits = decode_ops.linear(x, [self.gate.weight], norm=norm, normed=normed)
        started = self.experts.start_routed(normed, logits, self.gate.top_k, self.gate.norm_topk_prob)
        return self.experts.complete(started, residual=x)


def _layer_step(module: Any, arrived: Tensor) -> Step | None:
    """norm, attention, residual, norm, experts or a dense part, residual."""
    parts = [
        getattr(module, n, None) for n in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    ]
    if any(part is None for part in parts):
        return None
    before, behind = _norm_of(parts[0]), _norm_of(parts[2])
    attention, mlp = _Attention.of(parts[1], arrived), module.mlp
    if before is None or behind is None or attention is None:
        return None
    if len([*module.children()]) != len(parts) or before.weight.dtype == torch.float32:
        return None
    routed = _Routed.of(mlp)
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = attention.cache(hidden_states, args, kwargs)
        if cache is None or len(hidden_states) > decode_ops.MOST_ROWS:
            return own(module, hidden_states, *args, **kwargs)
        x = hidden_states[:, 0].contiguous()
        found = attention(x, before, kwargs["position_embeddings"], cache)
        then = None if routed is None else routed.gate.weight
        [x] = _project(found, [module.self_attn.o_proj], residual=x, then=then)
        if routed is not None and x.shape[1] % 32 == 0:
            return routed(x, behind)[:, None]
        return x[:, None] + mlp(decode_ops.rms_norm(x, behind)[:, None])

    return step
