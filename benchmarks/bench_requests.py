"""Kinds of request beside a plain one: tokens a second of decode, all rows together, on a model of random weights.

    python benchmarks/bench_requests.py                                   # 8 layers of Qwen3-30B-A3B, int4 experts
    python benchmarks/bench_requests.py --device cpu --layers 2 --kinds plain scores
    python benchmarks/bench_requests.py --csv benchmarks/results.csv

Decode is the time of --write tokens less that of one token, so what a prompt costs is left out. All kinds take turns.
The ratio is to a plain request, greedy and of one row, except for beams, which are compared with a batch of as many
rows: a row of each beam counts as a token, though a text has one of them a step.

The model writes a text that is known: embeddings are large, and the output layer's rows are set so that one token leads
to the next of a chain that does not repeat itself. So candidates can be right as often as a row says, whatever is
rounded where: "2 of 4 right" are two right ones and two others, and of "0.85 right" each one is right with that
probability. Those that are wrong are tokens from elsewhere in the chain, with experts of their own. A lookup of the
chain itself finds nothing; "repeating" is one of a chain of 48 tokens. --reuse has tokens choose so many of the experts
that the one before has chosen, in blocks of 16 tokens; without, routing is uniform.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from rows import about, add_arguments, record
from transformers import DynamicCache

from ktinject import rules
from ktinject.generation import sources
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
    **{
        kind: (1, {"prompt_lookup_num_tokens": 4})
        for kind in (
            *("prompt lookup", "repeating", "0 of 4 right", "1 of 4 right", "2 of 4 right", "4 of 4 right"),
            *("0.5 right", "0.85 right"),
        )
    },
    **{f"batch {batch}": (batch, {}) for batch in (4, 8, 12, 16, 32, 64)},
    f"{BEAMS} beams": (1, {"num_beams": BEAMS}),
}
PROMPT = 64
# On a CPU that others use, too, the process's own time: --cpu-time.
CLOCK: Callable[[], float] = time.perf_counter


CYCLE = 48  # tokens of the chain that repeats itself
BLOCK = 16  # tokens that share experts


class Chain:
    """Tokens, each of which leads to the next one.

    tokens  [n] int64, and the first one follows the last one
    known   the same
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.known = tokens, tokens.tolist()
        self._after = dict(zip(tokens.tolist(), tokens.roll(-1).tolist()))

    def row(self, start: int, length: int) -> torch.Tensor:
        """So many tokens of the chain, [length]."""
        return self.tokens[torch.arange(start, start + length) % len(self.tokens)]

    def behind(self, token: int, most: int) -> list[int]:
        """The tokens that follow one."""
        found: list[int] = []
        while len(found) < most:
            token = self._after[token]
            found.append(token)
        return found

    @torch.no_grad()
    def write_into(self, model: Any, reuse: float) -> None:
        """Have a model's output layer follow the chain. Tokens of a block share a direction.

        reuse  share of the length of an embedding that is the block's, squared
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        drawn, size = torch.Generator().manual_seed(len(self.tokens)), embedding.weight.shape[1]
        own = torch.randn(len(self.tokens), size, generator=drawn)
        blocks = torch.randn(-(-len(own) // BLOCK), size, generator=drawn).repeat_interleave(BLOCK, dim=0)
        found = (1 - reuse) ** 0.5 * own + reuse**0.5 * blocks[: len(own)]
        for weight, rows, values in (
            (embedding.weight, self.tokens, found),
            (head.weight, self.tokens.roll(-1), 0.02 * own),
        ):
            weight[rows.to(weight.device)] = values.to(weight.device, weight.dtype)


def share_of(reuse: float, experts: int, top_k: int) -> float:
    """What `Chain.write_into` takes for tokens that choose so many of the experts of the token before."""
    drawn = torch.Generator().manual_seed(0)
    a, b, shared = (torch.randn(4000, experts, generator=drawn) for _ in range(3))
    low, high = 0.0, 1.0
    for _ in range(20):
        share = (low + high) / 2
        chosen = [((1 - share) ** 0.5 * x + share**0.5 * shared).topk(top_k).indices for x in (a, b)]
        same = (chosen[0][:, :, None] == chosen[1][:, None]).any(-1).float().mean().item()
        low, high = (share, high) if same < reuse else (low, share)
    return low


class Candidates:
    """Takes the place of `Lookup`: four candidates a step, of which some are those of the chain.

    right  so many at the beginning, or the probability of each one
    """

    def __init__(self, right: float, chain: Chain, text: Sequence[int]) -> None:
        self._right, self._chain, self._last = right, chain, text[-1]
        self._random = random.Random(0)

    def extend(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1]

    def candidates(self, most: int) -> list[int]:
        found = self._chain.behind(self._last, 4)
        for at in range(4):
            # In any case, so that what is drawn does not depend on what was right.
            drawn, other = self._random.random(), self._random.choice(self._chain.known)
            if drawn >= self._right if 0 < self._right < 1 else at >= self._right:
                found[at] = other
        return found[:most]


class Requests:
    """Requests of each kind to one model.

    differ  texts that were not the chain
    """

    def __init__(self, model: Any, share: float) -> None:
        self.model, self.differ = model, 0
        vocab = model.config.get_text_config().vocab_size
        order = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))
        most = min(8192, vocab - CYCLE)
        self._chain, self._cycle = Chain(order[:most]), Chain(order[most : most + CYCLE])
        self._chain.write_into(model, share)
        self._cycle.write_into(model, share)
        rows = [self._chain.row(97 * row, 2 * PROMPT) for row in range(64)]
        self._tokens = torch.stack(rows).to(model.device)
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
        chain = self._chain
        if kind == "repeating":
            chain = self._cycle
            ids = chain.row(0, PROMPT)[None].to(ids.device)
        if "right" not in kind or new == 1:
            return self._seconds(ids, new, asked, chain)
        with patch.object(sources, "Lookup", lambda text, _: Candidates(float(kind.split()[0]), chain, text)):
            return self._seconds(ids, new, asked, chain)

    def _seconds(self, ids: torch.Tensor, new: int, asked: dict[str, Any], chain: Chain) -> float:
        wait: Callable[[], None] = torch.cuda.synchronize if ids.is_cuda else lambda: None
        wait()
        start = CLOCK()
        found = self._generate(ids, new, asked)
        wait()
        seconds = CLOCK() - start
        if not asked.get("do_sample") and "num_beams" not in asked:
            for row, text in zip(ids.tolist(), found.tolist()):
                if text[len(row) :] != chain.behind(row[-1], new):
                    self.differ += 1
        return seconds

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
    parser.add_argument(
        "--reuse", type=float, default=0.0, help="experts of a token that the one before chose"
    )
    parser.add_argument("--cpu-time", action="store_true", help="the process's CPU time, of one thread")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    config = random_models.config(arguments.shape, arguments.layers)
    variables = {"gpu_experts": 0, **rules.parse_overrides([f"experts={arguments.weights}"])}
    model = random_models.build(config, devices=arguments.device, variables=variables)
    share = (
        share_of(arguments.reuse, config.num_experts, config.num_experts_per_tok) if arguments.reuse else 0.0
    )
    requests = Requests(model, share)
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
    print(f"{requests.differ} texts were not the chain")
    for costs in model.ktinject_decoding.runners[1].costs.values():
        steps = {tokens: costs.of(tokens) / costs.of(1) for tokens in range(1, 6) if costs.knows(tokens)}
        shown = ", ".join(f"{tokens}: {cost:.2f}" for tokens, cost in steps.items())
        print(f"tokens of a step, and what it took in steps of one: {shown}")
        print(f"and going back to such steps: {costs.switch / costs.of(1):.2f}")
    if arguments.csv:
        record(lines, arguments.csv)


if __name__ == "__main__":
    main()
