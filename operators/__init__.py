"""The operators that rules can name: each file of this folder is imported here, and registers its own."""

import importlib
import pkgutil

from ktinject.operators.base import REGISTRY, Config, Operator, Placement, register_operator

__all__ = ["REGISTRY", "Config", "Operator", "Placement", "register_operator"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    if not _module.ispkg:
        importlib.import_module(_module.name)
