"""The base of dense linear operators: a subclass of `nn.Linear` whose weights are packed instead of parameters.

Libraries such as PEFT use `nn.Linear`, `in_features`, `out_features`, `weight` and `bias`. Here `weight` and `bias` are
tensors that are unpacked where they are read (operators/held.py). Values written to them in place, as PEFT does to
merge an adapter, are packed again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Config, Operator
from ktinject.operators.held import Held
from ktinject.operators.torch_ops.linear import handle_of, linear_op

if TYPE_CHECKING:
    from ktinject.machine import Machine

SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class PackedLinear(Operator, nn.Linear):
    """y = x · Wᵀ + b; subclasses define how W is packed and multiplied.

    An input on another device is copied to the operator's device, and the result is copied back. Gradients flow to the
    input, computed with the unpacked weight; weight and bias are frozen.
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

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes | ({"bias": (self.out_features,)} if self.has_bias else {})

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        shape = self.parameter_shapes().get(name)
        if shape is None:
            raise OperatorError(
                f"{self.name}: found parameter {name}; allowed: {', '.join(self.parameter_shapes())}."
            )
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
        """Pack the whole weight [n, k], or keep the bias [n]. The tensor has one of the dtypes `SOURCES`."""

    @abstractmethod
    def unpacked(self, name: str) -> Tensor:
        """A copy of `weight` [n, k], or of `bias` [n] if there is one, in the model's dtype, on the device of W."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [n, k] in the model's dtype, unpacked where it is read. Values written to it are packed again."""
        return self.held_weight("weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias [n] in the model's dtype, or None. Values written to it are kept."""
        return self.held_weight("bias") if self.has_bias else None

    def held_weight(self, name: str) -> Held:
        device = str(self.config.device)
        at = device if device.startswith("cuda") else "cpu"
        return Held.of(self, name, self.parameter_shapes()[name], self.dtype, at)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        found = super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return found

    def load_whole(self, name: str, tensor: Tensor) -> None:
        self.load(name, tensor, None, None)
        self.finish()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features], of x's dtype and on x's device.

        Raises OperatorError for another width, or for a dtype that the operator does not serve.
        """
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
            return linear_op(x, self._handle)
        return self.compute(x)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """`forward` without autograd."""

    @abstractmethod
    def compute_gradient(self, grad: Tensor) -> Tensor:
        """grad [..., n] → gradient of the input [..., k]."""

    def extra_repr(self) -> str:
        bias = ", bias" if self.has_bias else ""
        return f"{self.in_features} → {self.out_features}{bias}, {self.describe()['weights']}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
