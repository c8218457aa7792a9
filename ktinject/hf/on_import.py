"""Acts as soon as transformers is imported, and without importing it.

`import ktinject` must not import torch, yet transformers must know what ktinject adds to it as soon as somebody uses
it. transformers has no entry point for that, so a finder of modules waits for those of its modules that matter.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(module: str, act: Callable[[], object], among: Iterable[str] = ()) -> None:
    """Call `act` now if the module is imported, else as soon as it is.

    among   modules that import one another and that module: none of them is half imported when `act` is called
    """
    if module in sys.modules:
        act()
    elif not any(isinstance(finder, _Watch) and finder.module == module for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(module, act, {module, *among}))


class _Watch:
    """A finder that serves the watched modules, and acts as soon as none of them is half imported."""

    def __init__(self, module: str, act: Callable[[], object], watched: set[str]) -> None:
        self.module, self.act, self.unseen = module, act, watched
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

            def execute_and_act(module: ModuleType) -> None:
                self.executing.add(name)
                try:
                    execute(module)
                finally:
                    self.executing.remove(name)
                if not self.executing and self.module in sys.modules:
                    self.act()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
