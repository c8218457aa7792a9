"""Which modules of a model are its decoder layers, and what modules are called."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def layer_configs(config: PreTrainedConfig) -> list[Any]:
    """The configs of the text's decoder layers; one for all where they are alike.

    A config of different layers refuses to say one value for all (transformers' `per_layer_config`).
    """
    text: Any = config.get_text_config()
    return [*text.per_layer_config] if getattr(text, "is_heterogeneous", False) else [text]


class Layers:
    """Which decoder layer a module belongs to."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @cached_property
    def _prefix_and_count(self) -> tuple[str, int]:
        count = getattr(self._model.config.get_text_config(), "num_hidden_layers", 0)
        language = self._model.get_decoder()
        lists, inside = [], ""
        for path, module in self._model.named_modules():
            if module is language:
                inside = path
            if isinstance(module, nn.ModuleList):
                lists.append((path, len(module)))
        # A vision tower may be as deep as the language model, whose layers are nearly always called `layers`.
        lists.sort(
            key=lambda found: (
                found[1] != count,
                not found[0].startswith(inside),
                not found[0].endswith("layers"),
            )
        )
        return lists[0] if lists and lists[0][1] == count else ("", 0)

    @property
    def count(self) -> int:
        """Number of decoder layers; 0 if the model has none that can be told."""
        return self._prefix_and_count[1]

    @property
    def paths(self) -> list[str]:
        """The paths of the decoder layers."""
        prefix, count = self._prefix_and_count
        return [f"{prefix}.{number}" for number in range(count)]

    @property
    def decoder_path(self) -> str:
        """The path of `decoder`; empty for the model itself."""
        return self._prefix_and_count[0].rpartition(".")[0]

    @property
    def decoder(self) -> nn.Module:
        """The module that owns the decoder layers, through whose forward all tokens go; else the model itself."""
        return self._model.get_submodule(self.decoder_path)

    def of(self, path: str) -> int | None:
        """The decoder layer of a module path, None outside of them."""
        prefix, count = self._prefix_and_count
        inside = path.removeprefix(f"{prefix}.")
        number = inside.partition(".")[0]
        return int(number) if count and inside != path and number.isdigit() else None


def has_routed_experts(model: PreTrainedModel) -> bool:
    """Whether a module of the model goes by the name that transformers gives routed experts in every family."""
    return any(path.rpartition(".")[2] == "experts" for path, _ in model.named_modules())


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's class and its bases, most derived first."""
    return tuple(base.__name__ for base in type(module).__mro__[:-1])
