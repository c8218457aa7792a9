"""MXFP4 as gpt-oss stores it: 4-bit floats with a power of two for 32 inputs.

    <key>_blocks  U8 [..., n, groups, 16]; byte i of a group has input 2 i below and input 2 i + 1 above
    <key>_scales  U8 [..., n, groups]; the exponent of two, plus 127

Source: the OCP Microscaling Formats specification 1.0 (e2m1, e8m0) and the published gpt-oss checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
BYTES = GROUP // 2
MOST_SCALE = 252  # 6 · 2^125 is the largest that bf16 holds; 255 stands for NaN
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., n, 32 · groups] bf16, exact for scales from 2 on; blocks and scales as above, uint8."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    steps = (scales.int() << 23).view(torch.float32)
    return (_E2M1[codes.int()] * steps[..., None]).flatten(-2).bfloat16()
