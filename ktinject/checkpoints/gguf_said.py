"""Reads GGUF's metadata of one architecture, and keeps a list of what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ktinject.checkpoints.gguf_names import layers
from ktinject.errors import shown

MAX_LAYERS = 1_000

Config = dict[str, Any]

# What changes the results of the models that have it: key → values with which it does not.
# Source: LLM_KV_NAMES in llama.cpp's src/llama-arch.cpp.
_MEANINGFUL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("attn_logit_softcapping", "router_logit_softcapping", "final_logit_softcapping"), (0.0,)
    ),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale", "expert_group_scale"), (1.0,)),
    **dict.fromkeys(("attention.output_scale", "attention.value_scale"), (0.0, 1.0)),
    **dict.fromkeys(("attention.scale", "attention.temperature_scale", "attention.max_alibi_bias"), (0.0,)),
    **dict.fromkeys(("attention.temperature_length", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("attention.shared_kv_layers", "expert_latent_length", "moe_latent_size"), (0,)),
    **dict.fromkeys(("moe_every_n_layers", "num_loops", "hyper_connection.count"), (0, 1)),
    **dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp", "rope.scaling.alpha"), ()),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}


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
        self._asked: set[str] = set()

    def _get(self, key: str, default: Any, fits: Callable[[Any], bool]) -> Any:
        self._asked.add(key)
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
        self._asked.add(key)
        found = self.metadata.get(f"{self.name}.{key}")
        if found is not None and found not in allowed:
            wanted = (
                f", for {' or '.join(map(shown, allowed))}" if allowed else ", which the model does not know"
            )
            self.wrong.append(f"{self.name}.{key} is {shown(found)}{wanted}")

    def must_mean_nothing(self) -> None:
        """Refuse what changes results, and nobody has asked for: key → what leaves them as they are."""
        for key, allowed in _MEANINGFUL.items():
            if key not in self._asked:
                self.must(key, *allowed)
        self.must("rope.freq_base_swa", self.metadata.get(f"{self.name}.rope.freq_base"))

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
