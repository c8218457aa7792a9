"""Tensors of 2^31 rows and more: the native core counts in int, so they are refused, and nothing is read or written."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_waiting import allocated, experts, linear
from torch import Tensor

from ktinject import _native

MANY = 2**31


@pytest.fixture(scope="module")
def room() -> Any:
    """Addresses alone: no page is ever touched."""
    no_reserve = 0x4000  # Linux on x86; Python names it from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        pages = mmap.mmap(-1, 8 * MANY, flags=flags)
    except (OSError, ValueError) as error:
        pytest.skip(f"no room for {8 * MANY} addresses: {error}")
    return pages


def rows(room: Any, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.frombuffer(room, dtype=dtype, count=MANY).reshape(shape or (MANY, 1))


def wide(*shape: int) -> Tensor:
    return torch.ones(1).expand(*shape)


CALLS: dict[str, Callable[[Any], Any]] = {
    "Experts.load": lambda room: allocated(experts()).load("up", 0, wide(MANY, 64)),
    "Experts.load, inputs": lambda room: allocated(experts()).load("up", 0, wide(48, MANY)),
    "Experts.load_bias": lambda room: allocated(experts()).load_bias("up", 0, wide(MANY)),
    "Experts.load_fp8": lambda room: allocated(experts("fp8")).load_fp8(
        "up", 0, rows(room, torch.uint8), torch.ones(1, 1)
    ),
    "Experts.load_nvfp4": lambda room: allocated(experts("nvfp4")).load_nvfp4(
        "up", 0, rows(room, torch.uint8), rows(room, torch.uint8), 1.0
    ),
    "Experts.forward": lambda room: allocated(experts(hidden=1, inner=1, has_bias=False)).forward(
        rows(room, torch.float16),
        rows(room, torch.int32),
        rows(room, torch.float32),
        rows(room, torch.float16),
    ),
    "Linear.load": lambda room: allocated(linear(64, 48)).load(wide(MANY, 48)),
    "Linear.load_fp8": lambda room: allocated(linear(64, 48, "fp8")).load_fp8(
        rows(room, torch.uint8), torch.ones(1, 1)
    ),
    "Linear.load_nvfp4": lambda room: allocated(linear(64, 48, "nvfp4")).load_nvfp4(
        rows(room, torch.uint8), rows(room, torch.uint8), 1.0
    ),
    "Linear.load_bias": lambda room: allocated(linear(64, 48)).load_bias(wide(MANY)),
    "Linear.forward": lambda room: allocated(linear(1, 1)).forward(
        rows(room, torch.float16), rows(room, torch.float16)
    ),
    "choose": lambda room: _native.choose(
        scores=rows(room, torch.float32), generator=None, tokens=rows(room, torch.int64, MANY)
    ),
    "Norm": lambda room: _native.Norm(rows(room, torch.float32, MANY), 1e-6),
    "DecoderCache": lambda room: _native.DecoderCache(*[[rows(room, torch.float16, 1, 1, MANY, 1)]] * 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_beyond_an_int_are_refused(room: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"found {MANY}; allowed: up to {MANY - 1}; split the tensor"):
        CALLS[name](room)


def test_a_decode_step_has_rows_for_one_batch() -> None:
    made = _native.Decoder(64, "float32")
    x = torch.ones(1 << 14, 64)
    with pytest.raises(ValueError, match="batch: found 16384; allowed: 1 to 16383"):
        made.forward(
            x=x,
            cos=None,
            sin=None,
            mask=None,
            position=0,
            cache=_native.DecoderCache(
                [wide(1 << 14, 1, 1, 1).contiguous()], [wide(1 << 14, 1, 1, 1).contiguous()]
            ),
            first=0,
            last=0,
            final_norm=None,
            out=torch.empty_like(x),
        )
