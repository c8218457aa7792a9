"""What dense linear operators share: `nn.Linear` to everyone who asks, packed weights out of PyTorch's sight.

PEFT and others want `nn.Linear`, `in_features`, `out_features`, `weight` and `bias`. The last two are properties that
unpack: right for whoever looks at dtype, device or values, useless to write to.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Config, Operator
from ktinject.operators.linear_op import handle_of, linear_op

if TYPE_CHECKING:
    from ktinject.machine import Machine

SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(Operator, nn.Linear):
    """y = x · Wᵀ + b; subclasses say how W is kept and multiplied.

    Inputs on another device are brought over and the result is taken back. Gradients flow to the input, as of the
    unpacked weight; weight and bias are frozen.
    """

    config: Any

    def __init__(self, module: nn.Linear, config: Config) -> None:
        nn.Module.__init__(self)  # and not nn.Linear's, which makes parameters
        self.in_features, self.out_features = module.in_features, module.out_features
        self.config = config
        self.dtype = module.weight.dtype
        self.has_bias = module.bias is not None
        self._handle = handle_of(self)

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if not isinstance(module, nn.Linear):
            return "it replaces nn.Linear"
        if type(module).forward is not nn.Linear.forward:
            return "its forward is not that of nn.Linear"
        return None

    def wants(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes | ({"bias": (self.out_features,)} if self.has_bias else {})

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        shape = self.wants().get(name)
        if shape is None:
            raise OperatorError(f"{self.name}: found parameter {name}; allowed: {', '.join(self.wants())}.")
        if expert is not None or part is not None or tensor.shape != shape:
            raise OperatorError(
                f"{self.name}: {name}: found shape {list(tensor.shape)}, expert {expert}, part {part}; "
                f"expected the whole {list(shape)}."
            )
        if tensor.dtype not in SOURCES:
            raise OperatorError(
                f"{self.name}: {name}: found dtype {dtype_name(tensor.dtype)}; allowed: "
                f"{', '.join(map(dtype_name, SOURCES))}. Quantised codes have to be decoded first."
            )
        self.accept(name, tensor.detach())

    @abstractmethod
    def accept(self, name: str, tensor: Tensor) -> None:
        """Pack the whole weight [n, k], or keep the bias [n]; of a dtype of `SOURCES`."""

    @abstractmethod
    def unpacked(self, name: str) -> Tensor:
        """`weight` [n, k], or `bias` [n] where there is one, in the model's dtype, where it is kept; a copy."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight [n, k] in the model's dtype, made anew at each access; writing to it changes nothing."""
        return self.unpacked("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias [n] in the model's dtype, a copy; or None."""
        return self.unpacked("bias") if self.has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features], dtype and device kept.

        Raises OperatorError for another width, or a dtype that is not served.
        """
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
            return linear_op(x, self._handle)
        return self.compute(x)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """forward without autograd."""

    @abstractmethod
    def compute_gradient(self, grad: Tensor) -> Tensor:
        """grad [..., n] → gradient of the input [..., k]."""

    def extra_repr(self) -> str:
        bias = ", bias" if self.has_bias else ""
        return f"{self.in_features} → {self.out_features}{bias}, {self.describe()['weights']}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
