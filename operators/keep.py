"""`replace: keep`: the modules of this rule stay as they are, whatever later rules say."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from torch import Tensor, nn

from ktinject.operators.base import Operator, register_operator


@register_operator("keep")
class Keep(Operator):
    """Never built: the planner lists what the rule matched and leaves it to transformers."""

    replaces = False

    @classmethod
    def build(cls, module: nn.Module, config: Any) -> Self:
        raise NotImplementedError("a kept module is not replaced")

    def describe(self) -> dict[str, Any]:
        return {}

    def footprint(self) -> dict[str, int]:
        return {}

    def wants(self) -> dict[str, tuple[int, ...]]:
        return {}

    def load(self, name: str, tensor: Tensor, expert: int | None, part: int | None) -> NoReturn:
        raise NotImplementedError("a kept module is loaded by transformers")
