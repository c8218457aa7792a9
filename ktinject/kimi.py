"""Kimi-K2 is DeepSeek-V3 under another `model_type`; transformers does not know it without remote code.

Registering takes two steps, because the modeling files cannot be imported while `AutoConfig`'s own module still is,
and because `import ktinject` must not import torch: the config class as soon as transformers' list of them is there,
the rest when the first Kimi config is made, which is before anything can need it.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CONFIGS = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Make "kimi_k2" known to transformers: now if it is imported, else right after it is."""
    if _CONFIGS in sys.modules:
        _register_config()
    elif not any(isinstance(finder, _AfterConfigs) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterConfigs())


class _AfterConfigs:
    """An import hook that runs once, for the module that holds transformers' list of configs."""

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _CONFIGS:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register_config()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


@functools.cache
def _register_config() -> type:
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    class KimiK2Config(DeepseekV3Config):
        model_type = "kimi_k2"

        def __post_init__(self, **kwargs: Any) -> None:
            super().__post_init__(**kwargs)
            complete()

    AutoConfig.register("kimi_k2", KimiK2Config, exist_ok=True)
    return KimiK2Config


@functools.cache
def complete() -> None:
    """Register the model class and, above all, the mapping of checkpoint names.

    Without the mapping transformers would leave the experts randomly initialised, with no more than a warning.
    """
    from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
        config_class = _register_config()

    AutoModelForCausalLM.register(_register_config(), KimiK2ForCausalLM, exist_ok=True)
    register_checkpoint_conversion_mapping(
        "kimi_k2", get_checkpoint_conversion_mapping("deepseek_v3"), overwrite=True
    )
