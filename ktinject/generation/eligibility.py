"""Which requests run in recorded steps (CUDA graphs, or the native decoder) and in our own loop, and why others do not.

Three questions, each answered by a `Support`:

    graph_support       of a model, once: can its steps ever be captured?
    recording_support   of a model as it is now: would a recorded step miss anything?
    request_support     of one request: does it ask for anything that a recorded step does not give?

and `read_plain`: can our own loop run the request, or must transformers' loop?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
)

from ktinject.generation import (
    block_index_spec,
    cache_layers,
    compressed_probe,
    frequencies,
    kept_cache,
    masks,
    own_caches,
    replaced,
    sampling,
    step_inputs,
    trust,
)
from ktinject.generation.graph_runner import MAX_BATCH
from ktinject.generation.sampling import Request, Sampling
from ktinject.hf import adapters, compat
from ktinject.hf.private import owner_of
from ktinject.model_class import own_class, stored_parameters
from ktinject.operators import Operator
from ktinject.support import SUPPORTED, Support

# They compute nothing.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# transformers' hooks that record what was asked for with output_…=True, and else do nothing; they stay once set.
_RECORDING = "transformers.utils.output_capturing"


def graph_support(model: PreTrainedModel) -> Support:
    """Whether decode steps of a swapped model can be captured at all."""
    if not (known := compat.support("generation")):
        return known
    devices = sorted({str(tensor.device) for tensor in (*stored_parameters(model), *model.buffers())})
    plan = getattr(model, "ktinject", None)
    is_planned = len(devices) == 1 or (plan is not None and {*devices} <= {*plan.device_map.values()})
    if not is_planned or not all(device.startswith("cuda") for device in devices):
        where = ", ".join(devices)
        return Support.no(
            f"what is not swapped stands on {where}; it must stand on one GPU, or by layers on several"
        )
    fixed = {o.name for o in model.modules() if isinstance(o, Operator) and not o.capturable}
    if fixed:
        return Support.no(f"{', '.join(sorted(fixed))} cannot be captured")
    is_known = (
        model._can_compile_fullgraph
        or (own_caches.is_for(model) and compat.support("own_caches"))
        or (owner_of(own_class(model)) in compat.DECIDE_OF_PICTURES and compat.support("pictures"))
    )
    if not is_known and not (known := compressed_probe.support(model)):
        return known
    return attention_support(model)


def attention_support(model: PreTrainedModel) -> Support:
    """Whether masks are made for attention of the kind that is captured."""
    attention = masks.implementation_of(model)
    if attention in masks.ATTENTION:
        return SUPPORTED
    both = " and ".join(map(repr, masks.ATTENTION))
    return Support.no(f"attention runs as {attention!r}; captured are {both}")


def recording_support(model: PreTrainedModel) -> Support:
    """Whether a recorded step would miss nothing of the model as it is now."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return Support.no("there are hooks on all modules")
    idle = adapters.idle_parts(model)
    for path, module in model.named_modules():
        if module in idle:
            continue
        where = path or "the model"
        is_adapter = adapters.is_part(module)
        if is_adapter and not (found := _adapter_support(model, module)):
            return Support.no(f"{where} {found.reason}")
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(map(_is_harmless, hooks)):
            return Support.no(f"{where} has forward hooks")
        if module.training and not isinstance(module, _CONTAINERS) and not adapters.is_idle(module):
            named = "the model" if model.training else where
            return Support.no(f"{named} is in training mode")
        # Of PEFT's code, what was just looked at; as of any other module, nothing that was put in place of it.
        replay = trust.instance_support(module) if is_adapter else trust.replay_support(module)
        if not replay:
            return Support.no(f"{where} {replay.reason}")
    if model.device.type == "cpu":
        return SUPPORTED
    return frequencies.recording_support(model) and attention_support(model)


def _adapter_support(model: PreTrainedModel, module: nn.Module) -> Support:
    """Whether a recorded step holds a module of PEFT's, or does not need it."""
    support = adapters.replay_support(module)
    if support and model.device.type == "cpu" and (names := adapters.acting(module)):
        return Support.no(
            f"has the adapter {names[0]!r} (PEFT), which native steps do not compute. Merge it, or let it be"
        )
    return support


def _is_harmless(hook: Any) -> bool:
    return getattr(hook, "capturable", False) or getattr(hook, "__module__", "") == _RECORDING


def request_support(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any], config: GenerationConfig
) -> Support:
    """Whether recorded steps can serve a request, if they can serve the model.

    input_ids     [b, n]
    model_kwargs  what transformers has prepared for the model
    """
    held = compat.cache_of(model_kwargs)
    if len(input_ids) > MAX_BATCH:
        return Support.no(f"batch size {len(input_ids)}; captured are 1 to {MAX_BATCH}")
    if input_ids.device != model.device:
        return Support.no(f"the prompt is on {input_ids.device}, the model on {model.device}")
    is_own = held is None and config.use_cache and own_caches.is_for(model)
    if not config.use_cache or (held is None and not is_own):
        return Support.no("there is no cache (use_cache=False)")
    if is_own:
        own = own_caches.request_support(model, model_kwargs.get("attention_mask"), config)
        return own and _inputs_support(model, model_kwargs)
    if own_caches.keeps_prompts(held):
        own = own_caches.prompt_support(model, held, model_kwargs.get("attention_mask"), config)
        return own and _inputs_support(model, model_kwargs)
    if kept_cache.is_callers(held) and not (own := kept_cache.callers_support(model, held)):
        return own
    if config.cache_implementation not in (None, "static"):
        return Support.no(f"cache_implementation={config.cache_implementation!r}")
    if config.return_dict_in_generate and type(held) is not DynamicCache:
        return Support.no(f"return_dict_in_generate=True returns the cache, a {type(held).__name__}")
    if not (kind := cache_layers.kind_support(held) and replaced.cache_support(held)):
        return kind
    if not (padded := _padding_support(model, held, model_kwargs.get("attention_mask"))):
        return padded
    return _inputs_support(model, model_kwargs)


def _inputs_support(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> Support:
    """Whether steps would be given and seen by what recorded ones are."""
    if unknown := step_inputs.unknown(model_kwargs):
        return Support.no(f"the model gets {', '.join(unknown)}")
    if torch.is_autocast_enabled(model.device.type):
        return Support.no("autocast is on")
    if mode := trust.active_mode():
        return Support.no(f"{mode} is to see every operation")
    return SUPPORTED


def _padding_support(model: PreTrainedModel, cache: Any, mask: Any) -> Support:
    """Whether steps of rows with padding are what transformers computes.

    Of blocks that are padding alone, attention sees nothing. transformers then takes the mean of all that its cache has
    room for, so what it gives depends on the cache.
    """
    if not isinstance(mask, Tensor):
        return SUPPORTED
    # No recorded step on a GPU has such an index.
    if mask.dim() == 2 and mask.device.type == "cpu" and bool((mask[:, 1:] < mask[:, :-1]).any()):
        if any(kind.is_pooled for kind in cache_layers.kinds_of(model.config)):
            return Support.no("a row has padding between its tokens, of which an index makes pools")
    if not any(kind.indexed for kind in map(cache_layers.kind_of, cache.layers)):
        return SUPPORTED
    block = block_index_spec.shortest_block(model)
    if block is None or mask.shape[1] < block or bool((mask[:, :block] != 0).any(1).all()):
        return SUPPORTED
    return Support.no(
        f"a row has padding for {block} tokens or more, and its layers choose blocks of as many"
    )


@dataclass(frozen=True)
class PlainRequest:
    """A request that our own loop can run.

    max_length   tokens, with the prompt
    stop         transformers' criterion for stop strings, a RowCriterion, or None
    is_dict      a `GenerateDecoderOnlyOutput` is returned, with the cache
    has_scores   it holds the processed logits of each step; `sampling.keeps_scores` says the same
    has_logits   it holds the model's logits of each step
    """

    sampling: Sampling
    request: Request
    max_length: int
    stop: Any
    is_dict: bool = False
    has_logits: bool = False

    @property
    def has_scores(self) -> bool:
        return self.sampling.keeps_scores


class RowCriterion(StoppingCriteria):
    """A criterion that our own loop takes: given rows [b, n] int64 on the host, it says which end, [b] bool.

    It is given no scores, and asked when the streamer, if there is one, has the step's tokens; transformers' loop asks
    some steps earlier.
    """


def read_plain(
    model: Any,
    processors: Any,
    criteria: Any,
    config: GenerationConfig,
    synced_gpus: bool,
    keeps_rows: bool,
) -> PlainRequest | Support:
    """The request, or why our own loop cannot run it; the arguments are those of transformers' `_sample`.

    keeps_rows  what rows compute after their end is seen by the caller
    """
    if synced_gpus:
        return Support.no("synced_gpus")
    if not (known := replaced.methods_support(model, replaced.OF_LOOPS)):
        return known
    if config.output_attentions or config.output_hidden_states:
        return Support.no(
            "attentions or hidden states are asked for (output_attentions, output_hidden_states)"
        )
    if config.is_assistant or model.config.is_encoder_decoder:
        return Support.no("an assistant, or an encoder and decoder")
    max_length, stop, ends = 0, None, None
    for criterion in criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria and not max_length:
            max_length = criterion.max_length
        elif kind is EosTokenCriteria and ends is None:
            ends = criterion.eos_token_id
        elif (kind is StopStringCriteria or isinstance(criterion, RowCriterion)) and stop is None:
            stop = criterion
        else:
            return Support.no(kind.__name__)
    if not max_length:
        return Support.no("there is no maximal length")
    pad = config._pad_token_tensor
    is_dict = bool(config.return_dict_in_generate)
    found = sampling.read(
        processors,
        config.do_sample,
        ends,
        int(pad) if ends is not None and pad is not None else None,
        keeps_scores=is_dict and bool(config.output_scores),
        keeps_rows=keeps_rows,
    )
    if isinstance(found, Support):
        return found
    return PlainRequest(*found, max_length, stop, is_dict, is_dict and bool(config.output_logits))
