"""What a router does with its weight, found out by running it: `F.linear(x, weight)`, or with a bias, and no more.

The choice of experts that follows may be anything: it stays the module's own code. So another matrix product can stand
in for the weight. `probe` runs a copy with such a product beside the router itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktinject.errors import OperatorError, few
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import answered_once, refusal_of
from ktinject.operators.probes.comparison import Tolerance
from ktinject.support import Support

_LOGITS = Tolerance(1e-2, "the median: sums in another order, rounded to bf16, may fall to the other side")
_CHOICES = Tolerance(0.1, "the part of the choices that differ: near ties of two experts may turn over")
_ELSEWHERE = Support.no("its forward does something else with the weight than F.linear")


@dataclass(frozen=True)
class RouterSpec:
    """The shape of the weight [experts, hidden], and whether there is a bias [experts]."""

    num_experts: int
    hidden_size: int
    has_bias: bool


class _StandIn:
    """Stands for a parameter of a router in its forward.

    Whatever else a parameter is asked for, the weight that the product holds answers, and takes what is written to it.
    """

    __slots__ = ("device", "dtype", "shape")
    _name: str

    # What holds the router may initialise its weights in transformers' loader, which then leaves this alone.
    _is_hf_initialized = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self  # to fp32, for a product in fp32: the result has the input's dtype in any case

    type = float = to

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is functional.linear and not kwargs and len(args) > 1 and isinstance(args[1], ProductWeight):
            if args[1].takes(args[2] if len(args) == 3 else None):
                return args[1].product(args[0])
        return func(*map(_held, args), **{name: _held(value) for name, value in (kwargs or {}).items()})

    @property
    def held(self) -> Tensor:
        """The parameter itself. Raises OperatorError where nothing holds it, as in a probe."""
        of: Any = getattr(self, "product", None)
        if not hasattr(of, "held_weight"):
            raise OperatorError(
                "cpu_router: the router's weight or bias is used in something else than F.linear, which is not served."
            )
        found: Tensor = of.held_weight(self._name)
        return found

    @property
    def data(self) -> Tensor:
        return self.held.data

    @data.setter
    def data(self, data: Tensor) -> None:
        self.held.data = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__slots__ or name == "product":
            raise AttributeError(name)
        return getattr(self.held, name)


def _delegated(name: str) -> Any:
    return lambda self, *args: getattr(self.held, name)(*args)


# Python looks for these in the class alone.
for _name in "add radd sub rsub mul rmul truediv matmul rmatmul neg pow getitem setitem len iter".split():
    setattr(_StandIn, f"__{_name}__", _delegated(f"__{_name}__"))
for _name in "iadd isub imul itruediv".split():
    setattr(_StandIn, f"__{_name}__", _delegated(f"__{_name}__"))


def _held(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_held, value))
    return value.held if isinstance(value, _StandIn) else value


class ProductBias(_StandIn):
    """Stands for a router's bias, which the product with the weight adds."""

    __slots__ = ("product",)
    _name = "bias"

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, product: Any = None) -> None:
        super().__init__(shape, dtype)
        self.product = product


class ProductWeight(_StandIn):
    """Stands for a router's weight: torch's `linear` with it, and with the bias where there is one, is `product`.

    product   [..., hidden] → [..., experts], in the input's dtype
    """

    __slots__ = ("bias", "product")
    _name = "weight"

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        bias: ProductBias | None = None,
    ) -> None:
        super().__init__(shape, dtype)
        self.product, self.bias = product, bias

    def takes(self, bias: Any) -> bool:
        return bias is self.bias


def copy_into(router: Any, module: nn.Module) -> None:
    """Give a new instance, of the module's class or one below it, the module's buffers and public attributes."""
    nn.Module.__init__(router)
    for name, value in vars(module).items():
        if not name.startswith("_"):
            router.__dict__[name] = value
    for name, buffer in module.named_buffers():
        router.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)
    for name, parameter in module._parameters.items():
        if parameter is None:  # such as the bias that a subclass of nn.Linear does without
            router.register_parameter(name, None)


@answered_once
def probe(module: nn.Module) -> RouterSpec | Support:
    """Whether the router's parameters, a `weight` and maybe a `bias`, are used in one `F.linear` alone."""
    names = [name for name, _ in module.named_parameters()]
    is_known = "weight" in names and {*names} <= {"weight", "bias"} and not list(module.children())
    if not is_known or [*_shapes(module).values()] != _expected(module):
        found = ", ".join(few(names)) or "none"
        return Support.no(
            f"its parameters are {found}; a weight [experts, hidden] is needed, and at most a bias [experts]"
        )
    try:
        with twin.on_cpu():
            return _compare(module)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error, "its forward cannot be tried out")


def _compare(module: nn.Module) -> RouterSpec | Support:
    random = torch.Generator("cpu").manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")

    n, k = module.get_parameter("weight").shape
    has_bias = "bias" in _shapes(module)
    weight, bias = (gaussian(n, k) * k**-0.5).bfloat16(), gaussian(n).bfloat16()
    tensors = {"weight": weight, "bias": bias} if has_bias else {"weight": weight}
    buffers = {name: gaussian(*b.shape).to(b.dtype) * 0.1 for name, b in module.named_buffers()}
    own = twin.of(module, tensors={**tensors, **buffers})

    def product(x: Tensor) -> Tensor:
        # In another order, and exact, so that a use of the weight beside this one shows.
        found = x.double().flip(-1) @ weight.double().flip(-1).T
        return (found + bias.double() if has_bias else found).to(x.dtype)

    other: Any = object.__new__(type(module))
    copy_into(other, own)
    stand_in = ProductBias((n,), weight.dtype) if has_bias else None
    other.__dict__["weight"] = ProductWeight(product, (n, k), weight.dtype, stand_in)
    if has_bias:
        other.__dict__["bias"] = stand_in
    x = gaussian(7, k).bfloat16()
    beside = [0.1 * gaussian(n) for _ in _corrections(module)]
    want, found = _tensors(own(x, *beside)), _tensors(other(x, *beside))
    if [a.shape for a in want] != [b.shape for b in found]:
        return _ELSEWHERE
    for a, b in zip(want, found):
        if a.is_floating_point():
            same = _LOGITS.allows(((a - b).abs() / (1 + a.abs())).median().item())
        else:
            same = _CHOICES.allows((a != b).float().mean().item())
        if not same:
            return _ELSEWHERE
    return RouterSpec(n, k, has_bias)


def computes_in_fp32(module: nn.Module) -> bool:
    """Whether the router gives the same bits for a bf16 weight as for an fp32 one of the same values."""
    return not isinstance(_in_fp32(module), Support)


@answered_once
def _in_fp32(module: nn.Module) -> RouterSpec | Support:
    found = probe(module)
    if isinstance(found, Support):
        return found
    try:
        with twin.on_cpu():
            return (
                found if _is_same_in_bf16(module) else Support.no("it rounds its product with a bf16 weight")
            )
    except Exception as error:
        return refusal_of(error, "its forward cannot be tried out")


def _is_same_in_bf16(module: nn.Module) -> bool:
    random = torch.Generator("cpu").manual_seed(0)
    n, k = module.get_parameter("weight").shape
    drawn = {
        name: torch.randn(p.shape, generator=random, dtype=torch.float32, device="cpu").bfloat16()
        for name, p in module.named_parameters()
    }
    buffers = {
        name: torch.randn(b.shape, generator=random, dtype=torch.float32, device="cpu") * 0.1
        for name, b in module.named_buffers()
    }
    x = torch.randn(7, k, generator=random, dtype=torch.float32, device="cpu").bfloat16()
    beside = [
        0.1 * torch.randn(n, generator=random, dtype=torch.float32, device="cpu")
        for _ in _corrections(module)
    ]
    narrow, wide = (
        _tensors(twin.of(module, tensors={**drawn, **buffers, "weight": weight})(x, *beside))
        for weight in (drawn["weight"], drawn["weight"].float())
    )
    return len(narrow) == len(wide) and all(map(torch.equal, narrow, wide))


def _corrections(module: nn.Module) -> list[str]:
    """What the forward takes behind the rows: a correction of the choice [experts], which the block holds."""
    taken = [*inspect.signature(type(module).forward).parameters.values()][2:]
    return [
        p.name
        for p in taken
        if p.kind is p.POSITIONAL_OR_KEYWORD and (p.default is p.empty or "bias" in p.name)
    ]


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _expected(module: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the parameters that are there, with as many experts as the weight has."""
    weight = module.get_parameter("weight").shape
    found = {"weight": (weight[0], weight[-1]), "bias": (weight[0],)}
    return [found[name] for name in _shapes(module)]


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [part for part in found if isinstance(part, Tensor)]
