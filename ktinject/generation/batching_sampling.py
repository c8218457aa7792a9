"""Each request of a batch chooses its tokens in its own way: greedily, or with its own temperature, top_k and top_p.

transformers' continuous batching samples for all requests or for none. Here a step takes the greatest token of each
greedy request and draws for the others. The numbers of a request stand in rows of the tensor that transformers keeps
for such arguments, so that a captured step reads those of the requests that it has now.

A row whose scores are not finite gets `NO_TOKEN`, and the others their tokens: one request's fault ends no other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ktinject.hf import compat

NO_TOKEN = -1  # of a row from which none can be chosen


@dataclass(frozen=True)
class Choice:
    """How a request chooses its tokens."""

    samples: int = 0  # 1: it draws
    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0

    @classmethod
    def of(cls, model: Any, config: GenerationConfig) -> Choice | None:
        """None for a request that asks for more than that."""
        if config.get_generation_mode() not in ("greedy_search", "sample") or config.max_time is not None:
            return None
        if (
            config.min_length or config.min_new_tokens
        ):  # which make processors only once `generate` has prepared them
            return None
        try:
            found = model._get_logits_processor(config)
        except Exception:  # of one that needs the prompt
            return None
        values: dict[str, Any] = {"samples": int(bool(config.do_sample))}
        for processor in found:
            if type(processor) is TemperatureLogitsWarper:
                values["temperature"] = float(processor.temperature)
            elif type(processor) is TopKLogitsWarper and processor.min_tokens_to_keep == 1:
                values["top_k"] = int(processor.top_k)
            elif type(processor) is TopPLogitsWarper and processor.min_tokens_to_keep == 1:
                values["top_p"] = float(processor.top_p)
            else:
                return None
        return cls(**values)

    def arguments(self, vocab: int) -> dict[str, Any]:
        """For `add_request` of a manager that `install` was called for."""
        return {**asdict(self), "top_k": min(self.top_k or vocab, vocab)}


def install(manager: Any, vocab: int) -> None:
    """Let each request of a manager choose as its `Choice` says. Before the manager is started."""
    manager.logit_processor = _Choices(vocab)


class _Choices(compat.ContinuousBatchingLogitsProcessorList):
    """What keeps the arguments. Logits are processed where tokens are chosen, for requests that draw alone.

    vocab  what stands for a top_k of all tokens
    """

    def __init__(self, vocab: int) -> None:
        self.warpers = (
            compat.ContinuousBatchingTemperatureLogitsWarper(TemperatureLogitsWarper(1.0)),
            compat.ContinuousBatchingTopKLogitsWarper(TopKLogitsWarper(vocab)),
            compat.ContinuousBatchingTopPLogitsWarper(TopPLogitsWarper(1.0)),
        )
        super().__init__(LogitsProcessorList([*self.warpers, _Samples()]))
        self.tensors_required = 4
        self.do_processing = False

    def choose(self, scores: Tensor, arguments: Tensor) -> Tensor:
        """scores [n, v] fp32, arguments [4, at least n] int32 → [n] int64."""
        arguments = arguments[:, : len(scores)]
        highest, greatest = scores.max(-1)
        greatest = greatest.where(highest.isfinite(), NO_TOKEN)  # NaN is the highest of its row
        draws = arguments[3] != 0
        if not scores.is_cuda:  # elsewhere, the host does not know
            if not draws.any():
                return greatest
            rows = draws.nonzero()[:, 0]
            return greatest.index_copy(0, rows, self._drawn(scores[rows], arguments[:, rows]))
        return torch.where(draws, self._drawn(scores, arguments), greatest)

    def _drawn(self, scores: Tensor, arguments: Tensor) -> Tensor:
        for warper, argument in zip(self.warpers, arguments):
            scores = warper(scores, argument.contiguous())
        weights = scores.softmax(-1)
        is_finite = weights.sum(-1).isfinite()
        # Of anything else `multinomial` raises, or stops the device, for all rows.
        weights = weights.where(is_finite[:, None], 1.0)
        return torch.multinomial(weights, num_samples=1)[:, 0].where(is_finite, NO_TOKEN)


class _Samples(compat.ContinuousBatchingLogitsProcessor):
    supported_kwargs = {"samples": int}
    ignored_kwargs = ()

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: Any) -> Tensor:
        found = [
            request.state.logit_processor_kwargs.get("samples", 0) for request in requests_with_new_token
        ]
        return torch.tensor(found, dtype=torch.int32, device="cpu")

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        return scores


def choose(runner: Any, scores: Tensor, output_ids: Tensor, arguments: Tensor) -> bool:
    """Write a step's tokens; gives whether the runner's requests choose in their own ways.

    scores      [1, n, v] fp32
    output_ids  [1, at least n], written
    arguments   of the requests, as `_Choices` keeps them
    """
    choices = runner.logit_processor
    if not isinstance(choices, _Choices):
        return False
    tokens = choices.choose(scores[0], arguments)
    output_ids[0, : len(tokens)].copy_(tokens)
    return True
