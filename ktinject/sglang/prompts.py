"""Long prompts: the experts of the CPU, or a part of them, pass through the GPU where that is faster.

What a layer takes on the CPU and over the bus is measured when the first one is loaded, and the GPU's memory for it is
taken then, before SGLang gives the rest to its cache. A prompt that passes through the GPU makes the host wait for what
is queued before it.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import Tensor

from ktinject.operators.cpu_experts import CpuExperts, weights_in_words
from ktinject.operators.offload import prefill_rates
from ktinject.operators.offload.prefill_rates import Rates
from ktinject.operators.offload.streaming import FEWEST_TOKENS, StreamedExperts
from ktinject.sglang.arguments import Arguments

log = logging.getLogger("ktinject")

# Where the chunk size is not known.
_MOST_TOKENS = 8192
# To pass through the GPU makes the host wait, and is not worth it for less.
_LEAST_S = 1e-3

_fruitless: set[object] = set()  # kinds of layers whose prompts the CPU always computes


class Prompts:
    """The experts of one layer, ready to pass through a GPU.

    first  the experts before it are the GPU's own, and are not in RAM
    """

    def __init__(self, streamed: StreamedExperts, rates: Rates, top_k: int) -> None:
        self.streamed, self.rates = streamed, rates
        self.first = streamed.first
        self.count = streamed.spec.num_experts - streamed.first
        # Of a token's experts, so many are asked of the CPU; the rates are for top_k of them.
        self._share = self.count / streamed.spec.num_experts * top_k / min(top_k, self.count)

    @classmethod
    def of(cls, given: Arguments, experts: CpuExperts, device: torch.device) -> Prompts | None:
        """None where the CPU computes every prompt: it is faster, or this is a part of the experts only, or there is no
        room, which is logged."""
        if given.share.parts > 1:  # those behind the part have no weights, and would be page-locked
            return None
        first = given.num_gpu_experts if given.mask is None else 0
        kind = device, experts.spec, first, weights_in_words(experts.config)
        if first == given.num_experts or kind in _fruitless or not StreamedExperts.support(experts.spec):
            return None
        try:
            streamed = StreamedExperts(experts.spec, experts.native, device, first)
            rates = prefill_rates.measure(streamed, kind[-1], min(given.top_k, given.num_experts - first))
            made = cls(streamed, dataclasses.replace(rates, host_s=0.0), given.top_k)
            if made.passing(given.most_tokens or _MOST_TOKENS):
                with streamed.ring.lock:
                    streamed.ring.reserve()
                return made
        except (RuntimeError, torch.OutOfMemoryError) as error:
            log.warning("prompts stay on the CPU: %s", error)
        _fruitless.add(kind)
        return None

    def passing(self, tokens: int) -> int:
        """How many experts pass through the GPU for so many tokens, from `first` on; 0: none."""
        if tokens < FEWEST_TOKENS:
            return 0
        routed = max(1, round(tokens * self._share))
        passing = self.rates.passing(routed, self.count)
        spared = self.rates.computed_s(routed) - self.rates.streamed_s(routed)
        return passing if passing < self.count or spared > _LEAST_S else 0

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        """The sum of the first `count` experts; others are skipped. Raises as `StreamedExperts.forward`."""
        end = None if count == self.count else self.first + count
        return self.streamed.forward(x, ids, weights, end, dtype)
