"""Kimi-K2 is DeepSeek-V3 under another `model_type`, which transformers only serves by running remote code.

Registered in two steps, because the modeling files cannot be imported while AutoConfig's own module still is: the
config class when this file is imported, model class and checkpoint names when the first such config is made.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from transformers import AutoConfig, DeepseekV3Config

from ktinject.hf import compat


class KimiK2Config(DeepseekV3Config):
    model_type = "kimi_k2"

    def __post_init__(self, **kwargs: Any) -> None:
        _model_class()
        super().__post_init__(**kwargs)


@functools.cache
def _model_class() -> Any:
    """DeepSeek-V3 under Kimi-K2's `model_type`, by which transformers looks up the names in a checkpoint."""
    compat.require("kimi_k2")
    from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM

    class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
        __qualname__ = "KimiK2ForCausalLM"  # as pickle looks for it
        config_class = KimiK2Config

        @classmethod
        def _can_set_experts_implementation(cls) -> bool:
            # transformers reads the source around a class to find out, which here is not the model's.
            return DeepseekV3ForCausalLM._can_set_experts_implementation()

    # Two threads may come here at once.
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM, exist_ok=True)
    # Without it, transformers' own from_pretrained leaves the experts random, with no more than a warning.
    names = compat.get_checkpoint_conversion_mapping("deepseek_v3")
    compat.register_checkpoint_conversion_mapping(KimiK2Config.model_type, names, overwrite=True)
    return KimiK2ForCausalLM


def __getattr__(name: str) -> Any:
    if name == "KimiK2ForCausalLM":
        return _model_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


with suppress(ValueError):  # a version of transformers that knows it by itself
    AutoConfig.register(KimiK2Config.model_type, KimiK2Config)
