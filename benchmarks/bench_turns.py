"""A conversation's second turn: seconds to its first token beside the first turn's, and beside those without a cache.

python benchmarks/bench_turns.py                                   # 32,768 tokens, 48 layers of Qwen3-30B-A3B, int4
python benchmarks/bench_turns.py --device cpu --layers 2 --tokens 2048
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from rows import commit
from transformers import GenerationConfig

from ktinject.serving.batches import Batches
from ktinject.serving.prefixes import Prefixes
from ktinject.tools import random_models


class Sink:
    """When the first token came, and how much of the prompt was there."""

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
    parser.add_argument("--new", type=int, default=32, help="of the second turn's question")
    args = parser.parse_args()
    config = random_models.config(args.shape, args.layers)
    model = random_models.build(config, devices=[args.device], variables={"experts": "int4"})
    asked = GenerationConfig(max_new_tokens=16, do_sample=False, pad_token_id=0)
    vocab = min(config.vocab_size, 1 << 15)

    def write(batches: Batches, ids: list[int]) -> tuple[list[int], Any]:
        sink = Sink()
        return batches.generate(ids, asked, sink, None)[0].tolist(), sink

    def serving(here: int, ram: int) -> Batches:
        return Batches(model, None, 1, 0, Prefixes(model, here, ram))

    kept, without = serving(2 * args.tokens, 8 << 30), serving(0, 0)
    write(kept, torch.randint(vocab, (256,)).tolist())  # graphs are captured
    first_text = torch.randint(vocab, (args.tokens,)).tolist()
    first, of_first = write(kept, first_text)
    question = first + torch.randint(vocab, (args.new,)).tolist()
    second, of_second = write(kept, question)
    whole, of_whole = write(without, question)
    print(
        f"{args.shape}, {args.tokens} tokens, {commit()}: first turn {of_first.first:.3f} s, "
        f"second {of_second.first:.3f} s ({of_second.first / of_first.first:.1%}; "
        f"{of_second.cached} of {len(question)} tokens were there), without a "
        f"cache {of_whole.first:.3f} s; same tokens: {second == whole}; {model.ktinject_decoding.last}"
    )


if __name__ == "__main__":
    main()
