"""An operator of one's own, named in a rule: every RMSNorm through PyTorch's fused function.

python examples/own_operator.py
"""

from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ktinject
from ktinject.operators import Operator


@ktinject.register_operator("fused_rms_norm")
class FusedRMSNorm(Operator):
    device_types = ("cuda", "cpu")

    def __init__(self, module: Any) -> None:
        super().__init__()
        # Kept under its old name, so that transformers loads it.
        self.weight: nn.Parameter = module.weight
        self.epsilon: float = module.variance_epsilon

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Any) -> str | None:
        return None if hasattr(module, "variance_epsilon") else f"{type(module).__name__} is no RMSNorm"

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        return cls(module)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.epsilon)


RULES = [
    {"name": "norms", "match": {"class": "DeepseekV3RMSNorm"}, "replace": {"operator": "fused_rms_norm"}},
    {"name": "experts", "match": {"class": "DeepseekV3Experts"}, "replace": {"operator": "cpu_experts"}},
]


def test_fused_rms_norm() -> None:
    """It keeps the contract between operators and the engine: with pytest, `pytest examples/own_operator.py`."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

    from ktinject.testing import check_operator

    check_operator(
        FusedRMSNorm, lambda: DeepseekV3RMSNorm(64), lambda n: {"hidden_states": torch.randn(n, 64)}
    )


if __name__ == "__main__":
    test_fused_rms_norm()
    model = ktinject.load(Path(__file__).parent / "models" / "tiny-deepseek-v3", RULES)
    print(model.ktinject)
