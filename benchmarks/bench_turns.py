"""A conversation's next turns: seconds to their first tokens beside the first turn's, and beside those without a cache.

python benchmarks/bench_turns.py                                   # 32,768 tokens, 48 layers of Qwen3-30B-A3B, int4
python benchmarks/bench_turns.py --set gpu_experts=auto --new 8    # experts on the GPU, questions of 8 tokens
python benchmarks/bench_turns.py --device cpu --layers 2 --tokens 2048
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rows import commit
from transformers import GenerationConfig

from ktinject import rules
from ktinject.serving.batches import Batches
from ktinject.serving.prefixes import Prefixes
from ktinject.tools import random_models


class Sink:
    """When the first token came, and how much of the prompt was there."""

    may_complete = False

    def __init__(self) -> None:
        self.asked, self.first, self.cached, self.calls = time.perf_counter(), 0.0, 0, 0

    def found(self, tokens: int) -> None:
        self.cached = tokens

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # behind the prompt
            self.first = time.perf_counter() - self.asked

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--new", type=int, default=32, help="tokens of each further turn's question")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--pause", type=float, default=3.0, help="seconds before each further turn is asked")
    parser.add_argument("--in-ram", action="store_true", help="texts wait in RAM, not on the GPU")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    config = random_models.config(args.shape, args.layers)
    variables = {"experts": "int4", "gpu_experts": 0, **rules.parse_overrides(args.set)}
    model = random_models.build(config, devices=[args.device], variables=variables)
    asked = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0)
    vocab = min(config.vocab_size, 1 << 15)

    def write(batches: Batches, ids: list[int]) -> tuple[list[int], Any]:
        sink = Sink()
        return batches.generate(ids, asked, sink, None)[0].tolist(), sink

    def serving(here: int, ram: int) -> Batches:
        return Batches(model, 1, 0, Prefixes(model, here, ram))

    kept, without = serving(0 if args.in_ram else 2 * args.tokens, 8 << 30), serving(0, 0)
    write(kept, torch.randint(vocab, (256,)).tolist())  # graphs are captured
    first_text = torch.randint(vocab, (args.tokens,)).tolist()
    first, of_first = write(kept, first_text)
    text, turns = first, []
    for number in range(args.turns - 1):
        question = text + torch.randint(vocab, (args.new,)).tolist()
        time.sleep(args.pause)
        text, of_turn = write(kept, question)
        turns.append(f"{of_turn.first:.3f} s ({of_turn.first / of_first.first:.1%})")
        if number == 0:
            there, second, asked_second = of_turn.cached, text, question
    whole, of_whole = write(without, asked_second)
    print(
        f"{args.shape}, {variables}, {args.tokens} tokens, {commit()}: first turn {of_first.first:.3f} s, "
        f"the next ones {', '.join(turns)}; {there} of {len(asked_second)} tokens were there; without a "
        f"cache {of_whole.first:.3f} s; same tokens: {second == whole}; {model.ktinject_decoding.last}"
    )


if __name__ == "__main__":
    main()
