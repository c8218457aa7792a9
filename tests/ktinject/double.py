"""A small pure-torch operator, and helpers that several tests share.

`held_experts` keeps the weights as plain fp32 tensors and runs the replaced module's own forward on them, so any
difference to the original is the engine's doing.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from ktinject.errors import OperatorError
from ktinject.machine import Gpu, Machine, detect
from ktinject.operators import REGISTRY, Config, Operator, register_operator

EXPERTS = {
    "name": "experts",
    "match": {"path": r".*\.experts", "class": "Module"},
    "replace": {"operator": "held_experts"},
}


@dataclass(frozen=True)
class HeldConfig(Config):
    refuse: str = ""  # what `supports` answers


@register_operator("held_experts")
class HeldExperts(Operator):
    """Works for every leaf that transformers has."""

    Config = HeldConfig
    per_expert = True

    def __init__(self, module: nn.Module, config: HeldConfig) -> None:
        super().__init__()
        self.shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.held: dict[str, Tensor] = {}
        self.config = config
        self.dtypes: set[torch.dtype] = set()
        # A copy on meta that shares no parameter, outside of nn.Module's bookkeeping.
        self.__dict__["original"] = copy.deepcopy(module).to("meta")

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        return config.refuse or None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls(module, config)

    def describe(self) -> dict[str, Any]:
        return {"kernel": "torch", "weights": "fp32"}

    def footprint(self) -> dict[str, int]:
        return {self.config.device: sum(torch.Size(shape).numel() * 4 for shape in self.shapes.values())}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def allocate(self) -> None:
        self.held = {name: torch.full(shape, torch.nan) for name, shape in self.shapes.items()}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        self.dtypes.add(tensor.dtype)
        assert expert is not None
        target = self.held[name][expert]
        if part is not None:
            n = tensor.shape[0]
            target = target[part * n : (part + 1) * n]
        target.copy_(tensor)

    def finish(self) -> None:
        for name, tensor in self.held.items():
            if tensor.isnan().any():
                raise OperatorError(f"{name} is not complete")

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        return self.held[name] if expert is None else self.held[name][expert]

    def is_lossless(self) -> bool:
        return True

    def forward(self, *args: Tensor) -> Tensor:
        held = {name: tensor.to(args[0].dtype) for name, tensor in self.held.items()}
        return torch.func.functional_call(self.original, held, args)


def on_meta(source: PreTrainedModel | Path) -> PreTrainedModel:
    """A model on meta, as users build it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source) if isinstance(source, Path) else copy.deepcopy(source.config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def saved(model: PreTrainedModel, folder: Path, **kwargs: Any) -> Path:
    """The model's folder, as `save_pretrained` writes it."""
    model.save_pretrained(folder, **kwargs)
    return folder


@functools.cache
def peft_too_old() -> str:
    """Why transformers' own adapters cannot be tried: it asks for a newer PEFT than is installed; "" if it does not."""
    needed = importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION
    found = metadata.version("peft")
    return (
        f"transformers wants PEFT {needed}, and {found} is here" if Version(found) < Version(needed) else ""
    )


def machine(memory: int = 2**40, gpus: int = 0, gpu_memory: int = 2**34) -> Machine:
    """This machine, with other memory and made-up GPUs."""
    from dataclasses import replace

    made_up = tuple(Gpu(i, "made-up", gpu_memory, gpu_memory, (9, 0)) for i in range(gpus))
    no_gpu = "" if gpus else "none here"
    return replace(detect(), memory_available_bytes=memory, gpus=made_up, no_gpu=no_gpu, cuda_built=True)


def memory_in_use() -> tuple[int, int]:
    """Bytes that are in use on the current GPU, and bytes that torch keeps there."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


class Recorder(LogitsProcessor):
    """Keeps the logits of every step; a processor that is not known, so the stock loop runs around the graphs."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.clone())
        return scores


__all__ = ["EXPERTS", "REGISTRY", "HeldExperts", "Recorder", "machine", "memory_in_use", "on_meta", "saved"]
