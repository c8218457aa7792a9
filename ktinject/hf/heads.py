"""A swapped model as transformers' MTP heads are made from it.

Heads take the classes of decoder layer and norm, and their device, from the last layer. Of a swapped model, that
holds operators. So they are shown a layer as it was, on meta: it has classes, and no weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class _With:
    """An object, but for some of its attributes."""

    def __init__(self, whole: Any, **others: Any) -> None:
        self._whole = whole
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def unswapped(model: PreTrainedModel) -> Any:
    """The model for `MtpModel` and its candidate generator."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if layers is None or not len(layers):
        return model
    kind = type(layers[-1])
    with torch.device("meta"):
        last = kind(decoder.config, len(layers) - 1)
    # Their device is that of its weights.
    embedding = model.get_input_embeddings().weight
    vars(last)["parameters"] = lambda *_, **__: iter([_weight_of(layers[-1], embedding)])
    shown = _With(decoder, layers=[*layers[:-1], last])
    return _With(model, get_decoder=lambda *_, **__: shown)


def _weight_of(module: nn.Module, otherwise: torch.Tensor) -> torch.Tensor:
    return next((weight for weight in module.parameters() if not weight.is_meta), otherwise)
