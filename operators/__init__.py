"""The operators that rules can name. Importing an operator's file registers it: one line each."""

from ktinject.operators.base import REGISTRY, Config, Operator, Placement, register_operator

from ktinject.operators import absorbed_mla  # isort: skip
from ktinject.operators import cpu_experts  # isort: skip
from ktinject.operators import cpu_linear  # isort: skip
from ktinject.operators import cpu_router  # isort: skip
from ktinject.operators import deferred_moe  # isort: skip
from ktinject.operators import dense_linear  # isort: skip
from ktinject.operators import fp8_linear  # isort: skip
from ktinject.operators import hybrid_experts  # isort: skip
from ktinject.operators import int4_linear  # isort: skip
from ktinject.operators import keep  # isort: skip
from ktinject.operators import rms_norm  # isort: skip

__all__ = [
    "REGISTRY",
    "Config",
    "Operator",
    "Placement",
    "absorbed_mla",
    "cpu_experts",
    "cpu_linear",
    "cpu_router",
    "deferred_moe",
    "dense_linear",
    "fp8_linear",
    "hybrid_experts",
    "int4_linear",
    "keep",
    "register_operator",
    "rms_norm",
]
