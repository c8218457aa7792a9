"""`generate` of a swapped model: what of it runs in our own decode loop and in CUDA graphs, and what in the stock one.

    model.generate ──► transformers prepares everything ──► `_sample` of the class made here
                                                              ├─ plain: transformers' prefill, then own_loop.py
                                                              └─ else: transformers' own `_sample`, its forward passes
                                                                 replaced by replays where that changes nothing

`install` makes the model an instance of a subclass of its class with that method in it. Other ways of generating stay
transformers' own. All of them do in a version of transformers whose private methods are not those that are called
here, see `hf.compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import OperatorError
from ktinject.generation import (
    batching,
    beams,
    candidates,
    continued,
    foreseen,
    kept_cache,
    own_caches,
    own_loop,
    replaced,
    short_memory,
    speculation,
    stateful,
)
from ktinject.generation.cpu import openmp, prompts
from ktinject.generation.decoding import Decoding
from ktinject.generation.eligibility import PlainRequest, read_plain
from ktinject.generation.steps import StockReplay
from ktinject.hf import compat
from ktinject.model_class import Methods, own_class, put_before
from ktinject.operators.offload import lent
from ktinject.support import Support


def install(model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
    """Let `generate` of a swapped model run as this file says.

    group  the processes that share the model, all of which call it
    """
    if model.device.type == "cpu":
        openmp.let_threads_sleep()
        openmp.outlive_forks()
    if group is None:
        short_memory.install(model)
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
    """For a transformers whose private methods are not those that `_Swapped` calls: `generate` is the model's own."""

    ktinject_decoding: Decoding

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoding = self.ktinject_decoding
        if decoding.group is not None:
            decoding.group.begin_request(args, kwargs)
        decoding.require(compat.support("generation"))
        decoding.note("stock loop", compat.support("generation").reason)
        try:
            return own_class(self).generate(self, *args, **kwargs)
        except OperatorError:
            decoding.drain()
            raise


class _Swapped(Methods):
    """The methods that differ from the model's own class."""

    ktinject_decoding: Decoding

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        return batching.manager(self, *args, **kwargs)

    def get_compiled_call(self, compile_config: Any) -> Callable[..., Any]:
        return self.ktinject_decoding.replay or own_class(self).get_compiled_call(self, compile_config)

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        replays = self.ktinject_decoding.replay is not None
        return replays or own_class(self)._valid_auto_compile_criteria(self, *args, **kwargs)

    def _validate_generation_mode(
        self: Any, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: Any
    ) -> None:
        stateful.validate(self, generation_mode, generation_config, generation_mode_kwargs)

    def _prefill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: Any, **first: Any) -> Any:
        with continued.attention(self, input_ids, compat.cache_of(model_kwargs), generation_config):
            return own_class(self)._prefill(self, input_ids, generation_config, model_kwargs, **first)

    def _beam_search(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        decoding: Decoding = self.ktinject_decoding
        held = compat.cache_of(model_kwargs)
        with _request(self, held) as turn:
            recorded = turn and decoding.request_support(input_ids, model_kwargs, generation_config)
            recorded = recorded and beams.support(generation_config, synced_gpus)
            recorded = recorded and _rereading(self, held, generation_config)
            recorded = recorded and own_caches.plain_support(self, model_kwargs)
            if decoding.explains:
                return foreseen.of_request(decoding, recorded, Support.no(beams.NAME), input_ids)
            decoding.require(recorded)
            arguments = {
                "logits_processor": logits_processor,
                "stopping_criteria": stopping_criteria,
                "generation_config": generation_config,
                "synced_gpus": synced_gpus,
                **model_kwargs,
            }
            how = f"{foreseen.kind_of(decoding, recorded)}stock loop: {beams.NAME}"
            if not recorded:
                decoding.note(how, recorded.reason)
                return own_class(self)._beam_search(self, input_ids, **arguments)
            found, kept = beams.run(self, input_ids, arguments)
            decoding.note(how, kept.reason)
            return found

    def _assisted_decoding(
        self: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        decoding: Decoding = self.ktinject_decoding
        assistants = {
            "inputs_tensor": inputs_tensor,
            "assistant_model": assistant_model,
            "assistant_tokenizer": assistant_tokenizer,
        }
        request = candidates.Request(
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            {**assistants, "target_tokenizer": tokenizer},
            model_kwargs,
        )
        with _request(self, request.held) as turn:
            recorded = turn and decoding.request_support(input_ids, model_kwargs, generation_config)
            recorded = recorded and replaced.methods_support(self, replaced.OF_CANDIDATES)
            recorded = recorded and speculation.support(decoding, request, synced_gpus)
            recorded = recorded and _rereading(self, request.held, generation_config)
            if decoding.explains:
                stateful.require(self, generation_config, assistant_model, recorded)
                return foreseen.of_candidates(decoding, recorded, request)
            decoding.require(recorded)
            if recorded:
                found, recorded, cache = speculation.run(self, request)
                if found is not None:
                    decoding.note(speculation.how(decoding, request), recorded.reason)
                    return found
                decoding.require(recorded)
                model_kwargs[compat.CACHE] = cache
            stateful.require(self, generation_config, assistant_model, recorded)
            decoding.note(f"stock loop: {request.name}", recorded.reason)
            return own_class(self)._assisted_decoding(
                self,
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                tokenizer=tokenizer,
                **assistants,
                **model_kwargs,
            )

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
        held = compat.cache_of(model_kwargs)
        is_kept = kept_cache.is_callers(held) or bool(generation_config.return_dict_in_generate)
        plain = read_plain(
            self,
            logits_processor,
            stopping_criteria,
            generation_config,
            synced_gpus,
            keeps_rows=is_kept and len(input_ids) > 1,
        )
        with _request(self, held) as turn:
            recorded = turn and decoding.request_support(input_ids, model_kwargs, generation_config)
            is_static = generation_config.cache_implementation == "static"
            if not recorded and is_static and isinstance(plain, PlainRequest):
                plain = Support.no("a static cache without graphs, which transformers may compile")
            if not isinstance(plain, PlainRequest):
                recorded = recorded and own_caches.plain_support(self, model_kwargs)
                recorded = recorded and _rereading(self, held, generation_config)
            if not input_ids.shape[1]:
                plain = Support.no("the prompt is embeddings (inputs_embeds)")
            if decoding.explains:
                return foreseen.of_request(decoding, recorded, plain, input_ids)
            decoding.require(recorded)
            if isinstance(plain, PlainRequest):
                return own_loop.run(
                    self, recorded, plain, input_ids, generation_config, streamer, model_kwargs
                )
            arguments = {
                "logits_processor": logits_processor,
                "stopping_criteria": stopping_criteria,
                "generation_config": generation_config,
                "synced_gpus": synced_gpus,
                "streamer": streamer,
                **model_kwargs,
            }
            return _run_stock_loop(self, recorded, plain, input_ids, arguments)


class _Shared(_Swapped):
    """The same for a model that several processes share."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.ktinject_decoding.group.begin_request(args, kwargs)
        return own_class(self).generate(self, *args, **kwargs)

    def _get_static_cache_init_shape(self) -> None:
        """A process has its part of the heads: each layer's cache is made for the keys that come."""


def _rereading(model: Any, held: Any, config: GenerationConfig) -> Support:
    """Whether a loop of transformers' may write a text in recorded steps, which do not read it again."""
    return replaced.rereading_support(model, 0 if held is None else held.get_seq_length(), config.max_length)


@contextmanager
def _request(model: Any, held: Any) -> Iterator[Support]:
    """Within, a request runs. Gives whether it may use recorded steps; whatever is raised leaves all as it was before.

    held  its cache, maybe the caller's
    """
    decoding: Decoding = model.ktinject_decoding
    decoding.require_forwards()
    outer, decoding.replay = decoding.replay, None
    try:
        with kept_cache.restored(held), decoding.turn() as turn, prompts.native(model):
            yield turn
    except OperatorError:
        decoding.drain()
        raise
    except (IndexError, ValueError) as error:
        # Of an embedding, and of native/bindings/decoder_token.cpp.
        if str(error).startswith(("index out of range", "token step: found token")) and (
            why := _too_wide(model)
        ):
            raise OperatorError(f"generate: {why}") from error
        raise
    except torch.OutOfMemoryError as error:
        decoding.release()
        lent.give_back(decoding.devices)
        torch.cuda.empty_cache()
        error.add_note(
            "ktinject: captured graphs and their caches were given back; the next request can run. "
            "Use a shorter prompt, fewer new tokens or a smaller batch."
        )
        raise
    finally:
        decoding.replay = outer


def _too_wide(model: Any) -> str:
    """What is wrong where a head gives scores of tokens that the model does not embed; "" if it does not."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedded, scored = getattr(words, "num_embeddings", None), getattr(head, "out_features", None)
    if embedded is None or scored is None or scored <= embedded:
        return ""
    return (
        f"a token that the model does not embed: it embeds {embedded:,} tokens, and its head scores {scored:,}. Resize "
        "one of them before the swap, or keep the others from being chosen: "
        f"suppress_tokens=[*range({embedded}, {scored})]."
    )


def _run_stock_loop(
    model: Any, recorded: Support, plain: Support, input_ids: Tensor, arguments: dict[str, Any]
) -> Any:
    """The request in transformers' own loop.

    recorded   whether recorded steps serve the request; they then replace forward passes of the loop
    plain      why our own loop does not run it
    arguments  of transformers' `_sample`
    """
    decoding: Decoding = model.ktinject_decoding
    decoding.note(f"{foreseen.kind_of(decoding, recorded)}stock loop: {plain.reason}", recorded.reason)
    max_length = arguments["stopping_criteria"].max_length or 0
    replay = StockReplay(model, max_length, input_ids.shape[1]) if recorded else None
    decoding.replay = replay
    found = own_class(model)._sample(model, input_ids, **arguments)
    if decoding.group is None:
        decoding.check()
    if replay is not None:
        config, cache = arguments["generation_config"], compat.cache_of(arguments)
        if config.return_dict_in_generate or kept_cache.is_callers(cache):
            replay.hand_back()
        decoding.note_reason(replay.support.reason)
    return found
