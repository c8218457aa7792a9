"""Puts the plug-in into transformers: light, since it runs whenever transformers is imported after ktinject."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.quantizers import register_quantization_config, register_quantizer

from ktinject.hf import building, plugin
from ktinject.hf.plugin import METHOD, HandedOver, KTInjectConfig, KTInjectQuantizer


def install() -> None:
    """Register the quantisation method, and take over `from_pretrained` where it is asked for. May be called again.

    From then on, one model is built at a time (hf/building.py).
    """
    building.install()
    own = PreTrainedModel.from_pretrained.__func__
    if hasattr(own, "ktinject"):
        return
    register_quantization_config(METHOD)(KTInjectConfig)
    register_quantizer(METHOD)(KTInjectQuantizer)

    @functools.wraps(own)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("quantization_config")
        if isinstance(asked, Mapping) and plugin.is_ours(asked):
            asked = KTInjectConfig(**asked)
        if not isinstance(asked, KTInjectConfig):
            try:
                return own(cls, pretrained_model_name_or_path, *args, **kwargs)
            except HandedOver as handed:
                asked = handed.config
        from ktinject.pretrained import load  # it imports all of the engine

        kwargs.pop("quantization_config", None)
        return load.from_pretrained(cls, pretrained_model_name_or_path, asked, *args, **kwargs)

    from_pretrained.ktinject = True  # type: ignore[attr-defined]
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
