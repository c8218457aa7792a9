"""A router on the CPU: its own forward, with the matrix product in the kernels of `cpu_linear`, exact as before.

torch takes 0.12 ms to multiply one bf16 token by a router of 128 experts (reference box), as long as the experts
themselves take in int4. Nothing else of a router changes, so every family's choice stays its own.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.errors import OperatorError, few
from ktinject.operators.base import Operator, register_operator
from ktinject.operators.cpu_linear import CpuLinear, CpuLinearConfig

if TYPE_CHECKING:
    from ktinject.machine import Machine

# Of logits that differ in the order of their fp32 sums; rounded to bf16, one may fall to the other side.
_TOLERANCE = 1e-2


class _Packed:
    """Stands for the router's weight in its forward: torch's `linear` with it is ours. It cannot be written to."""

    __slots__ = ("device", "dtype", "linear", "shape")

    def __init__(self, linear: CpuLinear) -> None:
        self.linear = linear
        self.dtype, self.device = linear.dtype, torch.device("cpu")
        self.shape = torch.Size(linear.parameter_shapes()["weight"])

    def to(self, *args: Any, **kwargs: Any) -> _Packed:
        return self  # to fp32, for a product in fp32: the result has the input's dtype in any case

    type = float = to

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is functional.linear and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].linear(args[0])
        raise OperatorError(
            f"cpu_router: the router's weight is used in {func.__name__}, which is not served."
        )


@register_operator("cpu_router")
class CpuRouter(Operator):
    """Multiplies a router's weight on the CPU. Takes routers with one bf16 parameter `weight` [experts, hidden].

    The router uses that weight in `F.linear(x, weight)`; all else of its forward runs as it is. The operator is an
    instance of the router's class, so transformers still records router logits. On a GPU, and in models that are not
    bf16, the router stays as it is.
    """

    device_types = ("cuda", "cpu")
    linear: CpuLinear

    @classmethod
    def resolve(cls, module: nn.Module, config: Any) -> tuple[type[Operator], Any] | None:
        weight = getattr(module, "weight", None)
        is_plain = isinstance(weight, Tensor) and weight.dtype != torch.bfloat16
        return None if config.device != "cpu" or is_plain else (cls, config)

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Machine) -> str | None:
        names = [name for name, _ in module.named_parameters()]
        if names != ["weight"] or module.get_parameter("weight").dim() != 2 or list(module.children()):
            return f"its parameters are {', '.join(few(names)) or 'none'}; a weight [experts, hidden] alone is needed"
        return _tried(_Once(module))

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        kind: Any = type(f"Cpu{type(module).__name__}", (cls, type(module)), {})
        router: Self = kind.__new__(kind)
        nn.Module.__init__(router)
        router._take(module, config)
        return router

    def _take(self, module: nn.Module, config: Any) -> None:
        for name, value in vars(module).items():
            if not name.startswith("_"):
                self.__dict__[name] = value
        for name, buffer in module.named_buffers():
            self.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
        weight = module.get_parameter("weight")
        with torch.device("meta"):
            like = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        # Not as children: the weight's name in checkpoints is the router's.
        self.__dict__["linear"] = CpuLinear.build(like, CpuLinearConfig(device=config.device))
        self.__dict__["packed"] = _Packed(self.__dict__["linear"])

    @property
    def weight(self) -> _Packed:
        found: _Packed = self.__dict__["packed"]
        return found

    def describe(self) -> dict[str, Any]:
        return self.linear.describe()

    def footprint(self) -> dict[str, int]:
        return self.linear.footprint()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.linear.parameter_shapes()

    def allocate(self) -> None:
        self.linear.allocate()

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        self.linear.load(name, tensor, expert, part)

    def finish(self) -> None:
        self.linear.finish()

    def is_lossless(self) -> bool:
        return self.linear.is_lossless()

    def unpack(self, name: str, expert: int | None = None) -> Tensor:
        return self.linear.unpack(name, expert)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's own forward."""
        return super().forward(*args, **kwargs)


class _Once:
    """A module as an argument that does not count: one try for a class and shape."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __hash__(self) -> int:
        return hash((type(self.module), self.module.get_parameter("weight").shape))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Once) and hash(self) == hash(other)


@cache
def _tried(once: _Once) -> str | None:
    """Run router and operator on the same random tokens and weights; the reason why the router is not served."""
    random = torch.Generator().manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    module: Any = copy.copy(once.module)
    n, k = module.weight.shape
    weight = (gaussian(n, k) * k**-0.5).bfloat16()
    module._parameters = {"weight": nn.Parameter(weight, False)}
    module._buffers = {name: gaussian(*b.shape).to(b.dtype) * 0.1 for name, b in module.named_buffers()}
    operator = CpuRouter.build(module, CpuLinearConfig(device="cpu"))
    operator.allocate()
    operator.load("weight", weight, None, None)
    x = gaussian(7, k).bfloat16()
    try:
        with torch.no_grad():
            want, found = _tensors(module(x)), _tensors(operator(x))
    except Exception as error:  # transformers' own code, given what it may not be made for
        return f"its forward cannot be tried out: {error}"
    if [a.shape for a in want] != [b.shape for b in found]:
        return "its forward does something else with the weight than F.linear"
    for a, b in zip(want, found):
        # Near ties of two experts may turn over.
        off = (
            (a != b).float().mean() if not a.is_floating_point() else ((a - b).abs() / (1 + a.abs())).median()
        )
        if not off <= (0.1 if not a.is_floating_point() else _TOLERANCE):
            return "its forward does something else with the weight than F.linear"
    return None


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [part for part in found if isinstance(part, Tensor)]
