"""`generate` of a swapped model: what of it runs in our own decode loop and in CUDA graphs, and what in the stock one.

    model.generate ──► transformers prepares everything ──► `_sample` of the class made here
                                                              ├─ plain: prefill as ever, then decode.run
                                                              └─ else: transformers' own `_sample`, its forward passes
                                                                 replaced by replays where that changes nothing

`install` makes the model an instance of a subclass of its class with that method in it; what other ways of generating
call is transformers' own. In a version of transformers that has other private methods than these, all of it is, see
`hf.compat`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    DynamicLayer,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StaticLayer,
    StopStringCriteria,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import OperatorError
from ktinject.generation import loop, sampling
from ktinject.generation.cpu import openmp
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cuda.fused import Fused
from ktinject.generation.graph_runner import MAX_BATCH, GraphRunner, bucket_of
from ktinject.generation.sampling import Request, Sampler, Sampling
from ktinject.generation.watch import Watch, active_mode, replaced_method, undeclared
from ktinject.hf import compat
from ktinject.model_class import Methods, own_class, put_before
from ktinject.operators import Operator
from ktinject.operators.offload.handoff import Handoff, wake

logger = logging.getLogger("ktinject")

# What a captured step makes itself, or what was used when the request was prepared.
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
# Methods that decide what a step is given, which a recorded one does not ask.
_PREPARING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "__call__")
# transformers' hooks that record what was asked for with output_…=True, and else do nothing; they stay once set.
_RECORDING = "transformers.utils.output_capturing"


class Decoding:
    """How a model decodes: `model.ktinject_decoding`.

    graphs    "" if decode steps run as CUDA graphs, else why they never do
    last      how the last request ran: "graph loop", "eager loop", "graph, stock loop: why" or "stock loop: why"
    reason    why the last request ran without graphs, or not all of it; "" if it ran with them
    requests  the same words → how many requests
    runners     batch size → what is captured for it
    fused     the modules that compute with few kernels in captured steps; None: all keep transformers' own
    native    decode steps of a model that stands on the CPU; None: of others, or before the first request
    """

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.graphs = _never(model)
        self.last, self.reason = "", ""
        self.requests: Counter[str] = Counter()
        self.runners: dict[int, GraphRunner] = {}
        self.fused = None if self.graphs else Fused(model, group)
        self._native: NativeDecoder | None = None
        self._model = weakref.ref(model)
        self._watch: Watch | None = None  # of the model that is recorded
        self._unrecordable = ""  # why that model cannot be
        self._fused_is_stale = True  # what is put on the model until its first request counts, too
        self._handoffs = [
            o.handoff for o in model.modules() if isinstance(getattr(o, "handoff", None), Handoff)
        ]
        if group is not None:
            group.add_check(self.check)
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._process = os.getpid()
        self._local = threading.local()

    @property
    def replay(self) -> Callable[..., Any] | None:
        """What the stock loop calls for the model, during one request of this thread."""
        return getattr(self._local, "replay", None)

    @replay.setter
    def replay(self, replay: Callable[..., Any] | None) -> None:
        self._local.replay = replay

    @property
    def native(self) -> NativeDecoder | None:
        return self._native if self.graphs else None

    def release(self) -> None:
        """Give back all captured graphs and their caches; the next request captures again."""
        self.runners.clear()
        self._native = None

    def check(self) -> None:
        """Raise what went wrong on the CPU in replays whose results were looked at. Raises OperatorError."""
        for handoff in self._handoffs:
            handoff.check()

    def drain(self) -> None:
        """Forget what goes wrong in a step that was queued behind one that failed: it is the same request's."""
        for handoff in self._handoffs:
            handoff.forget()

    def note(self, how: str, why: str) -> None:
        """Remember how a request runs; a reason is logged once."""
        self.last, self.reason = how, why
        if why and not self.requests[how]:
            level = logging.DEBUG if why == self.graphs else logging.WARNING
            model = self._model()
            on_cpu = model is not None and model.device.type == "cpu"
            without = "its own decode steps" if on_cpu else "CUDA graphs"
            logger.log(level, "generate runs without %s: %s", without, why)
        self.requests[how] += 1

    @contextmanager
    def turn(self) -> Iterator[str]:
        """One request at a time uses the runners, other threads wait. Gives why this one must not, or ""."""
        # In a forked child, whoever had the turn and worked in the runners is not there.
        if self._process != os.getpid():
            self._turn, self._owner, self._process = threading.Lock(), None, os.getpid()
            self.release()
        model = self._model()
        if self.graphs and (model is None or model.device.type != "cpu" or self.group is not None):
            yield self.graphs
        elif self._owner == threading.get_ident():
            yield "it is called from within another request of this model"
        else:
            with self._turn:
                self._owner = threading.get_ident()
                try:
                    yield ""
                finally:
                    self._owner = None

    def refuse(self, input_ids: Tensor, model_kwargs: Mapping[str, Any], config: GenerationConfig) -> str:
        """Why this request cannot run in graphs; "" if it can. To be called in one's turn."""
        model = self._model()
        assert model is not None
        cache = model_kwargs.get("past_key_values")
        if len(input_ids) > MAX_BATCH:
            return f"batch size {len(input_ids)}; captured are 1 to {MAX_BATCH}"
        if input_ids.device != model.device:
            return f"the prompt is on {input_ids.device}, the model on {model.device}"
        if not config.use_cache or cache is None:
            return "there is no cache (use_cache=False)"
        if getattr(cache, "_is_user_defined", False):
            return "the cache is the caller's own (past_key_values)"
        if config.cache_implementation not in (None, "static"):
            return f"cache_implementation={config.cache_implementation!r}"
        if config.return_dict_in_generate:
            return "return_dict_in_generate=True returns the cache"
        wanted = {DynamicCache: DynamicLayer, StaticCache: StaticLayer}.get(type(cache))
        odd = {type(layer).__name__ for layer in cache.layers if type(layer) is not wanted}
        if wanted is None or odd or cache.offloading:
            return f"the cache is a {type(cache).__name__} of {', '.join(sorted(odd)) or 'offloaded layers'}"
        unknown = {name for name, value in model_kwargs.items() if value is not None} - _KNOWN
        if unknown:
            return f"the model gets {', '.join(sorted(unknown))}"
        positions = model_kwargs.get("position_ids")
        if positions is not None and positions.dim() != 2:
            return "positions have more than one dimension"
        if torch.is_autocast_enabled(model.device.type):
            return "autocast is on"
        if mode := active_mode():
            return f"{mode} is to see every operation"
        return self.refuse_model()

    def refuse_model(self) -> str:
        """Why no step of the model as it is can be recorded; "" if it can. What was recorded of it before it changed is
        dropped. To be called in one's turn."""
        model = self._model()
        assert model is not None
        is_same = self._watch is not None and not self._watch.change()
        if self.group is not None:
            is_same = self.group.all_agree(is_same)
        if not is_same:
            self.release()
            self._fused_is_stale = True
            watch, why = Watch(model), _unrecordable(model)
            if self.group is not None:
                why = next((said for said in self.group.all_gather(why) if said), "")
            # In this order: an interrupt between the two makes the next request look again.
            self._unrecordable = why
            self._watch = watch
        if self._unrecordable or not self.graphs:
            if self._fused_is_stale and not self._unrecordable and self.fused is not None:
                self.fused, self._fused_is_stale = Fused(model, self.group), False
            return self._unrecordable
        if self.group is not None:
            return "several processes share the model"
        self._native = self._native or NativeDecoder(model)
        return self._native.refused

    def runner(self, cache: Any, logits: Tensor, tokens: int) -> GraphRunner | None:
        """The runner of a request of up to so many tokens; None, and `reason` says so, if there is no room for one."""
        batch = len(logits)
        if self.native is not None:
            tokens = int(cache.get_seq_length()) + 1  # its cache grows
        found = self.runners.get(batch)
        if found is not None and found.capacity >= tokens:
            return found
        self.runners.pop(batch, None)
        del found
        runner: GraphRunner | None
        assert self._watch is not None, "a request that was not refused"
        try:
            runner = GraphRunner(
                self.native or functools.partial(_forward, self._model, self.fused),
                wake if self._handoffs else lambda: None,
                cache,
                tokens,
                logits,
                own=functools.partial(_forward, self._model, None),
                change=self._watch.change,
            )
        except torch.OutOfMemoryError:
            self.release()
            self.reason = f"there is no room for a captured cache of {bucket_of(tokens)} tokens"
            runner = None
        if self.group is not None and not self.group.all_agree(runner is not None):
            self.reason = self.reason or "another process has no room for a captured cache"
            runner = None
        if runner is not None:
            self.runners[batch] = runner
        return runner


def install(model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
    """Let `generate` of a swapped model run as this file says.

    group  the processes that share the model, all of which call it
    """
    if model.device.type == "cpu":
        openmp.let_threads_sleep()
        openmp.outlive_forks()
    if not isinstance(model, GenerationMixin):
        return
    if not (known := compat.support("generation")):
        model.ktinject_decoding = Decoding(model, group)
        model.ktinject_decoding.reason = known.reason
        put_before(model, _Stock)
    elif type(model)._sample is GenerationMixin._sample:
        model.ktinject_decoding = Decoding(model, group)
        put_before(model, _Swapped if group is None else _Shared)


class _Stock(Methods):
    """The only method that differs where transformers' inside is not what it was: it says so, and calls the model's."""

    ktinject_decoding: Decoding

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoding = self.ktinject_decoding
        if decoding.group is not None:
            decoding.group.begin_request(args, kwargs)
        decoding.note("stock loop", compat.support("generation").reason)
        try:
            return own_class(self).generate(self, *args, **kwargs)
        except OperatorError:
            decoding.drain()
            raise


class _Swapped(Methods):
    """The methods that differ from the model's own class."""

    ktinject_decoding: Decoding

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        return self.ktinject_decoding.replay or own_class(self).get_compiled_call(self, compile_config)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        replays = self.ktinject_decoding.replay is not None
        return replays or own_class(self)._valid_auto_compile_criteria(self, *args, **kwargs)

    def _beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.ktinject_decoding.note("stock loop: beam search", "beam search")
        return own_class(self)._beam_search(self, *args, **kwargs)

    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.ktinject_decoding.note("stock loop: assisted decoding", "assisted decoding")
        return own_class(self)._assisted_decoding(self, *args, **kwargs)

    def _sample(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        decoding: Decoding = self.ktinject_decoding
        plain = _read(self, logits_processor, stopping_criteria, generation_config, synced_gpus)
        outer, decoding.replay = decoding.replay, None
        try:
            with decoding.turn() as eager:
                eager = eager or decoding.refuse(input_ids, model_kwargs, generation_config)
                if (
                    eager
                    and generation_config.cache_implementation == "static"
                    and not isinstance(plain, str)
                ):
                    plain = "a static cache without graphs, which transformers may compile"
                if not input_ids.shape[1]:
                    plain = "the prompt is embeddings (inputs_embeds)"
                if not isinstance(plain, str):
                    return _own(self, eager, plain, input_ids, generation_config, streamer, model_kwargs)
                steps = "" if eager else "native, " if decoding.native is not None else "graph, "
                decoding.note(f"{steps}stock loop: {plain}", eager)
                replay = None if eager else _Replay(self, stopping_criteria.max_length or 0)
                decoding.replay = replay
                found = own_class(self)._sample(
                    self,
                    input_ids,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    generation_config=generation_config,
                    synced_gpus=synced_gpus,
                    streamer=streamer,
                    **model_kwargs,
                )
                if decoding.group is None:
                    decoding.check()
                if replay is not None:
                    decoding.reason = replay.stopped
                return found
        except OperatorError:
            decoding.drain()
            raise
        except torch.OutOfMemoryError as error:
            decoding.release()
            torch.cuda.empty_cache()
            error.add_note(
                "ktinject: captured graphs and their caches were given back; the next request can run. "
                "Use a shorter prompt, fewer new tokens or a smaller batch."
            )
            raise
        finally:
            decoding.replay = outer


class _Shared(_Swapped):
    """The same of a model that several processes share."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.ktinject_decoding.group.begin_request(args, kwargs)
        return own_class(self).generate(self, *args, **kwargs)

    def _get_static_cache_init_shape(self) -> None:
        """A process has its part of the heads: each layer's cache is made for the keys that come."""


class _Plain:
    """A request that our own loop can run, see `_read`."""

    def __init__(self, chosen: Sampling, request: Request, max_length: int, stop: Any) -> None:
        self.sampling, self.request, self.max_length, self.stop = chosen, request, max_length, stop


def _read(
    model: Any, processors: Any, criteria: Any, config: GenerationConfig, synced_gpus: bool
) -> _Plain | str:
    """The request if it is plain, else why not."""
    if synced_gpus:
        return "synced_gpus"
    if config.return_dict_in_generate or any(getattr(config, name) for name in _OUTPUTS):
        return "more than tokens is asked for (return_dict_in_generate, output_…)"
    if config.is_assistant or model.config.is_encoder_decoder:
        return "an assistant, or an encoder and decoder"
    max_length, stop, ends = 0, None, None
    for criterion in criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria and not max_length:
            max_length = criterion.max_length
        elif kind is EosTokenCriteria and ends is None:
            ends = criterion.eos_token_id
        elif kind is StopStringCriteria and stop is None:
            stop = criterion
        else:
            return kind.__name__
    if not max_length:
        return "there is no maximal length"
    pad = config._pad_token_tensor
    found = sampling.read(
        processors, config.do_sample, ends, int(pad) if ends is not None and pad is not None else None
    )
    return found if isinstance(found, str) else _Plain(*found, max_length, stop)


def _own(
    model: Any,
    eager: str,
    plain: _Plain,
    input_ids: Tensor,
    config: GenerationConfig,
    streamer: Any,
    model_kwargs: dict[str, Any],
) -> Tensor:
    """The request in our own loop."""
    decoding: Decoding = model.ktinject_decoding
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    logits = _last(outputs, input_ids)
    cache = outputs.get("past_key_values")
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    del outputs
    new_tokens = max(1, plain.max_length - input_ids.shape[1])
    runner = None
    if not eager and new_tokens > 1:
        eager = _uneven(cache, input_ids) or decoding.refuse_model()  # the prompt ran code of the model
    if not eager and new_tokens > 1:
        runner = decoding.runner(cache, logits, input_ids.shape[1] + new_tokens)
        eager = "" if runner is not None else decoding.reason
    step: _GraphStep | _EagerStep
    native = decoding.native if runner is not None else None
    with model._optimize_model_for_decode(), nullcontext() if native is None else openmp.one_thread():
        if runner is not None:
            positions = model_kwargs.get("position_ids")
            eager = _begin(
                decoding,
                runner,
                logits,
                cache,
                model_kwargs.get("attention_mask"),
                None if positions is None else positions[:, -1:],
            )
            runner, native = (None, None) if eager else (runner, native)
        if runner is not None:
            _empty(cache)
            step = _GraphStep(runner, plain, decoding)
        else:
            step = _EagerStep(model, plain, logits, input_ids, model_kwargs)
        step.sampler.begin(input_ids, plain.request)
        draws = runner is not None and plain.sampling.do_sample and logits.is_cuda
        tokens = loop.run(
            input_ids,
            step,
            functools.partial(step.first, logits),
            new_tokens=new_tokens,
            pad=plain.sampling.pad,
            stop=None if plain.stop is None else lambda rows: plain.stop(rows, None),
            streamer=streamer,
            queue_ahead=runner is not None and native is None,
            generator=torch.cuda.default_generators[logits.device.index] if draws else None,
        )
    if runner is None:
        decoding.note("eager loop", eager)
    elif native is not None:
        decoding.note("native loop", runner.changed)
    else:
        decoding.note("eager loop" if runner.failure else "graph loop", runner.failure or runner.changed)
    return tokens


def _uneven(cache: Any, input_ids: Tensor) -> str:
    """Why a cache is not that of the prompt's tokens and no others; "" if it is."""
    held = int(cache.get_seq_length()) if cache is not None else 0
    return (
        ""
        if held == input_ids.shape[1]
        else f"the cache holds {held} tokens, the prompt {input_ids.shape[1]}"
    )


def _begin(
    decoding: Decoding,
    runner: GraphRunner,
    logits: Tensor,
    cache: Any,
    mask: Tensor | None,
    positions: Tensor | None,
) -> str:
    """Have a runner take over a prefill's cache, which stays as it is; why the model's own steps must run, or ""."""
    begin = functools.partial(runner.begin, cache, int(cache.get_seq_length()), mask, positions)
    begin()
    native = decoding.native
    if native is None:
        return ""
    native.refresh()
    found = [logits]

    def step() -> None:
        runner.ids.copy_(found.pop().argmax(-1, keepdim=True))
        runner.step()
        found.append(runner.logits.clone())

    native.prove(step, begin)
    return native.refused


def _last(outputs: Any, input_ids: Tensor) -> Tensor:
    """[b, v] fp32, a copy: the logits of a long prompt would be kept alive by a view."""
    return outputs.logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)


def _empty(cache: DynamicCache | StaticCache) -> None:
    """Give back a cache that was copied; nobody else holds it."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :0].clone(), layer.values[:, :, :0].clone()


class _GraphStep:
    """A step is two replays: the forward pass, then the choice."""

    def __init__(self, runner: GraphRunner, plain: _Plain, decoding: Decoding) -> None:
        self._runner, self._decoding = runner, decoding
        self._sampling, self.sampler = plain.sampling, runner.sampler(plain.sampling)
        self.result, self.end_row = self.sampler.result, self.sampler.end_row
        if decoding.group is not None:
            self.result = torch.cat([self.result, self.result[:1]])  # a third row, see `check`

    def first(self, logits: Tensor) -> None:
        self._runner.logits.copy_(logits)
        self._choose()

    def __call__(self) -> None:
        self._runner.step()
        self._choose()

    def _choose(self) -> None:
        self._runner.choose(self._sampling)
        if self._decoding.group is not None:
            self.result[:2].copy_(self.sampler.result)
            self.result[2].copy_(self._runner.logits[:, 0].isnan())

    def check(self, result: Tensor) -> None:
        group = self._decoding.group
        if group is None:
            self._decoding.check()
        elif bool(result[2].any()):
            group.raise_failures()  # all processes see NaN in the same step


class _EagerStep:
    """A step as transformers makes it, with our choice of the token."""

    def __init__(
        self, model: Any, plain: _Plain, logits: Tensor, input_ids: Tensor, model_kwargs: dict[str, Any]
    ) -> None:
        self._model, self._tokens, self._kwargs = model, input_ids, model_kwargs
        self.sampler = Sampler(plain.sampling, input_ids[:, -1:].clone(), logits.shape[1])
        self.result, self.end_row = self.sampler.result, self.sampler.end_row

    def first(self, logits: Tensor) -> None:
        self.sampler.choose(logits)

    def check(self, result: Tensor) -> None:
        pass  # the forward pass raises what went wrong

    def __call__(self) -> None:
        self._tokens = torch.cat([self._tokens, self.sampler.ids], dim=1)
        inputs = self._model.prepare_inputs_for_generation(
            self._tokens, next_sequence_length=1 if self._kwargs["use_cache"] else None, **self._kwargs
        )
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs)
        self.sampler.choose(_last(outputs, self._tokens))


class _Replay:
    """Stands for the model in the stock loop: its first step with one token shows the shapes, the next ones replay."""

    def __init__(self, model: Any, max_length: int) -> None:
        self._model, self._max_length = model, max_length
        self._steps = 0
        self._shape: Tensor | None = None
        self._runner: GraphRunner | None = None
        self._refused = ""

    @property
    def stopped(self) -> str:
        """Why not all steps that could be replayed were; "" if they were."""
        return self._refused or (self._runner.changed if self._runner is not None else "")

    def __call__(self, **inputs: Any) -> Any:
        ids: Tensor = inputs["input_ids"]
        if self._runner is None and self._shape is not None:
            self._runner, self._shape = self._begin(inputs, self._shape), None
        if self._runner is not None:
            self._runner.ids.copy_(ids)
            self._runner.step()
            logits = self._runner.logits[:, None]
            if (group := self._model.ktinject_decoding.group) is not None:
                group.raise_if_failed(logits)
            return CausalLMOutputWithPast(logits=logits, past_key_values=inputs["past_key_values"])
        outputs = self._model(**inputs)
        if ids.shape[1] == 1:
            self._shape = outputs.logits[:, -1] if self._steps == 0 else None
            self._steps += 1
        return outputs

    def _begin(self, inputs: dict[str, Any], logits: Tensor) -> GraphRunner | None:
        decoding: Decoding = self._model.ktinject_decoding
        self._refused = decoding.refuse_model()
        if self._refused:
            return None
        cache, mask = inputs["past_key_values"], inputs.get("attention_mask")
        runner = decoding.runner(cache, logits, max(self._max_length, int(cache.get_seq_length()) + 1))
        if runner is None:
            self._refused = decoding.reason
            return None
        mask = mask[:, 0, 0] if mask is not None and mask.dim() == 4 else mask
        self._refused = _begin(decoding, runner, logits, cache, mask, inputs.get("position_ids"))
        return None if self._refused else runner


def _forward(
    reference: weakref.ref[PreTrainedModel],
    fused: Fused | None,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: Any,
) -> Tensor:
    """The model, or its twin, on one token a row, [b, v]; weak, for a runner must not keep its model alive."""
    model = reference()
    assert model is not None
    if why := _other_attention(model):
        raise OperatorError(
            f"generate: {why}, of which a request's mask is made. Change it between requests."
        )
    return loop.logits_of(model if fused is None else fused, ids, mask, positions, cache)


def _unrecordable(model: PreTrainedModel) -> str:
    """What a recorded step of a model, as it is now, would miss; "" if nothing."""
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "there are hooks on all modules"
    for path, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            return "there are adapters on the model (PEFT)"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(map(_is_harmless, hooks)):
            return f"{path or 'the model'} has forward hooks"
        if module.training:
            return "the model is in training mode"
        if why := undeclared(module):
            return f"{path or 'the model'} {why}"
    if name := replaced_method(model, _PREPARING):
        return f"{name} of the model was replaced, which decides what each step is given"
    return "" if model.device.type == "cpu" else _other_attention(model)


def _other_attention(model: PreTrainedModel) -> str:
    attention = model.config.get_text_config()._attn_implementation
    return "" if attention == "sdpa" else f"attention runs as {attention!r}; captured is 'sdpa'"


def _is_harmless(hook: Any) -> bool:
    return getattr(hook, "capturable", False) or getattr(hook, "__module__", "") == _RECORDING


def _never(model: PreTrainedModel) -> str:
    """Why no decode step of a model can ever be captured; "" if it may be."""
    if not (known := compat.support("generation")):
        return known.reason
    devices = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    plan = getattr(model, "ktinject", None)
    laid = len(devices) == 1 or (plan is not None and {*devices} <= {*plan.device_map.values()})
    if not laid or not all(device.startswith("cuda") for device in devices):
        where = ", ".join(devices)
        return f"what is not swapped stands on {where}; it must stand on one GPU, or by layers on several"
    fixed = {o.name for o in model.modules() if isinstance(o, Operator) and not o.capturable}
    if fixed:
        return f"{', '.join(sorted(fixed))} cannot be captured"
    if not model._can_compile_fullgraph:
        return f"transformers does not say that {type(model).__name__} is free of host decisions"
    return _other_attention(model)
