"""Whether steps on compressed keys of fixed size are those of a model's own caches: both are run, on a small twin.

transformers says of no such model that its steps can be captured. We say it (compressed.py), and rely on what its
compressors do with a cache's layer, which another version may do differently.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ktinject.generation import compressed, loop, masks
from ktinject.generation.cache import FixedCache, bucket_of
from ktinject.generation.cache_layers import kinds_of
from ktinject.generation.compressed import Steps
from ktinject.hf import compat
from ktinject.operators.probes import twin
from ktinject.operators.probes.answer import Memory, refusal_of
from ktinject.support import SUPPORTED, Support

# All in fp32: what is left is the order of sums. A window that is shown too early, or never, changes all logits.
_TOLERANCE = 1e-3
# Tokens: of a prompt that ends within the first windows, and behind some more of them; and of padding in one row.
_PROMPT, _TOKENS, _PADDING = 5, 24, 2
# Sizes of the twin. Windows of different lengths, fewer keys that an index chooses than there are.
_SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "index_n_heads": 8,
    "index_topk": 3,
    "sliding_window": 6,
}
_RATE = 3  # of the first kind of windows, the others have longer ones

_ANSWERS: Memory[Support] = Memory()


def support(model: PreTrainedModel) -> Support:
    """Whether we know the steps of a model of which transformers does not say that they decide nothing on the host."""
    if not (known := compressed.model_support(model)):
        return known
    config: Any = model.config
    kinds = [*dict.fromkeys(config.layer_types)]
    key: Hashable = (
        compressed.class_of(model),
        *kinds,
        str(config.rope_parameters),
        config.head_dim,
        config.index_head_dim,
    )
    return _ANSWERS.once(key, lambda: _compared(model, kinds))


def _compared(model: PreTrainedModel, kinds: list[str]) -> Support:
    try:
        with twin.on_cpu():
            error = _error(_small(model, kinds))
    except Exception as failure:  # transformers' own code, given what it may not be made for
        return refusal_of(failure)
    if error <= _TOLERANCE:
        return SUPPORTED
    return Support.no(
        f"its steps on caches of fixed size differ from its own: relative difference {error:.2g}"
    )


def _small(model: PreTrainedModel, kinds: list[str]) -> PreTrainedModel:
    """A model of the same class with small random weights and a layer of each kind."""
    config: Any = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    for name, size in _SIZES.items():
        setattr(config, name, size)
    config.num_hidden_layers, config.layer_types = len(kinds), kinds
    config.mlp_layer_types = ["moe"] * len(kinds)
    config.compress_rates = {name: _RATE + i for i, name in enumerate(config.compress_rates)}
    config._attn_implementation = config._experts_implementation = "eager"
    found: Any = compressed.class_of(model)(config).float().eval()
    for name, parameter in found.named_parameters():
        std = parameter.shape[-1] ** -0.5
        parameter.normal_(std=std) if parameter.dim() > 1 else parameter.normal_(float("norm" in name), 0.1)
    return found


def _error(model: Any) -> float:
    """The largest relative error of a step's logits."""
    how = masks.of_model(model)
    if isinstance(how, Support):
        raise RuntimeError(how.reason)
    ids = torch.randint(0, _SIZES["vocab_size"], (2, _TOKENS), device="cpu")
    mask = torch.ones_like(ids)
    mask[0, :_PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    theirs = DynamicCache(config=model.config)

    def own(tokens: slice) -> Tensor:
        inputs = {
            "attention_mask": mask[:, : tokens.stop],
            "position_ids": positions[:, tokens],
            "use_cache": True,
        }
        logits: Tensor = model(input_ids=ids[:, tokens], **inputs, **{compat.CACHE: theirs}).logits
        return logits[:, -1]

    own(slice(0, _PROMPT))
    kinds = kinds_of(model.config)
    ours = FixedCache(theirs, bucket_of(_TOKENS), len(ids), ids.device, kinds)
    ours.begin(theirs, _PROMPT, mask, positions[:, _PROMPT : _PROMPT + 1])
    steps, errors = Steps(model), []
    for at in range(_PROMPT, _TOKENS):
        view = ours.bucket(ours.reserve())
        given = how.of(view, model)
        found = loop.logits_of(steps, ids[:, at : at + 1], given, ours.positions, view)[:, -1]
        ours.advance()
        wanted = own(slice(at, at + 1))
        errors.append((found - wanted).norm(dim=-1) / wanted.norm(dim=-1))
    return float(torch.stack(errors).nan_to_num(torch.inf).max())
