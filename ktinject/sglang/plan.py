"""What a start of SGLang with experts on the CPU would make of a checkpoint, without SGLang and without weights."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf
from typing import Any

from torch import Tensor, nn

from ktinject.errors import PlanError
from ktinject.operators.probes import experts as probes
from ktinject.operators.probes.experts import ExpertsSpec
from ktinject.sglang import arguments, weights
from ktinject.sglang.arguments import Arguments


@dataclass(frozen=True)
class LayerPlan:
    """One layer's experts on the CPU.

    layer    its number in the checkpoint
    experts  how many are on the CPU
    weights  how they are packed, in words
    kernel   that of this machine
    values   what becomes of the checkpoint's values: "kept", "exact", or what they are and how they are rounded
    bytes    of RAM, of the experts on the CPU, in one process
    """

    layer: int
    experts: int
    weights: str
    kernel: str
    values: str
    bytes: int


@dataclass(frozen=True)
class ServerPlan:
    """The layers that have experts, in order, and the arguments that they were planned for."""

    method: str
    num_gpu_experts: int
    layers: tuple[LayerPlan, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON: `kt_method`, `kt_num_gpu_experts`, `bytes` of all layers, and `layers`, a record of each."""
        return {
            "kt_method": self.method,
            "kt_num_gpu_experts": self.num_gpu_experts,
            "bytes": sum(layer.bytes for layer in self.layers),
            "layers": [asdict(layer) for layer in self.layers],
        }

    def lines(self) -> list[str]:
        """For people: a line for layers in a row that are alike, and their sum."""
        said = []
        for alike, run in groupby(self.layers, lambda layer: asdict(layer) | {"layer": 0}):
            found = [*run]
            first, last = found[0].layer, found[-1].layer
            said.append(
                (f"layer {first}: " if first == last else f"layers {first} to {last}: each ")
                + f"{alike['experts']} experts as {alike['weights']}, by {alike['kernel']}, {_size(alike['bytes'])}; "
                f"values of the checkpoint: {alike['values']}"
            )
        total = _size(sum(layer.bytes for layer in self.layers))
        return [
            *said,
            f"experts on the CPU take {total} of RAM, on the GPU {self.num_gpu_experts} of each layer",
        ]


def plan(model: nn.Module, path: str, method: str, num_gpu_experts: int = 0) -> ServerPlan:
    """Every layer's experts as `--kt-method` packs them: by the server's own choice, of headers alone.

    model            on the meta device, of the checkpoint's config
    path             as --kt-weight-path
    method           as --kt-method
    num_gpu_experts  as --kt-num-gpu-experts
    Raises           OperatorError or CheckpointError for what the server refuses when it loads, PlanError for a model
                     without experts, or with such as SGLang does not hand over
    """
    meant = arguments.method_of(method)
    given = [
        Arguments(
            layer_idx=layer,
            num_experts=spec.num_experts,
            top_k=1,  # of no effect on weights
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_gpu_experts=arguments.placed(spec.num_experts, num_gpu_experts, None)[0],
            mask=None,
            threads=None,
            nodes=64,
            weight_path=path,
            method=meant,
            method_name=method,
            deferred=0,
            swiglu_limit=0.0,
            swiglu_alpha=0.0,
        )
        for layer, spec in _layers(model)
    ]
    for _ in given:
        weights.OPENED.wait(path)
    done = 0
    try:
        layers = []
        for each in given:
            done += 1
            layers.append(_layer(each))
    finally:
        for _ in given[done:]:
            weights.OPENED.leave(path)
    return ServerPlan(method, num_gpu_experts, tuple(layers))


def _layer(given: Arguments) -> LayerPlan:
    made, becomes = weights.planned(given)
    count, said = len(given.held), made.describe()
    return LayerPlan(
        given.layer_idx,
        count,
        said["weights"],
        said["kernel"],
        "; ".join(dict.fromkeys(becomes.values())) or "none on the CPU",
        made.footprint()["cpu"] * count // given.num_experts,
    )


def _layers(model: nn.Module) -> list[tuple[int, ExpertsSpec]]:
    """The layers that have routed experts, by the numbers in their paths. Raises PlanError."""
    found = []
    for path, module in model.named_modules():
        down = getattr(module, "down_proj", None)
        number = re.search(r"(?:^|\.)layers\.(\d+)\.", path)
        if number is None or not isinstance(down, Tensor) or down.dim() != 3:
            continue
        spec = probes.probe(module)
        why = _unserved(spec) if isinstance(spec, ExpertsSpec) else spec.reason
        if why or not isinstance(spec, ExpertsSpec):
            raise PlanError(
                f"{path}: {type(module).__name__}: {why}; SGLang hands over experts that compute silu(gate) · up, "
                "without biases and limits. Serve this model with all experts on the GPU, or with `ktinject serve`."
            )
        found.append((int(number[1]), spec))
    if not found:
        raise PlanError(
            f"{type(model).__name__}: no layer has routed experts that are known, so --kt-method has nothing to pack. "
            "Plan it without --kt-method, and serve it with `ktinject serve`."
        )
    return found


def _unserved(spec: ExpertsSpec) -> str:
    """Why SGLang's experts on the CPU are not these; empty if they are."""
    if not spec.has_gate:
        return "its experts have no gate"
    if spec.has_bias:
        return "its experts have biases"
    if spec.takes_rows:
        return "its routing weights multiply the input"
    if (spec.activation, spec.alpha) != ("silu", 1.0):
        return f"its activation is {spec.activation}" + (
            "" if spec.alpha == 1.0 else f" of {spec.alpha} · gate"
        )
    if (spec.gate_max, spec.up_limit, spec.up_offset) != (inf, inf, 0.0):
        return "its gate or up has a limit"
    return ""


def _size(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:,.1f} MiB"
