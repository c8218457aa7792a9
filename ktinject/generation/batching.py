"""Continuous batching of a swapped model: transformers' scheduler and paged cache, with our operators in its steps.

generate_batch ─► init_continuous_batching ─► transformers' manager, its class ours ─► thread: step by step
                                                                                      │
                       for the time of a step: the model's turn, attention of packed requests, dispatcher awake

A step calls the model on the new tokens of all requests at once, packed in one row [1, tokens]. Our own loop, captured
steps and native decoder play no part: a layer's operators are called as in any forward pass. So the experts of all
requests are one task. In transformers' CUDA graphs, submits to the CPU are captured; padding costs no expert.

Differences from the stock manager: attention is switched for each step, and back, so that `generate` of the same
model finds it as it was. Each text is attended by itself (packed_attention.py). Latent attention is cached as
`absorbed_mla` has it. What cannot be batched is refused by name when the manager is made.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from ktinject.errors import OperatorError
from ktinject.generation import batching_probe, masks
from ktinject.generation.cache_layers import has_latents
from ktinject.generation.consecutive import modules_with_states
from ktinject.generation.decoding import Decoding
from ktinject.hf import compat
from ktinject.model_class import own_class, stored_parameters
from ktinject.operators.absorbed_mla import AbsorbedMla
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload import expert_cache, handoff, lent, submits
from ktinject.operators.offload.gpu_experts import RESERVE_BYTES
from ktinject.operators.torch_ops import packed_attention
from ktinject.support import SUPPORTED, Support

_CACHED = frozenset(
    {"full_attention", "sliding_attention"}
)  # the kinds of layers that transformers' cache knows
# Steps are padded to multiples of these in CUDA graphs; transformers' own are 64 tokens and 16,384 cached ones, which
# is much for a decode step of a few requests.
_PADDED_TOKENS, _PADDED_CACHE = 16, 4096
# Of the cache on a CPU, where transformers would take 60 % of the memory: tokens if the work is not known, and requests
# at once if it is.
CPU_TOKENS, _REQUESTS = 32768, 64


def support(model: Any) -> Support:
    """Whether requests to a swapped model can be batched."""
    if not (known := compat.support("batching")):
        return known
    decoding: Decoding = model.ktinject_decoding
    if decoding.group is not None:
        return Support.no("several processes share the model")
    devices = {str(tensor.device) for tensor in stored_parameters(model)}
    if len(devices) > 1:
        return Support.no(
            f"its layers stand on {', '.join(sorted(devices))}, and the paged cache on one device"
        )
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _CACHED
    if kinds or modules_with_states(model):
        named = ", ".join(sorted(kinds)) or "states of fixed size"
        return Support.no(f"it has layers with {named}, and transformers' paged cache is for keys and values")
    if getattr(model.config, "is_encoder_decoder", False):
        return Support.no("it has an encoder and a decoder")
    if isinstance(name := _attention(model), Support):
        return name
    return decoding.batched(lambda: _probed(model))


def _probed(model: Any) -> Support:
    """Whether the model computes packed requests right."""
    config, name = _cached_config(model), _attention(model)
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return batching_probe.support(
        model,
        heads,
        compat.find_head_dim(config),
        has_masks=isinstance(name, str) and "flash" not in name,
        packed=functools.partial(_packed, model),
    )


def manager(
    model: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """transformers' manager for the model; the arguments are those of `init_continuous_batching`.

    Raises  OperatorError if requests cannot be batched
    """
    if not (can := support(model)):
        raise OperatorError(
            f"continuous batching of {type(model).__name__}: {can.reason}. Use generate, with one prompt or several."
        )
    model.ktinject_decoding.take_turns()
    with _packed(model):
        config = _with_defaults(model, continuous_batching_config, workload_hints)
        _make_room(model, config)
        made = own_class(model).init_continuous_batching(model, generation_config, config, workload_hints)
        if type(made).switch_to_cb_friendly_attn is not _stay:  # else it is one that was kept
            made.__class__ = _manager_class(type(made))
    return made


def _stay(manager: Any, model: Any, *args: Any) -> None:
    """Attention is switched for each step, not by the manager for good."""


def _with_defaults(model: Any, config: Any, hints: Any) -> Any:
    """The config of continuous batching, with defaults for this model where the caller names none."""
    from transformers import ContinuousBatchingConfig

    config = copy.copy(config) if config is not None else ContinuousBatchingConfig()
    if model.device.type == "cuda" and config.use_cuda_graph is not False:
        config.q_padding_interval_size = config.q_padding_interval_size or _PADDED_TOKENS
        config.kv_padding_interval_size = config.kv_padding_interval_size or _PADDED_CACHE
    if model.device.type == "cpu" and config.num_blocks is None and config.max_memory_percent is None:
        page = getattr(config, "page_size", None) or config.block_size
        longest, count = CPU_TOKENS, 1
        if hints is not None and hints.max_prompt_length + hints.max_generated_length:
            longest = hints.max_prompt_length + hints.max_generated_length
            count = min(hints.num_requests, _REQUESTS)
        config.num_blocks = count * math.ceil(longest / page)
    return config


def _make_room(model: Any, config: Any) -> None:
    """Have experts on the model's GPU give back their memory, if its paged cache needs that."""
    if model.device.type != "cuda" or not lent.is_lent({model.device}):
        return
    if config.num_blocks is not None:
        running = model.ktinject.runtime_memory.get(str(model.device))
        page = getattr(config, "page_size", None) or config.block_size
        wanted = config.num_blocks * page * (0 if running is None else running.kv_bytes_per_token)
        if wanted and wanted + RESERVE_BYTES <= lent.free_bytes(model.device):
            return
    # Else transformers takes a share of what is free.
    lent.give_back({model.device})
    torch.cuda.empty_cache()


def _attention(model: Any) -> str | Support:
    """The name by which transformers calls the attention of packed requests of this model."""
    own = masks.implementation_of(model)
    if own == "eager":
        return "paged|eager"
    if "flash" in own or own.startswith("paged|"):
        return own
    if own != "sdpa":
        return Support.no(f"attention runs as {own!r}; batched are 'sdpa', 'eager' and flash attention")
    latent = _latent(model)
    if latent is not None and not latent:
        return latent
    config = model.config.get_text_config()
    is_packed = model.device.type == "cpu" or (
        latent is None and packed_attention.support(model.device, model.dtype, compat.find_head_dim(config))
    )
    return _prefix() + (packed_attention.NAME if is_packed else "sdpa")


@functools.cache
def _prefix() -> str:
    """What stands before the names of attention that reads a paged cache: in older versions, "paged|"."""

    class Config:
        _attn_implementation = "sdpa"

    is_newer: bool = compat.attn_mask_is_needed(Config)
    prefix = "" if is_newer else "paged|"
    compat.ALL_ATTENTION_FUNCTIONS.register(prefix + packed_attention.NAME, packed_attention.forward)
    return prefix


def _latent(model: Any) -> Support | None:
    """Whether latent attention can be cached; None if the model has none."""
    config = model.config.get_text_config()
    if not has_latents(config):
        return None
    layers = {
        path: module
        for path, module in model.named_modules()
        if getattr(module, "kv_b_proj", None) is not None
    }
    for path, module in layers.items():
        if not isinstance(module, AbsorbedMla):
            return Support.no(
                f"{path} is a {type(module).__name__}, whose keys and values differ in width; absorbed_mla can"
            )
        if module.spec.chooses != "none":
            return Support.no(f"{path} attends to places that an indexer chooses")
        if (module.spec.kv_lora_rank + module.spec.qk_rope_head_dim) % 2:
            return Support.no(f"{path} caches an odd number of values a token")
    return SUPPORTED


@contextmanager
def _packed(model: Any) -> Iterator[None]:
    """Within, the model computes packed requests. It is this thread's turn, others wait."""
    decoding: Decoding = model.ktinject_decoding
    name = _attention(model)
    if isinstance(name, Support):
        raise OperatorError(f"continuous batching: {name.reason}.")
    with decoding.alone(), _attends_as(model.config, name):
        yield


# transformers decides by the name in the config whether it makes masks, so that has to be another one for a step.
# Models may share a config: id → the config, what it said before, and how many steps have another name in it.
_renamed: dict[int, tuple[Any, str, int]] = {}
_renaming = threading.Lock()


@contextmanager
def _attends_as(config: Any, name: str) -> Iterator[None]:
    """Within, attention has a name; the last one to leave, of all threads, gives back the config's own."""
    with _renaming:
        _, own, count = _renamed.get(id(config), (config, config._attn_implementation, 0))
        _renamed[id(config)] = config, own, count + 1
        config._attn_implementation = name
    try:
        yield
    finally:
        with _renaming:
            _, own, count = _renamed.pop(id(config))
            if count > 1:
                _renamed[id(config)] = config, own, count - 1
            else:
                config._attn_implementation = own


def _give_names_back() -> None:
    """In a child, which has none of the threads whose steps these were."""
    global _renaming
    _renaming = threading.Lock()
    for config, own, _ in _renamed.values():
        config._attn_implementation = own
    _renamed.clear()


os.register_at_fork(after_in_child=_give_names_back)


def _cached_config(model: Any) -> Any:
    """The text config of a model as transformers' cache is to see it: with the widths of the latent, if it has one."""
    config = model.config.get_text_config()
    layer = next((module for module in model.modules() if isinstance(module, AbsorbedMla)), None)
    if layer is not None:
        config = copy.copy(config)
        config.num_key_value_heads = 1
        config.head_dim = (layer.spec.kv_lora_rank + layer.spec.qk_rope_head_dim) // 2
    return config


class _Shown:
    """Something with another value of one attribute."""

    def __init__(self, shown: Any, name: str, value: Any) -> None:
        self._shown = shown
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shown, name)


class _Step:
    """The model as a step calls it: rows of padding get no experts.

    A row for which no token could be chosen may be in one more step, before its request is taken out; the model gets
    some token for it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        ids = inputs["input_ids"] = inputs["input_ids"].clamp(min=0)
        live = None
        if ids.is_cuda:
            live = torch.arange(ids.shape[1], device=ids.device) < inputs["cu_seq_lens_q"][-1]
        with submits.only(live):
            return self._model(**inputs)


@cast(Any, functools.cache)
def _manager_class(stock: Any) -> Any:
    class Manager(stock):
        """transformers' manager, in whose steps the model computes packed requests."""

        model: Any
        _use_prefix_sharing: bool
        switch_to_cb_friendly_attn = _stay

        def warmup(self) -> None:
            with _packed(self.model):
                super().warmup()

        def _create_batch_processor(self) -> Any:
            with _packed(self.model):
                cached = _cached_config(self.model)
                config = _Shown(self.model.config, "get_text_config", lambda: cached)
                shown = copy.copy(self)
                shown.model = _Shown(self.model, "config", config)
                made = stock._create_batch_processor(shown)
                self._use_prefix_sharing = shown._use_prefix_sharing
            made.model_runner.__class__ = _runner_class(type(made.model_runner))
            return made

        def _generation_step(self) -> None:
            decoding: Decoding = self.model.ktinject_decoding
            with _packed(self.model):
                expert_cache.step()
                handoff.wake()
                self.batch_processor._generation_step(_Step(self.model))
            decoding.check()

    Manager.__name__, Manager.__qualname__ = stock.__name__, stock.__qualname__
    return Manager


@cast(Any, functools.cache)
def _runner_class(stock: Any) -> Any:
    from ktinject.generation import batching_sampling  # with it comes all of continuous batching

    if issubclass(stock, _Runner):
        return stock

    class Runner(_Runner, stock):
        """transformers' runner, without graphs for long prompts whose experts are better streamed through the GPU."""

        def compute_batch(self, model: Any, batch_data: Any) -> None:
            ids = batch_data["input_ids"]
            self._is_streamed = ids.is_cuda and is_streamed(model, ids.shape[1])
            self._arguments = batch_data["logits_processor_args"]
            super().compute_batch(model, batch_data)

        def _get_forward_fn(self, use_block_table: bool) -> tuple[Any, bool]:
            forward, uses_graph = super()._get_forward_fn(use_block_table=use_block_table)
            return forward, uses_graph and not self._is_streamed

        def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
            if not batching_sampling.choose(self, scores, output_ids, self._arguments):
                super()._sample(scores, output_ids)

    return Runner


class _Runner:
    _is_streamed = False
    _arguments: Any = None


def is_streamed(model: Any, tokens: int) -> bool:
    """Whether experts are streamed to a GPU for so many tokens: the host does that, and no replayed graph."""
    top_k = int(getattr(model.config.get_text_config(), "num_experts_per_tok", 1))
    layers = (module for module in model.modules() if isinstance(module, HybridExperts))
    return any(layer.streams(tokens, top_k) for layer in layers)
