"""Make transformers know "kimi_k2", as soon as it is imported and without importing it.

`import ktinject` must not import torch, yet `AutoConfig.from_pretrained` of a Kimi-K2 folder must work after it. The
public `AutoConfig.register` takes the config class, and to import AutoConfig is to import torch, seconds of it: so an
import hook waits for transformers' list of configs, and kimi_k2.py registers then.
"""

from __future__ import annotations

import importlib

from ktinject.hf.on_import import when_imported

_CONFIGS = "transformers.models.auto.configuration_auto"
# They import one another, in an order that depends on what is asked of transformers first, and DeepSeek-V3's config,
# of which Kimi-K2's is derived, needs the two lists whole for its docstring.
_AMONG = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
)


def register() -> None:
    """Add the config to transformers' list: now if that is imported, else as soon as it is."""
    when_imported(_CONFIGS, lambda: importlib.import_module("ktinject.hf.kimi_k2"), _AMONG)
