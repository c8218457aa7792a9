"""Continuous batching: tokens a second of 1, 4, 16 … clients, and the time to their first tokens, beside `generate`.

    python benchmarks/bench_batching.py                                          # 48 layers of Qwen3-30B-A3B, int4
    python benchmarks/bench_batching.py --device cpu --layers 2 --clients 1 4 16
    python benchmarks/bench_batching.py --model examples/models/tiny-qwen3-moe --device cpu --clients 1 4 16

All clients ask at once, each for a text of its own. Tokens a second are all written tokens over the time from the first
request to the last token, prompts included. `generate` writes the first client's text alone, in its own steps, over
the same time. Graphs are captured in a round before that is not counted. All take turns, --repeats times, and the
median is taken; what is printed beside is the ratio to one client of continuous batching.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from rows import commit
from transformers import ContinuousBatchingConfig

import ktinject
from ktinject import rules
from ktinject.tools import random_models

_random = torch.Generator().manual_seed(0)


def texts(model: Any, count: int, tokens: int) -> list[list[int]]:
    """Others each time: what was read before is in the cache of prefixes."""
    vocab = model.config.get_text_config().vocab_size
    return torch.randint(min(vocab, 1 << 15), (count, tokens), generator=_random).tolist()


class Clients:
    """A manager that is kept, and how long so many clients take with it."""

    def __init__(self, model: Any, count: int, prompt: int, new: int, graphs: bool | None) -> None:
        self._new = new
        self._shape = model, count, prompt
        page = 256
        # transformers lets no further request begin while a fifth of the cache or less is free.
        blocks = 3 * count * -(-(prompt + new + 1) // page) // 2 + 2
        self._manager = model.init_continuous_batching(
            greedy(model),
            ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=2048, use_cuda_graph=graphs),
        )
        self._manager.start()
        self.run()

    def run(self) -> tuple[float, list[float]]:
        """Tokens a second, and each client's seconds to its first token."""
        asked, found = texts(*self._shape), []
        begin = time.perf_counter()
        self._manager.add_requests(asked, max_new_tokens=self._new, record_timestamps=True)
        while len(found) < len(asked):
            output = self._manager.get_result(timeout=1)
            if output is None:
                if not self._manager.is_running():
                    raise SystemExit(
                        f"continuous batching: {self._manager.background_thread_status.fatal_error}"
                    )
                continue
            if output.error is not None:
                raise SystemExit(f"continuous batching: {output.error}")
            found.append(output)
        seconds = max(output.timestamps[-1] for output in found) - begin
        return sum(len(o.generated_tokens) for o in found) / seconds, [o.timestamps[0] - begin for o in found]

    def close(self) -> None:
        self._manager.stop(block=True, timeout=30)


def greedy(model: Any) -> Any:
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.eos_token_id, config.pad_token_id = False, -1, 0
    return config


def alone(model: Any, prompt: int, new: int) -> float:
    ids = torch.tensor(texts(model, 1, prompt), device=model.device)
    begin = time.perf_counter()
    out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    return (out.shape[1] - prompt) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--model", help="a folder, instead of a shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--write", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--graphs", choices=["auto", "on", "off"], default="auto")
    args = parser.parse_args()
    variables = {"gpu_experts": 0, **rules.parse_overrides([*(args.set or ["experts=int4"])])}
    if args.model is not None:
        model = ktinject.load(args.model, variables=variables, devices=[args.device], progress=False)
    else:
        config = random_models.config(args.shape, args.layers)
        model = random_models.build(config, devices=[args.device], variables=variables)
    name = args.model or args.shape
    print(
        f"{name}, {variables}, prompts of {args.prompt}, {args.write} written; commit {commit()}", flush=True
    )
    graphs = {"auto": None, "on": True, "off": False}[args.graphs]
    alone(model, args.prompt, args.write)
    print(f"generate: {model.ktinject_decoding.last}; {model.ktinject_decoding.reason}", flush=True)
    rates: dict[Any, list[float]] = {}
    firsts: dict[Any, list[float]] = {}
    for count in args.clients:
        # One after the other, as graphs of all would not fit; each beside `generate`, which shows what else changed.
        clients = Clients(model, count, args.prompt, args.write, graphs)
        for _ in range(args.repeats):
            rates.setdefault("generate", []).append(alone(model, args.prompt, args.write))
            rate, first = clients.run()
            rates.setdefault(count, []).append(rate)
            firsts.setdefault(count, []).extend(first)
        clients.close()
        show(count, rates, firsts, args.clients[0])


def show(count: int, rates: Any, firsts: Any, base: int) -> None:
    first = sorted(firsts[count])
    p99 = first[min(len(first) - 1, int(0.99 * len(first)))]
    rate, of_one = statistics.median(rates[count]), statistics.median(rates[base])
    own = statistics.median(rates["generate"])
    print(
        f"{count:3} clients: {rate:8.1f} tokens/s, {rate / of_one:5.2f} of {base}, {rate / own:5.2f} of generate "
        f"({own:.1f}); first token: median {statistics.median(first):.3f} s, p99 {p99:.3f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
