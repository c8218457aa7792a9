"""The base of dense linear operators: a subclass of `nn.Linear` whose weights are packed instead of parameters.

Libraries such as PEFT use `nn.Linear`, `in_features`, `out_features`, `weight` and `bias`. Here `weight` and `bias` are
properties that unpack at each access. Values written to them in place, as PEFT does to merge an adapter, are packed
again.
"""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Config, Operator
from ktinject.operators.torch_ops.linear import handle_of, linear_op

if TYPE_CHECKING:
    from ktinject.machine import Machine

SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Unpacked(Tensor):
    """An unpacked weight or bias. Every operation that writes to it also packs it again.

    Its views and its `.data` are of this class, too. Other results computed from it are plain tensors.
    """

    _linear: PackedLinear
    _name: str
    _whole: Tensor  # the plain tensor that holds the values

    @classmethod
    def of(cls, linear: PackedLinear, name: str) -> Unpacked:
        with torch.inference_mode(False):
            return cls._view(linear, name, whole := linear.unpacked(name), whole)

    @classmethod
    def _view(cls, linear: PackedLinear, name: str, whole: Tensor, part: Tensor) -> Unpacked:
        found = torch.Tensor._make_subclass(cls, part)
        found._linear, found._name, found._whole = linear, name, whole
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Unpacked)]
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if given and _writes(func, kwargs or {}):
                given[0]._pack(args[1] if func == _SET_DATA else None)
            if type(found) is Tensor:
                for one in given:
                    if found.untyped_storage().data_ptr() == one._whole.untyped_storage().data_ptr():
                        return cls._view(one._linear, one._name, one._whole, found)
            return found

    def _pack(self, data: Tensor | None) -> None:
        """Pack the new values.

        data    the tensor that was set as `.data`; None: the values were written in place
        """
        if data is None:
            self._linear.write(self._name, self._whole)
        elif getattr(data, "_whole", None) is not self._whole:
            self._linear.write(self._name, data.as_subclass(Tensor))

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._whole.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._whole.__reduce_ex__(protocol)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function changes its first argument or `out`. Judged by the function's name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        in_place = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
        return func == _SET_DATA or name == "__setitem__" or in_place
    return (name.endswith("_") and name != "requires_grad_") or kwargs.get("out") is not None


@functools.cache
def _warn_rounded(operator: str, weights: str) -> None:
    logging.getLogger("ktinject").warning(
        "%s: a weight is written to, and rounded to %s anew. Merge adapters into the checkpoint to round once.",
        operator,
        weights,
    )


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
        """The weight [n, k] in the model's dtype, unpacked at each access. Values written to it are packed again."""
        return Unpacked.of(self, "weight")

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias [n] in the model's dtype, or None. Values written to it are kept."""
        return Unpacked.of(self, "bias") if self.has_bias else None

    def write(self, name: str, tensor: Tensor) -> None:
        """Replace `weight` [n, k] or `bias` [n]. Raises OperatorError for another shape or dtype."""
        if name == "weight" and self.describe()["weights"] != "bf16":
            _warn_rounded(self.name, self.describe()["weights"])
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
