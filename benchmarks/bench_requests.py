"""Kinds of request beside a plain one: tokens a second of decode, all rows together, on a model of random weights.

    python benchmarks/bench_requests.py                                   # 8 layers of Qwen3-30B-A3B, int4 experts
    python benchmarks/bench_requests.py --device cpu --layers 2 --kinds plain scores
    python benchmarks/bench_requests.py --csv benchmarks/results.csv

Decode is the time of --write tokens less that of one token, so what a prompt costs is left out. All kinds take turns.
The ratio is to a plain request, greedy and of one row, except for beams, which are compared with a batch of as many
rows: a row of each beam counts as a token, though a text has one of them a step.

What a prompt lookup finds in a text of random weights says nothing. So there are random candidates, of which the first
ones are taken for right: "2 of 4 right" writes three tokens a step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from rows import about, add_arguments, record
from transformers import DynamicCache, GenerationMixin
from transformers.generation import PromptLookupCandidateGenerator

from ktinject import rules
from ktinject.generation import sampling, speculation
from ktinject.tools import random_models

BEAMS = 4
# A request of a kind: a batch, and what generate is asked for beside. All beams count as rows.
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "sampled": (1, {"do_sample": True}),
    "scores": (1, {"return_dict_in_generate": True, "output_scores": True}),
    "scores, logits": (1, {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}),
    "own cache": (1, {}),
    "second turn": (1, {}),
    "prompt lookup": (1, {"prompt_lookup_num_tokens": 4}),
    **{f"{right} of 4 right": (1, {"prompt_lookup_num_tokens": 4}) for right in (0, 1, 2, 4)},
    **{f"batch {batch}": (batch, {}) for batch in (4, 8, 12, 16, 32, 64)},
    f"{BEAMS} beams": (1, {"num_beams": BEAMS}),
}
PROMPT = 64


class Candidates(PromptLookupCandidateGenerator):
    """Random candidates, four a step, of which a certain number at the beginning is taken for right."""

    def __init__(self, right: int, vocab: int) -> None:
        super().__init__(num_output_tokens=4)
        self._right, self._vocab = right, vocab
        self._random = torch.Generator().manual_seed(0)
        self._found = torch.empty(0, dtype=torch.int64)

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        self._found = torch.randint(self._vocab, (4,), generator=self._random)
        return torch.cat([input_ids, self._found.to(input_ids.device)[None]], dim=1), None

    def greatest(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [k + 1, v] behind the text and each candidate → the tokens that are chosen, [k + 1]."""
        chosen = sampling.greatest(scores)
        count = len(chosen) - 1
        found = self._found[:count].clone()
        found[self._right :] ^= 1
        chosen[:count] = found.to(chosen.device)
        return chosen


class Requests:
    """Requests of each kind to one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        random = torch.Generator().manual_seed(0)
        vocab = model.config.get_text_config().vocab_size
        self._tokens = torch.randint(vocab, (64, 2 * PROMPT), generator=random).to(model.device)
        self._first = DynamicCache(config=model.config)
        self._said = self._generate(self._tokens[:1, :PROMPT], PROMPT, {"past_key_values": self._first})

    def _generate(self, ids: torch.Tensor, new: int, asked: dict[str, Any]) -> torch.Tensor:
        given = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **asked}
        found = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **given
        )
        return found if isinstance(found, torch.Tensor) else found.sequences

    def seconds(self, kind: str, new: int) -> float:
        """What a request for so many new tokens takes."""
        batch, asked = KINDS[kind]
        ids = self._tokens[:batch, :PROMPT]
        if kind == "own cache":
            asked = {"past_key_values": DynamicCache(config=self.model.config)}
        elif kind == "second turn":
            asked = {"past_key_values": copy.deepcopy(self._first)}
            ids = torch.cat([self._said, self._tokens[:1, PROMPT:]], dim=1)
        if "right" not in kind or new == 1:
            return self._seconds(ids, new, asked)
        candidates = Candidates(int(kind[0]), self.model.config.get_text_config().vocab_size)
        # Of the class: what is set on the model would be a change of it.
        generator = patch.object(GenerationMixin, "_get_candidate_generator", lambda *_, **__: candidates)
        judge = patch.object(speculation, "sampling", SimpleNamespace(greatest=candidates.greatest))
        with generator, judge:
            return self._seconds(ids, new, asked)

    def _seconds(self, ids: torch.Tensor, new: int, asked: dict[str, Any]) -> float:
        wait: Callable[[], None] = torch.cuda.synchronize if ids.is_cuda else lambda: None
        wait()
        start = time.perf_counter()
        self._generate(ids, new, asked)
        wait()
        return time.perf_counter() - start

    def rate(self, kind: str, new: int) -> float:
        """Tokens a second of decode."""
        one, all_ = self.seconds(kind, 1), self.seconds(kind, new)
        return rows_of(kind) * (new - 1) / (all_ - one)


def rows_of(kind: str) -> int:
    """Rows of a step."""
    batch, asked = KINDS[kind]
    return batch * asked.get("num_beams", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=random_models.SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--device", help="instead of the first GPU, such as cpu")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("-n", "--write", type=int, default=96)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    config = random_models.config(arguments.shape, arguments.layers)
    variables = rules.parse_overrides([f"experts={arguments.weights}"])
    model = random_models.build(config, devices=arguments.device, variables=variables)
    requests = Requests(model)
    rates: dict[str, list[float]] = {kind: [] for kind in arguments.kinds}
    how = {}
    for repetition in range(arguments.repetitions + 1):
        for kind in arguments.kinds:
            rate = requests.rate(kind, arguments.write)
            how[kind] = model.ktinject_decoding.last
            if repetition:  # the first time, graphs are captured
                rates[kind].append(rate)
    found = {kind: statistics.median(each) for kind, each in rates.items()}
    shown = about(arguments, arguments.shape, config.num_hidden_layers, weights=arguments.weights)
    lines = []
    for kind, rate in found.items():
        beside = f"batch {BEAMS}" if "beams" in kind else "plain"
        ratio = round(rate / found[beside], 3) if beside in found else ""
        print(f"{kind:16} {rate:9.1f} tokens/s  {ratio:6} of {beside:8} {how[kind]}", flush=True)
        us = 1e6 * rows_of(kind) / rate
        lines.append(
            {**shown, "benchmark": "request", "kernel": how[kind].split(":")[0], "routing": kind}
            | {"tokens": rows_of(kind), "us": round(us, 1), "peer": beside, "ratio": ratio}
        )
    if arguments.csv:
        record(lines, arguments.csv)


if __name__ == "__main__":
    main()
