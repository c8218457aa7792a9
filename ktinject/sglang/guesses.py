"""Which experts the next layer will probably ask for: idle CPU workers read them while the GPU computes attention.

SGLang gives a layer's experts y = x / rms(x) · w, x being the residual stream. The next layer's router will get nearly
x / rms(x) · v, by the weight v of its own norm: but for a factor, that is a norm of y by the weight v / w. A factor is
nothing to a router that chooses the greatest logits. docs/explanation/decode.md has more of guesses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.decode_ops import Norm
from ktinject.sglang import routers
from ktinject.sglang.layer import Guess, Layer
from ktinject.sglang.routers import Router

log = logging.getLogger("ktinject")


def connect(model: nn.Module) -> None:
    """Let each layer of a loaded model guess at the next one's experts, where both routers choose the greatest logits.

    The log says once which layers are guessed at, and why others are not.
    """
    found = [(layer, path, _router(model, path, layer)) for layer, path in routers.layers_of(model)]
    said: dict[str, list[int]] = {}
    for (layer, path, here), (following, next_path, there) in pairwise(found):
        choose = here if isinstance(here, str) else there if isinstance(there, str) else _chooser(here, there)
        layer.guess = None if isinstance(choose, str) else Guess(following, choose)
        of = routers.kind_of(model, path if isinstance(here, str) else next_path)
        why = f"not guessed at: {of}: {choose}" if isinstance(choose, str) else f"guessed at: {of}"
        said.setdefault(why, []).append(following.given.layer_idx)
    for why, at in said.items():
        log.info("experts of layers %s are %s", routers.spans(at), why)


def _router(model: nn.Module, path: str, layer: Layer) -> Router | str:
    """That of the experts at this path; or why there is no guess at them, or from them."""
    router = routers.find(model, path, layer)
    if isinstance(router, str):
        return router
    if not layer.is_whole:
        return "the CPU has not all experts in their order"
    if not layer.is_foreseeable(router.top_k):
        return "a token's experts are read sooner than they are guessed"
    return router


def _chooser(here: Router, there: Router) -> Callable[[Tensor], Tensor | None] | str:
    """See `Guess.choose`; why not, between devices. What a weight of zero hides stays hidden."""
    if here.norm.device != there.gate.device:
        return "the next layer is on another device"
    ratio = torch.where(here.norm == 0, 0.0, there.norm / here.norm)
    norm, gate = Norm(ratio.to(there.gate.dtype), eps=1e-6), there.gate

    def choose(x: Tensor) -> Tensor | None:
        if (x.dtype, x.device) != (gate.dtype, gate.device):
            return None
        logits = decode_ops.linear(x.contiguous(), [gate], norm=norm)
        return decode_ops.route(logits, there.top_k, False)[1]

    return choose
