"""What the linear layers on GPUs share: `nn.Linear` to everyone who asks, packed weights out of PyTorch's sight.

PEFT and others want `nn.Linear`, `in_features`, `out_features`, `weight` and `bias`. `weight` is a property that
unpacks: right for whoever looks at its dtype, device or values, useless to write to.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Config, Operator
from ktinject.operators.linear_op import handle_of, linear_op

if TYPE_CHECKING:
    from ktinject.machine import Machine

DTYPES = (torch.bfloat16, torch.float16)
SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class GpuLinear(Operator, nn.Linear):
    """y = x · Wᵀ + b on a CUDA device; subclasses say how W is kept and multiplied.

    Inputs are bf16 or fp16 [..., in_features]; sums are fp32. Inputs on another device are brought over and the
    result is taken back. Gradients flow to the input, as of the unpacked weight; weight and bias are frozen.
    """

    device_types = ("cuda",)
    capturable = True
    capability: ClassVar[tuple[int, int]] = (8, 0)  # least compute capability

    config: Any

    def __init__(self, module: nn.Linear, config: Config) -> None:
        nn.Module.__init__(self)  # and not nn.Linear's, which makes parameters
        self.in_features, self.out_features = module.in_features, module.out_features
        self.config = config
        self.dtype = module.weight.dtype
        self.has_bias = module.bias is not None
        self._bias: Tensor | None = None  # [n] fp32 on the device
        self._loaded: set[str] = set()
        self._handle = handle_of(self)

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        if not isinstance(module, nn.Linear):
            return "it replaces nn.Linear"
        if type(module).forward is not nn.Linear.forward:
            return "its forward is not that of nn.Linear"
        if module.weight.dtype not in DTYPES:
            return (
                f"its dtype is {_name(module.weight.dtype)}, and activations are served in bfloat16 and float16; "
                "load the model in one of these"
            )
        reason = cls.misfit(module.in_features, module.out_features, config)
        if reason is None and config.device.startswith("cuda"):
            if not machine.cuda_built:
                return "this build of ktinject has no CUDA parts; install the CUDA toolkit and build again"
            gpu = next((gpu for gpu in machine.gpus if f"cuda:{gpu.index}" == config.device), None)
            if gpu is not None and gpu.capability < cls.capability:
                return (
                    f"{config.device} ({gpu.name}) has compute capability {gpu.capability[0]}.{gpu.capability[1]}; "
                    f"{cls.capability[0]}.{cls.capability[1]} or newer is needed"
                )
        return reason

    @classmethod
    @abstractmethod
    def misfit(cls, k: int, n: int, config: Any) -> str | None:
        """Why a weight [n, k] is not served, or None."""

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        assert isinstance(module, nn.Linear), "as `supports` found"
        reason = cls.misfit(module.in_features, module.out_features, config)
        if reason:
            raise OperatorError(f"{cls.name}: a linear layer cannot be replaced: {reason}.")
        return cls(module, config)

    def wants(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        return shapes | ({"bias": (self.out_features,)} if self.has_bias else {})

    def allocate(self) -> None:
        try:
            if self.has_bias:
                self._bias = torch.empty(self.out_features, dtype=torch.float32, device=self.config.device)
            self._allocate()
        except torch.cuda.OutOfMemoryError:
            size = sum(self.footprint().values())
            raise OperatorError(
                f"{self.name}: no room for {size / 2**20:.1f} MiB on {self.config.device}. "
                "Choose smaller weights, or keep more modules on the CPU."
            ) from None

    @abstractmethod
    def _allocate(self) -> None:
        """Take the memory of the weight."""

    @abstractmethod
    def _pack(self, weight: Tensor) -> None:
        """Take a float weight [n, k], which is on the device."""

    @abstractmethod
    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The weight [n, k] on the device, each value rounded once."""

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
                f"{self.name}: {name}: found dtype {_name(tensor.dtype)}; allowed: "
                f"{', '.join(map(_name, SOURCES))}. Quantised codes have to be decoded first."
            )
        tensor = tensor.detach()
        if name == "bias":
            assert self._bias is not None
            self._bias.copy_(tensor)
        else:
            self._pack(tensor.to(self.config.device))
        self._loaded.add(name)

    def finish(self) -> None:
        absent = [name for name in self.wants() if name not in self._loaded]
        if absent:
            raise OperatorError(f"{self.name}: never loaded: {', '.join(absent)}.")

    def _at(self, name: str) -> None:
        if name not in self._loaded:
            raise OperatorError(f"{self.name}: {name} is not loaded.")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight [n, k] in the model's dtype, made anew at each access; writing to it changes nothing."""
        self._at("weight")
        return self.dequantise(self.dtype)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """The bias in the model's dtype, a copy; or None."""
        if not self.has_bias:
            return None
        self._at("bias")
        assert self._bias is not None
        return self._bias.to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] bf16 or fp16 → [..., out_features], dtype and device kept.

        Raises OperatorError for another dtype or width.
        """
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
            return linear_op(x, self._handle)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """forward without autograd."""
        if x.dtype not in DTYPES or x.shape[-1:] != (self.in_features,):
            raise OperatorError(
                f"{self.name}: found input {_name(x.dtype)} {list(x.shape)}; "
                f"allowed: bfloat16 or float16 [..., {self.in_features}]."
            )
        here = x.to(self.config.device).reshape(-1, self.in_features)
        y = self.multiply(here.contiguous())
        return y.view(*x.shape[:-1], self.out_features).to(x.device)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """x [m, k] contiguous on the device → [m, n], bias added."""

    def compute_gradient(self, grad: Tensor) -> Tensor:
        """grad [..., n] → gradient of the input [..., k]."""
        here = grad.to(self.config.device).reshape(-1, self.out_features)
        return (here @ self.dequantise(grad.dtype)).view(*grad.shape[:-1], self.in_features).to(grad.device)

    def extra_repr(self) -> str:
        bias = ", bias" if self.has_bias else ""
        return f"{self.in_features} → {self.out_features}{bias}, {self.describe()['weights']}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
