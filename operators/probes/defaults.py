"""What probes need of torch's global state, whatever the process has set.

Our own code names the dtype and the device of each tensor that it makes. transformers' modules, which probes run, do
not. torch's default dtype belongs to the process: users set it, and so does transformers for the time in which any
thread builds a model. So a probe must not rely on it, and must not set it either: `Defaults` stands for it on one
thread, and for the generator of random numbers, which users seed.

How exact products of fp32 are belongs to the process, too, and there is no other way than to set it. Others then
compute more exactly for a moment, which changes nothing that they may rely on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What makes floats wherever no dtype is given.
_FLOATS = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn),
        *(torch.eye, torch.linspace, torch.logspace, torch.empty_strided, torch.empty_permuted),
    }
)
# What draws random numbers, from the generator of the process unless it is given another one. By their names: of
# tensors, of torch.nn.init, and what transformers puts in place of the latter.
_DRAWING = frozenset(
    "rand randn randint randperm bernoulli multinomial uniform_ normal_ random_ bernoulli_ exponential_ trunc_normal_ "
    "kaiming_uniform_ kaiming_normal_".split()
)
# What makes floats if it is given a float.
_OF_VALUES = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.full, torch.arange})


class Defaults(TorchFunctionMode):
    """Within, on this thread, floats whose dtype nobody names are fp32, and random numbers are always the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator("cpu").manual_seed(0)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator}
        if kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if func in _FLOATS:
            return func(*args, **{**kwargs, "dtype": torch.float32})
        found = func(*args, **kwargs)
        if func not in _OF_VALUES or found.dtype is torch.float32 or not found.is_floating_point():
            return found
        # A tensor, or an array of numpy's, says itself of which dtype it is.
        if args and (isinstance(args[0], Tensor) or hasattr(args[0], "dtype")):
            return found
        return func(*args, **{**kwargs, "dtype": torch.float32})


_FP32 = ("ieee", "none")  # "none" is what nobody has set


class _Products:
    """The precision of products on the CPU that users have set, while there is somebody who needs exact ones."""

    def __init__(self) -> None:
        self._lock, self._count, self._before = threading.Lock(), 0, "ieee"
        mkldnn: Any = torch.backends.mkldnn
        self._settings = mkldnn.matmul

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._before = self._settings.fp32_precision
                if self._before not in _FP32:
                    self._settings.fp32_precision = "ieee"
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._before not in _FP32:
                self._settings.fp32_precision = self._before


_products = _Products()


@contextmanager
def exact_products() -> Iterator[None]:
    """Within, the CPU multiplies fp32 in fp32."""
    _products.begin()
    try:
        yield
    finally:
        _products.end()
