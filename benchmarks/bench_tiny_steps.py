"""Decode steps on the CPU of every family that the tests build, at toy sizes: native steps beside transformers' own.

    python benchmarks/bench_tiny_steps.py                     # all families, four layers where a config takes that
    python benchmarks/bench_tiny_steps.py --families gpt_oss qwen3_next --turns 7
    python benchmarks/bench_tiny_steps.py --beams 4           # of a beam search, a step of so many rows

At these sizes nearly nothing is read, so what is timed is what a step costs beside its weights. Both are the same
swapped model in the same process, in turns; own steps are those of a model with a hook, which runs transformers' loop.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rows import about, add_arguments, record

import ktinject
from ktinject.errors import KTInjectError
from ktinject.tools import benchmark

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import models
from models import multimodal

TEXT = [name for name in models.AVAILABLE if name not in models.REFUSED]
# Of these, the tests' sizes have no layer that attends, or parts that no published model with experts has.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
DEPTH = 16  # tokens of the prompt: enough for a choice of compressed keys
ALL = [*TEXT, *(name for name in multimodal.AVAILABLE if name not in TEXT)]


def built(name: str) -> Any:
    """Of four layers, the kinds of two repeated, where the family's config takes that."""
    if name not in models.FAMILIES:
        return multimodal.tiny(name)
    lists = {
        key: value * 2
        for key, value in models.FAMILIES[name].items()
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    }
    try:
        return models.tiny(name, num_hidden_layers=4, **{**lists, **CHANGES.get(name, {})})
    except (ValueError, TypeError, IndexError, KeyError, AssertionError):
        return models.tiny(name)


def rate(model: Any, steps: int, beams: int) -> float:
    """Steps a second."""
    if beams == 1:
        return float(benchmark.decode(model, steps, 1, depth=DEPTH).mean)
    ids = torch.randint(3, 88, (1, DEPTH), generator=torch.Generator().manual_seed(0))

    def seconds(new: int) -> float:
        begun = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            num_beams=beams,
            do_sample=False,
            eos_token_id=None,
        )
        return time.perf_counter() - begun

    prompt = seconds(1)  # and no step
    return steps / (seconds(steps + 1) - prompt)


def measured(name: str, steps: int, turns: int, beams: int) -> dict[str, Any]:
    model = built(name).bfloat16()
    model = ktinject.optimize(model, "auto", devices=["cpu"], progress=False)
    layers = len(next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1))
    rate(model, 8, beams)  # layers are compared, caches made
    fast, slow = [], []
    for _ in range(turns):
        fast.append(rate(model, steps, beams))
        how, why = model.ktinject_decoding.last, model.ktinject_decoding.reason
        hook = model.register_forward_pre_hook(lambda *_: None)
        slow.append(rate(model, max(4, steps // 4), beams))
        hook.remove()
    native, own = 1e3 / statistics.median(fast), 1e3 / statistics.median(slow)
    return {
        "family": name,
        "layers": layers,
        "own_ms": f"{own:.2f}",
        "native_ms": f"{native:.2f}",
        "ratio": f"{own / native:.1f}",
        "how": f"{how}: {why}" if why else how,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=ALL)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--beams", type=int, default=1)
    add_arguments(parser)
    arguments = parser.parse_args()
    logging.getLogger("ktinject").setLevel(logging.ERROR)  # that a model has hooks is meant
    lines = []
    print("| family | layers | own steps, ms a token | native | ratio | how |\n|---|---|---|---|---|---|")
    for name in arguments.families:
        try:
            found = measured(name, arguments.steps, arguments.turns, arguments.beams)
            print("|", " | ".join(map(str, found.values())), "|", flush=True)
            times = {"us": 1e3 * float(found["native_ms"]), "peer_us": 1e3 * float(found["own_ms"])}
            more = {
                "benchmark": "tiny steps",
                "tokens": arguments.beams,
                "weights": "bf16",
                "peer": "transformers' steps",
            }
            lines.append(
                about(
                    arguments,
                    name,
                    found["layers"],
                    **more,
                    **times,
                    ratio=found["ratio"],
                    kernel=found["how"],
                )
            )
        except (KTInjectError, ValueError) as error:
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0]} |", flush=True)
        gc.collect()
    if arguments.csv:
        record(lines, arguments.csv)


if __name__ == "__main__":
    main()
