"""Kimi-K2 is DeepSeek-V3 under another `model_type`, which transformers only serves by running remote code.

Registered in two steps, because the modeling files cannot be imported while AutoConfig's own module still is: the
config class here, model class and checkpoint names in hf.py when the first such config is made.
"""

from __future__ import annotations

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config


class KimiK2Config(DeepseekV3Config):
    model_type = "kimi_k2"

    def __post_init__(self, **kwargs: Any) -> None:
        import ktinject.hf.models  # noqa: F401

        super().__post_init__(**kwargs)


if KimiK2Config.model_type not in CONFIG_MAPPING:
    AutoConfig.register(KimiK2Config.model_type, KimiK2Config)
