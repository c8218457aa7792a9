"""Routers whose weights a checkpoint has in bf16: the model holds them in bf16, too.

Since transformers 5.24 most families keep their routers' weights in fp32 in a bf16 model. Their forward takes x and
weight to fp32 in any case, so it computes the same with 16-bit weights of the same values. Those take half the memory,
and they are what `cpu_router` and the decode steps have kernels for. Weights that bf16 does not hold stay in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.checkpoints.formats.base import FLOATS
from ktinject.hf.key_map import KeyMap
from ktinject.operators.probes import router


def routers(model: PreTrainedModel, checkpoint: Checkpoint | None, mapping: KeyMap | None) -> None:
    """Take the routers' fp32 weights to bf16, all that one of transformers' patterns names or none of them.

    model       a bf16 model; others are left as they are
    checkpoint  what fills it, and `mapping`, its names; None: the weights are there, or nothing says what they will be
    """
    if model.dtype != torch.bfloat16:
        return

    def is_narrow(name: str, weight: Tensor) -> bool:
        if checkpoint is None or mapping is None:
            return weight.is_meta or torch.equal(weight.bfloat16().float(), weight)
        pieces = mapping.targets.get(name, ())
        # "float" is all that an index alone says.
        return bool(pieces) and all(
            checkpoint.format_of(p.key).name in (FLOATS["BF16"], "float") for p in pieces
        )

    for pattern in sorted(model._keep_in_fp32_modules_strict or ()):
        named = re.compile(pattern.replace("*", ".*")).search
        found = [name for name, _ in model.named_parameters() if named(name)]
        if not found or any(named(name) for name, _ in model.named_buffers()):
            continue
        if all(_is_router(model, name, is_narrow) for name in found):
            model._keep_in_fp32_modules_strict = {*model._keep_in_fp32_modules_strict} - {pattern}
            for name in found:
                holder, weight = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
                holder._parameters["weight"] = nn.Parameter(weight.detach().bfloat16(), weight.requires_grad)


def _is_router(model: PreTrainedModel, name: str, is_narrow: Callable[[str, Tensor], bool]) -> bool:
    path, _, last = name.rpartition(".")
    module, weight = model.get_submodule(path), model.get_parameter(name)
    is_plain = last == "weight" and weight.dtype == torch.float32 and type(weight) is nn.Parameter
    return is_plain and is_narrow(name, weight) and router.computes_in_fp32(module)


@contextmanager
def narrowed(model: PreTrainedModel, checkpoint: Checkpoint | None, mapping: KeyMap | None) -> Iterator[None]:
    """Within, a model is as `routers` makes it; behind, as it was."""
    kept = model._keep_in_fp32_modules_strict
    weights = {module: module._parameters.get("weight") for module in model.modules()}
    try:
        routers(model, checkpoint, mapping)
        yield
    finally:
        model._keep_in_fp32_modules_strict = kept
        for module, weight in weights.items():
            if module._parameters.get("weight") is not weight:
                module._parameters["weight"] = weight
