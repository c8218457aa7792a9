"""Decode of many families of models, full-size layers with random weights: recorded steps beside eager ones.

    python benchmarks/bench_families.py                                    # all shapes, 8 layers of each, int4 experts
    python benchmarks/bench_families.py --shapes qwen3.5-35b-a3b:40 gpt-oss-20b:24 --csv benchmarks/results.csv
    python benchmarks/bench_families.py --device cpu --shapes gpt-oss-20b:2 --steps 8

Eager is the same model in the same process, with hooks on it so that nothing is recorded. The bound is what the CPU
must read for a token, counted by these hooks, over the read bandwidth measured in this process: the chosen experts and,
without a GPU, all linear layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch
from rows import about, add_arguments, record

from ktinject import _native, rules
from ktinject.errors import KTInjectError
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.tools import benchmark, random_models


class Counter:
    """Hooks that keep decode eager, and count what the experts of one step read."""

    def __init__(self, model: Any) -> None:
        self.bytes = 0.0
        self._experts = [module for module in model.modules() if isinstance(module, CpuExperts)]
        self._hooks = [module.register_forward_pre_hook(self._count) for module in self._experts]
        # Where there are no experts of ours, too.
        self._hooks.append(model.register_forward_pre_hook(lambda *_: None))

    def _count(self, experts: CpuExperts, inputs: tuple[Any, ...]) -> None:
        ids = next((x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point()), None)
        used, tokens = 0, 0
        if ids is not None:
            tokens, used = ids.shape
        elif experts.spec.takes_rows:  # of every expert, zeros where the token does not go to it
            tokens, used = len(inputs[0]) // experts.spec.num_experts, int(inputs[0].any(-1).sum())
        if tokens == 1:
            self.bytes += experts.native.bytes * used / experts.spec.num_experts

    def of_a_step(self, model: Any) -> float:
        ids = torch.zeros(1, 4, dtype=torch.int64, device=model.device)
        self.bytes = 0.0
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2)
        return self.bytes

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_arguments(parser)
    parser.add_argument("--shapes", nargs="+", default=[*random_models.SHAPES], metavar="NAME[:LAYERS]")
    parser.add_argument("--layers", type=int, default=8, help="of shapes that do not say it")
    parser.add_argument("--weights", default="int4")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a rule's variable, such as head=int4",
    )
    parser.add_argument(
        "--steps", type=int, default=64, help="tokens of a recorded request; of an eager one, a quarter"
    )
    parser.add_argument("--depth", type=int, default=0, help="tokens of the prompt before them")
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--device", help="instead of the first GPU, such as cpu")
    parser.add_argument("--kernels", action="store_true", help="GPU kernels of a step, the longest first")
    parser.add_argument(
        "--no-guess", action="store_true", help="no step guesses at the next layer's experts (foresee: false)"
    )
    arguments = parser.parse_args()
    lines = []
    for named in arguments.shapes:
        shape, _, layers = named.partition(":")
        config = random_models.config(shape, int(layers or arguments.layers))
        variables = [f"experts={arguments.weights}"]
        if arguments.device == "cpu" and not any(text.startswith("dense=") for text in arguments.set):
            variables.append(f"dense={arguments.weights}")
        try:
            model = _build(config, arguments.device, variables, arguments.set)
        except KTInjectError as error:
            print(f"{named:24} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        for module in model.modules():
            if isinstance(module, HybridExperts) and arguments.no_guess:
                module.config = dataclasses.replace(module.config, foresee=False)
        lines.append(_measure(model, shape, config, arguments))
        del model
        torch.cuda.empty_cache()
    if arguments.csv:
        record(lines, arguments.csv)


def _build(config: Any, device: str | None, variables: list[str], asked: list[str]) -> Any:
    """asked: those of `--set`, with which a model is built in any case."""

    def build(variables: list[str]) -> Any:
        return random_models.build(
            config,
            devices=device,
            variables={"gpu_experts": 0, **rules.parse_overrides([*variables, *asked])},
        )

    try:
        return build(variables)
    except KTInjectError:
        if len(variables) == 1:
            raise
        return build(variables[:1])


def _measure(model: Any, shape: str, config: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    found = benchmark.decode(model, arguments.steps, arguments.repetitions, depth=arguments.depth)
    decoding = model.ktinject_decoding
    how, why = decoding.last, decoding.reason
    where = benchmark.profile(model) if arguments.kernels and model.device.type == "cuda" else None
    right, asked = decoding.guesses()
    guesses = f"guesses {right / asked:.2f} right, " if asked else ""
    counter = Counter(model)
    read = counter.of_a_step(model)
    eager = benchmark.decode(model, max(4, arguments.steps // 4), 1, depth=arguments.depth)
    counter.remove()
    read += sum(module.native.bytes for module in model.modules() if isinstance(module, CpuLinear))
    bandwidth = statistics.median(_native.read_bandwidth(256 << 20) for _ in range(3))
    rate, slow = found.mean, eager.mean
    bound = bandwidth / read
    print(
        f"{shape:20} x{config.num_hidden_layers:<3} {rate:8.1f} t/s  bound {bound:7.0f}  {rate / bound:5.2f}"
        f"  eager {slow:7.1f}  {rate / slow:5.1f}x  {guesses}{how} {why}",
        flush=True,
    )
    if where is not None:
        print(
            f"    a step of {where.step:.0f} µs: GPU {where.gpu:.0f}, experts {where.cpu:.0f}, "
            f"handoff {where.handoff:.0f}, neither {where.idle:.0f}"
        )
        for us, count, name in where.kernels[:12]:
            print(f"    {us:8.1f} µs {count:6.1f} x {name[:110]}")
    weights = " ".join([arguments.weights, *arguments.set])
    kernel = next((e.runs["kernel"] for e in model.ktinject.replacements if "expert" in e.path), "")
    return {
        **about(arguments, shape, config.num_hidden_layers, weights=weights, kernel=kernel),
        **{"benchmark": "family", "routing": how, "tokens": 1, "us": round(1e6 / rate, 1)},
        **{"gb_s": round(read * rate / 1e9, 2), "roofline_us": round(1e6 / bound, 1)},
        **{"share": round(rate / bound, 3), "bound": "memory"},
        **{"peer": "eager", "peer_us": round(1e6 / slow, 1), "ratio": round(rate / slow, 2)},
    }


if __name__ == "__main__":
    main()
