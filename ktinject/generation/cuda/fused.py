"""Decode steps of few kernels: norms, attention, routing and what lies between them as native/cuda computes it.

Between two layers of experts, transformers runs some fifty kernels on tensors of a single token; nearly all of that
time is launches. So what is captured is a twin of the model, in which modules with a known spec (layer_spec.py) compute
with few kernels. The model itself stays as it is, for prompts and for other threads:

    a decoder layer   norm and projections to heads | attention | output projection and residual
                      | norm and router | choice of experts and submit | wait and residual
    its parts         a norm, attention, a router, where the layer around them is not known
    before            angles of rotation

That these kernels compute what the modules compute is not believed. The first step runs both, on the model's own
numbers, and a module whose kernels differ stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.distributed.process_group import ProcessGroup
from ktinject.generation import layer_spec
from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.fused_steps import Step, step_of
from ktinject.generation.layer_spec import DecoderLayerSpec
from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")

# Rounding to a dtype of the intermediate results, which differ by the order of a sum: a few units in the last place.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Of a whole layer, whose parts have been compared: only how they are put together. Where two experts are nearly as
# likely, rounding decides, and a layer with the other one differs by more than rounding.
_LAYER_TOLERANCE = 0.1


class Fused:
    """A twin of a model in which known modules compute with few kernels, if these agreed in the first step.

    twin      holds the model's modules, and not the model
    refused   path → why a module with a known spec keeps its own forward
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.refused: dict[str, str] = {}
        self._checked = False
        # Blocks of attention count themselves here; requests of one model take turns.
        heads = max((getattr(m, "num_attention_heads", 0) for m in _configs(model)), default=0)
        counts: dict[torch.device, Tensor] = {}

        def counts_for(module: nn.Module) -> Tensor:
            device = _device(module)
            if device not in counts:
                counts[device] = torch.zeros(decode_ops.MOST_ROWS * heads, dtype=torch.int32, device=device)
            return counts[device]

        specs = dict(layer_spec.parts(model))
        self._layers = {path for path, spec in specs.items() if isinstance(spec, DecoderLayerSpec)}

        def steps(model: nn.Module) -> Iterator[tuple[str, nn.Module, Step]]:
            for path, spec in specs.items():
                module = model.get_submodule(path)
                step = step_of(spec, module, counts_for(module))
                if step is not None:
                    yield path, module, step

        wanted = {module for _, module, _ in steps(model)}
        self.twin = twin.tree(model, wanted.__contains__, without=("ktinject_decoding",))
        self._steps = {path: (module, step) for path, module, step in steps(self.twin)}

    def __len__(self) -> int:
        return len(self._steps)

    def __call__(self, **inputs: Any) -> Any:
        """The model's output; the first time, known modules compare and compute as ever."""
        checking = not self._checked
        try:
            # For the time of the call only: a twin that holds its steps, which hold it, would not be freed at once.
            for path, (module, step) in self._steps.items():
                vars(module)["forward"] = self._comparing(path, module, step) if checking else step
            outputs = self.twin(**inputs)
            self._checked = True
            return outputs
        finally:
            for module, _ in self._steps.values():
                vars(module).pop("forward", None)
            for path in self.refused:
                self._steps.pop(path, None)

    def _comparing(self, path: str, module: nn.Module, step: Step) -> Step:
        own = type(module).forward
        is_layer = path in self._layers
        tolerance = {"": _LAYER_TOLERANCE} if is_layer else _TOLERANCE

        def forward(*args: Any, **kwargs: Any) -> Any:
            theirs = own(module, *args, **kwargs)
            part = next((p for p in self.refused if is_layer and p.startswith(f"{path}.")), None)
            if part is None:
                try:
                    support = _agreement(step(*args, **kwargs), theirs, tolerance)
                except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                    support = Support.no(f"{type(error).__name__}: {error}")
            else:
                support = Support.no(f"{part} does")
            if self._group is not None:
                # Parts exchange what they compute: all processes must compare and replace the same ones.
                support = self._group.all_support(support)
            if not support:
                self.refused[path] = support.reason
                logger.info("%s: its decode step keeps its own kernels: %s", path, support.reason)
            return theirs

        return forward


def _agreement(ours: Any, theirs: Any, tolerance: dict[Any, float]) -> Support:
    """Whether two outputs are the same but for rounding."""
    if isinstance(ours, tuple) != isinstance(theirs, tuple):
        return Support.no(f"{type(ours).__name__}, not {type(theirs).__name__}")
    ours = [t for t in (ours if isinstance(ours, tuple) else (ours,)) if t is not None]
    theirs = [t for t in (theirs if isinstance(theirs, tuple) else (theirs,)) if t is not None]
    if len(ours) != len(theirs):
        return Support.no(f"{len(ours)} outputs, not {len(theirs)}")
    for a, b in zip(ours, theirs):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return Support.no(f"an output is {list(a.shape)} {a.dtype}, not {list(b.shape)} {b.dtype}")
        if not b.dtype.is_floating_point:
            continue  # ids may change places where weights tie; the weights tell
        error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)
        if not error <= tolerance.get("", tolerance.get(b.dtype, 0.0)):
            return Support.no(f"relative difference {error.item():.2g}")
    return SUPPORTED


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    return [] if config is None else [config, config.get_text_config()]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
