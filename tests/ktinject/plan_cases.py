"""Plans and refusals, for the tests of the planner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from double import EXPERTS, machine
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ktinject import rules
from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import KTInjectError
from ktinject.hf import models
from ktinject.planning.plan import Plan
from ktinject.planning.planner import make

torch.set_num_threads(1)

KEEP_ROUTER = {"name": "router", "match": {"path": r".*\.mlp\.gate"}, "replace": "keep"}


def rule(operator: str = "held_experts", **arguments: Any) -> list[dict[str, Any]]:
    return [EXPERTS | {"replace": {"operator": operator, **arguments}}]


def planned(model: PreTrainedModel, source: Any = None, folder: Path | None = None, **kwargs: Any) -> Plan:
    ruleset = rules.read(source or rule())
    has = kwargs.pop("machine", None) or machine()
    if folder is None:
        return make(model, ruleset, None, has, **kwargs)
    with Checkpoint.open(folder, models.quantization(model.config)) as checkpoint:
        return make(model, ruleset, checkpoint, has, **kwargs)


def refusal(kind: type[KTInjectError], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        planned(*args, **kwargs)
    assert type(caught.value) is kind
    return str(caught.value)


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a single-file checkpoint after `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    to.mkdir(exist_ok=True)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to
