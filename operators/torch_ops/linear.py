"""The custom op through which dense linear operators are traced and differentiated, whatever they compute on.

Its schema carries a number, since a traced graph cannot hold a Python object.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor


class Product(Protocol):
    """y = x · Wᵀ + b with frozen W and b."""

    in_features: int
    out_features: int

    def compute(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features], without autograd."""

    def compute_gradient(self, grad: Tensor) -> Tensor:
        """grad [..., out_features] → the gradient of x [..., in_features]."""


_handles = itertools.count(1)
_linears: weakref.WeakValueDictionary[int, Product] = weakref.WeakValueDictionary()


def handle_of(linear: Product) -> int:
    """A new number for a linear layer, valid as long as the object lives."""
    handle = next(_handles)
    _linears[handle] = linear
    return handle


@torch.library.custom_op("ktinject::linear", mutates_args=(), schema="(Tensor x, int handle) -> Tensor")
def linear_op(x: Tensor, handle: int) -> Tensor:
    return _linears[handle].compute(x)


@linear_op.register_fake
def _(x: Tensor, handle: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], _linears[handle].out_features)


@torch.library.custom_op(
    "ktinject::linear_backward", mutates_args=(), schema="(Tensor grad, int handle) -> Tensor"
)
def linear_backward_op(grad: Tensor, handle: int) -> Tensor:
    return _linears[handle].compute_gradient(grad)


@linear_backward_op.register_fake
def _(grad: Tensor, handle: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], _linears[handle].in_features)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.handle = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return linear_backward_op(grad, ctx.handle), None


linear_op.register_autograd(_backward, setup_context=_save)
