"""Values of configs with which transformers builds a model that cannot generate: refused by their names.

Other values are no business of ours: what is out of proportion, checkpoints/beside.py refuses before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from ktinject.errors import PlanError, listed, shown

# How families call the number of experts that a token goes to, and the number of experts.
_CHOSEN = re.compile(r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|experts_top_k")
_EXPERTS = re.compile(r"(moe_)?num_(local_|routed_)?experts|n_routed_experts")


def check(config: PreTrainedConfig) -> None:
    """Raises PlanError for all such values, in one report."""
    found = (*_of_outputs(config), *_of_experts(config.get_text_config(decoder=True)))
    faults = [*dict.fromkeys(found)]  # of a config in a config, twice
    if faults:
        name = f"{config.name_or_path}: " if config.name_or_path else ""
        raise PlanError(
            f"{name}with this config the model cannot generate:{listed(faults)}\nCorrect config.json."
        )


def token_fault(config: GenerationConfig) -> str:
    """What is wrong with the tokens that a generation config names; "" if nothing is.

    A list in a list is read as transformers reads it.
    """
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(config, name, None)
        if value is not None and not _is_token(value):
            return f"{name} is {shown(value)}; allowed are a whole number, or a list of such"
    return ""


def _is_token(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_token, value))
    return isinstance(value, int) and not isinstance(value, bool)


def _of_outputs(config: PreTrainedConfig) -> Iterator[str]:
    text = config.get_text_config(decoder=True)
    for each in [config] if text is config else [config, text]:
        if each.is_encoder_decoder:
            yield f"is_encoder_decoder is true, and a {type(each).__name__} has a decoder alone; write false"
        if each.return_dict is False:
            yield "return_dict is false, and transformers' models need what they return by name; write true"


def _of_experts(config: PreTrainedConfig) -> Iterator[str]:
    values = {name: value for name, value in vars(config).items() if not isinstance(value, bool)}
    count = max(
        (most for name, value in values.items() if _EXPERTS.fullmatch(name) for most in _ints(value)),
        default=0,
    )
    if count < 2:  # a dense model, whatever else it says
        return
    for name, value in values.items():
        wrong = (
            [chosen for chosen in _ints(value) if not 1 <= chosen <= count] if _CHOSEN.fullmatch(name) else []
        )
        if wrong:
            yield f"{name} is {shown(wrong[0])}; of {count} experts, 1 to {count} can be chosen for a token"


def _ints(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, int)]
