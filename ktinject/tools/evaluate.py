"""How close a swapped model stays to the model it came from: on given text, and in what it writes.

Letters: T tokens of the text, V entries of the vocabulary. The text is cut into windows that do not overlap. The first
token of a window is context only; every other token is predicted from those before it in its window. Memory stays
bounded by two windows of logits and `CHUNK_BYTES`, however long the text is.

With `decode`, the model reads the windows token by token through a cache, as `generate` writes after the prompt,
several windows side by side. Only this measures what acts at decode alone, such as deferred experts. It takes some ten
times as long.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ktinject.errors import OperatorError, PlanError
from ktinject.hf import compat, pictures

CHUNK_BYTES = 64 << 20
"""Bytes of one fp64 piece of logits; a few such pieces live at once."""

ROWS = 16
"""Windows that are decoded side by side."""


@dataclass(frozen=True)
class Divergence:
    """Model b measured against model a on the same predictions.

    tokens         predictions compared
    mean_nats      mean of KL(a ‖ b) over them
    p99_nats       its 99th percentile
    top1           share of predictions whose most likely token is the same
    perplexity_a, perplexity_b
    change_error   standard error of perplexity_b / perplexity_a, from what each prediction adds to it
    """

    tokens: int
    mean_nats: float
    p99_nats: float
    top1: float
    perplexity_a: float
    perplexity_b: float
    change_error: float


@dataclass(frozen=True)
class Agreement:
    """Greedy continuations of the same prompts by two models.

    prompts    how many
    identical  prompts whose continuations are equal to the last token
    tokens     tokens in the longer continuation of each prompt, in all
    same       how many of those are equal, position by position
    """

    prompts: int
    identical: int
    tokens: int
    same: int


def perplexity(model: PreTrainedModel, ids: Tensor, *, window: int = 512, decode: bool = False) -> float:
    """The perplexity of `model` on a text.

    ids      [T] token ids, int64
    window   tokens that the model sees at once
    decode   token by token
    Returns  exp of the mean negative log-likelihood, in nats, of every predicted token
    Raises   PlanError if text or window do not fit the model; OperatorError if a logit is not finite
    """
    total, count = 0.0, 0
    for rows, targets in _predictions(model, ids, window, decode):
        total += float(_nll(_log_probabilities(rows), targets).sum())
        count += len(rows)
    return math.exp(total / count)


def divergence(
    a: PreTrainedModel, b: PreTrainedModel, ids: Tensor, *, window: int = 512, decode: bool = False
) -> Divergence:
    """Compare the next-token distributions of two models on a text, in fp64.

    a, b     reference and candidate, with the same vocabulary
    ids      [T] token ids, int64
    window   tokens that the models see at once
    decode   token by token
    Returns  a `Divergence`
    Raises   PlanError if text, window or vocabularies do not fit; OperatorError if a logit is not finite
    """
    size_a, size_b = a.config.get_text_config().vocab_size, b.config.get_text_config().vocab_size
    if size_a != size_b:
        raise PlanError(
            f"vocabularies of {size_a} and {size_b} tokens cannot be compared; they must be equal."
        )
    kl: list[Tensor] = []
    same = 0
    nll_a: list[Tensor] = []
    nll_b: list[Tensor] = []
    pairs = zip(_predictions(a, ids, window, decode), _predictions(b, ids, window, decode), strict=True)
    for (rows_a, targets), (rows_b, _) in pairs:
        p, q = _log_probabilities(rows_a), _log_probabilities(rows_b).to(rows_a.device)
        kl.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).cpu())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        nll_a.append(_nll(p, targets))
        nll_b.append(_nll(q, targets))
    nats = torch.cat(kl).sort().values
    count = len(nats)
    of_a, of_b = torch.cat(nll_a), torch.cat(nll_b)
    change = math.exp(float((of_b - of_a).mean()))
    return Divergence(
        tokens=count,
        mean_nats=float(nats.mean()),
        p99_nats=float(nats[math.ceil(0.99 * count) - 1]),
        top1=same / count,
        perplexity_a=math.exp(float(of_a.mean())),
        perplexity_b=math.exp(float(of_b.mean())),
        change_error=change * float((of_b - of_a).std(correction=0)) / math.sqrt(count),
    )


def greedy(
    model: PreTrainedModel,
    prompt: Tensor,
    new_tokens: int,
    *,
    streamer: BaseStreamer | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[int]:
    """The greedy continuation of a prompt.

    prompt      [T] token ids, int64, T ≥ 1
    new_tokens  at most this many; fewer where the model ends
    streamer    is given each token as it comes
    more        of pictures in the prompt, as `pictures.encode` gives it
    Raises      PlanError if prompt and continuation do not fit the model
    """
    check_prompt(model, prompt, new_tokens)
    ids = prompt.to(model.device)[None]
    # Sampling settings of the checkpoint would only draw a warning: greedy search reads none of them.
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        streamer=streamer,
        **pictures.placed(more or {}, model),
    )
    return written[0, len(prompt) :].tolist()


def check_prompt(model: PreTrainedModel, prompt: Tensor, new_tokens: int) -> None:
    """Raises PlanError if a prompt, [T] token ids, and so many new tokens do not fit a model, on meta or not."""
    longest = longest_text(model.config)
    if not 1 <= len(prompt) <= longest - new_tokens:
        raise PlanError(
            f"a prompt of {len(prompt)} tokens and {new_tokens} new ones: the prompt must have at least 1, "
            f"both together at most {longest}, what the model was made for. Change one of them."
        )
    _check_ids(model, prompt)


def greedy_agreement(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> Agreement:
    """Compare what two models wrote, each list as `greedy` returns it, prompt by prompt."""
    pairs = list(zip(a, b, strict=True))
    return Agreement(
        prompts=len(pairs),
        identical=sum(list(x) == list(y) for x, y in pairs),
        tokens=sum(max(len(x), len(y)) for x, y in pairs),
        same=sum(i == j for x, y in pairs for i, j in zip(x, y)),
    )


def longest_text(config: PreTrainedConfig) -> int:
    """Tokens that a model was made to see at once; no limit if its config names none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def _check_ids(model: PreTrainedModel, ids: Tensor) -> None:
    vocabulary = model.config.get_text_config().vocab_size
    low, high = ids.aminmax()
    if low < 0 or high >= vocabulary:
        raise PlanError(
            f"token ids from {int(low)} to {int(high)} do not fit a vocabulary of {vocabulary}. "
            "Use the tokenizer that belongs to the model."
        )


def check_text(model: PreTrainedModel, ids: Tensor, window: int) -> None:
    """Raises PlanError if a text, [T] token ids, or such windows do not fit a model, on meta or not."""
    if ids.dim() != 1 or len(ids) < 2:
        raise PlanError(
            f"text of shape {tuple(ids.shape)}: at least 2 token ids in one dimension are needed."
        )
    longest = longest_text(model.config)
    if not 2 <= window <= longest:
        raise PlanError(f"window of {window} tokens: allowed is 2 to {longest}, what the model was made for.")
    _check_ids(model, ids)


def _windows(model: PreTrainedModel, ids: Tensor, window: int) -> Iterator[Tensor]:
    """The text in windows, [≤ window] each; a last window of one token predicts nothing and is left out."""
    check_text(model, ids, window)
    for piece in ids.split(window):
        if len(piece) > 1:
            yield piece


def _predictions(
    model: PreTrainedModel, ids: Tensor, window: int, decode: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [rows, V] and what came next, [rows], for all predictions; the same rows for every model."""
    read = _decoded if decode else _read
    for logits, targets in read(model, list(_windows(model, ids, window))):
        rows = max(1, CHUNK_BYTES // (8 * logits.shape[-1]))
        yield from zip(logits.split(rows), targets.split(rows))


def _read(model: PreTrainedModel, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """A window at a time."""
    for piece in pieces:
        with torch.inference_mode():
            logits = model(input_ids=piece[None].to(model.device), use_cache=False).logits[0, :-1]
        yield logits, piece[1:]


def _decoded(model: PreTrainedModel, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """A token of up to ROWS windows of one length at a time; the first tokens are their prompts."""
    while pieces:
        rows = [piece for piece in pieces[:ROWS] if len(piece) == len(pieces[0])]
        pieces = pieces[len(rows) :]
        text = torch.stack(rows)
        cache = None
        for at in range(text.shape[1] - 1):
            with torch.inference_mode():
                step = text[:, at : at + 1].to(model.device)
                out = model(input_ids=step, use_cache=True, **{compat.CACHE: cache})
            cache = getattr(out, compat.CACHE)
            yield out.logits[:, -1], text[:, at + 1]


def _log_probabilities(rows: Tensor) -> Tensor:
    if not rows.isfinite().all():
        raise OperatorError("the model gave a logit that is not finite; nothing can be measured on it.")
    return rows.double().log_softmax(-1)


def _nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihoods [rows], in nats, of `targets` [rows]; on the CPU."""
    found = F.nll_loss(log_probabilities, targets.to(log_probabilities.device), reduction="none")
    return found.cpu()
