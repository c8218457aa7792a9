"""Models with deferred experts, and requests to them, for the tests of `deferred_moe`."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import reference
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import ktinject

# Relative, of logits. Seen: 2e-7, and 5e-4 where an intermediate is carried across a rounding boundary.
SAME = 2e-3
# What the definition changes must be far above that, or the comparison shows nothing. Seen at the least: 9e-2.
CHANGED = 2e-2
# Where two experts, or two tokens, are closer than this in logits, rounding may choose the other one: a GPU that
# computes the rest of the model moved the router's logits by 3e-3 in one place of ten, and by up to 2e-2.
CLEAR = 1e-2
FOUND, CANDIDATES = 12, 96
PROMPT, WRITTEN = 5, 6

VOCABULARY = models.COMMON["vocab_size"]


def rules(model: PreTrainedModel, **arguments: Any) -> list[dict[str, Any]]:
    block = type(blocks(model)[-1]).__name__
    return [
        {"name": "experts", "match": {"class": block}, "replace": {"operator": "deferred_moe", **arguments}}
    ]


def blocks(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "experts") and hasattr(module, "forward")]


def swap(model: PreTrainedModel, **arguments: Any) -> PreTrainedModel:
    return ktinject.optimize(copy.deepcopy(model), rules(model, **arguments), progress=False)


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Run:
    """One request: its cache, and one forward pass after the other. Tells a reference what is a decode step."""

    def __init__(self, model: PreTrainedModel, definition: reference.Deferral | None = None) -> None:
        self.model, self.definition = model, definition
        self.cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Tensor:
        if self.definition is not None:
            self.definition.decodes = ids.shape[1] == 1 and self.cache.get_seq_length() > 0
        return self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits[:, -1]


def decode(run: Run, ids: Tensor, prompt: int) -> Tensor:
    """Logits [steps, batch, vocabulary]: the prompt at once, then token by token."""
    logits = [run(ids[:, :prompt])]
    return torch.stack(logits + [run(ids[:, at : at + 1]) for at in range(prompt, ids.shape[1])])


@cache
def decided(
    model: PreTrainedModel,
    schedule: tuple[int, ...],
    prompt: int = PROMPT,
    count: int = WRITTEN,
    chunk: int | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """The texts with the clearest choices: what the definition writes greedily after random prompts.

    chunk    how many tokens of the prompt it gets at a time; None: all
    Returns  the texts [FOUND, prompt + count], and their logits [count + 1, FOUND, vocabulary], as `decode` has them
    """
    text = tokens(CANDIDATES, prompt, seed=seed)
    model = copy.deepcopy(model)
    run = Run(model, definition := reference.Deferral(model, list(schedule)))
    logits = [[run(part) for part in text.split(chunk or prompt, 1)][-1]]
    for _ in range(count):
        text = torch.cat([text, logits[-1].argmax(-1, keepdim=True)], 1)
        logits.append(run(text[:, -1:]))
    best = torch.stack(logits[:-1]).topk(2).values
    apart = [best[..., 0] - best[..., 1], *(choices.view(CANDIDATES, -1).T for choices in definition.apart)]
    closest, rows = torch.cat(apart).amin(0).topk(FOUND)
    assert closest[-1] > CLEAR, f"{FOUND} of {CANDIDATES} texts with a closest choice of {closest.tolist()}"
    return text[rows], torch.stack(logits)[:, rows]


def at_once(*requests: Callable[[], Tensor], times: int = 4) -> list[list[Tensor]]:
    """What each request gives, made so often by a thread of its own while the others make theirs."""
    found: list[list[Tensor]] = [[] for _ in requests]

    def work(request: Callable[[], Tensor], results: list[Tensor]) -> None:
        for _ in range(times):
            results.append(request())

    threads = [threading.Thread(target=work, args=pair) for pair in zip(requests, found)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(results) for results in found] == [times] * len(requests)
    return found


def exact(model: PreTrainedModel) -> PreTrainedModel:
    """With weights that packing does not round."""
    return model.bfloat16().float()


def random_case(seed: int) -> tuple[PreTrainedModel, list[int], int]:
    choose = random.Random(seed)
    family = ["qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss", "qwen2_moe", "minimax_m2"][seed % 6]
    count, top_k = choose.randint(2, 5), choose.randint(1, 4)
    changes: dict[str, Any] = {"num_hidden_layers": count, "num_experts_per_tok": top_k}
    if family == "deepseek_v3":
        changes |= {"topk_group": 2}
    if family == "qwen3_moe":
        changes |= {"mlp_only_layers": choose.sample(range(count), count // 3)}
    model = exact(models.tiny(family, seed=seed, **changes))
    layers = len(blocks(model))
    return model, [choose.randint(0, top_k) for _ in range(layers - 1)] + [0], choose.randint(1, 4)


def qwen() -> PreTrainedModel:
    """Dense layers stand between its Mixture-of-Experts layers 0, 2, 4 and 6."""
    return exact(
        models.tiny("qwen3_moe", num_hidden_layers=7, num_experts_per_tok=4, mlp_only_layers=[1, 3, 5])
    )
