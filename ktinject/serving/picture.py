"""The plan as the page draws it: of each decoder layer where its experts are, and of each device what fills it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ktinject.hf.layers import Layers
from ktinject.operators.cpu_experts import CpuExperts
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.planning.plan import Plan


def of_model(model: PreTrainedModel, about: dict[str, Any]) -> dict[str, Any]:
    """What GET /plan answers, as JSON.

    about   goes before the rest: the model's name, its context, …
    """
    plan: Plan = model.ktinject
    return {
        **about,
        "class": type(model).__name__,
        "devices": [_device(plan, device) for device in plan.bytes],
        "layers": [_layer(plan, model, path) for path in Layers(model).paths],
        "notes": list(plan.notes),
    }


def experts_of(layer: nn.Module) -> CpuExperts | None:
    """The operator of a layer's routed experts; None if they were not swapped, or there are none."""
    return next((module for module in layer.modules() if isinstance(module, CpuExperts)), None)


def on_gpu(operator: CpuExperts) -> list[int]:
    """Ids of the experts that are on a GPU now."""
    return operator.experts_on_gpu() if isinstance(operator, HybridExperts) else []


def _device(plan: Plan, device: str) -> dict[str, Any]:
    """Bytes of a device: its weights, what a request takes beside them, and what may be used."""
    runs = plan.runtime_memory.get(device)
    return {
        "name": device,
        "weights": plan.bytes[device],
        "workspace": sum(runs.workspace.values()) if runs else 0,
        "cache_per_token": runs.kv_bytes_per_token if runs else 0,
        "limit": plan.limits.get(device),
    }


def _layer(plan: Plan, model: PreTrainedModel, path: str) -> dict[str, Any]:
    layer, inside = model.get_submodule(path), f"{path}."
    swapped = [one for one in plan.replacements if one.path.startswith(inside)]
    operators = list(dict.fromkeys(one.operator for one in swapped))
    device = next(_devices_of(plan, path))
    operator = experts_of(layer)
    found: dict[str, Any] = {"device": device, "operators": operators, "experts": None}
    if operator is not None:
        described = operator.describe()
        found["experts"] = {
            "count": operator.num_experts,
            "operator": operator.name,
            "weights": described["weights"],
            "kernel": described["kernel"],
            "on_gpu": on_gpu(operator),
        }
    elif (count := _own_experts(layer)) is not None:
        found["experts"] = {
            "count": count,
            "operator": None,
            "weights": str(model.dtype).removeprefix("torch."),
        }
        found["experts"] |= {"on_gpu": list(range(count)) if device.startswith("cuda") else []}
    return found


def _devices_of(plan: Plan, path: str) -> Iterator[str]:
    """The device of a module that is not replaced, by the longest path of the plan's map that holds it."""
    for held in sorted(plan.device_map, key=len, reverse=True):
        if not held or path == held or path.startswith(f"{held}."):
            yield plan.device_map[held]
    yield "cpu"


def _own_experts(layer: nn.Module) -> int | None:
    """The number of routed experts of a layer whose experts were not swapped."""
    counts = (
        getattr(module, "num_experts", None)
        for name, module in layer.named_modules()
        if name.endswith("experts")
    )
    return next((count for count in counts if isinstance(count, int)), None)
