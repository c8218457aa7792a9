"""What transformers gives each decode step beside a token, its position and the cache, and whether that matters.

    the prompt   pixel_values, grids, token types …: for the model's own forward of the prompt
    positions    [axes, b, n] of models that place images in time, height and width; a step of text has one for all axes
    a step       transformers still gives it some of these. A recorded step gets tokens and positions [b, 1] alone

That a step's logits do not depend on the rest is not believed: the first request of a kind makes one step both ways, on
copies of its cache, and without what the model remembers of the prompt.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktinject.hf import compat
from ktinject.operators.probes import twin
from ktinject.support import SUPPORTED, Support

# What a captured step makes itself, or what was used when the request was prepared.
_MADE = frozenset(
    {
        "input_ids",
        "attention_mask",
        "position_ids",
        compat.CACHE,
        "use_cache",
        "logits_to_keep",
        "return_dict",
        "tokenizer",
    }
)
# What says where in a prompt its images, videos and sounds are, beside what transformers itself drops behind a prompt.
_OF_PROMPT = frozenset(
    {
        "image_grid_thw",
        "video_grid_thw",
        "second_per_grid_ts",
        "video_second_per_grid",
        "feature_attention_mask",
        "use_audio_in_video",
        "mm_token_type_ids",
        "moe_mm_token_type_ids",
        "spatial_shapes",
        "num_crops",
    }
)
# An attribute in which models keep how far behind images positions and numbers of tokens are apart. It is for calls
# without positions; a recorded step has them.
REMEMBERED = "rope_deltas"
# Relative error of logits: both ways run the same kernels on the same values.
_TOLERANCE = 1e-3


def unknown(given: Mapping[str, Any]) -> list[str]:
    """Names of what is given to a model that is neither of the prompt alone nor known of a step."""
    known = _MADE | _OF_PROMPT | {*compat.MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL}
    return sorted(name for name in _named(given) if name not in known)


def beside(inputs: Mapping[str, Any]) -> frozenset[str]:
    """Names of what a step is given that a recorded one leaves out; of positions with axes, too."""
    found = _named(inputs) - _MADE
    positions = inputs.get("position_ids")
    return frozenset(found | ({"position_ids"} if positions is not None and positions.dim() > 2 else set()))


def _named(given: Mapping[str, Any]) -> set[str]:
    """Without what says nothing: None, or False of an output that is not asked for."""
    return {name for name, value in given.items() if value is not None and value is not False}


def last_positions(positions: Tensor | None) -> Tensor | None | Support:
    """The last of positions [b or 1, n] or [axes, b or 1, n], as [b or 1, 1]; or why there is not one for all axes.

    Of four axes, the first one counts tokens, for masks.
    """
    if positions is None:
        return None
    last = positions[..., -1:]
    if last.dim() == 2:
        return last
    if last.dim() != 3:
        return Support.no(f"positions have {last.dim()} dimensions")
    turned = last[1:] if len(last) == 4 else last
    if not bool((turned == turned[:1]).all()):
        return Support.no("the next token has another position on each axis")
    return turned[0]


def step_support(model: PreTrainedModel, inputs: Mapping[str, Any], positions: Tensor | None) -> Support:
    """Whether a step gives the same logits without what a recorded one leaves out. Leaves the cache as it is.

    inputs     of a step of one token, as transformers calls the model
    positions  [b or 1, 1], as a recorded step has them
    """
    if names := unknown(inputs):
        return Support.no(f"the model gets {', '.join(names)}")

    def logits(model: Any, given: dict[str, Any]) -> Tensor:
        own = copy.deepcopy(inputs[compat.CACHE])
        with torch.no_grad():
            found: Tensor = model(**{**given, compat.CACHE: own, "return_dict": True}).logits[:, -1]
        return found.float()

    ours = {name: value for name, value in inputs.items() if name in _MADE}
    if positions is not None:
        ours["position_ids"] = positions.expand(len(inputs["input_ids"]), -1)
    theirs = logits(model, dict(inputs))
    error = (logits(_forgetful(model), ours) - theirs).norm() / theirs.norm().clamp(min=1e-20)
    if error <= _TOLERANCE:
        return SUPPORTED
    names = sorted(beside(inputs))
    return Support.no(f"a step depends on {', '.join(names)}: relative difference {error.item():.2g}")


def _forgetful(model: PreTrainedModel) -> nn.Module:
    """A twin of the model that remembers nothing of the prompt."""

    def remembers(module: nn.Module) -> bool:
        return vars(module).get(REMEMBERED) is not None

    found = twin.tree(model, remembers, without=("ktinject_decoding",))
    for module in filter(remembers, found.modules()):
        vars(module)[REMEMBERED] = None
    return found
