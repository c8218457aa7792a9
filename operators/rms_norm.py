"""RMS normalisation in one kernel: at decode a layer's four norms are a third of its kernel launches on a GPU, and with
a prompt on the CPU each is eight operations of torch's, whose threads have to be woken for every one.
`probes/norm.py` has the formula.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.addresses import CODES, address, stream_of
from ktinject.errors import OperatorError
from ktinject.operators.base import Config, Operator, register_operator
from ktinject.operators.probes import norm
from ktinject.operators.probes.norm import RmsNormSpec
from ktinject.support import Support

if TYPE_CHECKING:
    from ktinject.machine import Machine


def _spec_of(module: nn.Module) -> RmsNormSpec | Support:
    """What a norm computes, or why the kernel cannot compute it."""
    spec = norm.probe_of_one_input(module)
    if isinstance(spec, Support):
        return spec
    if spec.has_unit_offset and spec.rounds_before_weight:
        return Support.no(
            "its weight is stored less 1, and it rounds the sum of both, which the kernel does not"
        )
    return spec


@dataclass(frozen=True)
class RmsNormConfig(Config):
    """`rms_norm` has no arguments of its own."""


@register_operator("rms_norm")
class RmsNorm(Operator):
    """Computes an RMS norm in one kernel. Takes norms without bias.

    The weight may be stored less 1, and the result may be rounded before or after it is multiplied. The norm keeps its
    weight.
    """

    Config = RmsNormConfig
    device_types = ("cuda", "cpu")
    capturable = True

    def __init__(self, module: nn.Module, config: RmsNormConfig, spec: RmsNormSpec) -> None:
        super().__init__()
        self.weight: nn.Parameter = module.weight  # type: ignore[assignment]
        self.spec = spec
        self.config = config

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        spec = _spec_of(module)
        return spec.reason if isinstance(spec, Support) else None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        spec = _spec_of(module)
        if isinstance(spec, Support):
            raise OperatorError(f"rms_norm: {type(module).__name__} cannot be replaced: {spec.reason}.")
        return cls(module, config, spec)

    @property
    def epsilon(self) -> float:
        return self.spec.epsilon

    @epsilon.setter
    def epsilon(self, epsilon: float) -> None:
        self.spec = replace(self.spec, epsilon=epsilon)

    def follow(self, module: nn.Module, name: str) -> str | None:
        spec = _spec_of(module)
        if isinstance(spec, Support):
            return spec.reason
        if spec == self.spec:
            return super().follow(module, name)
        self.spec = spec
        return None

    def describe(self) -> dict[str, Any]:
        fused = self.config.device == "cpu" or _native.cuda_built()
        return {"kernel": "rms_norm" if fused else "torch", "weights": "kept"}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., n] → the same shape and dtype."""
        x, weight = hidden_states, self.weight
        needs_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        is_wide = weight.dtype == torch.float32
        like = x.dtype == weight.dtype or (is_wide and x.is_cuda and not self.spec.rounds_before_weight)
        served = like and x.dtype in CODES and x.device == weight.device
        served = served and weight.is_contiguous() and (x.is_cpu or (x.is_cuda and _native.cuda_built()))
        if not served or needs_graph or torch.compiler.is_compiling():
            return self._in_torch(x)
        x = x.contiguous()
        out = torch.empty_like(x)
        n = x.shape[-1]
        if x.is_cpu:
            _native.norm_rows(
                x=x.detach().view(-1, n),
                weight=weight.detach(),
                epsilon=self.spec.epsilon,
                out=out.view(-1, n),
                unit_offset=self.spec.has_unit_offset,
                rounds_first=self.spec.rounds_before_weight,
            )
            return out
        _native.rms_norm(
            address("x", x, x.device),
            address("weight", weight, x.device, weight.dtype, (n,)),
            address("out", out, x.device),
            CODES[x.dtype],
            x.numel() // n,
            n,
            self.spec.epsilon,
            stream_of(x.device),
            float(self.spec.has_unit_offset),
            self.spec.rounds_before_weight,
            is_wide,
        )
        return out

    def _in_torch(self, x: Tensor) -> Tensor:
        """The formula in torch's operations, to the bit what the module computes."""
        spec = self.spec
        weight = 1.0 + self.weight.float() if spec.has_unit_offset else self.weight
        return norm.formula(x, weight, spec.epsilon, spec.rounds_before_weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.spec.epsilon}"
