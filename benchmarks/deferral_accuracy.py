"""What deferring experts costs in accuracy, beside leaving the same experts out, on the two trained models.

    python benchmarks/deferral_accuracy.py            # twenty minutes on two cores: measures, then draws
    python benchmarks/deferral_accuracy.py --layers   # the same depths with the first layers left out
    python benchmarks/deferral_accuracy.py --shares   # one layer at a time, and how much of what it hands on is late
    python benchmarks/deferral_accuracy.py --draw     # tables and plot from the figures that are there

Each model runs under `deferred_moe` with bf16 weights on the CPU, and is compared with itself where nothing is
deferred. The held-out text is read token by token, so that all but the first token of a window of 512 is a decode step,
and every key and value in the cache comes from one: no prompt helps. Skipping leaves out, in the same layers, the
experts that deferring would add late; the weights of the others stay as they are.

Writes deferral-accuracy.csv, deferral-layers.csv or deferral-shares.csv beside it, and docs/images/deferral.png; prints
the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import ktinject
from ktinject.hf.layers import Layers
from ktinject.operators.deferred_moe import DeferredMoe, Pass
from ktinject.operators.offload.submits import of_ranks
from ktinject.tools import evaluate

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "examples/models"
OUT = ROOT / "benchmarks"
BLOCKS = {"tiny-deepseek-v3": "DeepseekV3MoE", "tiny-qwen3-moe": "Qwen3MoeSparseMoeBlock"}
TOP_K = 8
NEW_TOKENS = 64


# Of --layers: experts deferred, and how many of the first Mixture-of-Experts layers defer none.
LAYERS = [(4, 0), (4, 1), (4, 2), (4, 4), (4, 6), (3, 1), (2, 1)]


def load(name: str, deferred: int = 0) -> PreTrainedModel:
    rule = {
        "name": "experts",
        "match": {"class": BLOCKS[name]},
        "replace": {"operator": "deferred_moe", "deferred": deferred},
    }
    return ktinject.load(MODELS / name, [rule], devices=["cpu"], dtype=torch.float32, progress=False)


def skip(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Leave out at decode, in all but the last layer, the `count` experts of a token with the smallest weights."""
    within = Pass(Layers(model).decoder)

    def without(_: torch.nn.Module, arguments: tuple[Tensor, Tensor, Tensor]) -> Any:
        hidden_states, index, weights = arguments
        if within.decodes:
            index = of_ranks(index, weights, 0, index.shape[1] - count)
        return hidden_states, index, weights

    for block in [module for module in model.modules() if isinstance(module, DeferredMoe)][:-1]:
        block.get_submodule("experts").register_forward_pre_hook(without)
    return model


def text(name: str, tokens: int) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    return torch.tensor(tokenizer((MODELS / "heldout.txt").read_text("utf-8"))["input_ids"][:tokens])


def measure_layers(name: str, tokens: int, row: Callable[[dict[str, Any]], None]) -> None:
    reference, model = load(name), load(name, 1)
    leaves = [block.get_submodule("experts") for block in model.modules() if isinstance(block, DeferredMoe)]
    for count, first in LAYERS:
        schedule = [0] * first + [count] * (len(leaves) - 1 - first) + [0]
        for leaf, defers in zip(leaves, schedule):
            leaf.defers = defers
        found = evaluate.divergence(reference, model, text(name, tokens), decode=True)
        row({"model": name, "experts": count, "first": first, "late": sum(schedule), **asdict(found)})


@torch.no_grad()
def shares(model: PreTrainedModel, ids: Tensor, counts: Sequence[int]) -> list[dict[int, float]]:
    """For each Mixture-of-Experts layer: n → mean square of its n late experts' sum, over that of what it hands on."""
    leaves = {
        layer: layer.mlp.get_submodule("experts")
        for layer in Layers(model).decoder.layers
        if isinstance(layer.mlp, DeferredMoe)
    }
    late: dict[tuple[Any, int], list[Tensor]] = {(layer, n): [] for layer in leaves for n in counts}
    out: dict[Any, list[Tensor]] = {layer: [] for layer in leaves}

    def before(layer: Any, leaf: Any, arguments: tuple[Tensor, Tensor, Tensor]) -> None:
        x, index, weights = arguments
        for n in counts:
            chosen = of_ranks(index, weights, index.shape[1] - n, index.shape[1])
            late[layer, n].append(leaf.experts(x, chosen, weights).double().square().sum(-1))

    def after(layer: Any, result: Any) -> None:
        result = result[0] if isinstance(result, tuple) else result
        out[layer].append(result.double().square().sum(-1).flatten())

    hooks = []
    for layer, leaf in leaves.items():
        hooks.append(leaf.register_forward_pre_hook(functools.partial(before, layer)))
        hooks.append(layer.register_forward_hook(lambda layer, _, result: after(layer, result)))
    evaluate.perplexity(model, ids, window=128)
    for hook in hooks:
        hook.remove()
    return [
        {n: float((torch.cat(late[layer, n]) / torch.cat(out[layer])).mean()) for n in counts}
        for layer in leaves
    ]


def measure_shares(name: str, tokens: int, row: Callable[[dict[str, Any]], None]) -> None:
    reference, model, ids, counts = load(name), load(name, 1), text(name, tokens), (2, 4, 8)
    found = shares(reference, ids, counts)[:-1]
    leaves = [block.get_submodule("experts") for block in model.modules() if isinstance(block, DeferredMoe)]
    for at, of_layer in enumerate(found):
        for count, share in of_layer.items():
            for other, leaf in enumerate(leaves):
                leaf.defers = count if other == at else 0
            cost = evaluate.divergence(reference, model, ids, window=128, decode=True)
            row({"model": name, "layer": at, "experts": count, "share": share, "mean_nats": cost.mean_nats})


def shares_table(rows: list[dict[str, str]]) -> None:
    x, y = (torch.tensor([float(row[key]) for row in rows]).log() for key in ("share", "mean_nats"))
    correlation = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    spread = (y - x).exp()
    print(
        f"{len(rows)} layers and depths, share from {x.exp().min():.4f} to {x.exp().max():.2f}; correlation of ",
        end="",
    )
    print(
        f"logarithms with mean KL {correlation:.3f}; KL over share {spread.min():.2f} to {spread.max():.2f} nats"
    )


def layers_table(rows: list[dict[str, str]]) -> None:
    print(
        "| model | deferred | not in the first | late in all | perplexity | mean KL | p99 KL | same top-1 |"
    )
    print("|---|" + "---:|" * 7)
    for row in rows:
        change = float(row["perplexity_b"]) / float(row["perplexity_a"]) - 1
        cells = [row["model"], f"{row['experts']} of {TOP_K}", row["first"], row["late"]]
        cells += [f"{change:+.2%} ± {float(row['change_error']):.2%}".replace("-", "−")]
        cells += [
            f"{float(row['mean_nats']):.4f}",
            f"{float(row['p99_nats']):.3f}",
            f"{float(row['top1']):.1%}",
        ]
        print("| " + " | ".join(cells) + " |")


def measure(name: str, tokens: int, row: Callable[[dict[str, Any]], None]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    ids = text(name, tokens)
    lines = (MODELS / "prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [torch.tensor(tokenizer(json.loads(line)["prompt"])["input_ids"]) for line in lines]
    reference = load(name)
    expected = [evaluate.greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]
    for count in range(1, TOP_K + 1):
        for way in ("deferred", "skipped"):
            model = load(name, count) if way == "deferred" else skip(load(name), count)
            found = evaluate.divergence(reference, model, ids, decode=True)
            written = [evaluate.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
            agreement = evaluate.greedy_agreement(expected, written)
            same = {"prompts": agreement.identical, "greedy": agreement.same / agreement.tokens}
            row({"model": name, "experts": count, "way": way, **asdict(found), **same})


def table(rows: list[dict[str, str]]) -> None:
    measures = ("perplexity", "mean KL", "p99 KL", "same top-1", "same greedy tokens")
    print("| model | experts | " + " | ".join(f"{m}, deferred | skipped" for m in measures) + " |")
    print("|---|" + "---:|" * 11)
    for name in BLOCKS:
        for count in range(1, TOP_K + 1):
            late, gone = (
                next(r for r in rows if (r["model"], r["experts"], r["way"]) == (name, str(count), way))
                for way in ("deferred", "skipped")
            )
            cells = [name, f"{count} of {TOP_K}"]
            changes = [float(r["perplexity_b"]) / float(r["perplexity_a"]) - 1 for r in (late, gone)]
            cells += [f"{change:+.2%}".replace("-", "−") for change in changes]
            for column, form in (
                ("mean_nats", ".4f"),
                ("p99_nats", ".3f"),
                ("top1", ".1%"),
                ("greedy", ".0%"),
            ):
                cells += [format(float(r[column]), form) for r in (late, gone)]
            print("| " + " | ".join(cells) + " |")


def draw(rows: list[dict[str, str]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), sharex=True)
    for name, mark in zip(BLOCKS, "os"):
        for way, colour in (("skipped", "#c44"), ("deferred", "#247")):
            ours = [r for r in rows if (r["model"], r["way"]) == (name, way)]
            counts = [int(r["experts"]) for r in ours]
            change = [100 * abs(float(r["perplexity_b"]) / float(r["perplexity_a"]) - 1) for r in ours]
            label = f"{name.removeprefix('tiny-')}, {way}"
            style = {"marker": mark, "color": colour, "markersize": 4, "linewidth": 1.2, "label": label}
            axes[0].plot(counts, change, **style)
            axes[1].plot(counts, [float(r["mean_nats"]) for r in ours], **style)
    axes[0].axhline(0.5, color="#999", linewidth=0.8, linestyle=":")
    axes[0].set_ylabel("change of perplexity, %")
    axes[1].set_ylabel("mean KL divergence, nats")
    for axis in axes:
        axis.set_yscale("log")
        axis.set_xlabel(f"experts of a token's {TOP_K}")
        axis.grid(True, which="major", linewidth=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draw", action="store_true", help="only draw, from the figures that are there")
    parser.add_argument("--layers", action="store_true", help="schedules that spare the first layers")
    parser.add_argument("--shares", action="store_true", help="one layer at a time, on half of --tokens")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    by_depth, by_layers, by_share = (
        arguments.out / f"deferral{what}.csv" for what in ("-accuracy", "-layers", "-shares")
    )
    measuring = functools.partial(measure, tokens=arguments.tokens), by_depth
    if arguments.layers:
        measuring = functools.partial(measure_layers, tokens=arguments.tokens), by_layers
    if arguments.shares:
        measuring = functools.partial(measure_shares, tokens=arguments.tokens // 2), by_share
    if not arguments.draw:
        with measuring[1].open("w", newline="") as file:
            writer: Any = None

            def row(values: dict[str, Any]) -> None:
                nonlocal writer
                if writer is None:
                    writer = csv.DictWriter(file, values.keys(), lineterminator="\n")
                    writer.writeheader()
                writer.writerow({k: round(v, 7) if isinstance(v, float) else v for k, v in values.items()})
                file.flush()

            for name in BLOCKS:
                measuring[0](name, row=row)
    for figures, show in ((by_depth, table), (by_layers, layers_table), (by_share, shares_table)):
        if figures.exists():
            with figures.open(newline="") as file:
                show(list(csv.DictReader(file)))
    with by_depth.open(newline="") as file:
        draw(list(csv.DictReader(file)), ROOT / "docs/images/deferral.png")


if __name__ == "__main__":
    main()
