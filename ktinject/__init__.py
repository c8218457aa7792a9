"""Declarative CPU/GPU injection for Mixture-of-Experts models on stock transformers.

Names are imported when they are used, so that `import ktinject.rules` does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ktinject import pretrained
from ktinject.errors import CheckpointError, KTInjectError, OperatorError, PlanError, RuleError
from ktinject.hf import kimi

if TYPE_CHECKING:
    from ktinject.hf.plugin import KTInjectConfig
    from ktinject.operators import register_operator
    from ktinject.optimize import load, optimize, plan
    from ktinject.planning.plan import Plan
    from ktinject.rules import RuleSet
    from ktinject.tools.doctor import Report, doctor

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "KTInjectConfig",
    "KTInjectError",
    "OperatorError",
    "Plan",
    "PlanError",
    "Report",
    "RuleError",
    "RuleSet",
    "__version__",
    "doctor",
    "load",
    "optimize",
    "plan",
    "register_operator",
]

_HOME = {
    "KTInjectConfig": "ktinject.hf.plugin",
    "Plan": "ktinject.planning.plan",
    "Report": "ktinject.tools.doctor",
    "RuleSet": "ktinject.rules",
    "doctor": "ktinject.tools.doctor",
    "load": "ktinject.optimize",
    "optimize": "ktinject.optimize",
    "plan": "ktinject.optimize",
    "register_operator": "ktinject.operators",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ktinject' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `ktinject.plan` and `ktinject.optimize` functions: importing a submodule would set them to the module."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
kimi.register()
pretrained.register()
