"""Candidates for models with states, which transformers refuses to try: its caches cannot be taken back for certain.

generate ──► `validate`: all that transformers checks, but for that ──► preparation ──► `_assisted_decoding`
                            our loop serves the request: states are noted and taken back, see several.py  ◄─┤
                            else: `require` raises what transformers raises for such a model              ◄─┘
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, GenerationMixin

from ktinject.hf import compat
from ktinject.model_class import own_class
from ktinject.support import Support


class _Stateless:
    """A model as `validate` shows it to transformers. It changes nothing of the model, which other threads use."""

    _is_stateful = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._model)


def validate(model: Any, *arguments: Any) -> None:
    """transformers' `_validate_generation_mode`, which takes these arguments; `require` refuses states instead."""
    own = own_class(model)._validate_generation_mode
    decoding = model.ktinject_decoding
    serves = decoding.group is None and (decoding.graphs or model.device.type == "cpu")
    is_known = own is GenerationMixin._validate_generation_mode and compat.support("candidates")
    own(_Stateless(model) if serves and is_known and model._is_stateful else model, *arguments)


def require(model: Any, config: GenerationConfig, assistant: Any, served: Support) -> None:
    """Raise what transformers raises for candidates of such a model, if our loop does not serve the request."""
    if served:
        return
    mode = config.get_generation_mode(assistant)
    try:
        own_class(model)._validate_generation_mode(model, mode, config, {})
    except ValueError as error:
        error.add_note(
            f"ktinject: its own loop takes states back, but does not serve this request: {served.reason}."
        )
        raise
