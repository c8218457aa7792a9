"""Make transformers know "kimi_k2", as soon as it is imported and without importing it.

`import ktinject` must not import torch, yet `AutoConfig.from_pretrained` of a Kimi-K2 folder must work after it: so an
import hook waits for transformers' list of configs and adds to it. See kimi_k2.py for what is added.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_CONFIGS = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Add the config to transformers' list: now if that is imported, else right after it is."""
    if _CONFIGS in sys.modules:
        import ktinject.kimi_k2  # noqa: F401
    elif not any(isinstance(finder, _AfterConfigs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterConfigs())


class _AfterConfigs:
    """A finder that serves one module, once, with the registration behind it."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _CONFIGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import ktinject.kimi_k2  # noqa: F401

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
