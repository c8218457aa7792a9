"""Native experts with a SiLU gate and no limits, as most models have them, and empty."""

from __future__ import annotations

import math

from ktinject import _native


def silu_experts(
    experts: int,
    hidden_size: int,
    intermediate_size: int,
    weights: str = "bf16",
    group_size: int = 0,
    has_bias: bool = False,
    symmetric: bool = True,
) -> _native.Experts:
    return _native.Experts(
        experts=experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        weights=weights,
        group_size=group_size,
        symmetric=symmetric,
        has_gate=True,
        has_bias=has_bias,
        activation="silu",
        alpha=1.0,
        gate_max=math.inf,
        up_limit=math.inf,
        up_offset=0.0,
        kernel="auto",
    )
