"""The base of linear operators on GPUs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ktinject.errors import OperatorError
from ktinject.operators.base import Config
from ktinject.operators.linears.packed_linear import PackedLinear, dtype_name

if TYPE_CHECKING:
    from ktinject.machine import Machine

DTYPES = (torch.bfloat16, torch.float16)


class GpuLinear(PackedLinear):
    """y = x · Wᵀ + b on a CUDA device. Inputs are bf16 or fp16 [..., in_features]; sums are fp32."""

    device_types = ("cuda",)
    capturable = True
    capability: ClassVar[tuple[int, int]] = (8, 0)  # the oldest compute capability that can run it

    def __init__(self, module: nn.Linear, config: Config) -> None:
        super().__init__(module, config)
        self._bias: Tensor | None = None  # [n] fp32 on the device
        self._loaded: set[str] = set()

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        reason = super().supports(module, config, machine)
        if reason:
            return reason
        assert isinstance(module, nn.Linear)
        if module.weight.dtype not in DTYPES:
            return (
                f"its dtype is {dtype_name(module.weight.dtype)}, and activations are served in bfloat16 and float16; "
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
        """Why the operator cannot serve a weight [n, k]; None if it can."""

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        assert isinstance(module, nn.Linear), "as `supports` found"
        reason = cls.misfit(module.in_features, module.out_features, config)
        if reason:
            raise OperatorError(f"{cls.name}: a linear layer cannot be replaced: {reason}.")
        return cls(module, config)

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
        """Allocate the memory of the weight on the device."""

    @abstractmethod
    def _pack(self, weight: Tensor) -> None:
        """Quantise and pack a float weight [n, k] that is on the device. Raises OperatorError."""

    @abstractmethod
    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The unpacked weight [n, k] on the device, each value rounded once to `dtype`."""

    def accept(self, name: str, tensor: Tensor) -> None:
        if name == "bias":
            assert self._bias is not None
            self._bias.copy_(tensor)
        else:
            self._pack(tensor.to(self.config.device))
        self._loaded.add(name)

    def finish(self) -> None:
        absent = [name for name in self.parameter_shapes() if name not in self._loaded]
        if absent:
            raise OperatorError(f"{self.name}: never loaded: {', '.join(absent)}.")

    def _at(self, name: str) -> None:
        if name not in self._loaded:
            raise OperatorError(f"{self.name}: {name} is not loaded.")

    def unpacked(self, name: str) -> Tensor:
        self._at(name)
        if name == "weight":
            return self.dequantise(self.dtype)
        assert self._bias is not None
        return self._bias.to(self.dtype)

    def compute(self, x: Tensor) -> Tensor:
        if x.dtype not in DTYPES or x.shape[-1:] != (self.in_features,):
            raise OperatorError(
                f"{self.name}: found input {dtype_name(x.dtype)} {list(x.shape)}; "
                f"allowed: bfloat16 or float16 [..., {self.in_features}]."
            )
        here = x.to(self.config.device).reshape(-1, self.in_features)
        y = self.multiply(here.contiguous())
        return y.view(*x.shape[:-1], self.out_features).to(x.device)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """x [m, k] bfloat16 or float16, contiguous, on the device → x · Wᵀ + b, [m, n] of x's dtype."""

    def compute_gradient(self, grad: Tensor) -> Tensor:
        here = grad.to(self.config.device).reshape(-1, self.out_features)
        return (here @ self.dequantise(grad.dtype)).view(*grad.shape[:-1], self.in_features).to(grad.device)
