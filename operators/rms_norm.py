"""RMS normalisation in one kernel: at decode a layer's four norms are a third of its kernel launches on a GPU, and with
a prompt on the CPU each is eight operations of torch's, whose threads have to be woken for every one.

    y = weight * round(x / sqrt(mean(x²) + ε))

in the dtype of x, with sums in fp32, rounded where transformers rounds.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ktinject import _native
from ktinject.addresses import address
from ktinject.errors import OperatorError
from ktinject.operators.base import Config, Operator, register_operator
from ktinject.operators.offload.handoff import CODES, stream_of

if TYPE_CHECKING:
    from ktinject.machine import Machine


@dataclass(frozen=True)
class RmsNormConfig(Config):
    """`rms_norm` has no arguments of its own."""


def epsilon_of(module: nn.Module) -> float | str:
    """The ε of a module that computes the formula above, found by running it; or the reason why it does not."""
    weight = dict(module.named_parameters()).get("weight")
    if weight is None or weight.dim() != 1 or len(module.state_dict()) != 1 or [*module.children()]:
        return "it holds something else than one vector called weight"
    n = weight.shape[0]
    random = torch.Generator("cpu").manual_seed(0)
    values = torch.randn(n, generator=random, dtype=torch.float32) + 2.0
    twin: Any = copy.copy(module)
    twin._parameters = {"weight": nn.Parameter(values, False)}
    try:
        with torch.no_grad(), torch.device("cpu"):
            # With x far below sqrt(ε), y is weight * x / sqrt(ε).
            tiny = torch.full((1, n), 2.0**-60)
            scale = (twin(tiny) / (values * tiny)).mean().item()
            if not (math.isfinite(scale) and scale > 0):
                return "it has no ε"
            epsilon = float(f"{scale**-2:.6g}")
            for size in (1.0, 1e-3, 30.0):
                x = torch.randn(3, n, generator=random) * size
                difference = (twin(x) - formula(x, values, epsilon)).abs().max().item()
                if not difference <= 1e-5 * values.abs().max().item():
                    return f"it is not weight * x / sqrt(mean(x²) + ε): max difference {difference:.1e}"
            x = torch.randn(3, n, generator=random).bfloat16()
            twin._parameters = {"weight": nn.Parameter(values.bfloat16(), False)}
            if not torch.equal(twin(x), formula(x, values.bfloat16(), epsilon)):
                return "it rounds bf16 at another place"
    except Exception as error:  # the module's own code runs here, so anything may come out of it
        return f"its forward fails on a copy of itself: {type(error).__name__}: {error}"
    return epsilon


def formula(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same in PyTorch's operations."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


@register_operator("rms_norm")
class RmsNorm(Operator):
    """Computes an RMS norm in one kernel. Takes norms without bias and without an offset to their weight.

    The norm keeps its weight.
    """

    Config = RmsNormConfig
    device_types = ("cuda", "cpu")
    capturable = True

    def __init__(self, module: nn.Module, config: RmsNormConfig, epsilon: float) -> None:
        super().__init__()
        self.weight: nn.Parameter = module.weight  # type: ignore[assignment]
        self.epsilon = epsilon
        self.config = config

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        epsilon = epsilon_of(module)
        return epsilon if isinstance(epsilon, str) else None

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        epsilon = epsilon_of(module)
        if isinstance(epsilon, str):
            raise OperatorError(f"rms_norm: {type(module).__name__} cannot be replaced: {epsilon}.")
        return cls(module, config, epsilon)

    def describe(self) -> dict[str, Any]:
        fused = self.config.device == "cpu" or _native.cuda_built()
        return {"kernel": "rms_norm" if fused else "torch", "weights": "kept"}

    def footprint(self) -> dict[str, int]:
        return {}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        raise OperatorError(f"rms_norm: {name}: it takes no weights; transformers loads them.")

    def is_lossless(self) -> bool:
        return True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., n] → the same shape and dtype."""
        x, weight = hidden_states, self.weight
        needs_graph = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        served = x.dtype == weight.dtype and x.dtype in CODES and x.device == weight.device
        served = served and weight.is_contiguous() and (x.is_cpu or (x.is_cuda and _native.cuda_built()))
        if not served or needs_graph or torch.compiler.is_compiling():
            return formula(x, weight, self.epsilon)
        x = x.contiguous()
        out = torch.empty_like(x)
        n = x.shape[-1]
        if x.is_cpu:
            _native.norm_rows(
                x=x.detach().view(-1, n), weight=weight.detach(), epsilon=self.epsilon, out=out.view(-1, n)
            )
            return out
        _native.rms_norm(
            address("x", x, x.device),
            address("weight", weight, x.device, x.dtype, (n,)),
            address("out", out, x.device),
            CODES[x.dtype],
            x.numel() // n,
            n,
            self.epsilon,
            stream_of(x.device),
        )
        return out

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"
