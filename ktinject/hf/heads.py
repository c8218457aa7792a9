"""A swapped model as transformers' MTP heads are made from it.

Heads take the classes of decoder layer and norm, and their device, from the last layer. Of a swapped model, that
holds operators. So they are shown a layer as it was, on meta: it has classes, and no weights.

transformers loads heads from the model's own checkpoint, where its class knows their names. Heads that were trained for
a model whose checkpoint has none lie in a folder of its own beside it, `mtp`: a model.safetensors with the names that
transformers' `MtpModel` has, such as layers.0.eh_proj.weight.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

FOLDER, FILE = "mtp", "model.safetensors"


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
    return _With(model, get_decoder=lambda *_, **__: shown, **_beside(model.config))


def _beside(config: PreTrainedConfig) -> dict[str, Any]:
    """What a model has to say for heads beside its checkpoint to be loaded; nothing, if there are none."""
    folder = Path(config.name_or_path) / FOLDER
    if not config.name_or_path or not (folder / FILE).is_file():
        return {}
    with safe_open(folder / FILE, framework="pt") as file:
        heads = {name.split(".")[1] for name in file.keys() if name.startswith("layers.")}
    config = copy.deepcopy(config)
    config.name_or_path = str(folder)
    config.get_text_config().num_mtp_layers = len(heads)
    # Of its names, those that are heads', and no others instead of them.
    return {
        "config": config,
        "_keys_to_ignore_on_load_unexpected": [r"^layers\."],
        "_weight_conversions": [],
    }


def _weight_of(module: nn.Module, otherwise: torch.Tensor) -> torch.Tensor:
    return next((weight for weight in module.parameters() if not weight.is_meta), otherwise)
