"""Which experts the next layer will probably ask for: idle CPU workers read them while the GPU computes attention.

SGLang gives a layer's experts y = x / rms(x) · w, x being the residual stream. The next layer's router will get nearly
x / rms(x) · v, by the weight v of its own norm: but for a factor, that is a norm of y by the weight v / w. A factor is
nothing to a router that chooses by softmax. docs/explanation/decode.md has more of guesses.

Source: sglang 0.5.11 to 0.5.23: blocks with `gate`, `topk` and `experts`, in layers with `post_attention_layernorm`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.sglang.layer import Guess, Layer
from ktinject.sglang.wrapper import KTMoEWrapper

# SGLang's norms, and what is added to the weight of each.
_OFFSETS = {"RMSNorm": 0.0, "GemmaRMSNorm": 1.0}


class _Router(NamedTuple):
    """How a layer chooses its experts.

    norm   [hidden] float32, the weight of the norm before it
    gate   [experts, hidden]
    top_k  experts of a token
    """

    norm: Tensor
    gate: Tensor
    top_k: int


def connect(model: nn.Module) -> None:
    """Let each layer of a loaded model guess at the next one's experts, where both routers choose by softmax."""
    found = []
    for path, part in model.named_modules():
        made = getattr(getattr(part, "quant_method", None), "wrapper", None)
        if isinstance(made, KTMoEWrapper):
            found.append((made._layer, _router(model, path, made._layer)))
    found.sort(key=lambda one: one[0].given.layer_idx)
    for (layer, here), (following, there) in pairwise(found):
        choose = None if here is None or there is None else _chooser(here, there)
        layer.guess = None if choose is None else Guess(following, choose)


def _router(model: nn.Module, path: str, layer: Layer) -> _Router | None:
    """That of the experts at this path; None for one that is not known to choose as `decode_ops.route` does."""
    inside = path.rpartition(".")[0]
    block, around = model.get_submodule(inside), model.get_submodule(inside.rpartition(".")[0])
    gate, chosen = getattr(block, "gate", None), getattr(getattr(block, "topk", None), "topk_config", None)
    before = getattr(around, "post_attention_layernorm", None)
    norm, weight = getattr(before, "weight", None), getattr(gate, "weight", None)
    offset = _OFFSETS.get(type(before).__name__)
    if chosen is None or offset is None or not isinstance(norm, Tensor) or not isinstance(weight, Tensor):
        return None
    experts, hidden = layer.given.num_experts, layer.given.hidden_size
    if (
        (list(norm.shape), list(weight.shape)) != ([hidden], [experts, hidden])
        or not weight.is_contiguous()
        or hidden % 32
        or not _is_softmax(gate, chosen)
        or weight.dtype not in (torch.bfloat16, torch.float16)
        or not decode_ops.routes(experts, chosen.top_k)
        or not layer.is_foreseeable(chosen.top_k)
    ):
        return None
    return _Router(norm.detach().float() + offset, weight.detach(), chosen.top_k)


def _is_softmax(gate: Any, chosen: Any) -> bool:
    """Whether the experts with the greatest logits are chosen."""
    others = "use_grouped_topk", "custom_routing_function", "num_fused_shared_experts"
    biases = (
        getattr(chosen, "correction_bias", None),
        *(getattr(gate, name, None) for name in ("bias", "e_score_correction_bias")),
    )
    return (
        getattr(chosen, "scoring_func", "softmax") == "softmax"
        and not any(getattr(chosen, name, None) for name in others)
        and all(bias is None for bias in biases)
    )


def _chooser(here: _Router, there: _Router) -> Callable[[Tensor], Tensor | None] | None:
    """See `Guess.choose`; None between devices. What a weight of zero hides stays hidden."""
    if here.norm.device != there.gate.device:
        return None
    ratio = torch.where(here.norm == 0, 0.0, there.norm / here.norm)
    norm, gate = Norm(ratio.to(there.gate.dtype), eps=1e-6), there.gate

    def choose(x: Tensor) -> Tensor | None:
        if (x.dtype, x.device) != (gate.dtype, gate.device):
            return None
        logits = decode_ops.linear(x.contiguous(), [gate], norm=norm)
        return decode_ops.route(logits, there.top_k, False)[1]

    return choose
