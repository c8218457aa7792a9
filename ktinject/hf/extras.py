"""Tensors of a checkpoint that no parameter of the model is made of, and that may be there: named, and skipped.

transformers logs whatever it does not expect and goes on. Here the rest is refused: a name that is not expected is
mostly a weight under a name that is not known, and the model would run without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from transformers import PreTrainedModel

from ktinject.checkpoints.checkpoint import Checkpoint
from ktinject.errors import CheckpointError, PlanError, shown
from ktinject.rules.pattern import compiled, fullmatch

_HARMLESS = re.compile(
    # Scales of activations and of the cache: what is computed here is not rounded to their formats.
    r"(.*[._])?(input_scale|input_global_scale|input_zero_point|activation_scale|output_scale)"
    r"|.*\.([qkv]|kv|prob)_(scale|zero_point)"
    # Tables that older files have, and models compute.
    r"|.*\.masked_bias|(.*\.)?rope_freqs\.weight|.*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)"
)
# Towers beside the language model, of which a model without them needs nothing.
_TOWER = re.compile(
    r"(?:.*\.)?(visual|vision_tower|vision_model|vision_encoder|vision_embed_tokens|multi_modal_projector|mm_projector"
    r"|image_newline|audio_tower|audio_model|audio_encoder|embed_vision|embed_audio)\b.*"
)
_MTP = re.compile(r"(?:.*\.)?(mtp|mtp_layers|mtp_block|nextn|nextn_predict_layers)\..+")
_LAYER = re.compile(r"(?:.*\.)?layers\.([0-9]{1,4})\..+")
_ANNOUNCED = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def check_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns of `ignore`. Raises PlanError for one that is none."""
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in found:
        try:
            if not isinstance(pattern, str):
                raise ValueError("is no text")
            compiled(pattern)
        except ValueError as error:
            raise PlanError(
                f"ignore: {shown(pattern)} {error}. Write a pattern that names of tensors match as a whole."
            ) from error
    return found


def of(
    names: Sequence[str], model: PreTrainedModel, checkpoint: Checkpoint, ignore: Sequence[str]
) -> Iterator[str]:
    """The names, of those that a model does not expect, that may be skipped.

    ignore   patterns of names that the caller does without
    Raises   PlanError for a pattern that takes too long; CheckpointError as reading does
    """
    children = {part for path, _ in model.named_modules() for part in path.split(".")}
    config = model.config.get_text_config()
    layers = getattr(config, "num_hidden_layers", 0)
    more = max((number for key in _ANNOUNCED if type(number := getattr(config, key, None)) is int), default=0)
    for name in names:
        tower, layer = _TOWER.fullmatch(name), _LAYER.fullmatch(name)
        if (
            _HARMLESS.fullmatch(name)
            or (tower and tower[1] not in children)
            or (more > 0 and _MTP.fullmatch(name))
            or (layer and layers <= int(layer[1]) < layers + more)
            or any(_matches(pattern, name) for pattern in ignore)
            or _is_zero_bias(name, checkpoint)
        ):
            yield name


def _matches(pattern: str, name: str) -> bool:
    try:
        return fullmatch(pattern, name)
    except TimeoutError as error:
        raise PlanError(
            f"ignore: {shown(pattern)}: backtracking takes too long. Write a simpler pattern."
        ) from error


def _is_zero_bias(name: str, checkpoint: Checkpoint) -> bool:
    """AutoGPTQ writes a bias of zeros for layers that have none."""
    if not name.endswith(".bias") or not checkpoint.complete:
        return False
    if name.removesuffix("bias") + "qweight" not in checkpoint.names:
        return False
    try:
        return not bool(checkpoint.read(name).any())
    except CheckpointError:
        return False
