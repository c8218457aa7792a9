"""Decode steps of few kernels: norms, attention, routing and what lies between them as native/cuda computes it.

Between two layers of experts, transformers runs some fifty kernels on tensors of a single token; nearly all of that
time is launches. What is captured is therefore a twin of the model, in which the modules that `Fused` knows by what
they hold compute with few kernels instead; the model itself stays as it is, for prompts and for other threads:

    a decoder layer   norm and projections to heads | attention | output projection and residual
                      | norm and router | choice of experts and submit | wait and residual
    its parts         a norm, attention, a router, where the layer around them is not known
    before            angles of rotation

Whether one computes what its module computes is not believed: the first step runs both, on the model's own numbers, and
a module that differs stays as it is.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ktinject.distributed.process_group import ProcessGroup
from ktinject.generation import twin
from ktinject.generation.cuda import decode_ops
from ktinject.generation.cuda.fused_steps import Step, is_layer, known
from ktinject.support import Support

logger = logging.getLogger("ktinject")

# Rounding to a dtype of the intermediate results, which differ by the order of a sum: a few units in the last place.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
# Of a whole layer, whose parts have been compared: only how they are put together. Where two experts are nearly as
# likely, rounding decides, and a layer with the other one differs by more than rounding.
_LAYER_TOLERANCE = 0.1


class Fused:
    """A twin of a model whose known modules make decode steps of few kernels, if they were found to compute the same.

    twin      it holds the model's modules, and not the model
    refused   path → why a module that looked known keeps its own forward
    """

    def __init__(self, model: nn.Module, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.refused: dict[str, str] = {}
        self._checked = False
        self._steps: dict[str, tuple[nn.Module, Step]] = {}
        # Blocks of attention count themselves here; requests of one model take turns.
        heads = max((getattr(m, "num_attention_heads", 0) for m in _configs(model)), default=0)
        block_counts: dict[torch.device, Tensor] = {}

        def counter(module: nn.Module) -> Tensor:
            device = _device(module)
            if device not in block_counts:
                block_counts[device] = torch.zeros(
                    decode_ops.MOST_ROWS * heads, dtype=torch.int32, device=device
                )
            return block_counts[device]

        def step_of(module: nn.Module) -> Step | None:
            return None if "forward" in vars(module) else known(module, counter(module))

        self.twin = twin.tree(
            model, lambda module: step_of(module) is not None, without=("ktinject_decoding",)
        )
        for path, module in self.twin.named_modules():
            step = step_of(module)
            if step is not None:
                self._steps[path] = (module, step)

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
        tolerance = {"": _LAYER_TOLERANCE} if is_layer(module) else _TOLERANCE

        def forward(*args: Any, **kwargs: Any) -> Any:
            theirs = own(module, *args, **kwargs)
            try:
                parts = [p for p in self.refused if is_layer(module) and p.startswith(f"{path}.")]
                reason = f"{parts[0]} does" if parts else ""
                reason = reason or _difference(step(*args, **kwargs), theirs, tolerance)
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if self._group is not None:
                # Parts exchange what they compute: all processes must compare and replace the same ones.
                reason = self._group.all_support(Support(not reason, reason)).reason
            if reason:
                self.refused[path] = reason
                logger.info("%s: its decode step keeps its own kernels: %s", path, reason)
            return theirs

        return forward


def _difference(ours: Any, theirs: Any, tolerance: dict[Any, float]) -> str:
    """How two outputs differ; "" if they are the same but for rounding."""
    if isinstance(ours, tuple) != isinstance(theirs, tuple):
        return f"{type(ours).__name__}, not {type(theirs).__name__}"
    ours = [t for t in (ours if isinstance(ours, tuple) else (ours,)) if t is not None]
    theirs = [t for t in (theirs if isinstance(theirs, tuple) else (theirs,)) if t is not None]
    if len(ours) != len(theirs):
        return f"{len(ours)} outputs, not {len(theirs)}"
    for a, b in zip(ours, theirs):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return f"an output is {list(a.shape)} {a.dtype}, not {list(b.shape)} {b.dtype}"
        if not b.dtype.is_floating_point:
            continue  # ids may change places where weights tie; the weights tell
        error = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)
        if not error <= tolerance.get("", tolerance.get(b.dtype, 0.0)):
            return f"relative difference {error.item():.2g}"
    return ""


def _configs(model: nn.Module) -> list[Any]:
    config = getattr(model, "config", None)
    return [] if config is None else [config, config.get_text_config()]


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
