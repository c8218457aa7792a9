"""How a swapped model decodes: what is captured of it, and who may use that when."""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ktinject.distributed.process_group import ProcessGroup
from ktinject.errors import OperatorError
from ktinject.generation import (
    continued,
    eligibility,
    loop,
    masks,
    replaced,
    several,
    step_inputs,
    turn_pass,
)
from ktinject.generation.cache import KVBucket, bucket_of
from ktinject.generation.cache_layers import kinds_of
from ktinject.generation.compressed import CompressedLayer, Steps
from ktinject.generation.consecutive import OneByOne, modules_with_states
from ktinject.generation.cpu.native_decoder import NativeDecoder
from ktinject.generation.cuda.fused import Fused
from ktinject.generation.frequencies import Frequencies
from ktinject.generation.graph_runner import Forward, GraphRunner, size_of
from ktinject.generation.watch import Watch
from ktinject.hf import compat
from ktinject.operators.hybrid_experts import HybridExperts
from ktinject.operators.offload import expert_cache, lent
from ktinject.operators.offload.expert_cache import Hits
from ktinject.operators.offload.handoff import Handoff, wake
from ktinject.support import SUPPORTED, Support

logger = logging.getLogger("ktinject")


@dataclass(frozen=True)
class Explanation:
    """How a request would run.

    how     as `Decoding.last` says it afterwards
    reason  as `Decoding.reason`; "" if all its steps run in CUDA graphs, or in the native decoder
    slower  as `Decoding.slower`, where steps run in CUDA graphs
    """

    how: str
    reason: str
    slower: str = field(default="", compare=False)


class Decoding:
    """`model.ktinject_decoding`.

    graphs    whether decode steps can run as CUDA graphs, and why not
    last      how the last request ran: "graph loop", "eager loop", "graph, stock loop: why" or "stock loop: why"
    reason    why the last request ran without graphs, or not all of it; "" if it ran with them
    requests  the same words → how many requests
    runners   rows of a step → what is captured of that size
    strict    a request is refused, OperatorError, rather than run without CUDA graphs or native steps
    """

    def __init__(self, model: PreTrainedModel, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.graphs = eligibility.graph_support(model)
        self.last, self.reason = "", ""
        self.requests: Counter[str] = Counter()
        self._logged: set[str] = set()  # reasons, without their numbers
        self.runners: dict[int, GraphRunner] = {}
        self.strict = False
        self._native: NativeDecoder | None = None
        self._fused: Fused | None = None
        self._fuses = True
        self._frequencies: Frequencies | None = None  # of captured steps; None: their forward chooses
        self._model = weakref.ref(model)
        self._watch: Watch | None = None  # of the model that is recorded
        self._recordable = SUPPORTED  # whether that model can be
        self._given_back = 0  # how often experts had given back memory when it was recorded
        self._batched: tuple[Watch, Support] | None = (
            None  # whether requests can be batched, of a model as it was
        )
        self._masks: masks.Masks | Support | None = None  # how it is given those of a captured step
        # What steps of that model are given beside tokens → whether recorded ones may leave it out.
        self._left_out: dict[frozenset[str], Support] = {}
        self._handoffs = [
            o.handoff for o in model.modules() if isinstance(getattr(o, "handoff", None), Handoff)
        ]
        if group is not None:
            group.add_check(self.check)
        self._stood_for = replaced.stood_for(model)
        self._turn = threading.Lock()
        self._owner: int | None = None
        self._takes_turns = False  # those, too, whose steps are not recorded
        self._process = os.getpid()
        self._local = threading.local()

    @property
    def replay(self) -> Callable[..., Any] | None:
        """What the stock loop calls for the model, during one request of this thread."""
        return getattr(self._local, "replay", None)

    @replay.setter
    def replay(self, replay: Callable[..., Any] | None) -> None:
        self._local.replay = replay

    def expert_hits(self) -> Hits:
        """What the experts on GPUs were good for so far, all layers together."""
        model: Any = self._model()
        found = [o.hits() for o in model.modules() if isinstance(o, HybridExperts)]
        return sum(found, start=Hits())

    def guesses(self) -> tuple[int, int]:
        """Of the experts that captured steps foresaw one layer ahead: how many were right, of how many asked for.

        Of those guesses that the CPU followed: it stops where most are wrong, and tries again later.
        """
        model: Any = self._model()
        found = [o.native.guesses for o in model.modules() if isinstance(o, HybridExperts)]
        return sum(right for right, _ in found), sum(asked for _, asked in found)

    @property
    def explains(self) -> bool:
        """Whether `generate` of this thread is to say how a request would run, and not to run it."""
        return getattr(self._local, "explains", False)

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """How `model.generate` with these arguments would run, and why; nothing is computed but what prepares it.

        It cannot know of what shows only within a request: that memory is short, that a step cannot be captured, that
        a layer of the native decoder differs. As `generate`, it raises what is wrong with the arguments.
        """
        if not (known := compat.support("generation")):
            return Explanation("stock loop", known.reason)
        for name in ("custom_generate", "cache_implementation"):
            if kwargs.get(name) not in (None, "dynamic", "static", "offloaded", "quantized"):
                return Explanation("stock loop", f"{name}={kwargs[name]!r} decides how it runs")
        if kwargs.get(
            "trust_remote_code"
        ):  # of contrastive and constrained search, which are not transformers' any more
            return Explanation("stock loop", "trust_remote_code=True: it may run code from elsewhere")
        model: Any = self._model()
        kwargs.pop("streamer", None)  # it would be given the prompt
        self._local.explains = True
        try:
            found: Explanation = model.generate(*args, **kwargs)
        finally:
            self._local.explains = False
        return replace(found, slower=self.slower) if found.how.startswith("graph") else found

    def require(self, support: Support) -> None:
        """Refuse a request that recorded steps do not serve, if it must not be slow. Raises OperatorError."""
        if self.strict and not support:
            raise OperatorError(
                f"generate: this request would run without CUDA graphs or native decode steps: {support.reason}. "
                "Change the request, or allow it: model.ktinject_decoding.strict = False."
            )

    @property
    def native(self) -> NativeDecoder | None:
        """Decode steps of a model that stands on the CPU; None: of others, or before the first request."""
        return None if self.graphs else self._native

    @property
    def fused(self) -> Fused | None:
        """The modules that compute with few kernels in captured steps; None before the first captured request.

        Set to None before the first request, all modules keep transformers' kernels.
        """
        return self._fused

    @fused.setter
    def fused(self, fused: Fused | None) -> None:
        self._fused, self._fuses = fused, fused is not None

    @property
    def slower(self) -> str:
        """Which modules keep transformers' kernels in captured steps though there are faster ones, and why.

        "" if none does, and before the first captured request: that is found by comparing them in its first step.
        """
        found = {} if self._fused is None else self._fused.slower()
        return "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in found.items())

    def require_forwards(self) -> None:
        """Raises OperatorError as `replaced.require_forwards`."""
        replaced.require_forwards(self._stood_for)

    def release(self) -> None:
        """Give back all captured graphs and their caches; the next request captures again."""
        self.runners.clear()
        self._native = None

    def check(self) -> None:
        """Raise what went wrong on the CPU in replays whose results were looked at. Raises OperatorError."""
        for handoff in self._handoffs:
            handoff.check()

    def drain(self) -> None:
        """Discard errors from steps queued after a failed one; they belong to the same request."""
        for handoff in self._handoffs:
            handoff.forget()

    def note(self, how: str, why: str) -> None:
        """Remember how a request runs, and why so; each reason is logged once."""
        self.last = how
        self.requests[how] += 1
        self.note_reason(why)

    def note_reason(self, why: str) -> None:
        """Remember why the last request runs as it does. Reasons that differ in numbers alone are logged once."""
        self.reason = why
        kind = re.sub(r"\d+", "", why)
        if not why or kind in self._logged:
            return
        self._logged.add(kind)
        level = logging.DEBUG if why == self.graphs.reason else logging.WARNING
        model = self._model()
        on_cpu = model is not None and model.device.type == "cpu"
        without = "its own decode steps" if on_cpu else "CUDA graphs"
        logger.log(level, "generate runs without %s: %s", without, why)

    @contextmanager
    def turn(self) -> Iterator[Support]:
        """One request at a time uses the runners, other threads wait. Gives whether this request may."""
        self._mind_forks()
        model = self._model()
        is_recorded = self.graphs or (model is not None and model.device.type == "cpu" and self.group is None)
        if not is_recorded and not self._takes_turns:
            yield self.graphs
        elif self._owner == threading.get_ident():
            yield Support.no("it is called from within another request of this model")
        else:
            with self.alone():
                yield SUPPORTED if is_recorded else self.graphs

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other thread has a turn, not even for requests whose steps are not recorded."""
        self._mind_forks()
        if self._owner == threading.get_ident():
            yield
            return
        with self._turn:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = None

    def batched(self, find: Callable[[], Support]) -> Support:
        """Whether requests can be batched; found again where the model has changed."""
        model = self._model()
        assert model is not None
        with self.alone():
            if self._batched is None or self._batched[0].change():
                self._batched = Watch(model), find()
            return self._batched[1]

    def take_turns(self) -> None:
        """From now on, requests of other threads wait even where no steps are recorded."""
        self._takes_turns = True

    def _mind_forks(self) -> None:
        # A forked child has neither the thread that had the turn nor what that thread was doing.
        if self._process != os.getpid():
            self._turn, self._owner, self._process = threading.Lock(), None, os.getpid()
            self.release()

    def request_support(
        self, input_ids: Tensor, model_kwargs: Mapping[str, Any], config: GenerationConfig
    ) -> Support:
        """Whether this request can run in recorded steps. To be called in one's turn."""
        model = self._model()
        assert model is not None
        request = eligibility.request_support(model, input_ids, model_kwargs, config)
        return request and self.model_support()

    def model_support(self) -> Support:
        """Whether steps of the model as it is can be recorded. To be called in one's turn.

        What was recorded of the model before it changed is dropped.
        """
        model = self._model()
        assert model is not None
        methods = replaced.support(model)
        if self.group is not None:
            methods = self.group.all_support(methods)
        if not methods:
            return methods
        # Without the experts that have left a GPU, steps need less on it, and guess at the next layer's.
        is_same = self._watch is not None and self._given_back == lent.times() and not self._watch.change()
        if self.group is not None:
            is_same = self.group.all_agree(is_same)
        if not is_same:
            self._look_at(model)
        if not self._recordable:
            return self._recordable
        if self.graphs:
            if self._masks is None:
                self._masks = masks.of_model(model)
            return self._masks if isinstance(self._masks, Support) else SUPPORTED
        if self.group is not None:
            return Support.no("several processes share the model")
        self._native = self._native or NativeDecoder(model)
        return self._native.support

    def step_support(self, inputs: Mapping[str, Any]) -> Tensor | None | Support:
        """The positions [b or 1, 1] of a recorded step, or why there can be none. To be called in one's turn.

        inputs  of a step of one token, as transformers calls the model; its cache stays as it is
        """
        positions = step_inputs.last_positions(inputs.get("position_ids"))
        left_out = step_inputs.beside(inputs)
        if isinstance(positions, Support) or not left_out:
            return positions
        if left_out not in self._left_out:
            model = self._model()
            assert model is not None
            found = step_inputs.step_support(model, inputs, positions)
            self._left_out[left_out] = found if self.group is None else self.group.all_support(found)
        support = self._left_out[left_out]
        return positions if support else support

    def _look_at(self, model: PreTrainedModel) -> None:
        """Note the model as it is now."""
        self.release()
        self._given_back = lent.times()
        self._fused = self._masks = self._frequencies = None
        self._left_out.clear()
        continued.registered()
        watch, support = Watch(model), eligibility.recording_support(model)
        if self.group is not None:
            support = self.group.all_support(support)
        # In this order: an interrupt between the two makes the next request look again.
        self._recordable = support
        self._watch = watch

    def runner(self, cache: Any, logits: Tensor, tokens: int) -> tuple[GraphRunner | None, Support]:
        """The runner of a request of up to so many tokens; None, and why, if there is no room for one."""
        batch = size_of(len(logits), logits.device)
        if self.native is not None:
            tokens = int(cache.get_seq_length()) + 1  # its cache grows
        found = self.runners.get(batch)
        if found is not None and found.cache.takes(cache, tokens):
            return found, SUPPORTED
        self.runners.pop(batch, None)
        del found
        runner: GraphRunner | None = None
        support = SUPPORTED
        try:
            runner = lent.retried(lambda: self._new_runner(cache, logits, tokens), self.devices)
        except torch.OutOfMemoryError:
            self.release()
            support = Support.no(f"there is no room for a captured cache of {bucket_of(tokens)} tokens")
        if self.group is not None and not self.group.all_agree(runner is not None):
            support = support and Support.no("another process has no room for a captured cache")
            runner = None
        if runner is not None:
            self.runners[batch] = runner
        return runner, support

    @property
    def devices(self) -> set[torch.device]:
        """Where the model was loaded to."""
        model: Any = self._model()
        return set() if model is None else {*map(torch.device, model.ktinject.to_load)}

    def give_back(self) -> int:
        """Have the CPU alone compute the experts that `gpu_experts: auto` put on GPUs, for who needs the memory.

        Done by itself where a request, a cache or a model that is loaded finds no room.

        Returns  bytes that torch has for other tensors now, of all models on these GPUs; give them to other programs
                 by torch.cuda.empty_cache()
        """
        with self.alone():
            return lent.give_back(self.devices)

    def several_forwards(self) -> list[Forward]:
        """The model on tokens of one text, each a row: first with few kernels, if steps have them, then its own."""
        model = self._model()
        assert model is not None and isinstance(self._masks, masks.Masks), "a request that was not refused"
        paths = modules_with_states(model)
        models: list[Fused | OneByOne] = [OneByOne(model, paths)]
        if self._fused is not None:
            models.insert(0, self._fused)
        found = [functools.partial(run_model, self._model, each, self._masks) for each in models]
        return [*map(self._turning, found)]

    def turn_forward(self) -> turn_pass.Forward:
        """The model on the new tokens of a next turn."""
        assert isinstance(self._masks, masks.Masks), "a request that was not refused"
        return self._turning(functools.partial(turn_pass.run_model, self._model, self._masks))

    def _turning(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A forward in which rotary embeddings do not choose frequencies, where that is done before each step."""
        return forward if self._frequencies is None else self._frequencies.around(forward)

    def _new_runner(self, cache: Any, logits: Tensor, tokens: int) -> GraphRunner:
        """Raises torch.OutOfMemoryError."""
        model = self._model()
        assert model is not None and self._watch is not None, "a request that was not refused"
        if self._fuses and self._fused is None and logits.is_cuda:
            with_states = modules_with_states(model)
            self._fused = Fused(model, self.group, with_states)
        if self.native is None and self._frequencies is None:
            self._frequencies = Frequencies(model) or None
        how = self._masks if self.native is None else self.native.masks
        assert isinstance(how, masks.Masks), "a request that was not refused"
        return GraphRunner(
            self.native or self._turning(functools.partial(run_model, self._model, self._fused, how)),
            _between_steps if self._handoffs else lambda: None,
            cache,
            tokens,
            logits,
            own=functools.partial(run_model, self._model, None, how),
            change=self._watch.change,
            kinds=kinds_of(model.config),
            room=0 if self.native is not None else several.SIZES[-1],
            frequencies=self._frequencies,
        )


def _between_steps() -> None:
    """Before the replay of a step: exchange experts on the GPU, and wake who computes the others."""
    expert_cache.step()
    wake()


def run_model(
    reference: weakref.ref[PreTrainedModel],
    fused: Fused | OneByOne | None,
    how: masks.Masks,
    ids: Tensor,
    mask: Tensor,
    positions: Tensor,
    cache: KVBucket,
) -> Tensor:
    """The model, or a twin of it, on one token a row → logits [b, v].

    reference  weak, for a runner must not keep its model alive
    how        the model is given masks
    Raises     OperatorError if the model's attention was changed within a request
    """
    model = reference()
    assert model is not None
    runs: Any = fused
    if runs is None:
        runs = Steps(model) if any(isinstance(layer, CompressedLayer) for layer in cache.layers) else model
    return loop.logits_of(runs, ids, how.of(cache, model), positions, cache)[:, -1]
