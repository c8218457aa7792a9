"""Models of known shapes with random weights, without a checkpoint: what `ktinject bench` measures.

Time depends on shapes, not on values. Only one expert of a layer is packed and the others are copies of it, so tens of
gigabytes are there in seconds; every expert has its own memory, as in a real model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktinject import machine, rules
from ktinject.checkpoints.checkpoint import random_rows
from ktinject.distributed import layer_split, tensor_parallel
from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import PlanError
from ktinject.generation import generate
from ktinject.hf import models
from ktinject.hf.layers import Layers
from ktinject.loading import inject
from ktinject.operators import Operator
from ktinject.planning.devices import Budget
from ktinject.planning.plan import Plan
from ktinject.planning.planner import check_experts, make
from ktinject.tools.shapes import SHAPES


def config(shape: str, layers: int | None = None, **changes: Any) -> PreTrainedConfig:
    """The config of a shape, with so many layers, all of them with experts where that leaves fewer than the dense ones.

    changes  values that differ, such as vocab_size
    Raises   PlanError for a shape that is not known
    """
    if shape not in SHAPES:
        raise PlanError(
            f"shape {shape!r} is not known; allowed: {', '.join(SHAPES)}. Or give a model folder."
        )
    values = {**SHAPES[shape], "eos_token_id": None, "bos_token_id": None, "pad_token_id": None, **changes}
    if layers is not None:
        values["num_hidden_layers"] = layers
        for name in values.keys() & {"layer_types", "layers_block_type"}:
            values[name] = values[name][:layers]
        if layers <= 2 * values.get("first_k_dense_replace", 0):
            values["first_k_dense_replace"] = 0
    return AutoConfig.for_model(**values)


def build(
    config: PreTrainedConfig,
    ruleset: Any = "auto",
    *,
    devices: str | Sequence[str] | None = None,
    budget: Budget | None = None,
    variables: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tp: bool = False,
) -> PreTrainedModel:
    """A swapped model with random weights.

    tp       as in `optimize`; with equal seeds, the processes have equal weights where those are whole
    Raises   as `optimize`
    """
    model = models.meta_model(config, dtype)
    if ruleset == "auto":
        check_experts(model)
    found = machine.detect()
    group = ProcessGroup.join(found, devices) if tp else None
    plan = make(model, rules.read(ruleset, variables=variables), None, found, devices, budget, group)
    plan.check()
    if group is not None:
        tensor_parallel.apply(model, plan.styles, group.size)
    operators = inject.build(plan, model)
    for replacement in plan.replacements:
        if replacement.elsewhere:
            continue
        operator = operators[replacement.path]
        operator.allocate()
        _fill(operator, replacement.parameter_shapes)
        operator.finish()
    inject.apply(model, plan, operators, group)
    models.random_rest(model, plan.device_map)
    _route_by_tokens(model)
    if group is not None:
        tensor_parallel.install(model, plan.styles, group)
    layer_split.install(model, Layers(model).paths, plan.device_map)
    generate.install(model, group)
    return model.eval()


def _route_by_tokens(model: PreTrainedModel) -> None:
    """Give tables from tokens to experts (DeepSeek-V4) different experts for each token; they are zeros."""
    for module in model.modules():
        table = getattr(module, "tid2eid", None)
        if not isinstance(table, torch.Tensor):
            continue
        tokens, chosen = table.shape
        experts: int = module.num_experts
        first = torch.arange(tokens, device=table.device)[:, None] * 2_654_435_761 % experts
        table.copy_((first + torch.arange(chosen, device=table.device) * (experts // chosen)) % experts)


def _fill(operator: Operator, parameter_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Random weights, or one expert's for all where the operator can copy it."""
    repeat = getattr(operator, "repeat", None) if getattr(operator, "repeats", False) else None
    for name, shape in parameter_shapes.items():
        if not operator.per_expert:
            _load(operator, name, shape, None)
            continue
        for expert in range(1 if repeat is not None else shape[0]):
            _load(operator, name, shape[1:], expert)
    if repeat is not None:
        repeat(0)


def _load(operator: Operator, name: str, shape: Sequence[int], expert: int | None) -> None:
    if not (operator.takes_stored_only and operator.takes_codes(name)):
        operator.load(name, _random(shape), expert, None)
        return
    kind = operator.native_formats[-1 if name.startswith("down_proj") else 0]
    operator.load_stored(name, random_rows(kind, shape), expert, None)


def _random(shape: Sequence[int]) -> torch.Tensor:
    """[*shape] bf16, repeating: values do not matter, and to draw each one takes longer than to pack them."""
    drawn = torch.empty(999_983, dtype=torch.bfloat16, device="cpu").normal_(std=0.02)
    size = math.prod(shape)
    return drawn.repeat(-(-size // len(drawn)))[:size].view(*shape)


__all__ = ["SHAPES", "Plan", "build", "config"]
