"""Experts on the GPU as a cache: decode beside a fixed set and beside none, with routing replayed from traces.

    python benchmarks/bench_expert_cache.py --policy               # hit rates of the policy alone, without a GPU
    python benchmarks/bench_expert_cache.py                        # whole models on a GPU, in turns

The models have random weights, whose routing would mean nothing. So each captured step is given the choices of a trace
in place of the router's: of the published reuse curve (routing_traces.py says how it is made) or uniform. The three
models take turns in one process and see the same traces.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import routing_traces
import torch
from rows import about, add_arguments, of_model, record
from torch import Tensor

from ktinject import _native
from ktinject.generation import decoding
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload.expert_cache import Hits
from ktinject.tools import benchmark, random_models

ROOT = Path(__file__).parents[1]
TRACES: dict[str, Callable[..., Tensor]] = {
    "reuse curve": routing_traces.reuse,
    "uniform": routing_traces.uniform,
}


# --- the policy alone ---


def hit_rates(trace: Tensor, experts: int, share: float) -> tuple[float, float, float]:
    """The share of uses that hit, of a cache and of a fixed set; and experts copied a token. A quarter warms up.

    The fixed set is the best one, that of the most used experts of the whole trace.
    """
    places, warm = round(share * experts), len(trace) // 4
    policy = _native.ReusePolicy(experts, list(range(places)))
    before = 0, 0, 0
    for token, row in enumerate(trace):
        if token == warm:
            before = policy.uses, policy.hits, policy.exchanges
        policy.count(torch.bincount(row, minlength=experts).tolist())
        policy.exchange(2)
    counts = torch.bincount(trace[warm:].reshape(-1), minlength=experts)
    fixed = counts.sort(descending=True).values[:places].sum() / counts.sum()
    uses, hits, copies = (
        now - then for now, then in zip((policy.uses, policy.hits, policy.exchanges), before)
    )
    return hits / max(1, uses), fixed.item(), copies / (len(trace) - warm)


def of_examples(tokens: int) -> Iterator[tuple[str, tuple[list[Tensor], int]]]:
    """The routing of the trained models under examples/models on a text: traces of their layers, and experts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in sorted((ROOT / "examples/models").iterdir()):
        if not (folder / "config.json").exists():
            continue
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        written = (ROOT / "README.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
        ids = tokenizer(written, return_tensors="pt").input_ids[:, :tokens]
        config = model.config
        experts = getattr(config, "num_experts", None) or config.n_routed_experts
        yield folder.name, (routing_traces.recorded(model, ids, layers), experts)


def policy_alone(tokens: int) -> None:
    sources = {name: ([make(tokens)], 128) for name, make in TRACES.items()}
    for name, (traces, experts) in itertools.chain(sources.items(), of_examples(tokens)):
        near = [statistics.mean(routing_traces.again(trace, within) for trace in traces) for within in (1, 8)]
        print(f"{name}: again at the next token {near[0]:.2f}, within eight {near[1]:.2f}")
        for share in (0.1, 0.25, 0.4):
            rates = [hit_rates(trace, experts, share) for trace in traces]
            cache, fixed, copies = (statistics.mean(column) for column in zip(*rates))
            print(
                f"  {share:4.0%} of {experts} experts: hits {cache:.3f}, the best fixed set {fixed:.3f}; misses "
                f"{(1 - fixed) / max(1e-9, 1 - cache):.1f} times as many; {copies:.2f} copies a token and layer",
                flush=True,
            )


# --- whole models ---


class Feeder:
    """Gives the captured steps of a model the choices of a trace."""

    def __init__(self, model: Any) -> None:
        self.operators = [module for module in model.modules() if isinstance(module, HybridExperts)]
        one, config = self.operators[0], model.config
        self.top_k, self.experts = config.num_experts_per_tok, one.num_experts
        shape = len(self.operators), 1, self.experts
        self.logits = torch.zeros(shape, dtype=torch.bfloat16, device=model.device)
        self.ids = torch.zeros(len(self.operators), 1, self.top_k, dtype=torch.int64, device=model.device)
        self.all_logits, self.all_ids = self.logits[None], self.ids[None]
        self.at = 0
        for layer, operator in enumerate(self.operators):
            FED[id(operator)] = self, layer
            operator.capturable = True  # also with the methods that feed_steps replaces

    def begin(self, trace: Tensor) -> None:
        """trace [tokens, layers, 1, top_k]"""
        self.all_ids = trace.to(self.ids.device)
        logits = torch.zeros(*trace.shape[:3], self.experts, dtype=torch.bfloat16, device=self.ids.device)
        worth = torch.arange(self.top_k, 0, -1, device=self.ids.device).to(torch.bfloat16) / 8 + 8
        self.all_logits = logits.scatter_(-1, self.all_ids, worth.expand_as(self.all_ids))
        self.at = 0

    def next(self) -> None:
        self.logits.copy_(self.all_logits[self.at % len(self.all_logits)])
        self.ids.copy_(self.all_ids[self.at % len(self.all_ids)])
        self.at += 1


FED: dict[int, tuple[Feeder, int]] = {}
FEEDING: list[Feeder] = []  # the model whose turn it is


def feed_steps() -> None:
    """From now on, steps of one token of models with a Feeder take their routing from it."""
    start, start_routed, between = HybridExperts.start, HybridExperts.start_routed, decoding._between_steps

    def fed_start(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor, ranks: Any = None) -> Any:
        if id(self) in FED and len(hidden) == 1:
            feeder, layer = FED[id(self)]
            ids = feeder.ids[layer].to(ids.dtype)
        return start(self, hidden, ids, weights, ranks)

    def fed_start_routed(self: Any, hidden: Tensor, logits: Tensor, top_k: int, normed: bool) -> Any:
        if id(self) in FED and len(hidden) == 1:
            feeder, layer = FED[id(self)]
            logits = feeder.logits[layer].to(logits.dtype)
        return start_routed(self, hidden, logits, top_k, normed)

    def fed_between() -> None:
        for feeder in FEEDING:
            feeder.next()
        between()

    HybridExperts.start = fed_start  # type: ignore[method-assign]
    HybridExperts.start_routed = fed_start_routed  # type: ignore[method-assign]
    decoding._between_steps = fed_between


def built(arguments: argparse.Namespace, kind: str) -> Any:
    rules = (ROOT / "optimize_rules/auto.yaml").read_text()
    given = "      gpu_experts: ${variables.gpu_experts}\n"
    assert given in rules
    more = f"      gpu_weights: {arguments.weights}\n      dynamic: {str(kind == 'cache').lower()}\n"
    share = 0.0 if kind == "none" else arguments.share
    path = Path(arguments.scratch) / f"{kind}.yaml"
    path.write_text(rules.replace(given, f"      gpu_experts: {share}\n{more if share else ''}"))
    return random_models.build(
        random_models.config(arguments.shape, arguments.layers),
        str(path),
        variables={"experts": arguments.weights, "dense": arguments.dense},
    )


def prompts(arguments: argparse.Namespace, made: dict[str, Any], tokens: int) -> None:
    """Prompts whose experts are streamed, in turns: what is on the GPU stays off the bus."""
    rates: dict[str, list[float]] = {kind: [] for kind in made}
    for _ in range(arguments.repetitions):
        for kind, model in made.items():
            rates[kind] += benchmark.prefill(model, tokens, 1).rates
    for kind in made:
        pairs = sorted(other / own for own, other in zip(rates[kind], rates[arguments.kinds[0]]))
        print(
            f"prompt of {tokens}: {kind:6} {tokens / statistics.median(rates[kind]) * 1e3:.0f} ms, "
            f"{statistics.median(pairs):.3f} of {arguments.kinds[0]}'s time ({pairs[0]:.3f} to {pairs[-1]:.3f})",
            flush=True,
        )


def whole_models(arguments: argparse.Namespace) -> None:
    feed_steps()
    made = {kind: built(arguments, kind) for kind in arguments.kinds}
    feeders = {kind: Feeder(model) for kind, model in made.items()}
    lines: list[dict[str, Any]] = []
    for name in arguments.routing:
        layers = [
            TRACES[name](arguments.write * 2, feeders[arguments.kinds[0]].experts, seed=layer)
            for layer in range(len(feeders[arguments.kinds[0]].operators))
        ]
        trace = torch.stack(layers, dim=1)[:, :, None]
        rates: dict[str, list[float]] = {kind: [] for kind in made}
        results = {}
        before = {kind: sum((o.hits() for o in feeders[kind].operators), start=Hits()) for kind in made}
        for _ in range(arguments.repetitions):
            for kind, model in made.items():
                FEEDING[:] = [feeders[kind]]
                feeders[kind].begin(trace)
                results[kind] = benchmark.decode(model, arguments.write, 1)
                rates[kind] += results[kind].rates
        base = statistics.median(rates[arguments.kinds[0]])
        for kind in made:
            found = sum((o.hits() for o in feeders[kind].operators), start=Hits())
            uses, hits = found.uses - before[kind].uses, found.hits - before[kind].hits
            copies = found.fetches - before[kind].fetches
            rate = statistics.median(rates[kind])
            pairs = sorted(own / other for own, other in zip(rates[kind], rates[arguments.kinds[0]]))
            print(
                f"{name}: {kind:6} {rate:7.1f} t/s, {statistics.median(pairs):.3f} of {arguments.kinds[0]} "
                f"({pairs[0]:.3f} to {pairs[-1]:.3f}), hits {hits / max(1, uses):.3f}, "
                f"{copies / max(1, uses) * feeders[kind].top_k * len(feeders[kind].operators):.1f} copies a token, "
                f"{results[kind].how}",
                flush=True,
            )
            lines.append(
                of_model(
                    about(arguments, arguments.shape, arguments.layers),
                    results[kind],
                    routing=name,
                    weights=arguments.weights,
                    kernel=f"hybrid_experts, {arguments.share:.0%} on the GPU: {kind}",
                    peer=arguments.kinds[0],
                    peer_us=round(1e6 / base, 1),
                    ratio=round(rate / base, 2),
                )
            )
    for tokens in arguments.prompts:
        prompts(arguments, made, tokens)
    if arguments.csv:
        record(lines, arguments.csv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--policy", action="store_true", help="hit rates alone, without a GPU")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=random_models.SHAPES)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--dense", default="bf16")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--kinds", nargs="+", default=["none", "fixed", "cache"])
    parser.add_argument("--routing", nargs="+", default=[*TRACES], choices=TRACES)
    parser.add_argument("-n", "--write", type=int, default=128)
    parser.add_argument("-r", "--repetitions", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument("--tokens", type=int, default=1600, help="of a trace, with --policy")
    parser.add_argument("--scratch", default=".", help="a folder for rule files")
    arguments = parser.parse_args()
    if arguments.policy:
        policy_alone(arguments.tokens)
    else:
        whole_models(arguments)


if __name__ == "__main__":
    main()
