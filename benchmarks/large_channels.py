"""What quantised weights cost a model whose activations have large channels, as those of published models have.

    python benchmarks/large_channels.py            # ten minutes on two cores: the table of docs/explanation/numbers.md

Two channels of what linear layers and experts read, and two of each expert's intermediate, are scaled by a factor; the
weights that make them are scaled by it, those that read them by its inverse. So the function is the same, and the
unswapped model in fp32 is the reference for all. `weights alone` has the weights as the operators hold them, and
computes in fp32.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ktinject
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.cpu_linear import CpuLinear
from ktinject.tools import evaluate

MODELS = Path(__file__).parents[1] / "examples/models"
NAMES = ("tiny-deepseek-v3", "tiny-qwen3-moe")
FACTORS = (1.0, 30.0, 100.0)
FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"experts": "int8", "dense": "int8"},
    "int4, group 32": {"experts": "int4", "dense": "int8", "group_size": 32},
}
READ_NORMED = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate", "gate_proj", "up_proj")


@torch.no_grad()
def scale_channels(model: PreTrainedModel, factor: float, channels: tuple[int, ...] = (5, 50)) -> None:
    """Scale `channels` of what follows each norm of a layer, and of each intermediate, in place."""
    at = list(channels)
    for layer in model.model.layers:
        for norm, block in (
            (layer.input_layernorm, layer.self_attn),
            (layer.post_attention_layernorm, layer.mlp),
        ):
            norm.weight[at] *= factor
            for weight in _readers(block, len(norm.weight)):
                weight[..., at] /= factor
        for up, down in _intermediates(layer.mlp):
            up[..., at, :] *= factor
            down[..., at] /= factor


def _readers(block: nn.Module, hidden: int) -> Iterator[Tensor]:
    """The weights [..., hidden] that are multiplied with a block's normed input."""
    for path, module in block.named_modules():
        name = path.rpartition(".")[2]
        if name in READ_NORMED and module.weight.shape[-1] == hidden:
            yield module.weight
        elif name == "experts":
            yield module.gate_up_proj


def _intermediates(block: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """(up, down) of all that has an intermediate: up [..., its width, hidden] and down [..., hidden, its width]."""
    for module in block.modules():
        if hasattr(module, "gate_up_proj"):
            yield module.gate_up_proj.chunk(2, -2)[1], module.down_proj
        elif hasattr(module, "up_proj"):
            yield module.up_proj.weight, module.down_proj.weight


@torch.no_grad()
def with_weights_of(model: PreTrainedModel, swapped: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` with the weights that the operators of `swapped` hold."""
    rounded = copy.deepcopy(model)
    for path, operator in swapped.named_modules():
        if not isinstance(operator, CpuExperts | CpuLinear):
            continue
        for name, parameter in rounded.get_submodule(path).named_parameters(recurse=False):
            parameter.copy_(operator.unpack(name))
    return rounded


def measure(
    name: str, factor: float, variables: dict[str, Any], tokens: int
) -> tuple[float, evaluate.Divergence]:
    """The mean KL divergence of the weights alone, and all that the swapped model is measured by."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    ids = torch.tensor(tokenizer((MODELS / "heldout.txt").read_text("utf-8"))["input_ids"][:tokens])
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
    scale_channels(model, factor)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        swapped = ktinject.load(
            folder, variables=variables, devices=["cpu"], dtype=torch.float32, progress=False
        )
    alone = evaluate.divergence(model, with_weights_of(model, swapped), ids)
    return alone.mean_nats, evaluate.divergence(model, swapped, ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", type=int, default=8192, help="of the held-out text")
    arguments = parser.parse_args()
    print("| | channels scaled by | perplexity change | mean KL, nats | weights alone | ratio |")
    print("|---|---|---|---|---|---|")
    for name in arguments.models:
        for label in arguments.formats:
            for factor in arguments.factors:
                alone, found = measure(name, factor, FORMATS[label], arguments.tokens)
                change = found.perplexity_b / found.perplexity_a - 1
                print(
                    f"| {name}, {label} | {factor:g} | {change:+.2%} | {found.mean_nats:.1e} | {alone:.1e} "
                    f"| {found.mean_nats / alone:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
