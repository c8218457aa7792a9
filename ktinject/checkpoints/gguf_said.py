"""Reads GGUF's metadata of one architecture, and keeps a list of what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ktinject.checkpoints.gguf_names import layers
from ktinject.errors import shown

MAX_LAYERS = 1_000

Config = dict[str, Any]


class Said:
    """What the metadata says of one architecture, and a list of what is wrong with it.

    weights  names of the model's weights
    shapes   weight → its shape
    """

    def __init__(
        self, metadata: Mapping[str, Any], weights: Collection[str], shapes: Callable[[str], tuple[int, ...]]
    ) -> None:
        self.metadata, self.weights, self.shape = metadata, weights, shapes
        self.name = str(metadata.get("general.architecture"))
        self.wrong: list[str] = []

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool]) -> Any:
        found = self.metadata.get(f"{self.name}.{key}")
        if found is None and default is not ...:
            return default
        if not fits(found):
            self.wrong.append(f"{self.name}.{key} is {shown(found)}")
            return None if default is ... else default
        return found

    def count(self, key: str, default: Any = ...) -> Any:
        """An integer from 1 on."""
        return self._get(key, default, lambda x: type(x) is int and 0 < x < 2**31)

    def few(self, key: str, default: Any = ...) -> Any:
        """An integer from 0 on."""
        return self._get(key, default, lambda x: type(x) is int and 0 <= x < 2**31)

    def real(self, key: str, default: Any = ...) -> Any:
        """A number above 0, without the noise behind its seven digits in fp32."""
        found = self._get(key, default, lambda x: type(x) is float and 0 < x < 2**31)
        return float(f"{found:.7g}") if type(found) is float else found

    def flag(self, key: str, default: Any = ...) -> Any:
        return self._get(key, default, lambda x: type(x) is bool)

    def must(self, key: str, *allowed: Any) -> None:
        """Refuse what llama.cpp knows of an architecture and transformers does not; absent is allowed."""
        found = self.metadata.get(f"{self.name}.{key}")
        if found is not None and found not in allowed:
            self.wrong.append(f"{self.name}.{key} is {shown(found)}, for {' or '.join(map(shown, allowed))}")

    def layers(self) -> int:
        found = layers(self.metadata, self.name)
        if found is None or found > MAX_LAYERS:
            self.wrong.append(
                f"{self.name}.block_count is {shown(self.metadata.get(f'{self.name}.block_count'))}, of which "
                f"{shown(self.metadata.get(f'{self.name}.nextn_predict_layers', 0))} predict further tokens"
            )
            return 1
        return found

    def has(self, ending: str) -> bool:
        """Whether a layer has a weight."""
        return any(f"model.layers.{layer}.{ending}" in self.weights for layer in range(self.layers()))
