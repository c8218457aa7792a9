"""Decode steps of few kernels: norms, attention and routing as native/cuda/decode_ops.cu computes them.

Between two layers of experts, transformers runs some fifty kernels on tensors of a single token; nearly all of that
time is launches. While a step is captured, `Fused.applied` lets the modules that it knows by what they hold compute
with few kernels instead. Whether one computes what its module computes is not believed: the first step runs both, on
the model's own numbers, and a module that differs stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ktinject import _native

logger = logging.getLogger("ktinject")

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in native/moe/stages.hpp
# Rounding to a dtype of the intermediate results, which differ by the order of a sum: a few units in the last place.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
_SPLIT = 1024  # places of the cache that one block of attention takes
_MOST_SPLITS = 32

Step = Callable[..., Any]


def _stream(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight [n] · x [..., n] / rms(x), rounded to x's dtype before the multiplication, as transformers does."""
    x = x.contiguous()
    out = torch.empty_like(x)
    n = weight.numel()
    _native.rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), _CODES[x.dtype], x.numel() // n, n, eps, _stream(x)
    )
    return out


def route(logits: Tensor, top_k: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Softmax over logits [m, e], the top_k greatest: weights [m, t] of the same dtype, ids [m, t] int64."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    weights = logits.new_empty(rows, top_k)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    _native.route(
        logits.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        rows,
        experts,
        top_k,
        normed,
        _CODES[logits.dtype],
        _stream(logits),
    )
    return weights, ids


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norms: tuple[Tensor | None, Tensor | None, float],
    rotation: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: Tensor,
    mask: Tensor,
    scale: float,
) -> Tensor:
    """One token a row: norm and rotate, write to the cache, attend to it.

    q, k, v   [b, h, d], [b, g, d], [b, g, d] contiguous
    norms     weights [d] of queries and keys or None, and eps
    rotation  cos and sin, each [b or 1, 1, d]
    cache     keys and values [b, g, n, d], rows contiguous
    place     [1] int64: the token's place; places after it are not read
    mask      [b, 1, 1, n] bool
    Returns   [b, h, d]
    """
    batch, heads, size = q.shape
    groups = k.shape[1]
    keys, values = cache
    cos, sin = (t.expand(batch, 1, size).contiguous() for t in rotation)
    turned, out = torch.empty_like(q), torch.empty_like(q)
    shapes = {"batch": batch, "q_heads": heads, "kv_heads": groups, "size": size}
    strides = {"batch_stride": keys.stride(0), "head_stride": keys.stride(1)}
    dtype, stream = _CODES[q.dtype], _stream(q)
    q_weight, k_weight, eps = norms
    _native.attention_input(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        q_weight=0 if q_weight is None else q_weight.data_ptr(),
        k_weight=0 if k_weight is None else k_weight.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        place=place.data_ptr(),
        q_out=turned.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        eps=eps,
        dtype=dtype,
        stream=stream,
        **shapes,
        **strides,
    )
    splits = max(1, min(_MOST_SPLITS, keys.shape[2] // _SPLIT))
    scratch = torch.empty(
        batch * heads * splits * (size + 2) if splits > 1 else 0, dtype=torch.float32, device=q.device
    )
    _native.attention(
        q=turned.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        mask=mask.data_ptr(),
        place=place.data_ptr(),
        out=out.data_ptr(),
        scratch=scratch.data_ptr(),
        splits=splits,
        mask_stride=mask.stride(0),
        scale=scale,
        dtype=dtype,
        stream=stream,
        **shapes,
        **strides,
    )
    return out


class Fused:
    """The modules of a model whose decode step is known, and which of them were found to compute the same.

    refused   path → why a module that looked known keeps its own forward
    """

    def __init__(self, model: nn.Module) -> None:
        self.refused: dict[str, str] = {}
        self._checked = False
        self._steps: dict[str, tuple[nn.Module, Step]] = {}
        for path, module in model.named_modules():
            step = _known(module)
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

        def forward(*args: Any, **kwargs: Any) -> Any:
            theirs = own(module, *args, **kwargs)
            try:
                ours = step(*args, **kwargs)
                reason = _difference(ours, theirs)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if reason:
                self.refused[path] = reason
                logger.info("%s: its decode step keeps its own kernels: %s", path, reason)
            return theirs

        return forward


def _difference(ours: Any, theirs: Any) -> str:
    """How two outputs differ; "" if they are the same but for rounding."""
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
        if not error <= _TOLERANCE[b.dtype]:
            return f"relative difference {error.item():.2g}"
    return ""


def _known(module: nn.Module) -> Step | None:
    """The decode step of a module by what it is made of, or None."""
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        return _norm_step(module)
    if name.endswith("Attention"):
        return _attention_step(module)
    if name.endswith("Router"):
        return _router_step(module)
    return None


def _epsilon(norm: nn.Module) -> float | None:
    """What a norm adds to the mean square, by the names it is known under."""
    found = (getattr(norm, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((eps for eps in found if isinstance(eps, float)), None)


def _norm_step(module: nn.Module) -> Step | None:
    weight = getattr(module, "weight", None)
    eps = _epsilon(module)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None

    def step(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != weight.dtype:
            raise ValueError(f"found {hidden_states.dtype}, the weight is {weight.dtype}")
        return rms_norm(hidden_states, weight, eps)

    return step


def _router_step(module: Any) -> Step | None:
    has = all(hasattr(module, name) for name in ("weight", "top_k", "num_experts", "norm_topk_prob"))
    if not has or getattr(module, "bias", None) is not None or hasattr(module, "e_score_correction_bias"):
        return None

    def step(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(hidden_states, module.weight)
        return (logits, *route(logits, module.top_k, module.norm_topk_prob))

    return step


def _attention_step(module: Any) -> Step | None:
    """Attention with projections to heads, rotation by halves and, maybe, a norm of queries and keys by heads."""
    needed = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "head_dim",
        "scaling",
        "layer_idx",
        "num_key_value_groups",
    )
    if not all(hasattr(module, name) for name in needed) or hasattr(module, "sinks"):
        return None
    if getattr(module, "attn_logit_softcapping", None):
        return None
    size = module.head_dim
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    weights = [getattr(norm, "weight", None) for norm in norms]
    if any(norm is not None for norm in norms) and not all(
        isinstance(weight, Tensor) and weight.shape == (size,) for weight in weights
    ):
        return None
    eps = 0.0 if norms[0] is None else _epsilon(norms[0])
    if eps is None:
        return None
    own = type(module).forward

    def step(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, rotation = kwargs.get("past_key_values"), kwargs.get("position_embeddings")
        mask = kwargs.get("attention_mask")
        layer: Any = cache.layers[module.layer_idx] if cache is not None else None
        batch, tokens, _ = hidden_states.shape
        # Others may call the model meanwhile, with a prompt and a cache of their own.
        if tokens != 1 or args or rotation is None or mask is None or not hasattr(layer, "place"):
            return own(module, hidden_states, *args, **kwargs)
        q, k, v = (
            project(hidden_states).view(batch, -1, size)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        out = attend(
            q,
            k,
            v,
            (weights[0], weights[1], eps),
            rotation,
            (layer.keys, layer.values),
            layer.place,
            mask,
            module.scaling,
        )
        return module.o_proj(out.view(batch, 1, -1)), None

    return step
