"""Which of transformers' auto classes builds the model of a config: a language model, or one that also takes images.

A config.json names the class of its weights (`architectures`), and transformers' mappings the classes that a config can
have. Some configs have two: Qwen3.5's has a class of the language model alone, and one with a vision tower.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from ktinject.errors import PlanError

# The language model first: it is what runs where the config does not say.
_AUTO: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForImageTextToText)
_WITH_IMAGES = "ForConditionalGeneration"  # how the class of a checkpoint with a vision tower ends

# Models that also speak, in several models of their own: the config of the part that reads and writes text, and the
# names of the others' weights.
_SPEAKING = {"qwen3_omni_moe": ("thinker_config", (r"^talker\.", r"^code2wav\."))}


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class whose `from_config` builds the model of a config. Raises PlanError if there is none.

    It is the one that gives the class that `architectures` names; else, where that speaks of images, one that takes
    images; else one of a language model, if there is one.
    """
    found = {auto: auto._model_mapping[type(config)].__name__ for auto in _AUTO if _has(auto, config)}
    if not found:
        raise PlanError(
            f"model type {config.model_type!r}: transformers has no language model for it, with images or without. "
            "Build the model yourself inside torch.device('meta') and call ktinject.optimize on it."
        )
    named = config.architectures or ()
    exact = [auto for auto, name in found.items() if name in named]
    if not exact and any(name.endswith(_WITH_IMAGES) for name in named):
        exact = [auto for auto in found if auto is not AutoModelForCausalLM]
    return [*exact, *found][0]


def _has(auto: Any, config: PreTrainedConfig) -> bool:
    return type(config) in auto._model_mapping


def writing_part(config: PreTrainedConfig) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """The config itself; of a model that also speaks, the config of the part that reads and writes text.

    Returns  it, and patterns of names of weights that are of the other parts
    """
    if config.model_type not in _SPEAKING:
        return config, ()
    part, others = _SPEAKING[config.model_type]
    found: PreTrainedConfig = getattr(config, part)
    for name in ("quantization_config", "dtype"):  # said of the whole
        value = getattr(config, name, None)
        if value is not None and getattr(found, name, None) is None:
            setattr(found, name, value)
    found.name_or_path = config.name_or_path
    return found, others
