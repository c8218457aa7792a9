"""Make transformers know "kimi_k2", as soon as it is imported and without importing it.

`import ktinject` must not import torch, yet `AutoConfig.from_pretrained` of a Kimi-K2 folder must work after it. The
public `AutoConfig.register` takes the config class, and to import AutoConfig is to import torch, seconds of it: so an
import hook waits for transformers' list of configs, and kimi_k2.py registers then.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_CONFIGS = "transformers.models.auto.configuration_auto"
_WATCHED = (
    _CONFIGS,
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
)


def register() -> None:
    """Add the config to transformers' list: now if that is imported, else as soon as it is."""
    if _CONFIGS in sys.modules:
        import ktinject.hf.kimi_k2  # noqa: F401
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


class _Watch:
    """A finder that serves the watched modules, and registers as soon as none of them is half imported.

    They import one another, in an order that depends on what is asked of transformers first, and DeepSeek-V3's config,
    of which Kimi-K2's is derived, needs the two lists whole for its docstring.
    """

    def __init__(self) -> None:
        self.unseen = set(_WATCHED)
        self.executing: set[str] = set()

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.unseen:
            return None
        self.unseen.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                self.executing.add(name)
                try:
                    execute(module)
                finally:
                    self.executing.remove(name)
                if not self.executing and _CONFIGS in sys.modules:
                    import ktinject.hf.kimi_k2  # noqa: F401

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
