"""What a router does with its weight, found out by running it: `F.linear(x, weight)` and nothing else.

The choice of experts that follows may be anything: it stays the module's own code. So another matrix product can stand
in for the weight. `probe` runs a copy with such a product beside the router itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    """The shape of the weight [experts, hidden]."""

    num_experts: int
    hidden_size: int


class ProductWeight:
    """Stands for a router's weight in its forward: torch's `linear` with it is `product`. It cannot be written to.

    product   [..., hidden] → [..., experts], in the input's dtype
    """

    __slots__ = ("device", "dtype", "product", "shape")

    def __init__(
        self, product: Callable[[Tensor], Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.product, self.dtype = product, dtype
        self.shape, self.device = torch.Size(shape), torch.device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> ProductWeight:
        return self  # to fp32, for a product in fp32: the result has the input's dtype in any case

    type = float = to

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        if func is functional.linear and len(args) == 2 and not kwargs and isinstance(args[1], cls):
            return args[1].product(args[0])
        raise OperatorError(
            f"cpu_router: the router's weight is used in {func.__name__}, which is not served."
        )


def copy_into(router: Any, module: nn.Module) -> None:
    """Give a new instance, of the module's class or one below it, the module's buffers and public attributes."""
    nn.Module.__init__(router)
    for name, value in vars(module).items():
        if not name.startswith("_"):
            router.__dict__[name] = value
    for name, buffer in module.named_buffers():
        router.register_buffer(name, buffer, name not in module._non_persistent_buffers_set)


@answered_once
def probe(module: nn.Module) -> RouterSpec | Support:
    """Whether the router's one parameter, a `weight`, is used in `F.linear` alone."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or module.get_parameter("weight").dim() != 2 or list(module.children()):
        found = ", ".join(few(names)) or "none"
        return Support.no(f"its parameters are {found}; a weight [experts, hidden] alone is needed")
    try:
        with twin.on_cpu():
            return _compare(module)
    except Exception as error:  # transformers' own code, given what it may not be made for
        return refusal_of(error, "its forward cannot be tried out")


def _compare(module: nn.Module) -> RouterSpec | Support:
    random = torch.Generator("cpu").manual_seed(0)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    n, k = module.get_parameter("weight").shape
    weight = (gaussian(n, k) * k**-0.5).bfloat16()
    buffers = {name: gaussian(*b.shape).to(b.dtype) * 0.1 for name, b in module.named_buffers()}
    own = twin.of(module, tensors={"weight": weight, **buffers})

    def product(x: Tensor) -> Tensor:
        # In another order, and exact, so that a use of the weight beside this one shows.
        return (x.double().flip(-1) @ weight.double().flip(-1).T).to(x.dtype)

    other: Any = object.__new__(type(module))
    copy_into(other, own)
    other.__dict__["weight"] = ProductWeight(product, (n, k), weight.dtype)
    x = gaussian(7, k).bfloat16()
    want, found = _tensors(own(x)), _tensors(other(x))
    if [a.shape for a in want] != [b.shape for b in found]:
        return _ELSEWHERE
    for a, b in zip(want, found):
        if a.is_floating_point():
            same = _LOGITS.allows(((a - b).abs() / (1 + a.abs())).median().item())
        else:
            same = _CHOICES.allows((a != b).float().mean().item())
        if not same:
            return _ELSEWHERE
    return RouterSpec(n, k)


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [part for part in found if isinstance(part, Tensor)]
