"""An operator of one's own, named in a rule: every RMSNorm through PyTorch's fused function.

python examples/own_operator.py
"""

from pathlib import Path
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn

import ktinject
from ktinject.operators import Operator


@ktinject.register_operator("fused_rms_norm")
class FusedRMSNorm(Operator):
    device_types = ("cpu", "cuda")

    def __init__(self, shape: tuple[int, ...], eps: float, dtype: Any, device: str) -> None:
        super().__init__()
        self.shape, self.eps, self.dtype, self.device = shape, eps, dtype, device
        self.weight: Tensor | None = None

    @classmethod
    def supports(cls, module: nn.Module, config: Any, machine: Any) -> str | None:
        if not hasattr(module, "variance_epsilon"):
            return f"{type(module).__name__} is no RMSNorm"
        return None

    @classmethod
    def build(cls, module: Any, config: Any) -> Self:
        return cls(tuple(module.weight.shape), module.variance_epsilon, module.weight.dtype, config.device)

    def describe(self) -> dict[str, Any]:
        return {"kernel": "torch rms_norm", "weights": str(self.dtype).removeprefix("torch.")}

    def footprint(self) -> dict[str, int]:
        return {self.device: self.shape[0] * self.dtype.itemsize}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": self.shape}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> None:
        self.weight = tensor.to(self.device, self.dtype, copy=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.shape, self.weight, self.eps)


RULES = [
    {"name": "norms", "match": {"class": "DeepseekV3RMSNorm"}, "replace": {"operator": "fused_rms_norm"}},
    {"name": "experts", "match": {"class": "DeepseekV3Experts"}, "replace": {"operator": "cpu_experts"}},
]

if __name__ == "__main__":
    model = ktinject.load(Path(__file__).parent / "models" / "tiny-deepseek-v3", RULES)
    print(model.ktinject)
