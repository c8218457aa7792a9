"""Tensors, dtypes and streams as numbers, for native calls that take them so.

DLPack would make CUDA streams wait for each other.

Behind a number nothing can be checked any more. So the tensor is, here, and no other file hands out an address.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
}  # as native/bindings/handoff.cpp numbers them


def address(
    name: str,
    tensor: Tensor | None,
    device: torch.device,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] | None = None,
    strided: int = 0,
) -> int:
    """The address of a tensor that native code will use as what is said here.

    name     what it is, for the refusal
    tensor   None: there is none
    dtype    that it must have; None: any
    shape    that it must have; None: any
    strided  leading dimensions whose strides the native call is told; what is within them must be contiguous
    Returns  0 for None
    Raises   ValueError if it is not so
    """
    if tensor is None:
        return 0
    fits = (
        (dtype is None or tensor.dtype == dtype)
        and tensor.device == device
        and (shape is None or tensor.shape == tuple(shape))
        and (_is_dense(tensor, strided) if strided else tensor.is_contiguous())
    )
    if not fits:
        of = "any shape" if shape is None else f"shape {list(shape)}"
        within = f" within its first {strided} dimensions" if strided else ""
        raise ValueError(
            f"{name}: found {list(tensor.shape)} {tensor.dtype}, strides {list(tensor.stride())}, on {tensor.device}; "
            f"expected {of}, {dtype or 'any dtype'}, contiguous{within}, on {device}"
        )
    return tensor.data_ptr()


def _is_dense(tensor: Tensor, first: int) -> bool:
    """Whether what lies within the first dimensions is contiguous."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[first:]), reversed(tensor.stride()[first:])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def stream_of(device: torch.device) -> tuple[int, int]:
    """The current stream of a CUDA device, as native launches take it: number of the device, handle."""
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream
